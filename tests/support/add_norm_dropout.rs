//! Tests of dropout that add_layer_norm and add_rms_norm share.

use super::add_norm::Op;
use support::gpu::caching_or_skip;
use tch::{Device, Kind, Tensor};
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::cuda::Graph;
use tch_extension::testing::{assert_close, cuda_or_skip, devices};

impl Op {
    /// What is dropped is dropped in both directions, everything else is scaled, and the share is the
    /// probability.
    pub fn dropout_drops_the_same_values_in_both_directions(self) {
        for device in devices() {
            for (kind, stream) in [
                (Kind::Float, Kind::Float),
                (Kind::Double, Kind::Double),
                (Kind::BFloat16, Kind::BFloat16),
                (Kind::BFloat16, Kind::Float),
                (Kind::Half, Kind::Half),
            ] {
                for columns in [1024, 1000, 33] {
                    let x = Tensor::ones([400, columns], (kind, device)).set_requires_grad(true);
                    let residual =
                        Tensor::zeros([400, columns], (stream, device)).set_requires_grad(true);
                    let call = || {
                        (self.fused)(&x, &residual, &[columns], [None, None], 0.25)
                            .expect("outputs")
                    };
                    let (sum, output) = call();
                    let is_kept = sum.ne(0.0);
                    let share = is_kept.to_kind(Kind::Double).mean(None).double_value(&[]);
                    assert!((share - 0.75).abs() < 0.02, "{share} {kind:?} {columns} {device:?}");
                    let expected = is_kept.to_kind(Kind::Double) * (4.0 / 3.0);
                    assert_close(&sum.detach(), &expected.to_kind(stream), 1e-2, 0.0);
                    let other = call().0;
                    assert!(!other.equal(&sum), "two calls drew the same numbers");
                    let gradients = |create_graph| {
                        let options = GradOptions {
                            create_graph,
                            retain_graph: Some(true),
                            ..Default::default()
                        };
                        let loss = (&sum * 3.0).sum(Kind::Float)
                            + (&output * &residual.detach().to_kind(kind)).sum(Kind::Float);
                        let found = grad(&[&loss], &[&x, &residual], &options).expect("gradients");
                        found.exactly::<2>().expect("two")
                    };
                    for create_graph in [false, true] {
                        let [of_x, of_residual] = gradients(create_graph);
                        assert_eq!((of_x.kind(), of_residual.kind()), (kind, stream));
                        let threes = Tensor::full([400, columns], 3.0, (stream, device));
                        assert_close(&of_residual.detach(), &threes, 1e-2, 0.0);
                        let expected = is_kept.to_kind(Kind::Double) * 4.0;
                        assert_close(&of_x.detach(), &expected.to_kind(kind), 1e-2, 0.0);
                    }
                    let all = (self.fused)(&x, &residual, &[columns], [None, None], 1.0);
                    let (sum, _) = all.expect("outputs");
                    assert!(sum.eq(0.0).all().int64_value(&[]) == 1, "{kind:?} {columns}");
                    let of_x = grad(&[&sum.sum(Kind::Float)], &[&x], &GradOptions::default());
                    let of_x = of_x.expect("a gradient").single().expect("one");
                    assert!(of_x.eq(0.0).all().int64_value(&[]) == 1, "{kind:?} {columns}");
                }
            }
        }
    }

    /// Gradients under dropout, from both outputs: those of the formula with the same mask.
    pub fn gradients_under_dropout_are_those_of_the_formula(self) {
        for device in devices() {
            for columns in [64, 33] {
                let options = (Kind::Double, device);
                let random = || Tensor::randn([6, columns], options).set_requires_grad(true);
                let (x, residual) = (random(), random());
                let [weight, bias] = self.parameters(columns, Kind::Double, device);
                let weight = weight.map(|weight| weight.set_requires_grad(true));
                let parameters = [weight.as_ref(), bias.as_ref()];
                let (sum, output) =
                    (self.fused)(&x, &residual, &[columns], parameters, 0.5).expect("outputs");
                let mask = (&sum - &residual).detach().ne(0.0).to_kind(Kind::Double) * 2.0;
                let dropped = &x * &mask;
                let (other_sum, other_output) =
                    (self.reference)(&dropped, &residual, &[columns], parameters, 0.0)
                        .expect("outputs");
                assert_close(&sum.detach(), &other_sum.detach(), 1e-12, 1e-12);
                let leaves = [&x, &residual, weight.as_ref().expect("a weight")];
                let gradients = |[sum, output]: [&Tensor; 2]| {
                    let loss = sum.square().sum(Kind::Double) + output.sin().sum(Kind::Double);
                    let create = GradOptions { create_graph: true, ..Default::default() };
                    let first = grad(&[&loss], &leaves, &create).expect("first");
                    let first = first.exactly::<3>().expect("three");
                    let loss: Tensor = first.iter().map(|of| of.square().sum(Kind::Double)).sum();
                    let second = grad(&[&loss], &leaves, &GradOptions::default()).expect("second");
                    first.into_iter().chain(second.exactly::<3>().expect("three"))
                };
                let found = gradients([&sum, &output]);
                for (found, expected) in found.zip(gradients([&other_sum, &other_output])) {
                    assert_close(&found.detach(), &expected.detach(), 1e-9, 1e-9);
                }
            }
        }
    }

