//! Tests of `nn::Embedding`: against libtorch's own, and that its gradient has the same bits in
//! every run.

use std::sync::{Arc, Mutex};
use support::gpu::caching_or_skip;
use tch::nn::{EmbeddingConfig, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_extension::autograd::{GradOptions, grad, register_hook};
use tch_extension::cuda::Graph;
use tch_extension::nn::{Embedding, embedding};
use tch_extension::testing::{
    assert_as_accurate, assert_close, conformance, cuda_or_skip, devices, gradcheck, gradgradcheck,
};

const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

fn table(
    device: Device,
    kind: Kind,
    [rows, columns]: [i64; 2],
    config: EmbeddingConfig,
) -> (VarStore, Embedding) {
    let mut vs = VarStore::new(device);
    let table = embedding(vs.root(), rows, columns, config);
    vs.set_kind(kind);
    (vs, table)
}

/// Indices of this size below `rows`, some of which occur often.
fn indices(device: Device, size: &[i64], rows: i64) -> Tensor {
    let drawn = Tensor::rand(size, (Kind::Double, device)).square() * rows as f64;
    drawn.to_kind(Kind::Int64).clamp(0, (rows - 1).max(0))
}

fn configs() -> Vec<EmbeddingConfig> {
    let plain = EmbeddingConfig::default();
    let mut configs = vec![];
    for padding_idx in [-1, 2] {
        for scale_grad_by_freq in [false, true] {
            configs.push(EmbeddingConfig { padding_idx, scale_grad_by_freq, ..plain });
        }
    }
    configs
}

fn libtorch(weight: &Tensor, indices: &Tensor, config: EmbeddingConfig) -> Tensor {
    let EmbeddingConfig { padding_idx, scale_grad_by_freq, sparse, .. } = config;
    Tensor::embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse)
}

/// The gradient of the weight for a given gradient of the output.
fn gradient(output: &Tensor, weight: &Tensor, of_output: &Tensor) -> Tensor {
    let of_output = [Some(of_output)];
    let options = GradOptions { grad_outputs: &of_output, ..Default::default() };
    grad(&[output], &[weight], &options).expect("gradient").into_vec().remove(0).expect("one")
}

/// The sum of the gradients at each row's indices, one at a time, in `Double`.
fn exact(weight: &Tensor, indices: &Tensor, of_output: &Tensor, config: EmbeddingConfig) -> Tensor {
    let columns = weight.size()[1];
    let rows = of_output.to_kind(Kind::Double).reshape([-1, columns]);
    let flat = indices.reshape([-1]).to_kind(Kind::Int64);
    let mut sum = Tensor::zeros(weight.size(), (Kind::Double, weight.device()));
    let mut sum = sum.index_add_(0, &flat, &rows);
    if config.scale_grad_by_freq {
        let counts = flat.bincount(None::<&Tensor>, weight.size()[0]).clamp_min(1);
        sum /= counts.to_kind(Kind::Double).unsqueeze(1);
    }
    if config.padding_idx >= 0 {
        let _ = sum.get(config.padding_idx).zero_();
    }
    sum
}

/// Sizes of tables and indices. With more than 3072 indices, libtorch sorts them; with few rows it
/// would then use atomics.
const SIZES: [([i64; 2], &[i64]); 8] = [
    ([5, 3], &[4]),
    ([5, 8], &[2, 3]),
    ([7, 1], &[3, 4, 2]),
    ([65, 64], &[16, 512]),
    ([3, 33], &[5000]),
    ([4000, 16], &[4096]),
    ([4000, 16], &[3, 1000]),
    ([1024, 24], &[8, 600]),
];

