//! Tests that add_layer_norm and add_rms_norm share.
#![allow(dead_code)]

use proptest::prelude::*;
use std::cell::Cell;
use support::property::{Case as RandomCase, Property, size, style};
use support::{KINDS, Suite, is_half, leaves};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad, saved_tensors_hooks};
use tch_extension::ops::{NormWay, force};
use tch_extension::testing::{
    Sample, SampleTable, Shape, assert_as_accurate, assert_close, devices,
};

/// x, residual, the normalised shape, weight and bias; the probability of dropout.
pub type Call = fn(&Tensor, &Tensor, &[i64], [Option<&Tensor>; 2], f64) -> Result<(Tensor, Tensor)>;

/// The sum, the normalised shape, weight and bias.
pub type Norm = fn(&Tensor, &[i64], [Option<&Tensor>; 2]) -> Result<Tensor>;

/// Values like those of `randn`, but the same in each run: the largest of a few errors is compared with
/// the largest of a few others, which in one run of many fails for no reason.
fn fixed_normal(size: &[i64], seed: i64) -> Tensor {
    let places = Tensor::arange(size.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    let mixed = ((places + seed as f64 * 1e4) * 12.9898).sin() * 43758.5453;
    let uniform = &mixed - mixed.floor();
    let normal = ((uniform * 2.0 - 1.0) * 0.999_999).erfinv() * std::f64::consts::SQRT_2;
    normal.to_kind(Kind::Float).reshape(size)
}

/// One of the operators.
#[derive(Clone, Copy)]
pub struct Op {
    pub name: &'static str,
    pub has_bias: bool,
    pub fused: Call,
    pub reference: Call,
    /// libtorch's norm, of a sum.
    pub libtorch: Norm,
}

#[derive(Clone, Copy)]
pub struct Case {
    op: Op,
    dims: usize,
    affine: bool,
    way: NormWay,
}

/// With kernels of sums, and with libtorch's addition before a norm's.
const WAYS: [NormWay; 2] = [NormWay::Automatic, NormWay::Passes];

impl Case {
    fn parameters(self) -> usize {
        if !self.affine { 0 } else { 1 + usize::from(self.op.has_bias) }
    }

    fn call(self, call: Call, arguments: &[Tensor]) -> Result<Vec<Tensor>> {
        let [input, residual, parameters @ ..] = arguments else { unreachable!("two at least") };
        let size = input.size();
        let shape = &size[size.len() - self.dims..];
        let parameters = [parameters.first(), parameters.get(1)];
        let (sum, output) = force(self.way, || call(input, residual, shape, parameters, 0.0))?;
        Ok(vec![sum, output])
    }

    fn shapes(self, [m, n]: [i64; 2]) -> Vec<Shape> {
        let mut parameter = vec![2; self.dims - 1];
        parameter.push(n);
        let input = [vec![m], parameter.clone()].concat();
        let parameters = vec![parameter; self.parameters()];
        [input.clone(), input].into_iter().chain(parameters).map(Shape::new).collect()
    }

    fn samples(self, sizes: &[[i64; 2]], kind: Kind, device: Device) -> Vec<Sample> {
        let table = SampleTable::empty(["M", "N"], move |sizes| self.shapes(sizes));
        table.with_sizes(sizes).samples(kind, device).expect("samples")
    }

    /// For each size of team, for rows that are not aligned, and for rows that are too long.
    fn large(self, kind: Kind, device: Device) -> Vec<Sample> {
        let sizes = [
            [300, 40],
            [37, 256],
            [700, 64],
            [33, 768],
            [9, 1029],
            [6, 4096],
            [3, 8192],
            [2, 8200],
        ];
        let table = SampleTable::empty(["M", "N"], move |sizes| self.shapes(sizes));
        table.with_sizes(&sizes).with_layouts([33, 64]).samples(kind, device).expect("samples")
    }

    pub fn suite(self, test: impl FnOnce(&Suite<'_>)) {
        eprintln!("{} {} {} {:?}", self.op.name, self.dims, self.affine, self.way);
        let small = [[3, 8], [2, 16], [1, 1], [0, 8], [3, 0], [5, 33]];
        test(&Suite {
            fused: &move |arguments| self.call(self.op.fused, arguments),
            reference: &move |arguments| self.call(self.op.reference, arguments),
            small: &move |kind, device| self.samples(&small, kind, device),
            large: &move |kind, device| self.large(kind, device),
            terms: &move |sample| {
                let size = sample.inputs[0].size();
                let columns: i64 = size[size.len() - self.dims..].iter().product();
                size[0].max(columns)
            },
        });
    }
}

impl Op {
    pub fn for_each_case(self, mut test: impl FnMut(&Suite<'_>)) {
        for (dims, affine, way) in
            [(1, true, WAYS[0]), (1, false, WAYS[0]), (2, true, WAYS[0]), (1, true, WAYS[1])]
        {
            Case { op: self, dims, affine, way }.suite(&mut test);
        }
    }

    pub fn parameters(self, columns: i64, kind: Kind, device: Device) -> [Option<Tensor>; 2] {
        let random = || Tensor::randn([columns], (kind, device));
        [Some(random()), self.has_bias.then(random)]
    }

    /// A residual stream or parameters of `Float` next to a branch of a half kind: h has the stream's
    /// kind and y the branch's, and so have their gradients.
    pub fn a_stream_of_float_next_to_a_half_branch(self) {
        for device in devices() {
            for (kind, stream, parameter_kind) in
                [Kind::Half, Kind::BFloat16].into_iter().flat_map(|kind| {
                    let float = Kind::Float;
                    [(kind, float, kind), (kind, float, float), (kind, kind, float)]
                })
            {
                for (rows, columns) in [(5, 64), (3, 33), (40, 768), (2, 4096), (2, 8192)] {
                    // Few digits, so that no kind rounds the sum: that error would be much larger than those
                    // that are compared, and the same for both.
                    let seed = Cell::new(0);
                    let random = |size: &[i64]| {
                        seed.set(seed.get() + 1);
                        fixed_normal(size, seed.get()).to_device(device)
                    };
                    let double = |kind| {
                        let random = random(&[rows, columns]);
                        ((random * 8.0).round().clamp(-32.0, 32.0) / 8.0).to_kind(kind)
                    };
                    let (x, residual) = (double(kind), double(stream));
                    let parameters = [
                        Some(random(&[columns]).to_kind(parameter_kind)),
                        self.has_bias.then(|| random(&[columns]).to_kind(parameter_kind)),
                    ];
                    // CUDA's kernels round parameters to the stream's kind.
                    let parameters = parameters
                        .map(|of| of.map(|of| of.to_kind(stream).to_kind(parameter_kind)));
                    let inputs: Vec<Tensor> = [Some(x), Some(residual)]
                        .into_iter()
                        .chain(parameters)
                        .flatten()
                        .map(|tensor| tensor.set_requires_grad(true))
                        .collect();
                    let grads = [double(Kind::Float), double(kind)];
                    let run = |call: Call, inputs: &[Tensor]| {
                        let inputs: Vec<Tensor> = leaves(inputs);
                        let parameters = [inputs.get(2), inputs.get(3)];
                        let (sum, output) =
                            call(&inputs[0], &inputs[1], &[columns], parameters, 0.0)
                                .expect("outputs");
                        let grads: Vec<Tensor> = grads
                            .iter()
                            .zip([&sum, &output])
                            .map(|(grad, output)| grad.to_kind(output.kind()))
                            .collect();
                        let options = GradOptions {
                            grad_outputs: &[Some(&grads[0]), Some(&grads[1])],
                            ..Default::default()
                        };
                        let leaves: Vec<&Tensor> = inputs.iter().collect();
                        let found = grad(&[&sum, &output], &leaves, &options).expect("gradients");
                        let found = found.into_vec().into_iter().flatten();
                        [sum.detach(), output.detach()].into_iter().chain(found).collect::<Vec<_>>()
                    };
                    let found = run(self.fused, &inputs);
                    assert_eq!((found[0].kind(), found[1].kind()), (stream, kind));
                    for (gradient, input) in found[2..].iter().zip(&inputs) {
                        assert_eq!(gradient.kind(), input.kind());
                    }
                    let theirs = run(self.reference, &inputs);
                    let exact: Vec<Tensor> =
                        inputs.iter().map(|input| input.to_kind(Kind::Double)).collect();
                    for (place, ((found, theirs), exact)) in
                        found.iter().zip(&theirs).zip(&run(self.reference, &exact)).enumerate()
                    {
                        // So are their gradients.
                        let is_rounded = place >= 4 && device.is_cuda() && is_half(stream);
                        let kind = if is_rounded { stream } else { found.kind() };
                        let (found, theirs) = (found.to_kind(kind), theirs.to_kind(kind));
                        assert_as_accurate(&found, &theirs, exact);
                    }
                }
            }
        }
    }

    /// Only h's gradient has a graph, so that the bias' gradient is a constant.
    pub fn second_derivatives_where_one_gradient_has_no_graph(self) {
        for device in devices() {
            let random =
                |size: &[i64]| Tensor::randn(size, (Kind::Double, device)).set_requires_grad(true);
            let mut leaves = vec![random(&[4, 16]), random(&[4, 16]), random(&[16])];
            if self.has_bias {
                leaves.push(random(&[16]));
            }
            let second = |call: Call| {
                let parameters = [leaves.get(2), leaves.get(3)];
                let (sum, output) =
                    call(&leaves[0], &leaves[1], &[16], parameters, 0.0).expect("outputs");
                let loss = output.sum(Kind::Double) + sum.square().sum(Kind::Double);
                let all: Vec<&Tensor> = leaves.iter().collect();
                let create = GradOptions { create_graph: true, ..Default::default() };
                let first = grad(&[&loss], &all, &create).expect("first").into_vec();
                let loss: Tensor =
                    first.iter().flatten().map(|of| of.square().sum(Kind::Double)).sum();
                let found = grad(&[&loss], &all[..3], &GradOptions::default()).expect("second");
                found.exactly::<3>().expect("three")
            };
            for (found, expected) in second(self.fused).iter().zip(second(self.reference)) {
                assert_close(found, &expected, 1e-9, 1e-9);
            }
        }
    }

    /// Both gradients of a sum without dropout may be one tensor, but what autograd accumulates into
    /// two leaves is not.
    pub fn leaves_do_not_share_their_gradients(self) {
        for device in devices() {
            let random = || Tensor::randn([4, 64], (Kind::Float, device)).set_requires_grad(true);
            let (x, residual) = (random(), random());
            let (sum, output) =
                (self.fused)(&x, &residual, &[64], [None, None], 0.0).expect("outputs");
            (sum.sum(Kind::Float) + output.square().sum(Kind::Float)).backward();
            let before = residual.grad().copy();
            let _ = x.grad().fill_(7.0);
            assert!(residual.grad().equal(&before));
        }
    }

    /// The kernels read moments and a mask by address.
    pub fn hooks_may_lay_out_what_is_kept_in_another_way(self) {
        for device in devices() {
            for dropout in [0.0, 0.5] {
                let gradient = |is_spread: bool| {
                    tch::manual_seed(3);
                    let x = Tensor::arange(32, (Kind::Float, device)).sin().view([4, 8]);
                    let leaf = x.set_requires_grad(true);
                    let spread = |tensor: &Tensor| Ok(Tensor::f_stack(&[tensor, tensor], -1)?);
                    let every_other = |packed: &Tensor| Ok(packed.f_select(-1, 0)?);
                    let guard = is_spread.then(|| saved_tensors_hooks(spread, every_other));
                    let residual = leaf.detach();
                    let (_, output) = (self.fused)(&leaf, &residual, &[8], [None, None], dropout)
                        .expect("a result");
                    drop(guard);
                    (&output * &output.detach().cos()).sum(Kind::Float).backward();
                    leaf.grad()
                };
                assert_eq!(gradient(true), gradient(false), "{device:?} {dropout}");
            }
        }
    }

    /// As with libtorch's addition: where only h has a gradient, nothing of the norm is read.
    pub fn what_only_the_norm_reads_may_change_before_the_sums_gradient(self) {
        for device in devices() {
            for dropout in [0.0, 0.5] {
                let leaf = || Tensor::ones([4, 8], (Kind::Float, device)).set_requires_grad(true);
                let (input, residual) = (leaf(), leaf());
                let [weight, bias] = self.parameters(8, Kind::Float, device);
                let parameters = [weight.as_ref(), bias.as_ref()];
                let (mut sum, _) =
                    (self.fused)(&input, &residual, &[8], parameters, dropout).expect("a result");
                let _ = sum.g_add_scalar_(1.0);
                if let Some(weight) = &weight {
                    let _ = weight.detach().g_add_scalar_(1.0);
                }
                sum.sum(Kind::Float).backward();
                assert_eq!(residual.grad(), residual.ones_like(), "{device:?} {dropout}");
                // Twice as much, or nothing.
                let scale = 1.0 / (1.0 - dropout);
                let found = input.grad();
                let is_right = found.eq(0.0).logical_or(&found.eq(scale)).all();
                assert!(
                    is_right.int64_value(&[]) == 1
                        && found.sum(Kind::Float).double_value(&[]) > 0.0
                );
            }
        }
    }

    /// The numbers are those of libtorch's addition and norm.
    pub fn agrees_with_libtorch(self) {
        for device in devices() {
            for kind in KINDS {
                for columns in [768, 33] {
                    let random = || Tensor::randn([20, columns], (kind, device)) * 3.0;
                    let (x, residual) = (random(), random());
                    let parameters = self.parameters(columns, kind, device);
                    let parameters = [parameters[0].as_ref(), parameters[1].as_ref()];
                    let (sum, output) =
                        (self.fused)(&x, &residual, &[columns], parameters, 0.0).expect("outputs");
                    let other_sum = &x + &residual;
                    assert!(sum.equal(&other_sum), "{kind:?} {device:?}");
                    let theirs =
                        (self.libtorch)(&other_sum, &[columns], parameters).expect("libtorch's");
                    let double = |of: &Tensor| of.to_kind(Kind::Double);
                    let of_parameters = parameters.map(|of| of.map(double));
                    let of_parameters = [of_parameters[0].as_ref(), of_parameters[1].as_ref()];
                    let exact = (self.libtorch)(&double(&other_sum), &[columns], of_parameters);
                    match kind {
                        Kind::Double => assert_close(&output, &theirs, 1e-12, 1e-12),
                        _ => assert_as_accurate(&output, &theirs, &exact.expect("exact")),
                    }
                }
            }
        }
    }

    pub fn bad_input_is_refused_by_name(self) {
        for device in devices() {
            let of = |size: &[i64], kind| Tensor::zeros(size, (kind, device));
            let x = of(&[3, 8], Kind::Float);
            let (half, whole) = (of(&[3, 8], Kind::Half), of(&[3, 8], Kind::Int64));
            let (short, double) = (of(&[3, 7], Kind::Float), of(&[3, 8], Kind::Double));
            let (weight, double_weight) = (of(&[7], Kind::Float), of(&[8], Kind::Double));
            let call =
                |x: &Tensor, residual: &Tensor, shape: &[i64], weight: Option<&Tensor>, p| {
                    (self.fused)(x, residual, shape, [weight, None], p)
                };
            for (error, parts) in [
                (call(&x, &x, &[], None, 0.0), ["normalized_shape", "at least one dimension"]),
                (call(&x, &x, &[5], None, 0.0), ["input", "[*, 5]"]),
                (call(&whole, &whole, &[8], None, 0.0), ["input", "Int64"]),
                (call(&x, &short, &[8], None, 0.0), ["residual", "[3, 8]"]),
                (call(&x, &double, &[8], None, 0.0), ["residual", "Float, as input"]),
                (call(&x, &half, &[8], None, 0.0), ["residual", "Float, as input"]),
                (call(&half, &double, &[8], None, 0.0), ["residual", "Half, as input, or Float"]),
                (call(&x, &x, &[8], Some(&weight), 0.0), ["weight", "[8]"]),
                (
                    call(&half, &half, &[8], Some(&double_weight), 0.0),
                    ["weight", "Half, as input, or Float"],
                ),
                (call(&x, &x, &[8], Some(&Tensor::new()), 0.0), ["weight", "defined"]),
                (call(&x, &x, &[8], None, 1.5), ["dropout", "1.5"]),
                (call(&x, &x, &[8], None, f64::NAN), ["dropout", "NaN"]),
                (call(&Tensor::new(), &x, &[8], None, 0.0), ["input", "defined"]),
                (call(&x, &Tensor::new(), &[8], None, 0.0), ["residual", "defined"]),
            ] {
                let error = error.expect_err("an error").to_string();
                let start = format!("{}: ", self.name);
                assert!(error.starts_with(&start) && !error.contains('\n'), "{error}");
                assert!(parts.iter().all(|part| error.contains(part)), "{error}: {parts:?}");
            }
        }
    }

    /// Random calls agree with the reference.
    pub fn random_cases(self) {
        let count = 3 + usize::from(self.has_bias);
        let cases = || {
            let lead = proptest::collection::vec(size(), 0..3);
            (lead, size(), any::<bool>(), any::<bool>(), style(5)).prop_map(
                move |(mut x, columns, has_weight, has_bias, style)| {
                    x.push(columns);
                    let parameter = Some(vec![columns]);
                    let bias = parameter.clone().filter(|_| has_bias && count > 3);
                    let weight = parameter.clone().filter(|_| has_weight);
                    style.case(vec![Some(x.clone()), Some(x), weight, bias, parameter])
                },
            )
        };
        let run = |call: Call, inputs: &[Option<Tensor>]| {
            let [Some(x), Some(residual), weight, bias, Some(shape)] = inputs else {
                unreachable!("five inputs")
            };
            let parameters = [weight.as_ref(), bias.as_ref()];
            let (sum, output) = call(x, residual, &shape.size(), parameters, 0.0)?;
            Ok(vec![sum, output])
        };
        for device in devices() {
            let property = Property {
                name: self.name,
                fused: &|inputs| run(self.fused, inputs),
                reference: &|inputs| run(self.reference, inputs),
                // The composite also broadcasts, and adds other mixtures; the docs say that both are refused.
                excluded: &|RandomCase(arguments)| {
                    let [Some(x), Some(residual), weight, bias, Some(shape)] = &arguments[..]
                    else {
                        return true;
                    };
                    let first = weight.as_ref().or(bias.as_ref()).map(|parameter| parameter.kind);
                    let is_mixed = is_half(x.kind) && residual.kind == Kind::Float;
                    let takes =
                        |kind: Kind| kind == x.kind || is_half(x.kind) && kind == Kind::Float;
                    let mut parameters = weight.iter().chain(bias.iter());
                    x.size != residual.size
                        || shape.size.is_empty()
                        || !x.size.ends_with(&shape.size)
                        || !KINDS.contains(&x.kind)
                        || x.kind != residual.kind && !is_mixed
                        || parameters.any(|of| {
                            !takes(of.kind) || Some(of.kind) != first || of.size != shape.size
                        })
                },
            };
            property.holds_for(cases(), 1500, device);
        }
    }
}

/// Declares the tests of an operator.
macro_rules! tests {
    ($op:expr) => {
        $crate::add_norm::tests! {
            $op;
            a_stream_of_float_next_to_a_half_branch,
            dropout_drops_the_same_values_in_both_directions,
            gradients_under_dropout_are_those_of_the_formula,
            leaves_do_not_share_their_gradients,
            what_only_the_norm_reads_may_change_before_the_sums_gradient,
            hooks_may_lay_out_what_is_kept_in_another_way,
            cuda_many_rows_for_each_block,
            cuda_graphs_draw_new_numbers_in_each_replay,
            second_derivatives_where_one_gradient_has_no_graph,
            agrees_with_libtorch,
            bad_input_is_refused_by_name,
            random_cases,
        }

        #[test]
        fn forward_agrees_with_the_reference() {
            $op.for_each_case(|suite| suite.forward_agrees_with_the_reference());
        }

        #[test]
        fn gradients_agree_with_the_reference() {
            $op.for_each_case(|suite| suite.gradients_agree_with_the_reference());
        }

        #[test]
        fn with_and_without_a_graph_the_bits_are_the_same() {
            $op.for_each_case(|suite| suite.with_and_without_a_graph_the_bits_are_the_same());
        }

        #[test]
        fn gradcheck_of_every_small_sample() {
            $op.for_each_case(|suite| suite.gradcheck_of_every_small_sample());
        }

        #[test]
        fn second_derivatives_of_every_small_sample() {
            $op.for_each_case(|suite| suite.gradgradcheck_of_every_small_sample());
        }

        #[test]
        fn conformance_in_every_kind() {
            $op.for_each_case(|suite| suite.conformance_of(suite.small));
        }

        #[test]
        fn cuda_agrees_with_the_cpu() {
            $op.for_each_case(|suite| suite.cuda_agrees_with_the_cpu("cuda_agrees_with_the_cpu"));
        }

        #[test]
        fn cuda_half_kinds_agree_with_the_cpu() {
            $op.for_each_case(|suite| {
                suite.cuda_half_kinds_agree_with_the_cpu("cuda_half_kinds_agree_with_the_cpu")
            });
        }
    };
    ($op:expr; $($name:ident,)+) => {
        $(
            #[test]
            fn $name() {
                $op.$name();
            }
        )+
    };
}
pub(crate) use tests;
