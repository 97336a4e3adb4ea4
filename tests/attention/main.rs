//! Tests of `nn`'s attention: the function against its reference and in random cases, the switch of
//! back ends, the cache, and the layer.

mod back_ends;
mod cache;
mod cuda;
mod decode;
mod layer;
mod packed;
mod refusals;

use proptest::prelude::*;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use support::property::{Property, style};
use support::{KINDS, Suite, is_half};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::amp::Autocast;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::nn::{
    AttentionOptions, Causal, SdpaBackend, f_scaled_dot_product_attention,
    scaled_dot_product_attention_reference, sdpa_kernel,
};
use tch_extension::testing::{
    ConformanceOptions, Sample, SampleTable, Shape, assert_as_accurate, assert_close, conformance,
    devices, tolerance,
};

/// The switches of back ends belong to the process, so a test that changes them runs alone.
static SWITCHES: RwLock<()> = RwLock::new(());

fn unchanged() -> RwLockReadGuard<'static, ()> {
    SWITCHES.read().unwrap_or_else(PoisonError::into_inner)
}

fn alone() -> RwLockWriteGuard<'static, ()> {
    SWITCHES.write().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mask {
    None,
    /// An input that may require grad.
    Added,
    /// Made from the sizes.
    Bool,
    Causal(Causal),
}

#[derive(Clone, Copy, Debug)]
struct Case {
    mask: Mask,
    /// How many heads of the query share one of key and value.
    group: i64,
    scale: Option<f64>,
}

const PLAIN: Case = Case { mask: Mask::None, group: 1, scale: None };
const CASES: [Case; 7] = [
    PLAIN,
    Case { mask: Mask::Added, ..PLAIN },
    Case { mask: Mask::Bool, group: 2, ..PLAIN },
    Case { mask: Mask::Causal(Causal::UpperLeft), ..PLAIN },
    Case { mask: Mask::Causal(Causal::LowerRight), group: 3, ..PLAIN },
    Case { group: 2, scale: Some(0.25), ..PLAIN },
    Case { mask: Mask::Added, group: 2, scale: Some(-0.5) },
];

const LARGE: [[i64; 5]; 3] = [[2, 2, 130, 130, 64], [1, 2, 33, 257, 24], [1, 1, 300, 40, 128]];