#[test]
fn outputs_and_gradients_are_libtorch_s_or_more_exact() {
    for device in devices() {
        for kind in KINDS {
            for (size, shape) in SIZES {
                for config in configs() {
                    let (_vs, table) = table(device, kind, size, config);
                    for index_kind in [Kind::Int64, Kind::Int] {
                        let indices = indices(device, shape, size[0]).to_kind(index_kind);
                        let (ours, theirs) =
                            (table.forward(&indices), libtorch(&table.ws, &indices, config));
                        assert!(ours.equal(&theirs) && ours.size() == theirs.size());
                        let of_output =
                            Tensor::randn(ours.size(), (Kind::Double, device)).to_kind(kind);
                        let found = gradient(&ours, &table.ws, &of_output);
                        assert!(found.is_contiguous() && found.size() == table.ws.size());
                        let exact = exact(&table.ws, &indices, &of_output, config);
                        eprintln!("{size:?} {shape:?} {config:?} {kind:?} {device:?}");
                        match kind {
                            Kind::Double => assert_close(&found, &exact, 1e-12, 1e-12),
                            Kind::Float => assert_sums(&found, &exact, indices.numel()),
                            _ => {
                                let rival = gradient(&theirs, &table.ws, &of_output);
                                assert_as_accurate(&found, &rival, &exact);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Sums of so many normal numbers, added in `Float` in any order and rounded to their kind.
fn assert_sums(found: &Tensor, exact: &Tensor, count: usize) {
    let rounding = match found.kind() {
        Kind::Half => 2_f64.powi(-11),
        Kind::BFloat16 => 2_f64.powi(-8),
        _ => 2_f64.powi(-24),
    };
    assert_close(&found.to_kind(Kind::Double), exact, rounding, 2_f64.powi(-22) * count as f64);
}

/// 4096 times 1 in `BFloat16`: a sum in that kind stops at 256.
#[test]
fn frequent_rows_keep_growing_in_half_kinds() {
    for device in devices() {
        let (_vs, table) = table(device, Kind::BFloat16, [3, 8], Default::default());
        let indices = Tensor::ones([4096], (Kind::Int64, device));
        let output = table.forward(&indices);
        let found = gradient(&output, &table.ws, &output.ones_like());
        let expected = Tensor::from_slice(&[0.0, 4096.0, 0.0]).unsqueeze(1).expand([3, 8], false);
        assert_close(&found.to_kind(Kind::Double), &expected.to_device(device), 0.0, 0.0);
    }
}

/// The mean of equal gradients is each of them. Half kinds hold neither all counts nor their inverses.
#[test]
fn scales_by_frequency_are_exact_in_half_kinds() {
    for device in devices() {
        for kind in KINDS {
            let config = EmbeddingConfig { scale_grad_by_freq: true, ..Default::default() };
            let (_vs, table) = table(device, kind, [400, 2], config);
            // Row i occurs i + 1 times.
            let counts = Tensor::arange(400, (Kind::Int64, device)) + 1;
            let indices = Tensor::repeat_interleave(&counts, None);
            for create_graph in [false, true] {
                let output = table.forward(&indices);
                let of_output = [Some(&output.ones_like())];
                let options =
                    GradOptions { grad_outputs: &of_output, create_graph, ..Default::default() };
                let found = grad(&[&output], &[&table.ws], &options).expect("gradient");
                let found = found.into_vec().remove(0).expect("one").detach();
                assert_eq!(found.kind(), kind);
                // The sum of up to 400 rounded values.
                let bound = if kind == Kind::Double { 1e-12 } else { 1e-5 };
                assert_close(&found, &found.ones_like(), bound, bound);
            }
        }
    }
}

#[test]
fn first_and_second_derivatives() {
    for device in devices() {
        for config in configs() {
            let (_vs, table) = table(device, Kind::Double, [5, 3], config);
            let indices =
                Tensor::from_slice(&[1_i64, 4, 1, 1, 0, 2]).view([2, 3]).to_device(device);
            // Squares have a second derivative; the lookup alone is linear.
            let run = |inputs: &[Tensor]| {
                let table = WithWeight(&table, &inputs[0]);
                Ok([table.run(&indices, config) * &inputs[1]])
            };
            let factor = Tensor::randn([2, 3, 3], (Kind::Double, device)).set_requires_grad(true);
            if config.padding_idx < 0 && !config.scale_grad_by_freq {
                gradcheck(run, &[&table.ws, &factor], &Default::default()).expect("first");
            }
            // With padding or scale, the gradient is not that of the output, so only its own
            // derivative can be compared: it is linear in the factor.
            let output = run(&[table.ws.shallow_clone(), factor.shallow_clone()]).map(|[y]| y);
            let output = output.map_err(|error: tch_extension::Error| error).expect("output");
            let options = GradOptions { create_graph: true, ..Default::default() };
            let total = output.sum(Kind::Double);
            let first =
                grad(&[&total], &[&table.ws], &options).expect("first").into_vec().remove(0);
            let first = first.expect("one");
            let without = exact(&table.ws, &indices, &factor.detach(), config);
            assert_close(&first.detach(), &without, 1e-12, 1e-12);
            let probe = Tensor::randn([5, 3], (Kind::Double, device));
            let second = gradient(
                &(&first * &probe).sum(Kind::Double),
                &factor,
                &Tensor::from(1.0).to_device(device),
            );
            // d(Σ probe · first) / d factor, of the exact formula, by linearity.
            for place in [0_i64, 3, 10, 17] {
                let mut unit = Tensor::zeros([18], (Kind::Double, device));
                let _ = unit.narrow(0, place, 1).fill_(1.0);
                unit = unit.view([2, 3, 3]);
                let expected =
                    (exact(&table.ws, &indices, &unit, config) * &probe).sum(Kind::Double);
                let found = second.reshape([-1]).get(place);
                assert_close(&found, &expected, 1e-12, 1e-12);
            }
        }
        let (_vs, table) = table(device, Kind::Double, [4, 2], Default::default());
        let indices = Tensor::from_slice(&[1_i64, 3, 1]).to_device(device);
        let run = |inputs: &[Tensor]| {
            let y = WithWeight(&table, &inputs[0]).run(&indices, Default::default());
            Ok([&y * &y])
        };
        gradgradcheck(run, &[&table.ws], &Default::default()).expect("second");
    }
}

/// The table's operator with another weight, which derivatives are taken with respect to.
struct WithWeight<'a>(&'a Embedding, &'a Tensor);

impl WithWeight<'_> {
    fn run(&self, indices: &Tensor, config: EmbeddingConfig) -> Tensor {
        let vs = VarStore::new(self.1.device());
        let size = self.0.ws.size();
        let mut table = embedding(vs.root(), size[0], size[1], config);
        table.ws = self.1.shallow_clone();
        table.forward(indices)
    }
}

#[test]
fn conformance_in_every_kind() {
    for device in devices() {
        for kind in KINDS {
            let weight = Tensor::randn([5, 3], (kind, device)).set_requires_grad(true);
            let run = |inputs: &[Tensor]| {
                let indices = Tensor::from_slice(&[1_i64, 4, 1, 0])
                    .view([2, 2])
                    .to_device(inputs[0].device());
                let vs = VarStore::new(inputs[0].device());
                let mut table = embedding(vs.root(), 5, 3, Default::default());
                table.ws = inputs[0].shallow_clone();
                Ok([table.f_forward(&indices)?])
            };
            // A graph cannot be captured, because the indices come from the host.
            let options = tch_extension::testing::ConformanceOptions {
                cuda_graph: false,
                ..Default::default()
            };
            conformance(run, &[&weight], &options)
                .unwrap_or_else(|error| panic!("{kind:?}:\n{error}"));
        }
    }
}

/// Where libtorch 2.11 adds with atomics: more than 3072 indices, and few rows.
#[test]
fn cuda_gradients_have_the_same_bits_in_every_run() {
    let Some(device) = cuda_or_skip("cuda_gradients_have_the_same_bits_in_every_run") else {
        return;
    };
    let mut theirs_differ = 0;
    for kind in [Kind::Float, Kind::Half, Kind::BFloat16] {
        for ([rows, columns], count) in [
            ([1, 64], 1 << 16),
            ([65, 384], 1 << 15),
            ([256, 1024], 1 << 14),
            ([1024, 768], 1 << 15),
            ([50257, 64], 1 << 14),
        ] {
            for config in configs().into_iter().filter(|config| config.padding_idx < rows) {
                let (_vs, table) = table(device, kind, [rows, columns], config);
                let indices = indices(device, &[count], rows);
                let of_output =
                    Tensor::randn([count, columns], (Kind::Float, device)).to_kind(kind);
                let first = gradient(&table.forward(&indices), &table.ws, &of_output);
                let first_of_theirs =
                    gradient(&libtorch(&table.ws, &indices, config), &table.ws, &of_output);
                let mut differs = false;
                for _ in 0..10 {
                    let again = gradient(&table.forward(&indices), &table.ws, &of_output);
                    assert!(again.equal(&first), "{rows} {columns} {count} {kind:?} {config:?}");
                    let again =
                        gradient(&libtorch(&table.ws, &indices, config), &table.ws, &of_output);
                    differs |= !again.equal(&first_of_theirs);
                }
                theirs_differ += i32::from(differs);
                let exact = exact(&table.ws, &indices, &of_output, config);
                assert_sums(&first, &exact, count as usize);
            }
        }
    }
    // If this fails, libtorch has changed, and `rows_without_atomics` is no longer needed.
    eprintln!("libtorch's own gradient differs between runs in {theirs_differ} cases");
    assert!(theirs_differ > 0, "libtorch's own gradients have the same bits, too");
}

/// Tables for which masks are taken on CUDA: of one row, or of few rows and columns.
#[test]
fn cuda_few_rows_have_right_gradients_and_the_same_bits() {
    let Some(device) = cuda_or_skip("cuda_few_rows_have_right_gradients_and_the_same_bits") else {
        return;
    };
    for kind in KINDS {
        for ([rows, columns], count) in [
            ([1, 848], 25_322),
            ([1, 7], 20),
            ([2, 768], 2000),
            ([3, 9], 23_904),
            ([4, 1], 1761),
            ([32, 64], 4096),
        ] {
            for padding_idx in [-1, rows - 1] {
                let config = EmbeddingConfig { padding_idx, ..Default::default() };
                let (_vs, table) = table(device, kind, [rows, columns], config);
                let indices = indices(device, &[count], rows);
                let of_output =
                    Tensor::randn([count, columns], (Kind::Float, device)).to_kind(kind);
                let of = || gradient(&table.forward(&indices), &table.ws, &of_output);
                let found = of();
                eprintln!("{kind:?} {rows} {columns} {count} {padding_idx}");
                assert!(found.is_contiguous() && (0..3).all(|_| of().equal(&found)));
                let exact = exact(&table.ws, &indices, &of_output, config);
                assert_sums(&found, &exact, count as usize);
                let theirs =
                    gradient(&libtorch(&table.ws, &indices, config), &table.ws, &of_output);
                match kind {
                    // libtorch may round several times.
                    Kind::Half | Kind::BFloat16 => assert_as_accurate(&found, &theirs, &exact),
                    _ => assert_sums(&theirs, &exact, count as usize),
                }
            }
        }
    }
}

/// Indices of which about one in twenty is 7, and the others vary.
fn with_a_frequent_one(device: Device, count: i64, rows: i64) -> Tensor {
    let drawn = indices(device, &[count], rows);
    let is_frequent = Tensor::rand([count], (Kind::Float, device)).lt(0.05);
    drawn.masked_fill(&is_frequent, 7.min(rows - 1))
}

/// A sum that was rounded to a half kind once.
fn assert_rounded(found: &Tensor, sum: &Tensor) {
    let unit = if found.kind() == Kind::Half { 2f64.powi(-11) } else { 2f64.powi(-8) };
    let bound = sum.abs() * (1.01 * unit) + 1e-4;
    let is_within = (found.to_kind(Kind::Double) - sum).abs().le_tensor(&bound);
    assert!(is_within.all().int64_value(&[]) == 1, "{:?} of {:?}", found.kind(), found.size());
}

/// The table's gradient for these of both outputs, and the rows and the table that were returned.
fn tied_gradient(table: &Embedding, indices: &Tensor, grads: [Option<&Tensor>; 2]) -> Tensor {
    let (rows, weight) = table.f_forward_tied(indices).expect("rows");
    assert!(rows.equal(&table.forward(indices)) && weight.data_ptr() == table.ws.data_ptr());
    let outputs = [(&rows, grads[0]), (&weight, grads[1])];
    let (outputs, grads): (Vec<_>, Vec<_>) =
        outputs.into_iter().filter(|(_, grad)| grad.is_some()).unzip();
    let options = GradOptions { grad_outputs: &grads, ..Default::default() };
    grad(&outputs, &[&table.ws], &options).expect("gradient").into_vec().remove(0).expect("one")
}

#[test]
fn a_tied_table_has_the_sum_of_both_gradients() {
    for device in devices() {
        for kind in KINDS {
            let more = [([4000, 16], &[4096][..]), ([9000, 5], &[2, 1500]), ([40, 8], &[0])];
            for (size, shape) in SIZES.into_iter().chain(more) {
                for config in configs() {
                    let (_vs, table) = table(device, kind, size, config);
                    let count: i64 = shape.iter().product();
                    let drawn = with_a_frequent_one(device, count, size[0]).view(shape);
                    for index_kind in [Kind::Int64, Kind::Int] {
                        let indices = drawn.to_kind(index_kind);
                        let of = |size: &[i64]| Tensor::randn(size, (Kind::Double, device));
                        let of_rows = of(&[shape, &size[1..]].concat()).to_kind(kind);
                        let of_table = of(&size).to_kind(kind);
                        let exact = exact(&table.ws, &indices, &of_rows, config);
                        eprintln!("{size:?} {shape:?} {config:?} {kind:?} {device:?}");
                        let held = of_table.copy();
                        let both =
                            tied_gradient(&table, &indices, [Some(&of_rows), Some(&of_table)]);
                        assert!(of_table.equal(&held), "the caller's gradient has changed");
                        let sum = &exact + of_table.to_kind(Kind::Double);
                        match kind {
                            Kind::Double => assert_close(&both, &sum, 1e-12, 1e-12),
                            Kind::Float => assert_sums(&both, &sum, indices.numel()),
                            // Added in place on CUDA, if nothing is left out or scaled.
                            _ if device.is_cuda()
                                && config.padding_idx < 0
                                && !config.scale_grad_by_freq
                                && (1..=size[0]).contains(&count) =>
                            {
                                assert_rounded(&both, &sum)
                            }
                            _ => {
                                let lookup =
                                    gradient(&table.forward(&indices), &table.ws, &of_rows);
                                assert!(both.equal(&(lookup + &of_table)));
                            }
                        }
                        let rows_alone = tied_gradient(&table, &indices, [Some(&of_rows), None]);
                        let untied = gradient(&table.forward(&indices), &table.ws, &of_rows);
                        assert!(rows_alone.equal(&untied));
                        let table_alone = tied_gradient(&table, &indices, [None, Some(&of_table)]);
                        assert!(table_alone.equal(&of_table));
                    }
                }
            }
        }
    }
}

/// Rows are added in the memory of the table's gradient, unless somebody holds it.
#[test]
fn a_tied_gradient_is_overwritten_only_if_nobody_holds_it() {
    for device in devices() {
        // On the CPU, rows of half kinds are added up in a table of their own.
        let kind = if device.is_cuda() { Kind::BFloat16 } else { Kind::Float };
        let (_vs, table) = table(device, kind, [400, 8], Default::default());
        let indices = with_a_frequent_one(device, 100, 400);
        for is_held in [false, true] {
            let (rows, weight) = table.f_forward_tied(&indices).expect("rows");
            let seen = Arc::new(Mutex::new((0, None)));
            let place = seen.clone();
            let hook = register_hook(&weight, move |grad| {
                let held = is_held.then(|| grad.shallow_clone());
                *place.lock().expect("a lock") = (grad.data_ptr().addr(), held);
                Ok(None)
            });
            let loss = (&rows * 2.0).sum(kind) + (&weight * 3.0).sum(kind);
            let found = gradient(&loss, &table.ws, &loss.ones_like());
            let (address, held) = std::mem::take(&mut *seen.lock().expect("a lock"));
            drop(hook.expect("a hook"));
            assert_eq!(found.data_ptr().addr() == address, !is_held, "{device:?}");
            if let Some(held) = held {
                assert!(held.equal(&held.full_like(3.0)));
            }
            let counts = indices.bincount(None::<&Tensor>, 400).to_kind(kind) * 2.0 + 3.0;
            assert!(found.equal(&counts.unsqueeze(1).expand([400, 8], false)));
            // So does the gradient that the caller asks for.
            let (rows, weight) = table.f_forward_tied(&indices).expect("rows");
            let loss = (&rows * 2.0).sum(kind) + (&weight * 3.0).sum(kind);
            let both = grad(&[&loss], &[&table.ws, &weight], &Default::default());
            let [of_table, of_weight] = &both.expect("gradients").into_vec()[..] else { panic!() };
            assert!(of_table.as_ref().expect("one").equal(&found));
            let of_weight = of_weight.as_ref().expect("one");
            assert!(of_weight.equal(&of_weight.full_like(3.0)));
        }
    }
}

#[test]
fn a_tied_table_has_second_derivatives_and_conforms() {
    for device in devices() {
        let weight = Tensor::randn([6, 3], (Kind::Double, device)).set_requires_grad(true);
        let run = |inputs: &[Tensor]| {
            let indices = Tensor::from_slice(&[1_i64, 4, 1, 0]).to_device(inputs[0].device());
            let vs = VarStore::new(inputs[0].device());
            let mut table = embedding(vs.root(), 6, 3, Default::default());
            table.ws = inputs[0].shallow_clone();
            let (rows, weight) = table.f_forward_tied(&indices)?;
            Ok([&rows * &rows, &weight * &weight * &weight])
        };
        gradcheck(run, &[&weight], &Default::default()).expect("first");
        gradgradcheck(run, &[&weight], &Default::default()).expect("second");
        let options =
            tch_extension::testing::ConformanceOptions { cuda_graph: false, ..Default::default() };
        conformance(run, &[&weight], &options).unwrap_or_else(|error| panic!("{error}"));
        let (_vs, table) = table(device, Kind::Float, [6, 3], Default::default());
        let indices = Tensor::from_slice(&[1_i64, 4]).to_device(device);
        let (rows, weight) = table.f_forward_tied(&indices).expect("rows");
        assert!(
            weight.shallow_clone().f_add_(&weight.ones_like()).is_err(),
            "a view of several outputs"
        );
        // A table that was changed after it was saved is an error.
        let loss = (&weight * &weight).sum(Kind::Float) + rows.sum(Kind::Float);
        let _ =
            tch::no_grad(|| table.ws.shallow_clone().f_add_(&weight.ones_like())).expect("a step");
        assert!(grad(&[&loss], &[&table.ws], &Default::default()).is_err());
        let (rows, weight) =
            tch::no_grad(|| table.f_forward_tied(&indices)).expect("rows without a graph");
        assert!(!rows.requires_grad() && weight.equal(&table.ws));
    }
}

/// Sizes with whole and odd vectors, runs within chunks of 32 indices and across many of them, also of all
/// indices; and a captured backward pass.
#[test]
fn cuda_tied_gradients_have_the_same_bits_in_every_run_and_captured() {
    let name = "cuda_tied_gradients_have_the_same_bits_in_every_run_and_captured";
    let Some(device) = caching_or_skip(name) else { return };
    for kind in KINDS {
        for ([rows, columns], count) in [
            ([50257, 768], 16_384),
            ([40_000, 33], 33_000),
            ([5000, 2050], 1000),
            ([1000, 4], 33),
            ([1000, 1], 32),
            ([64, 8], 31),
        ] {
            let drawn = with_a_frequent_one(device, count, rows);
            let halves = drawn.masked_fill(&drawn.lt(rows / 3), rows - 1);
            for indices in [&drawn, &halves, &drawn.zeros_like(), &drawn.full_like(rows - 1)] {
                let (_vs, table) = table(device, kind, [rows, columns], Default::default());
                let of_rows = Tensor::randn([count, columns], (kind, device));
                let of_table = Tensor::randn([rows, columns], (kind, device));
                let of = || tied_gradient(&table, indices, [Some(&of_rows), Some(&of_table)]);
                let first = of();
                eprintln!("{rows} {columns} {count} {kind:?}");
                let exact = exact(&table.ws, indices, &of_rows, Default::default());
                let sum = exact + of_table.to_kind(Kind::Double);
                match kind {
                    Kind::Double => assert_close(&first, &sum, 1e-11, 1e-11),
                    Kind::Float => assert_sums(&first, &sum, count as usize),
                    _ => assert_rounded(&first, &sum),
                }
                assert!((0..5).all(|_| of().equal(&first)));
                let (graph, captured) = Graph::capture(device, || {
                    let (rows, weight) = table.f_forward_tied(indices)?;
                    let grads = [Some(&of_rows), Some(&of_table)];
                    let options = GradOptions { grad_outputs: &grads, ..Default::default() };
                    grad(&[&rows, &weight], &[&table.ws], &options)?.single()
                })
                .expect("a graph");
                for _ in 0..3 {
                    graph.replay().expect("a replay");
                    assert!(captured.equal(&first));
                }
            }
        }
    }
}

#[test]
fn empty_tables_and_indices() {
    for device in devices() {
        for (size, shape) in
            [([5, 0], &[4_i64, 2][..]), ([5, 3], &[0]), ([0, 3], &[2, 0]), ([5, 3], &[])]
        {
            let (_vs, table) = table(device, Kind::Float, size, Default::default());
            let indices = Tensor::zeros(shape, (Kind::Int64, device));
            let output = table.forward(&indices);
            assert_eq!(output.size(), [shape, &[size[1]]].concat());
            let found = gradient(&output, &table.ws, &output.ones_like());
            assert_eq!(found.size(), size);
            let total = found.sum(Kind::Float).double_value(&[]);
            assert_eq!(total, output.numel() as f64);
        }
    }
}

#[test]
fn it_is_tch_s_layer_also_when_sparse() {
    for device in devices() {
        for sparse in [false, true] {
            let config = EmbeddingConfig { sparse, ..Default::default() };
            tch::manual_seed(9);
            let (vs, ours) = table(device, Kind::Float, [6, 4], config);
            tch::manual_seed(9);
            let other = VarStore::new(device);
            let theirs = tch::nn::embedding(other.root(), 6, 4, config);
            assert!(ours.ws.equal(&theirs.ws) && vs.variables().keys().eq(["weight"]));
            let indices = Tensor::from_slice(&[1_i64, 5, 1]).to_device(device);
            let run = |y: Tensor, weight: &Tensor| {
                y.square().sum(Kind::Float).backward();
                let gradient = weight.grad();
                assert_eq!(gradient.is_sparse(), sparse);
                if sparse { gradient.to_dense(None, false) } else { gradient }
            };
            let found = run(ours.forward(&indices), &ours.ws);
            assert_close(&found, &run(theirs.forward(&indices), &theirs.ws), 1e-6, 1e-6);
        }
    }
}

#[test]
fn bad_input_is_refused_by_name() {
    let (_vs, table) = table(Device::Cpu, Kind::Float, [5, 3], Default::default());
    let error = |indices: &Tensor| table.f_forward(indices).expect_err("refused").to_string();
    let of = |values: &[i64]| Tensor::from_slice(values);
    assert!(
        error(&of(&[1]).to_kind(Kind::Float))
            .starts_with("nn::Embedding: indices: expected kind Int64 or Int")
    );
    assert!(error(&Tensor::new()).starts_with("nn::Embedding: indices: expected a tensor"));
    for bad in [5, -1] {
        let error = error(&of(&[0, bad]));
        assert!(error.contains("index out of range") && !error.contains('\n'), "{error}");
    }
    let message = |rows, columns, padding_idx| {
        let vs = VarStore::new(Device::Cpu);
        let config = EmbeddingConfig { padding_idx, ..Default::default() };
        let make = std::panic::AssertUnwindSafe(|| embedding(vs.root(), rows, columns, config));
        *std::panic::catch_unwind(make)
            .map(|_| ())
            .expect_err("a panic")
            .downcast::<String>()
            .expect("a text")
    };
    assert!(message(-1, 3, -1).contains("num_embeddings: expected at least 0, got -1"));
    assert!(message(5, -3, -1).contains("embedding_dim: expected at least 0, got -3"));
    assert!(message(5, 3, 5).contains("padding_idx: expected -1 or one of 5 rows, got 5"));
    assert!(message(5, 3, -2).contains("padding_idx: expected -1"));
}
