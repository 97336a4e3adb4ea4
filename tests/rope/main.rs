//! Tests of `ops::rope`: against its reference and finite differences, in any memory, in place, and
//! with bad input.

#[path = "../support/mod.rs"]
mod support;

mod in_place;
mod layouts;
mod random;

use support::refusal::assert_refused;
use support::{KINDS, Suite, is_half, leaves};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::amp::Autocast;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::nn::{RopeConfig, RopeOp, rope as layer};
use tch_extension::ops::{RopeOptions, f_rope, f_rope_tables, rope, rope_reference, rope_tables};
use tch_extension::testing::{
    Sample, SampleTable, Shape, assert_close, cuda_or_skip, devices, gradcheck, gradgradcheck,
};

type Op = fn(&Tensor, &Tensor, &Tensor, &Tensor, &RopeOptions) -> Result<(Tensor, Tensor)>;

/// The rows of the tables before the first token's.
const OFFSET: i64 = 2;

/// What varies besides sizes and kinds. The tables are no input of the samples, because they have no
/// gradient from a kernel.
#[derive(Clone, Copy, Debug)]
struct Case {
    interleaved: bool,
    /// How many values of a head are not rotated; one more if the number of the others is odd.
    rest: i64,
    /// Whether the tables have kind `Float`, whatever that of q and k.
    float_tables: bool,
}

fn cases() -> impl Iterator<Item = Case> {
    [false, true].into_iter().flat_map(|interleaved| {
        [(0, true), (0, false), (5, true), (16, false)].map(|(rest, float_tables)| Case {
            interleaved,
            rest,
            float_tables,
        })
    })
}

/// Tables of `pairs` columns, whose numbers are no cosines and sines, so that a mistake shows. They are
/// made on the device, because a call may be captured in a CUDA graph.
fn tables(positions: i64, pairs: i64, options: (Kind, Device)) -> (Tensor, Tensor) {
    let numbers =
        Tensor::arange(positions * pairs, (Kind::Double, options.1)).view([-1, pairs.max(1)]);
    let numbers = numbers.reshape([positions, pairs]);
    ((&numbers * 1.3).sin().to_kind(options.0), ((&numbers * 0.7).cos() * 0.9).to_kind(options.0))
}

impl Case {
    fn options(self) -> RopeOptions {
        RopeOptions { interleaved: self.interleaved, offset: OFFSET, ..Default::default() }
    }

    fn tables(self, q: &Tensor) -> (Tensor, Tensor) {
        let pairs = (q.size()[3] - self.rest).max(0) / 2;
        let is_float = self.float_tables || q.kind() == Kind::Float;
        let kind = if is_float { Kind::Float } else { q.kind() };
        tables(q.size()[1] + OFFSET + 1, pairs, (kind, q.device()))
    }

    fn call(self, op: Op, inputs: &[Tensor], options: RopeOptions) -> Result<Vec<Tensor>> {
        let (cos, sin) = self.tables(&inputs[0]);
        let (q, k) = op(&inputs[0], &inputs[1], &cos, &sin, &options)?;
        Ok(vec![q, k])
    }

    /// Samples of q and k, which has half as many heads.
    fn samples(self, sizes: &[[i64; 4]], kind: Kind, device: Device) -> Vec<Sample> {
        let table = self.table(sizes).with_layouts([2, 3, 2, 16]);
        table.samples(kind, device).expect("samples")
    }

    fn table(self, sizes: &[[i64; 4]]) -> SampleTable<4, impl Fn([i64; 4]) -> Vec<Shape>> {
        let shapes = |[b, t, h, d]: [i64; 4]| {
            vec![Shape::new([b, t, h, d]), Shape::new([b, t, (h + 1) / 2, d])]
        };
        SampleTable::empty(["B", "T", "H", "D"], shapes).with_sizes(sizes)
    }

    /// All small samples for one case of each convention, and few without layouts for the others, whose
    /// kernels find their way through memory alike.
    fn small_or_few(self, suite: &Suite<'_>, kind: Kind, device: Device) -> Vec<Sample> {
        if self.rest == 5 {
            return (suite.small)(kind, device);
        }
        let sizes = [[2, 3, 2, 8], [3, 1, 2, 6], [1, 2, 3, 17], [2, 3, 0, 4], [1, 2, 1, 1]];
        self.table(&sizes).samples(kind, device).expect("samples")
    }