impl Case {
    /// Calls `op` with the options of this case.
    fn call(
        self,
        op: fn(&Tensor, &Tensor, &Tensor, &AttentionOptions<'_>) -> Result<Tensor>,
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>> {
        let (q, k, v) = (&inputs[0], &inputs[1], &inputs[2]);
        // The first query sees no key, and of the others each sees a different half.
        let places = Tensor::arange(q.size()[2] * k.size()[2], (Kind::Int64, q.device()));
        let drawn = (places * 7).remainder(11).gt(4).view([q.size()[2], k.size()[2]]);
        let seen = drawn.logical_and(
            &Tensor::arange(q.size()[2], (Kind::Int64, q.device())).gt(0).unsqueeze(1),
        );
        let options = AttentionOptions {
            attn_mask: match self.mask {
                Mask::Added => Some(&inputs[3]),
                Mask::Bool => Some(&seen),
                Mask::None | Mask::Causal(_) => None,
            },
            causal: match self.mask {
                Mask::Causal(causal) => Some(causal),
                _ => None,
            },
            scale: self.scale,
            enable_gqa: self.group != 1,
            ..Default::default()
        };
        // Some back ends return a transposed tensor.
        Ok(vec![op(q, k, v, &options)?.contiguous()])
    }

    fn fused(self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        self.call(f_scaled_dot_product_attention, inputs)
    }

    fn reference(self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        self.call(scaled_dot_product_attention_reference, inputs)
    }

    /// Sizes: batch, heads of key and value, queries, keys, features.
    fn samples(self, sizes: &[[i64; 5]], kind: Kind, device: Device) -> Vec<Sample> {
        let shapes = move |[b, h, l, s, e]: [i64; 5]| {
            let mask = (self.mask == Mask::Added).then(|| vec![b, 1, l, s]);
            [vec![b, h * self.group, l, e], vec![b, h, s, e], vec![b, h, s, e]]
                .into_iter()
                .chain(mask)
                .map(Shape::new)
                .collect()
        };
        let table = SampleTable::empty(["B", "H", "L", "S", "E"], shapes).with_sizes(sizes);
        table.samples(kind, device).expect("samples")
    }

    fn suite(self, test: impl FnOnce(&Suite<'_>)) {
        self.suite_of(&KINDS, test);
    }

    /// The suite with samples of these kinds only.
    fn suite_of(self, kinds: &[Kind], test: impl FnOnce(&Suite<'_>)) {
        eprintln!("{self:?}");
        let of = |sizes: &[[i64; 5]], kind, device| match kinds.contains(&kind) {
            true => self.samples(sizes, kind, device),
            false => vec![],
        };
        let small = [
            [2, 1, 3, 5, 4],
            [1, 2, 4, 4, 2],
            [1, 1, 1, 1, 1],
            [1, 1, 1, 6, 8],
            [1, 1, 5, 3, 3],
            [0, 1, 2, 2, 2],
            [1, 0, 2, 2, 2],
            [1, 1, 0, 2, 2],
            [1, 1, 2, 0, 2],
            [1, 1, 2, 2, 0],
        ];
        test(&Suite {
            fused: &move |inputs| self.fused(inputs),
            reference: &move |inputs| self.reference(inputs),
            small: &|kind, device| of(&small, kind, device),
            large: &|kind, device| of(&LARGE, kind, device),
            terms: &|sample| {
                let (q, k) = (&sample.inputs[0], &sample.inputs[1]);
                q.size()[1..].iter().chain(&k.size()[2..3]).product()
            },
        });
    }
}

#[test]
fn forward_agrees_with_the_reference() {
    let _unchanged = unchanged();
    for case in CASES {
        case.suite_of(&LARGE_KINDS, |suite| suite.forward_agrees_with_the_reference());
    }
}

#[test]
fn gradients_agree_with_the_reference() {
    let _unchanged = unchanged();
    for case in CASES {
        case.suite_of(&LARGE_KINDS, |suite| suite.gradients_agree_with_the_reference());
    }
}

const LARGE_KINDS: [Kind; 2] = [Kind::Float, Kind::Double];

/// libtorch's kernels round the weights of half kinds in places of their own. On the whole they are
/// at least as exact as the reference in these kinds; single elements may be off by twice as much.
fn assert_near(found: &Tensor, rival: &Tensor, exact: &Tensor) {
    let rounding = if found.kind() == Kind::Half { 2_f64.powi(-11) } else { 2_f64.powi(-8) };
    let double = |tensor: &Tensor| tensor.detach().to_kind(Kind::Double);
    let errors = |tensor: &Tensor| double(tensor) - exact;
    let rms = |tensor: &Tensor| tensor.square().mean(Kind::Double).sqrt().double_value(&[]);
    let largest = |tensor: &Tensor| tensor.abs().max().double_value(&[]);
    let (found, rival) = (errors(found), errors(rival));
    for (found, allowed) in [
        (rms(&found), rms(&rival) + rounding * rms(exact)),
        (largest(&found), 2.0 * (largest(&rival) + rounding * largest(exact))),
    ] {
        assert!(found <= allowed, "{found:e} where {allowed:e} is allowed");
    }
}

/// Outputs and gradients.
#[test]
fn half_kinds_are_as_exact_as_the_reference() {
    let _unchanged = unchanged();
    for case in CASES {
        for device in devices() {
            for kind in [Kind::Half, Kind::BFloat16] {
                for sample in case.samples(&LARGE, kind, device) {
                    eprintln!("{case:?} {} {kind:?} {device:?}", sample.name);
                    let exact: Vec<_> =
                        sample.inputs.iter().map(|input| input.to_kind(Kind::Double)).collect();
                    let fused = |inputs: &[Tensor]| case.fused(inputs);
                    let reference = |inputs: &[Tensor]| case.reference(inputs);
                    let all = |op: support::Operator<'_>, inputs: &[Tensor]| -> Vec<Tensor> {
                        let gradients = support::gradients(op, &support::leaves(inputs), &[0]);
                        let outputs = op(inputs).expect("output").into_iter();
                        outputs.chain(gradients.into_iter().flatten()).collect()
                    };
                    let (found, rival) =
                        (all(&fused, &sample.inputs), all(&reference, &sample.inputs));
                    let exact = all(&reference, &exact);
                    assert_eq!(found.len(), 1 + sample.inputs.len());
                    for ((found, rival), exact) in found.iter().zip(&rival).zip(&exact) {
                        assert_eq!(found.kind(), kind);
                        assert_near(found, rival, exact);
                    }
                }
            }
        }
    }
}

#[test]
fn gradcheck_of_every_small_sample() {
    let _unchanged = unchanged();
    for case in CASES {
        case.suite(|suite| suite.gradcheck_of_every_small_sample());
    }
}

#[test]
fn second_derivatives() {
    let _alone = alone();
    let all = || {
        for case in CASES {
            case.suite(|suite| suite.gradgradcheck_of_every_small_sample());
        }
    };
    sdpa_kernel(&[SdpaBackend::Math], all).expect("the switch");
}

#[test]
fn cuda_agrees_with_the_cpu() {
    let _unchanged = unchanged();
    for case in CASES {
        case.suite(|suite| suite.cuda_agrees_with_the_cpu("attention cuda_agrees_with_the_cpu"));
    }
}

#[test]
fn cuda_half_kinds_agree_with_the_cpu() {
    let _unchanged = unchanged();
    for case in CASES {
        let name = "attention cuda_half_kinds_agree_with_the_cpu";
        case.suite(|suite| suite.cuda_half_kinds_agree_with_the_cpu(name));
    }
}

/// libtorch's fused backward passes on CUDA add with atomics. For a strided last dimension,
/// libtorch takes another back end, which rounds the weights of half kinds.
#[test]
fn conformance_in_every_kind() {
    let _unchanged = unchanged();
    for case in CASES {
        for device in devices() {
            for kind in KINDS {
                let bound = 8.0 * tolerance(kind).0;
                let tolerance = is_half(kind).then_some((bound, bound));
                let options =
                    ConformanceOptions { deterministic: false, tolerance, ..Default::default() };
                for sample in case.samples(&[[2, 1, 3, 5, 8], [1, 2, 4, 4, 8]], kind, device) {
                    let leaves = sample.leaves().expect("leaves");
                    let inputs: Vec<&Tensor> = leaves.iter().collect();
                    conformance(|inputs| case.fused(inputs), &inputs, &options).unwrap_or_else(
                        |error| panic!("{case:?} {} {kind:?}:\n{error}", sample.name),
                    );
                }
            }
        }
    }
}

/// The reference could be wrong in the same way, so these numbers come from the formula.
#[test]
fn the_formula_by_hand() {
    let _unchanged = unchanged();
    let (q, k, v) = ([1.0, -2.0], [0.5, 3.0, -1.0], [10.0, 20.0, 40.0]);
    for device in devices() {
        let tensor =
            |values: &[f64]| Tensor::from_slice(values).view([1, 1, -1, 1]).to_device(device);
        let cases = [
            (None, [[true; 3]; 2]),
            (Some(Causal::UpperLeft), [[true, false, false], [true, true, false]]),
            (Some(Causal::LowerRight), [[true, true, false], [true, true, true]]),
        ];
        for (causal, seen) in cases {
            let options = AttentionOptions { causal, scale: Some(0.7), ..Default::default() };
            for op in [f_scaled_dot_product_attention, scaled_dot_product_attention_reference] {
                let output = op(&tensor(&q), &tensor(&k), &tensor(&v), &options).expect("output");
                for (row, q) in q.iter().enumerate() {
                    let weight = |key: usize| match seen[row][key] {
                        true => (0.7 * q * k[key]).exp(),
                        false => 0.0,
                    };
                    let total: f64 = (0..3).map(weight).sum();
                    let expected = (0..3).map(|key| weight(key) * v[key]).sum::<f64>() / total;
                    let found = output.double_value(&[0, 0, row as i64, 0]);
                    assert!((found - expected).abs() < 1e-12, "{causal:?}: {found} {expected}");
                }
            }
        }
    }
}

#[test]
fn dropout_keeps_the_mean_and_zero_and_one_are_exact() {
    let _unchanged = unchanged();
    for device in devices() {
        let q = Tensor::randn([2, 4, 64, 16], (Kind::Float, device));
        let v = Tensor::ones([2, 4, 64, 16], (Kind::Float, device));
        let call = |dropout_p| {
            let options = AttentionOptions { dropout_p, ..Default::default() };
            f_scaled_dot_product_attention(&q, &q, &v, &options).expect("output")
        };
        assert_close(&call(0.0), &v, 1e-5, 1e-5);
        assert_eq!(call(1.0).abs().max().double_value(&[]), 0.0);
        let half = call(0.5);
        let (mean, deviation) =
            (half.mean(Kind::Double).double_value(&[]), half.std(false).double_value(&[]));
        assert!((mean - 1.0).abs() < 0.1 && deviation > 0.1, "{mean} {deviation}");
    }
}

#[test]
fn kinds_are_those_of_libtorch_under_autocast() {
    let _unchanged = unchanged();
    for device in devices() {
        let make = |kind| Tensor::randn([1, 2, 3, 8], (kind, device));
        let mask = Tensor::randn([3, 3], (Kind::Float, device));
        let lower = if device.is_cuda() { Kind::Half } else { Kind::BFloat16 };
        let _autocast = Autocast::new(device, lower).expect("autocast");
        for q in KINDS {
            for k in KINDS {
                let (q, k) = (make(q), make(k));
                for attn_mask in [None, Some(&mask)] {
                    let options = AttentionOptions { attn_mask, ..Default::default() };
                    let ours = f_scaled_dot_product_attention(&q, &k, &k, &options);
                    let theirs = Tensor::f_scaled_dot_product_attention(
                        &q, &k, &k, attn_mask, 0.0, false, None, false,
                    );
                    match theirs {
                        Ok(theirs) => {
                            let ours = ours.expect("libtorch takes it");
                            assert_eq!(ours.kind(), theirs.kind());
                            assert_close(&ours, &theirs, 1e-5, 1e-5);
                        }
                        Err(error) => assert!(ours.is_err(), "{error}"),
                    }
                }
            }
        }
    }
}

/// libtorch's kernel for the CPU reads a `Float` mask next to `Double` as `Double`: wrong numbers, and
/// elements beyond its end, as soon as there are enough keys for a vector.
#[test]
fn a_float_mask_next_to_double_is_what_its_values_are() {
    let _unchanged = unchanged();
    for device in devices() {
        for keys in [1, 7, 8, 16, 17, 40, 130] {
            let make = |t| Tensor::randn([2, 3, t, 8], (Kind::Double, device));
            let (q, k, v) = (make(12), make(keys), make(keys));
            let mask = Tensor::randn([12, keys], (Kind::Float, device));
            for (mask, requires_grad) in [(mask.copy(), false), (mask.copy(), true)] {
                let mask = mask.set_requires_grad(requires_grad);
                let options = AttentionOptions { attn_mask: Some(&mask), ..Default::default() };
                let y = f_scaled_dot_product_attention(&q, &k, &v, &options).expect("output");
                let scores = q.matmul(&k.transpose(-2, -1)) / 8_f64.sqrt();
                let scores = scores + mask.to_kind(Kind::Double);
                let expected = scores.softmax(-1, Kind::Double).matmul(&v);
                assert_close(&y.detach(), &expected.detach(), 1e-12, 1e-12);
                if requires_grad {
                    y.sum(Kind::Double).backward();
                    assert_eq!(mask.grad().kind(), Kind::Float);
                }
            }
        }
    }
}

/// A query sees the keys that both show it.
#[test]
fn a_mask_next_to_causal_holds_with_it() {
    let _unchanged = unchanged();
    for device in devices() {
        for [queries, keys] in [[5, 5], [3, 7], [7, 3], [1, 4], [20, 20], [4, 33]] {
            let make = |t| Tensor::randn([2, 3, t, 8], (Kind::Double, device));
            let (q, k, v) = (make(queries), make(keys), make(keys));
            for (causal, offset) in [(Causal::UpperLeft, 0), (Causal::LowerRight, keys - queries)] {
                let place = |count| Tensor::arange(count, (Kind::Int64, device));
                let after = place(queries).unsqueeze(1) + offset;
                let hidden = place(keys).gt_tensor(&after);
                // Padding: the first keys of one row of the batch, with no mask for each query.
                let padded = place(keys)
                    .lt_tensor(&Tensor::from_slice(&[2, 0]).to_device(device).view([2, 1]));
                let padded = padded.view([2, 1, 1, keys]);
                let added = Tensor::randn([3, queries, keys], (Kind::Double, device));
                let negative = f64::NEG_INFINITY;
                let scores = q.matmul(&k.transpose(-2, -1)) / 8_f64.sqrt();
                let cases = [
                    (padded.logical_not(), scores.masked_fill(&padded, negative)),
                    (added.copy(), &scores + &added),
                    (added.to_kind(Kind::Float), scores + added.to_kind(Kind::Float)),
                ];
                for (mask, scores) in cases {
                    let weights = scores.masked_fill(&hidden, negative).softmax(-1, Kind::Double);
                    // A query that sees no key gets zeros.
                    let expected = weights.nan_to_num(0.0, None, None).matmul(&v);
                    let options = AttentionOptions {
                        attn_mask: Some(&mask),
                        causal: Some(causal),
                        ..Default::default()
                    };
                    for op in
                        [f_scaled_dot_product_attention, scaled_dot_product_attention_reference]
                    {
                        let found = op(&q, &k, &v, &options).expect("output");
                        eprintln!("{queries} {keys} {causal:?} {:?}", mask.kind());
                        assert_close(&found, &expected, 1e-12, 1e-12);
                    }
                }
            }
        }
    }
}

/// A `Float` mask next to half kinds.
#[test]
fn a_mask_may_be_more_precise() {
    let _unchanged = unchanged();
    for device in devices() {
        for kind in [Kind::Half, Kind::BFloat16] {
            let x = Tensor::randn([2, 3, 20, 16], (kind, device));
            let mask = Tensor::randn([20, 20], (Kind::Float, device));
            let options = AttentionOptions { attn_mask: Some(&mask), ..Default::default() };
            let y = f_scaled_dot_product_attention(&x, &x, &x, &options).expect("output");
            assert_eq!(y.kind(), kind);
            let double = |x: &Tensor| x.to_kind(Kind::Double);
            let (x, mask) = (double(&x), double(&mask));
            let of = |x: &Tensor, mask: &Tensor| {
                let options = AttentionOptions { attn_mask: Some(mask), ..Default::default() };
                scaled_dot_product_attention_reference(x, x, x, &options).expect("reference")
            };
            let rival = of(&x.to_kind(kind), &mask.to_kind(kind));
            assert_as_accurate(&y, &rival, &of(&x, &mask));
        }
    }
}

/// libtorch's own operator then accesses memory that is not its own on CUDA.
#[test]
fn the_mask_alone_may_require_grad() {
    let _unchanged = unchanged();
    for device in devices() {
        for kind in [Kind::Float, Kind::BFloat16] {
            let make = |size: &[i64]| Tensor::randn(size, (kind, device));
            let [q, k, v] = [(); 3].map(|()| make(&[1, 1, 64, 16]));
            let gradient = |mask: &Tensor, [q, k, v]: [&Tensor; 3], op: Op| {
                let mask = mask.detach().set_requires_grad(true);
                let options = AttentionOptions { attn_mask: Some(&mask), ..Default::default() };
                let y = op(q, k, v, &options).expect("output");
                let loss = (y.to_kind(Kind::Double) * v.detach()).sum(Kind::Double);
                grad(&[&loss], &[&mask], &GradOptions::default()).expect("gradient").single()
            };
            type Op = fn(&Tensor, &Tensor, &Tensor, &AttentionOptions<'_>) -> Result<Tensor>;
            let mask = make(&[64, 64]);
            let found = gradient(&mask, [&q, &k, &v], f_scaled_dot_product_attention);
            let double = |of: &Tensor| of.to_kind(Kind::Double);
            let exact = gradient(
                &double(&mask),
                [&double(&q), &double(&k), &double(&v)],
                scaled_dot_product_attention_reference,
            );
            let (found, exact) = (found.expect("one"), exact.expect("one"));
            let bound = if kind == Kind::Float { 1e-5 } else { 3e-2 };
            assert_close(&double(&found), &exact, bound, bound);
        }
    }
}

#[test]
fn leading_dimensions_broadcast_and_may_be_missing() {
    let _unchanged = unchanged();
    for device in devices() {
        let make = |size: &[i64]| Tensor::randn(size, (Kind::Double, device));
        let sizes: [[&[i64]; 3]; 6] = [
            [&[5, 8], &[6, 8], &[6, 3]],
            [&[4, 5, 8], &[4, 6, 8], &[4, 6, 8]],
            [&[2, 3, 4, 5, 8], &[2, 3, 4, 6, 8], &[2, 3, 4, 6, 8]],
            [&[1, 4, 5, 8], &[2, 4, 6, 8], &[2, 4, 6, 8]],
            [&[2, 4, 5, 8], &[1, 1, 6, 8], &[2, 1, 6, 8]],
            [&[2, 1, 5, 8], &[2, 1, 6, 8], &[2, 4, 6, 8]],
        ];
        for sizes in sizes {
            let [q, k, v] = sizes.map(make);
            let options = AttentionOptions::default();
            let found = f_scaled_dot_product_attention(&q, &k, &v, &options).expect("output");
            let expected = scaled_dot_product_attention_reference(&q, &k, &v, &options);
            assert_close(&found, &expected.expect("reference"), 1e-12, 1e-12);
        }
    }
}

/// libtorch 2.11 ends the process with a division by zero if there are no heads.
#[test]
fn no_heads_give_an_empty_tensor_and_zero_gradients() {
    let _unchanged = unchanged();
    for device in devices() {
        for heads in [[0, 0], [0, 2]] {
            let make =
                |h| Tensor::randn([2, h, 3, 8], (Kind::Float, device)).set_requires_grad(true);
            let (q, k) = (make(heads[0]), make(heads[1]));
            let options = AttentionOptions { enable_gqa: true, ..Default::default() };
            let y = f_scaled_dot_product_attention(&q, &k, &k, &options).expect("output");
            assert_eq!(y.size(), [2, 0, 3, 8]);
            y.sum(Kind::Float).backward();
            assert!(q.grad().defined() && k.grad().abs().sum(Kind::Float).double_value(&[]) == 0.0);
        }
    }
}

/// q, k, v and an added mask of any sizes that fit, or nearly fit. libtorch decides what is refused,
/// and the reference what is right.
#[test]
fn random_cases() {
    let _unchanged = unchanged();
    let size = || 1..12_i64;
    let cases = || {
        let sizes = (1..4_i64, 1..4_i64, size(), 1..=40_i64, size(), size());
        (sizes, 0..3, style(4)).prop_map(|((b, h, l, s, e, ev), mask, style)| {
            let size = (mask > 0).then(|| vec![1, h, l, s]);
            let all = [vec![b, h, l, e], vec![b, h, s, e], vec![b, h, s, ev]];
            let mut case = style.case(all.into_iter().map(Some).chain([size]).collect());
            if let (2, Some(Some(argument))) = (mask, case.0.get_mut(3)) {
                argument.kind = Kind::Float;
            }
            case
        })
    };
    let call = |op: fn(&Tensor, &Tensor, &Tensor, &AttentionOptions<'_>) -> Result<Tensor>| {
        move |inputs: &[Option<Tensor>]| {
            let [Some(q), Some(k), Some(v), attn_mask] = inputs else { unreachable!("four") };
            let options = AttentionOptions { attn_mask: attn_mask.as_ref(), ..Default::default() };
            op(q, k, v, &options).map(|y| vec![y.contiguous()])
        }
    };
    let reference = |q: &Tensor, k: &Tensor, v: &Tensor, options: &AttentionOptions<'_>| {
        let _ = Tensor::f_scaled_dot_product_attention(
            q,
            k,
            v,
            options.attn_mask,
            0.0,
            false,
            None,
            false,
        )?;
        scaled_dot_product_attention_reference(q, k, v, options)
    };
    let property = Property {
        name: "scaled_dot_product_attention",
        fused: &call(f_scaled_dot_product_attention),
        reference: &call(reference),
        excluded: &|case| {
            let sizes: Vec<_> = case.0.iter().flatten().map(|argument| &argument.size).collect();
            // libtorch does not look at the number of values.
            let keys = |size: &Vec<i64>| size.len().checked_sub(2).map(|place| size[place]);
            keys(sizes[1]) != keys(sizes[2])
        },
    };
    for device in devices() {
        property.holds_for(cases(), 2000, device);
    }
}