    /// Rows that follow one another through a block's ring buffer, for each size of team, with every kind
    /// of stream, with and without dropout, and with both gradients.
    pub fn cuda_many_rows_for_each_block(self) {
        let Some(device) = cuda_or_skip("cuda_many_rows_for_each_block") else { return };
        let kinds = [
            (Kind::Double, Kind::Double),
            (Kind::Float, Kind::Float),
            (Kind::BFloat16, Kind::BFloat16),
            (Kind::Half, Kind::Float),
        ];
        // The last size takes libtorch's addition.
        let sizes =
            [(60_000, 8), (30_000, 64), (4000, 768), (3000, 1024), (900, 4096), (3, 16_384)];
        for (kinds, size) in kinds.into_iter().flat_map(|kinds| sizes.map(|size| (kinds, size))) {
            for probability in [0.0, 0.25] {
                self.many_rows(device, kinds, size, probability);
            }
        }
    }

    /// Compares with libtorch's norm in `Double`, at the same h and with the same values dropped.
    fn many_rows(
        self,
        device: Device,
        (kind, stream): (Kind, Kind),
        (rows, columns): (i64, i64),
        probability: f64,
    ) {
        let random = |kind| Tensor::randn([rows, columns], (kind, device));
        let [weight, bias] = self.parameters(columns, stream, device);
        // Far from zero, so that h tells whether a value was dropped.
        let x = random(kind);
        let x = (x.abs() + 1.0) * x.sign().where_scalarother(&x.ne(0.0), 1.0);
        let all = [Some(x.to_kind(kind)), Some(random(stream)), weight, bias];
        let leaves: Vec<Tensor> =
            all.into_iter().flatten().map(|leaf| leaf.set_requires_grad(true)).collect();
        let parameters = [leaves.get(2), leaves.get(3)];
        let (sum, output) =
            (self.fused)(&leaves[0], &leaves[1], &[columns], parameters, probability)
                .expect("outputs");
        let double = |of: &Tensor| of.detach().to_kind(Kind::Double);
        let exact: Vec<Tensor> =
            leaves.iter().map(|leaf| double(leaf).set_requires_grad(true)).collect();
        // A value was kept if h is nearer to x / (1 - p) + residual than to the residual alone.
        let scale = 1.0 / (1.0 - probability);
        let (x, residual, found) = (double(&leaves[0]), double(&leaves[1]), double(&sum));
        let of_kept = (&found - (&x * scale + &residual)).abs();
        let is_kept = of_kept.le_tensor(&(&found - &residual).abs());
        let h = &exact[0] * (is_kept.to_kind(Kind::Double) * scale) + &exact[1];
        let h = &h - h.detach() + &found;
        let parameters = [exact.get(2), exact.get(3)];
        let normal = (self.libtorch)(&h, &[columns], parameters).expect("libtorch's");
        let grads = [random(stream), random(kind)];
        let run = |outputs: [&Tensor; 2], leaves: &[Tensor]| {
            let grads: Vec<Tensor> =
                grads.iter().zip(outputs).map(|(grad, of)| grad.to_kind(of.kind())).collect();
            let grad_outputs = &[Some(&grads[0]), Some(&grads[1])];
            let options = GradOptions { grad_outputs, ..Default::default() };
            let leaves: Vec<&Tensor> = leaves.iter().collect();
            let found = grad(&outputs, &leaves, &options).expect("gradients").into_vec();
            found.into_iter().map(|of| of.expect("a gradient")).collect::<Vec<Tensor>>()
        };
        let found = run([&sum, &output], &leaves);
        for (place, (found, expected)) in found.iter().zip(run([&h, &normal], &exact)).enumerate() {
            let epsilon = match found.kind() {
                Kind::Double => 1e-11,
                Kind::Float => 1e-5,
                Kind::Half => 2e-3,
                _ => 1.6e-2,
            };
            // Sums over the rows grow with the root of their number, as their errors do.
            let terms = if place < 2 { 1.0 } else { (rows as f64).sqrt() };
            assert_close(found, &expected.to_kind(found.kind()), epsilon, epsilon * terms);
        }
    }

    /// Each replay of a captured graph draws new numbers, forward and backward the same ones, and the
    /// seed decides which.
    pub fn cuda_graphs_draw_new_numbers_in_each_replay(self) {
        let test = "cuda_graphs_draw_new_numbers_in_each_replay";
        let Some(device) = caching_or_skip(test) else { return };
        let x = Tensor::ones([64, 256], (Kind::Float, device)).set_requires_grad(true);
        let residual = Tensor::zeros([64, 256], (Kind::Float, device));
        let run = || {
            let (sum, _) = (self.fused)(&x, &residual, &[256], [None, None], 0.5)?;
            let of_x = grad(&[&sum.sum(Kind::Float)], &[&x], &GradOptions::default())?.single()?;
            Ok([sum.detach(), of_x])
        };
        let seeded = || {
            tch::manual_seed(17);
            let [sum, _] = run().expect("outputs");
            sum
        };
        assert!(seeded().equal(&seeded()), "the seed decides");
        let (graph, [sum, of_x]) = Graph::capture(device, run).expect("a graph");
        let replays: Vec<Tensor> = (0..3)
            .map(|_| {
                graph.replay().expect("a replay");
                assert!(sum.equal(&of_x), "backward drew other numbers than forward");
                sum.copy()
            })
            .collect();
        assert!(!replays[0].equal(&replays[1]) && !replays[1].equal(&replays[2]));
    }
}