    fn suite(self, test: impl FnOnce(&Suite<'_>)) {
        let small = [
            [2, 3, 2, 8],
            [1, 1, 1, 2],
            [3, 1, 2, 6],
            [1, 2, 3, 17],
            [0, 3, 2, 4],
            [2, 0, 2, 4],
            [2, 3, 0, 4],
            [2, 3, 2, 0],
            [1, 2, 1, 1],
        ];
        // For the kernels on CUDA: one and several vectors a head of each kind; more heads than
        // threads of a block, more vectors than that, and more sequences than a grid has rows.
        let large = [
            [2, 300, 3, 64],
            [3, 7, 40, 128],
            [70, 1, 2, 32],
            [2, 9, 5, 80],
            [1, 5, 2, 20],
            [1, 2, 600, 16],
            [1, 3, 2, 8200],
            [66_000, 2, 1, 2],
        ];
        eprintln!("{self:?}");
        test(&Suite {
            fused: &move |inputs| self.call(f_rope, inputs, self.options()),
            reference: &move |inputs| self.call(rope_reference, inputs, self.options()),
            small: &move |kind, device| self.samples(&small, kind, device),
            large: &move |kind, device| self.samples(&large, kind, device),
            terms: &|_| 2,
        });
    }
}

fn for_each_case_with_fewer_samples(test: impl Fn(&Suite<'_>)) {
    cases().for_each(|case| {
        case.suite(|suite| {
            test(&Suite {
                small: &|kind, device| case.small_or_few(suite, kind, device),
                ..*suite
            });
        });
    });
}

#[test]
fn forward_agrees_with_the_reference() {
    cases().for_each(|case| case.suite(|suite| suite.forward_agrees_with_the_reference()));
}

#[test]
fn gradients_agree_with_the_reference() {
    cases().for_each(|case| case.suite(|suite| suite.gradients_agree_with_the_reference()));
}

#[test]
fn with_and_without_a_graph_the_bits_are_the_same() {
    cases().for_each(|case| {
        case.suite(|suite| suite.with_and_without_a_graph_the_bits_are_the_same());
    });
}

#[test]
fn gradcheck_of_every_small_sample() {
    for_each_case_with_fewer_samples(|suite| suite.gradcheck_of_every_small_sample());
}

#[test]
fn second_derivatives_of_every_small_sample() {
    for_each_case_with_fewer_samples(|suite| suite.gradgradcheck_of_every_small_sample());
}

#[test]
fn conformance_in_every_kind() {
    for_each_case_with_fewer_samples(|suite| suite.conformance_of(suite.small));
}

#[test]
fn cuda_agrees_with_the_cpu() {
    cases().for_each(|case| {
        case.suite(|suite| suite.cuda_agrees_with_the_cpu("cuda_agrees_with_the_cpu"));
    });
}

#[test]
fn cuda_half_kinds_agree_with_the_cpu() {
    cases().for_each(|case| {
        case.suite(|suite| {
            suite.cuda_half_kinds_agree_with_the_cpu("cuda_half_kinds_agree_with_the_cpu");
        });
    });
}

/// The reference could be wrong in the same way, so these numbers come from the formula.
#[test]
fn the_formula_by_hand() {
    let (tokens, heads, size, pairs) = (3, 2, 5, 2);
    for (device, interleaved) in
        devices().into_iter().flat_map(|device| [(device, false), (device, true)])
    {
        let options = (Kind::Double, device);
        let q = Tensor::arange(tokens * heads * size, options).view([1, tokens, heads, size]).sin();
        let k = q.narrow(2, 1, 1) * 0.5;
        let (cos, sin) = rope_tables(10, 2 * pairs, 100.0, options);
        let options = RopeOptions { interleaved, offset: 4, ..Default::default() };
        for op in [f_rope as Op, rope_reference] {
            let found = op(&q, &k, &cos, &sin, &options).expect("outputs");
            for (x, y) in [(&q, &found.0), (&k, &found.1)] {
                for (token, head) in (0..tokens).flat_map(|t| (0..x.size()[2]).map(move |h| (t, h)))
                {
                    let of = |x: &Tensor, place: i64| x.double_value(&[0, token, head, place]);
                    for pair in 0..pairs {
                        let angle = (token + 4) as f64 / 100_f64.powf(pair as f64 / pairs as f64);
                        let (a, b) = match interleaved {
                            true => (2 * pair, 2 * pair + 1),
                            false => (pair, pair + pairs),
                        };
                        let expected = [
                            of(x, a) * angle.cos() - of(x, b) * angle.sin(),
                            of(x, b) * angle.cos() + of(x, a) * angle.sin(),
                        ];
                        for (place, expected) in [a, b].into_iter().zip(expected) {
                            assert!((of(y, place) - expected).abs() < 1e-13, "{device:?}");
                        }
                    }
                    assert_eq!(of(y, 4), of(x, 4), "the last value is copied");
                }
            }
        }
    }
}

/// A product of two rotated vectors depends on the distance of their positions only, which is what the
/// operator is for.
#[test]
fn products_depend_on_the_distance() {
    for (device, interleaved) in
        devices().into_iter().flat_map(|device| [(device, false), (device, true)])
    {
        let options = (Kind::Double, device);
        let one = Tensor::randn([1, 1, 2, 64], options).expand([1, 100, 2, 64], false);
        let (cos, sin) = rope_tables(1000, 64, 10000.0, options);
        let scores = |offset| {
            let options = RopeOptions { interleaved, offset, ..Default::default() };
            let (q, k) = rope(&one, &one, &cos, &sin, &options);
            q.transpose(1, 2).matmul(&k.transpose(1, 2).transpose(2, 3))
        };
        assert_close(&scores(0), &scores(800), 1e-10, 1e-10);
    }
}

/// Every documented kind of the tables next to every kind of q and k; nothing changes under autocast.
#[test]
fn kinds_of_the_tables_and_autocast() {
    for device in devices() {
        for (kind, interleaved) in KINDS.into_iter().flat_map(|kind| [(kind, false), (kind, true)])
        {
            let q = Tensor::randn([2, 5, 3, 32], (Kind::Double, device)).to_kind(kind);
            let k = Tensor::randn([2, 5, 1, 32], (Kind::Double, device)).to_kind(kind);
            for table_kind in KINDS {
                let (cos, sin) = tables(8, 16, (table_kind, device));
                let options = RopeOptions { interleaved, offset: 1, ..Default::default() };
                let call = |op: Op| op(&q, &k, &cos, &sin, &options);
                if table_kind != kind && table_kind != Kind::Float {
                    assert_refused(
                        "rope: cos",
                        &[&format!("{table_kind:?}"), &format!("{kind:?}")],
                        call(f_rope),
                        || rope(&q, &k, &cos, &sin, &options),
                    );
                    continue;
                }
                let (ours, expected) =
                    (call(f_rope).expect("ours"), call(rope_reference).expect("it"));
                let bound = match kind {
                    Kind::Double => 1e-14,
                    Kind::Float => 1e-6,
                    Kind::Half => 1e-3,
                    _ => 8e-3,
                };
                for (ours, expected) in [(&ours.0, &expected.0), (&ours.1, &expected.1)] {
                    assert_eq!(ours.kind(), kind);
                    assert_close(ours, expected, bound, bound);
                }
                let _autocast = Autocast::new(device, Kind::BFloat16).expect("autocast");
                let again = call(f_rope).expect("ours under autocast");
                assert!(again.0.equal(&ours.0) && again.1.equal(&ours.1));
            }
        }
    }
}

/// Half kinds are rounded once: the result is the nearest number to that in `Float`.
#[test]
fn half_kinds_are_rounded_once() {
    for (device, kind) in devices().into_iter().flat_map(|device| {
        KINDS.into_iter().filter(|&kind| is_half(kind)).map(move |kind| (device, kind))
    }) {
        let q = Tensor::randn([2, 40, 6, 64], (Kind::Float, device)).to_kind(kind);
        let (cos, sin) = rope_tables(40, 64, 10000.0, (Kind::Float, device));
        for interleaved in [false, true] {
            let options = RopeOptions { interleaved, ..Default::default() };
            let (ours, _) = rope(&q, &q, &cos, &sin, &options);
            let wide = q.to_kind(Kind::Float);
            let (exact, _) = rope(&wide, &wide, &cos, &sin, &options);
            assert!(ours.equal(&exact.to_kind(kind)), "{kind:?} on {device:?}");
        }
    }
}

/// If the tables require grad, they get the gradient that libtorch's operations give, and so do q and k.
#[test]
fn tables_have_gradients_too() {
    for (device, interleaved) in
        devices().into_iter().flat_map(|device| [(device, false), (device, true)])
    {
        let options = (Kind::Double, device);
        let q = Tensor::randn([1, 3, 2, 6], options);
        let k = Tensor::randn([1, 3, 1, 6], options);
        let (cos, sin) = tables(5, 2, options);
        let all = leaves(&[q, k, cos, sin]);
        let options = RopeOptions { interleaved, offset: 1, ..Default::default() };
        for needed in 0..4 {
            let inputs: Vec<Tensor> = all
                .iter()
                .enumerate()
                .map(|(place, leaf)| {
                    leaf.detach().set_requires_grad(place == needed || needed == 3)
                })
                .collect();
            let inputs: Vec<&Tensor> = inputs.iter().collect();
            let call = |inputs: &[Tensor]| -> Result<Vec<Tensor>> {
                let (q, k) = f_rope(&inputs[0], &inputs[1], &inputs[2], &inputs[3], &options)?;
                Ok(vec![q, k])
            };
            gradcheck(call, &inputs, &Default::default()).expect("first derivatives");
            gradgradcheck(call, &inputs, &Default::default()).expect("second derivatives");
        }
        // Without a graph, tables that require grad go through the kernel.
        let [q, k, cos, sin] = &all[..] else { unreachable!("four") };
        let (ours, _) = tch::no_grad(|| rope(q, k, cos, sin, &options));
        assert!(!ours.requires_grad());
    }
}

/// The tables may be longer than what is used, may be views, and may be changed after a backward pass,
/// but not before it.
#[test]
fn tables_in_any_memory() {
    for (device, kind) in devices().into_iter().flat_map(|d| KINDS.map(|kind| (d, kind))) {
        for interleaved in [false, true] {
            let q = Tensor::randn([2, 6, 3, 32], (Kind::Float, device)).to_kind(kind);
            let options = RopeOptions { interleaved, offset: 3, ..Default::default() };
            let (cos, sin) = rope_tables(20, 32, 10000.0, (kind, device));
            let (expected, _) = rope(&q, &q, &cos, &sin, &options);
            // Of full width, as Hugging Face has them; every second column; columns that are adjacent;
            // rows that begin anywhere.
            let wide = |table: &Tensor| Tensor::cat(&[table, table], 1).narrow(1, 0, 16);
            let repeated =
                |table: &Tensor| table.repeat_interleave_self_int(2, 1, None).slice(1, 0, None, 2);
            let columns = |table: &Tensor| table.transpose(0, 1).contiguous().transpose(0, 1);
            let odd =
                |table: &Tensor| Tensor::cat(&[&table.narrow(1, 0, 1), table], 1).narrow(1, 1, 16);
            for memory in [&wide as &dyn Fn(&Tensor) -> Tensor, &repeated, &columns, &odd] {
                for (cos, sin) in
                    [(memory(&cos), memory(&sin)), (cos.shallow_clone(), memory(&sin))]
                {
                    let (found, _) = rope(&q, &q, &cos, &sin, &options);
                    assert!(found.equal(&expected), "{kind:?} {interleaved} on {device:?}");
                }
            }
        }
    }
    let q = Tensor::randn([1, 2, 1, 4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let (mut cos, sin) = rope_tables(2, 4, 10000.0, (Kind::Float, Device::Cpu));
    let (y, _) = rope(&q, &q, &cos, &sin, &RopeOptions::default());
    let _ = cos.g_mul_scalar_(2.0);
    let error = grad(&[&y.sum(Kind::Float)], &[&q], &GradOptions::default()).expect_err("changed");
    assert!(error.to_string().contains("modified by an inplace operation"), "{error}");
}

/// Steps with a cache give what one call for all tokens gives.
#[test]
fn tokens_one_by_one_are_those_of_one_call() {
    for (device, kind) in devices().into_iter().flat_map(|d| KINDS.map(|kind| (d, kind))) {
        for interleaved in [false, true] {
            let layer = layer(64, device, RopeConfig { interleaved, ..Default::default() });
            let q = Tensor::randn([3, 9, 4, 64], (Kind::Float, device)).to_kind(kind);
            let k = q.narrow(2, 1, 2);
            let cast = |table: &Tensor| table.to_kind(kind);
            let (cos, sin) = match kind {
                Kind::Double => (cast(&layer.cos), cast(&layer.sin)),
                _ => (layer.cos.shallow_clone(), layer.sin.shallow_clone()),
            };
            let options = RopeOptions { interleaved, ..Default::default() };
            let all = rope(&q, &k, &cos, &sin, &options);
            for token in 0..9 {
                let one = |x: &Tensor| x.narrow(1, token, 1);
                let options = RopeOptions { offset: token, ..options };
                let step = rope(&one(&q), &one(&k), &cos, &sin, &options);
                assert!(step.0.equal(&one(&all.0)) && step.1.equal(&one(&all.1)), "{kind:?}");
            }
        }
    }
}

#[test]
fn an_infinity_stays_in_its_pair() {
    for (device, interleaved) in
        devices().into_iter().flat_map(|device| [(device, false), (device, true)])
    {
        let q = Tensor::randn([1, 2, 1, 40], (Kind::Float, device));
        let _ = q.narrow(3, 3, 1).fill_(f64::INFINITY);
        let _ = q.narrow(3, 39, 1).fill_(f64::NAN);
        let (cos, sin) = rope_tables(2, 32, 10000.0, (Kind::Float, device));
        let options = RopeOptions { interleaved, ..Default::default() };
        let (ours, _) = rope(&q, &q, &cos, &sin, &options);
        let (expected, _) = rope_reference(&q, &q, &cos, &sin, &options).expect("reference");
        assert!(ours.allclose(&expected, 1e-5, 1e-6, true), "{device:?}");
        let bad = ours.isfinite().logical_not().sum(Kind::Int64).int64_value(&[]);
        // Position 0 has sines of zero, and 0 · ∞ is NaN.
        assert_eq!(bad, 2 * 3, "{device:?}");
    }
}

#[test]
fn bad_input_is_refused_by_name() {
    for device in devices() {
        let of = |size: &[i64], kind| Tensor::zeros(size, (kind, device));
        let float = |size: &[i64]| of(size, Kind::Float);
        let (q, k, table) = (float(&[2, 3, 4, 8]), float(&[2, 3, 2, 8]), float(&[5, 4]));
        let at = |offset| RopeOptions { offset, ..Default::default() };
        let default = at(0);
        let short = float(&[2, 4]);
        for (place, texts, q, k, cos, sin, options) in [
            ("rope: q", ["[B, T, H, D]", "[3, 4, 8]"], &q.get(0), &k, &table, &table, default),
            ("rope: q", ["Float", "Int64"], &q.to_kind(Kind::Int64), &k, &table, &table, default),
            ("rope: q", ["a tensor", "undefined"], &Tensor::new(), &k, &table, &table, default),
            ("rope: k", ["Float", "Double"], &q, &k.to_kind(Kind::Double), &table, &table, default),
            (
                "rope: k",
                ["[2, 3, 2, 8]", "[2, 4, 2, 8]"],
                &q,
                &float(&[2, 4, 2, 8]),
                &table,
                &table,
                default,
            ),
            (
                "rope: k",
                ["[1, 3, 2, 8]", "[2, 3, 2, 8]"],
                &q,
                &float(&[1, 3, 2, 8]),
                &table,
                &table,
                default,
            ),
            (
                "rope: k",
                ["[2, 3, 2, 8]", "[2, 3, 2, 6]"],
                &q,
                &float(&[2, 3, 2, 6]),
                &table,
                &table,
                default,
            ),
            (
                "rope: cos",
                ["2 dimensions", "[5, 1, 4]"],
                &q,
                &k,
                &table.unsqueeze(1),
                &table,
                default,
            ),
            (
                "rope: cos",
                ["4 columns", "full width"],
                &q,
                &k,
                &float(&[5, 8]),
                &float(&[5, 8]),
                default,
            ),
            ("rope: cos", ["0 + 3 rows", "got 2"], &q, &k, &short, &short, default),
            ("rope: cos", ["3 + 3 rows", "got 5"], &q, &k, &table, &table, at(3)),
            ("rope: cos", ["rows", "9223372036854775807"], &q, &k, &table, &table, at(i64::MAX)),
            (
                "rope: cos",
                ["Float", "BFloat16"],
                &q,
                &k,
                &of(&[5, 4], Kind::BFloat16),
                &table,
                default,
            ),
            ("rope: sin", ["[5, 4]", "[5, 3]"], &q, &k, &table, &float(&[5, 3]), default),
            ("rope: sin", ["Float", "Half"], &q, &k, &table, &of(&[5, 4], Kind::Half), default),
            ("rope: offset", ["not negative", "-1"], &q, &k, &table, &table, at(-1)),
        ] {
            assert_refused(place, &texts, f_rope(q, k, cos, sin, &options), || {
                rope(q, k, cos, sin, &options)
            });
        }
        if device.is_cuda() {
            let elsewhere = table.to_device(Device::Cpu);
            let error = f_rope(&q, &k, &table, &elsewhere, &default).expect_err("on the CPU");
            assert!(error.to_string().starts_with("rope: sin: expected device"), "{error}");
        }
    }
}

/// Without elements, the product of the other sizes may exceed 64 bits.
#[test]
fn empty_tensors_may_have_huge_sizes() {
    for device in devices() {
        let options = (Kind::Float, device);
        let size = [0, 1 << 40, 1 << 20, 8];
        let q = Tensor::zeros([0, 1, 1, 8], options).expand(size, false);
        let table = Tensor::zeros([1, 4], options).expand([1 << 40, 4], false);
        for in_place in [false, true] {
            let options = RopeOptions { in_place, ..Default::default() };
            let (found, _) = f_rope(&q, &q, &table, &table, &options).expect("nothing to rotate");
            assert_eq!((found.size(), found.numel()), (size.to_vec(), 0));
        }
        let leaf = q.set_requires_grad(true);
        let (y, _) = rope(&leaf, &leaf, &table, &table, &RopeOptions::default());
        let gradients = grad(
            &[&y],
            &[&leaf],
            &GradOptions { grad_outputs: &[Some(&leaf.detach())], ..Default::default() },
        );
        assert_eq!(gradients.expect("gradients").single().expect("one").size(), size);
    }
}

/// The last pairs of a head, which fill no vector, are rounded as those before them.
#[test]
fn pairs_are_rounded_alike() {
    for (device, kind) in devices().into_iter().flat_map(|d| KINDS.map(|kind| (d, kind))) {
        for interleaved in [false, true] {
            // Every pair and its angle are the same, and 37 pairs are no whole vectors.
            let pair = Tensor::from_slice(&[0.3, -0.7]).to_kind(kind).to_device(device);
            let q = match interleaved {
                true => pair.unsqueeze(0).expand([37, 2], false),
                false => pair.unsqueeze(1).expand([2, 37], false),
            };
            let q = q.reshape([1, 1, 1, 74]);
            let table = |value: f64| Tensor::full([1, 37], value, (kind, device));
            let options = RopeOptions { interleaved, ..Default::default() };
            let (y, _) = rope(&q, &q, &table(0.6), &table(0.8), &options);
            let y = if interleaved { y.view([37, 2]).transpose(0, 1) } else { y.view([2, 37]) };
            assert!(y.equal(&y.narrow(1, 0, 1).expand_as(&y)), "{kind:?} {interleaved} {device:?}");
        }
    }
}

#[test]
fn tables_are_exact() {
    for device in devices() {
        let options = (Kind::Double, device);
        let (cos, sin) = rope_tables(70, 6, 500.0, options);
        assert_eq!((cos.size(), sin.size()), (vec![70, 3], vec![70, 3]));
        for (position, pair) in
            (0..70).flat_map(|position| (0..3).map(move |pair| (position, pair)))
        {
            let angle = position as f64 * 500_f64.powf(-2.0 * pair as f64 / 6.0);
            assert!((cos.double_value(&[position, pair]) - angle.cos()).abs() < 1e-13);
            assert!((sin.double_value(&[position, pair]) - angle.sin()).abs() < 1e-13);
        }
        // No position is lost to the rounding of the kind.
        let (cos, _) = rope_tables(4000, 2, 10000.0, (Kind::BFloat16, device));
        let exact = Tensor::arange(4000, options).cos().to_kind(Kind::BFloat16);
        assert!(cos.squeeze().equal(&exact));
        // Far positions, rounded once: the errors of the angles are less than p / 2⁴⁸.
        let (far_cos, far_sin) = rope_tables(100_001, 8, 10000.0, (Kind::Float, device));
        for (position, pair) in
            [1, 99_999, 100_000].into_iter().flat_map(|p| (0..4).map(move |i| (p, i)))
        {
            let angle = position as f64 * 10_000_f64.powf(-2.0 * pair as f64 / 8.0);
            for (table, exact) in [(&far_cos, angle.cos()), (&far_sin, angle.sin())] {
                let error = (table.double_value(&[position, pair]) - exact).abs();
                let allowed = exact.abs() * 2_f64.powi(-24) + position as f64 * 2_f64.powi(-48);
                assert!(error <= allowed, "{position} {pair} on {device:?}: {error:e}");
            }
        }
        assert_eq!(rope_tables(0, 4, 10000.0, options).0.size(), [0, 2]);
        assert_eq!(rope_tables(4, 0, 10000.0, options).0.size(), [4, 0]);
        let _autocast = Autocast::new(device, Kind::BFloat16).expect("autocast");
        assert!(rope_tables(70, 6, 500.0, options).1.equal(&sin));
    }
    let cpu = (Kind::Float, Device::Cpu);
    for (place, text, positions, dim, base, options) in [
        ("rope_tables: positions", "-1", -1, 4, 10000.0, cpu),
        ("rope_tables: dim", "even", 4, 3, 10000.0, cpu),
        ("rope_tables: dim", "-2", 4, -2, 10000.0, cpu),
        ("rope_tables: base", "0", 4, 4, 0.0, cpu),
        ("rope_tables: base", "NaN", 4, 4, f64::NAN, cpu),
        ("rope_tables: options", "Int64", 4, 4, 10000.0, (Kind::Int64, Device::Cpu)),
    ] {
        assert_refused(place, &[text], f_rope_tables(positions, dim, base, options), || {
            rope_tables(positions, dim, base, options)
        });
    }
}

#[test]
fn the_layer_is_the_operator() {
    for (device, interleaved) in
        devices().into_iter().flat_map(|device| [(device, false), (device, true)])
    {
        let config = RopeConfig { positions: 12, base: 500.0, interleaved, ..Default::default() };
        let (fused, composite) = (
            layer(8, device, config),
            layer(8, device, RopeConfig { op: RopeOp::Composite, ..config }),
        );
        let (cos, sin) = rope_tables(12, 8, 500.0, (Kind::Float, device));
        assert!(fused.cos.equal(&cos) && fused.sin.equal(&sin) && !fused.cos.requires_grad());
        let q = Tensor::randn([2, 5, 4, 10], (Kind::BFloat16, device));
        let k = Tensor::randn([2, 5, 1, 10], (Kind::BFloat16, device));
        let options = RopeOptions { interleaved, offset: 7, ..Default::default() };
        let expected = rope(&q, &k, &cos, &sin, &options);
        let found = fused.forward(&q, &k, 7);
        assert!(found.0.equal(&expected.0) && found.1.equal(&expected.1));
        let found = composite.forward(&q, &k, 7);
        assert_close(&found.0, &expected.0, 1e-2, 1e-2);
        assert_close(&found.1, &expected.1, 1e-2, 1e-2);
        let error = fused.f_forward(&q, &k, 8).expect_err("too far").to_string();
        assert!(error.contains("8 + 5 rows"), "{error}");
    }
}

/// Offsets of more than 31 bits, for many sequences of two tokens and of one.
#[test]
fn cuda_more_than_two_to_the_31_elements() {
    let Some(device) = cuda_or_skip("cuda_more_than_two_to_the_31_elements") else { return };
    for (tokens, interleaved) in [(1, false), (2, true)] {
        let batch = (1 << 25) / tokens + 3;
        let q = Tensor::zeros([batch, tokens, 1, 64], (Kind::Half, device));
        let k = q.narrow(2, 0, 0);
        let last = batch - 2;
        let row = Tensor::randn([2, tokens, 1, 64], (Kind::Float, device)).to_kind(Kind::Half);
        q.narrow(0, last, 2).copy_(&row);
        let (cos, sin) = rope_tables(9, 64, 10000.0, (Kind::Float, device));
        let options = RopeOptions { interleaved, offset: 5, ..Default::default() };
        let (found, _) = rope(&q, &k, &cos, &sin, &options);
        let (expected, _) = rope(&row, &row, &cos, &sin, &options);
        assert!(found.narrow(0, last, 2).equal(&expected));
        assert_eq!(found.narrow(0, 0, last).abs().max().double_value(&[]), 0.0);
    }
}
