//! Tests of `ops::rms_norm`: against its reference, libtorch's own operator and finite differences,
//! and with bad input. The kernels are those of layer_norm with another statistic, whose tests look
//! at more sizes.

use proptest::prelude::*;
use support::property::{Case as RandomCase, Property, size, style};
use support::{KINDS, Suite, among_nan};
use tch::nn::{Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::amp::Autocast;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::nn::{RmsNormConfig, rms_norm as layer};
use tch_extension::ops::{NormWay, f_rms_norm, force, rms_norm_reference};
use tch_extension::testing::{
    Sample, SampleTable, Shape, assert_as_accurate, assert_close, cuda_or_skip, devices,
};

const EPS: Option<f64> = Some(1e-5);

/// How many dimensions are normalised, whether there is a weight, and which kernels are used.
#[derive(Clone, Copy, Debug)]
struct Case {
    dims: usize,
    weight: bool,
    way: NormWay,
}

const AFFINE: Case = Case { dims: 1, weight: true, way: NormWay::Automatic };
const PLAIN: Case = Case { weight: false, ..AFFINE };
const CASES: [Case; 4] = [AFFINE, PLAIN, Case { dims: 2, ..AFFINE }, Case { dims: 3, ..AFFINE }];

const WAYS: [NormWay; 7] = {
    use NormWay::{Cluster, Few, FewPasses, InPlace, Passes, Registers, Ring};
    [Registers, Cluster, Ring, InPlace, Few, Passes, FewPasses]
};

/// A case for each of the kernels, with and without a weight.
fn all_ways() -> impl Iterator<Item = Case> {
    WAYS.into_iter().flat_map(|way| [Case { way, ..AFFINE }, Case { way, ..PLAIN }])
}

impl Case {
    fn normalized_shape(self, input: &Tensor) -> Vec<i64> {
        let size = input.size();
        size[size.len() - self.dims..].to_vec()
    }

    fn fused(self, arguments: &[Tensor]) -> Result<Vec<Tensor>> {
        let (input, weight) = (&arguments[0], arguments.get(1));
        let shape = self.normalized_shape(input);
        Ok(vec![force(self.way, || f_rms_norm(input, &shape, weight, EPS))?])
    }

    fn reference(self, arguments: &[Tensor]) -> Result<Vec<Tensor>> {
        let input = &arguments[0];
        Ok(vec![rms_norm_reference(input, &self.normalized_shape(input), arguments.get(1), EPS)?])
    }

    fn shapes(self, [m, n]: [i64; 2]) -> Vec<Shape> {
        let mut parameter = vec![2; self.dims - 1];
        parameter.push(n);
        let input = [vec![m], parameter.clone()].concat();
        let parameters = vec![parameter; usize::from(self.weight)];
        std::iter::once(input).chain(parameters).map(Shape::new).collect()
    }

    fn table(self) -> SampleTable<2, impl Fn([i64; 2]) -> Vec<Shape>> {
        SampleTable::empty(["M", "N"], move |sizes| self.shapes(sizes))
    }

    fn samples(self, sizes: &[[i64; 2]], kind: Kind, device: Device) -> Vec<Sample> {
        self.table().with_sizes(sizes).samples(kind, device).expect("samples")
    }

    /// Samples that are too large for a Jacobian: for each kernel of the plan.
    fn large(self, kind: Kind, device: Device) -> Vec<Sample> {
        let sizes = [
            [300, 40],
            [5000, 3],
            [37, 256],
            [9, 1029],
            [6, 1032],
            [5, 2068],
            [3, 4098],
            [2, 8200],
            [2, 35000],
            [2, 140_001],
        ];
        let table = self.table().with_sizes(&sizes).with_layouts([33, 64]);
        table.samples(kind, device).expect("samples")
    }

    /// Runs one of the tests that all operators share.
    fn suite(self, test: impl FnOnce(&Suite<'_>)) {
        let columns =
            move |input: &Tensor| -> i64 { self.normalized_shape(input).iter().product() };
        let small = [[3, 5], [2, 8], [1, 1], [0, 4], [3, 0], [5, 33]];
        eprintln!("{self:?}");
        test(&Suite {
            fused: &move |arguments| self.fused(arguments),
            reference: &move |arguments| self.reference(arguments),
            small: &move |kind, device| self.samples(&small, kind, device),
            large: &move |kind, device| self.large(kind, device),
            terms: &move |sample| sample.inputs[0].size()[0].max(columns(&sample.inputs[0])),
        });
    }
}

fn for_each_case(mut test: impl FnMut(&Suite<'_>)) {
    for case in CASES.into_iter().chain(all_ways()) {
        case.suite(&mut test);
    }
}

#[test]
fn forward_agrees_with_the_reference() {
    for_each_case(|suite| suite.forward_agrees_with_the_reference());
}

#[test]
fn gradients_agree_with_the_reference() {
    for_each_case(|suite| suite.gradients_agree_with_the_reference());
}

#[test]
fn with_and_without_a_graph_the_bits_are_the_same() {
    for_each_case(|suite| suite.with_and_without_a_graph_the_bits_are_the_same());
}

#[test]
fn gradcheck_of_every_small_sample() {
    for_each_case(|suite| suite.gradcheck_of_every_small_sample());
}

#[test]
fn second_derivatives_of_every_small_sample() {
    for case in CASES {
        case.suite(|suite| suite.gradgradcheck_of_every_small_sample());
    }
}

#[test]
fn conformance_in_every_kind() {
    for_each_case(|suite| suite.conformance_of(suite.small));
}

/// As in layer_norm's test of that name.
#[test]
fn cuda_rows_may_begin_at_multiples_of_8_bytes() {
    use NormWay::{Automatic, Cluster, Passes, Registers};
    let Some(device) = cuda_or_skip("cuda_rows_may_begin_at_multiples_of_8_bytes") else { return };
    for kind in KINDS {
        let size = kind.elt_size_in_bytes() as i64;
        for (rows, eights) in support::ROWS_OF_EIGHTS {
            let sizes = [rows, eights * 8 / size];
            let inputs = AFFINE.samples(&[sizes], kind, device).remove(0).inputs;
            let exact: Vec<Tensor> =
                inputs.iter().map(|input| input.to_kind(Kind::Double)).collect();
            let expected = AFFINE.reference(&exact).expect("reference").remove(0).to_kind(kind);
            for way in [Automatic, Registers, Cluster, Passes] {
                let run = |eights: [i64; 2]| {
                    let arguments: Vec<Tensor> = std::iter::zip(&inputs, eights)
                        .map(|(tensor, eights)| among_nan(tensor, eights * 8 / size))
                        .collect();
                    Case { way, ..AFFINE }.fused(&arguments).expect("output").remove(0)
                };
                let found = run([1, 0]);
                let context = format!("{way:?} {sizes:?} {kind:?}");
                eprintln!("{context}");
                support::assert_as_close(&found, &expected, kind);
                assert!(run([0, 3]).equal(&found) && run([3, 1]).equal(&found), "{context}");
                assert!(eights % 2 == 0 || run([0, 0]).equal(&found), "{context}");
            }
        }
    }
}

#[test]
fn each_way_gives_the_same_sizes_kinds_strides_and_memory() {
    let ways: Vec<NormWay> = WAYS.into_iter().chain([NormWay::Automatic]).collect();
    for (case, inputs) in [
        (AFFINE, &[&[6, 40][..], &[40]][..]),
        (AFFINE, &[&[2, 3, 33], &[33]]),
        (AFFINE, &[&[0, 5], &[5]]),
        (AFFINE, &[&[5, 0], &[0]]),
        (PLAIN, &[&[3, 4100]]),
        (Case { dims: 2, ..AFFINE }, &[&[4, 2, 33], &[2, 33]]),
    ] {
        support::alike::assert_alike(&ways, &[inputs], |way, arguments| {
            Case { way, ..case }.fused(arguments)
        });
    }
}

/// The reference could be wrong in the same way as the kernel, so these numbers come from the
/// formula. The rows' means are far from zero: subtracting them would be seen.
#[test]
fn the_formula_by_hand() {
    let w = [0.5, -1.0, 2.0, 3.0];
    for device in devices() {
        for row in [[1.0, 2.0, 4.0, -3.0], [100.25, 100.25, 100.5, 100.75]] {
            let mean_square = row.iter().map(|x| x * x).sum::<f64>() / 4.0;
            let tensor = |values: &[f64]| Tensor::from_slice(values).to_device(device);
            for op in [f_rms_norm, rms_norm_reference] {
                let y = op(&tensor(&row), &[4], Some(&tensor(&w)), Some(0.125)).expect("output");
                for (index, x) in row.iter().enumerate() {
                    let expected = x / (mean_square + 0.125).sqrt() * w[index];
                    let found = y.double_value(&[index as i64]);
                    assert!((found - expected).abs() < 1e-13, "{found} {expected} on {device:?}");
                }
            }
        }
    }
}

fn libtorch(input: &Tensor, weight: Option<&Tensor>, eps: Option<f64>) -> Result<Tensor> {
    let columns = *input.size().last().expect("a dimension");
    Ok(input.f_rms_norm([columns], weight, eps)?)
}

/// A weight of any kind beside an input of any kind, with and without autocast, and without eps: the
/// kind of the result is libtorch's, and its values are as exact.
#[test]
fn kinds_and_eps_are_those_of_libtorch() {
    let kinds: Vec<Option<Kind>> = KINDS.into_iter().map(Some).chain([None]).collect();
    for device in devices() {
        for (kind, &weight) in
            KINDS.into_iter().flat_map(|kind| kinds.iter().map(move |w| (kind, w)))
        {
            for lower in [None, Some(Kind::BFloat16)] {
                let _autocast = lower.map(|kind| Autocast::new(device, kind).expect("autocast"));
                let x = (Tensor::randn([7, 40], (Kind::Double, device)) * 1e-3).to_kind(kind);
                let w = weight.map(|kind| Tensor::randn([40], (kind, device)));
                for eps in [EPS, None] {
                    let ours = f_rms_norm(&x, &[40], w.as_ref(), eps).expect("ours");
                    let theirs = libtorch(&x, w.as_ref(), eps).expect("libtorch's");
                    assert_eq!(ours.kind(), theirs.kind(), "{kind:?} {weight:?} {lower:?}");
                    let used = eps.unwrap_or(match kind {
                        Kind::Double => f64::EPSILON,
                        _ => f64::from(f32::EPSILON),
                    });
                    let double = |of: &Tensor| of.to_kind(Kind::Double);
                    let exact = rms_norm_reference(
                        &double(&x),
                        &[40],
                        w.as_ref().map(double).as_ref(),
                        Some(used),
                    );
                    let exact = exact.expect("exact");
                    match kind {
                        Kind::Double => assert_close(&ours, &exact, 1e-13, 1e-15),
                        _ => assert_as_accurate(&ours, &theirs, &exact),
                    }
                }
            }
        }
    }
}

/// The gradients of a weight whose kind no kernel takes come from tch's operations.
#[test]
fn a_weight_of_another_kind_has_a_gradient_of_its_kind() {
    for device in devices() {
        let x = Tensor::randn([5, 8], (Kind::BFloat16, device)).set_requires_grad(true);
        let w = Tensor::randn([8], (Kind::Double, device)).set_requires_grad(true);
        let y = f_rms_norm(&x, &[8], Some(&w), EPS).expect("output");
        assert_eq!(y.kind(), Kind::BFloat16);
        let gradients = grad(&[&y.sum(Kind::Float)], &[&x, &w], &GradOptions::default());
        let kinds: Vec<Option<Kind>> = gradients
            .expect("gradients")
            .iter()
            .map(|gradient| gradient.as_ref().map(Tensor::kind))
            .collect();
        assert_eq!(kinds, [Some(Kind::BFloat16), Some(Kind::Double)]);
    }
}

#[test]
fn bad_input_is_refused_by_name() {
    for device in devices() {
        let x = Tensor::zeros([3, 4], (Kind::Float, device));
        let of = |size: &[i64], kind| Tensor::zeros(size, (kind, device));
        let (short, whole) = (of(&[3], Kind::Float), of(&[4], Kind::Int64));
        let short_double = of(&[3], Kind::Double);
        for (error, parts) in [
            (f_rms_norm(&x, &[], None, EPS), ["normalized_shape", "at least one dimension"]),
            (f_rms_norm(&x, &[5], None, EPS), ["input", "[*, 5]"]),
            (f_rms_norm(&x, &[4], Some(&short), EPS), ["weight", "[4]"]),
            (f_rms_norm(&x, &[4], Some(&short_double), EPS), ["weight", "[4]"]),
            (f_rms_norm(&x, &[4], Some(&whole), EPS), ["weight", "Int64"]),
            (f_rms_norm(&of(&[3, 4], Kind::Int64), &[4], None, EPS), ["input", "Int64"]),
            (f_rms_norm(&Tensor::new(), &[4], None, EPS), ["input", "defined"]),
        ] {
            let error = error.expect_err("an error").to_string();
            assert!(error.starts_with("rms_norm: ") && !error.contains('\n'), "{error}");
            assert!(parts.iter().all(|part| error.contains(part)), "{error}: {parts:?}");
        }
    }
}

/// x, w?, and a tensor whose shape is the normalised shape; its values are not used.
fn take(inputs: &[Option<Tensor>]) -> (&Tensor, Option<&Tensor>, Vec<i64>) {
    let [Some(x), w, Some(shape)] = inputs else { unreachable!("three inputs") };
    (x, w.as_ref(), shape.size())
}

/// Only floating-point kinds are documented; libtorch takes integers, too.
fn is_undocumented(RandomCase(arguments): &RandomCase) -> bool {
    arguments[..2].iter().flatten().any(|argument| !KINDS.contains(&argument.kind))
}

#[test]
fn random_cases() {
    let normal = || proptest::collection::vec(size(), 1..3);
    let cases = || {
        let lead = proptest::collection::vec(size(), 0..3);
        (lead, normal(), any::<bool>(), style(3)).prop_map(|(mut x, normal, has_weight, style)| {
            x.extend(&normal);
            let weight = has_weight.then(|| normal.clone());
            style.case(vec![Some(x), weight, Some(normal)])
        })
    };
    let property = Property {
        name: "rms_norm",
        fused: &|inputs| {
            let (x, w, shape) = take(inputs);
            f_rms_norm(x, &shape, w, EPS).map(|y| vec![y])
        },
        // libtorch's own operator decides which inputs are refused. It rounds half kinds more often.
        reference: &|inputs| {
            let (x, w, shape) = take(inputs);
            let kind = x.f_rms_norm(shape.as_slice(), w, EPS)?.kind();
            let reference = rms_norm_reference(x, &shape, w, EPS)?;
            assert_eq!(reference.kind(), kind);
            Ok(vec![reference])
        },
        excluded: &is_undocumented,
    };
    for device in devices() {
        property.holds_for(cases(), 2500, device);
    }
}

#[test]
fn the_layer_has_torch_s_names_and_values() {
    for device in devices() {
        let vs = VarStore::new(device);
        let of = layer(vs.root(), &[2, 8], RmsNormConfig::default());
        assert_eq!(vs.variables().keys().collect::<Vec<_>>(), ["weight"]);
        let x = Tensor::randn([3, 2, 8], (Kind::Float, device));
        let expected = x.rms_norm([2, 8], of.weight.as_ref(), None);
        assert_close(&of.forward(&x).detach(), &expected.detach(), 1e-5, 1e-5);
        let residual = x.randn_like();
        let (sum, output) = of.forward_add(&x, &residual, 0.0);
        assert!(sum.equal(&(&x + &residual)));
        assert_close(&output.detach(), &of.forward(&sum).detach(), 1e-5, 1e-5);
        let plain = RmsNormConfig { elementwise_affine: false, ..Default::default() };
        let vs = VarStore::new(device);
        assert!(layer(vs.root(), &[8], plain).weight.is_none() && vs.is_empty());
        let error = of.f_forward(&x.transpose(0, 2)).expect_err("another shape").to_string();
        assert!(error.contains("rms_norm: input"), "{error}");
    }
}
