//! Tests of `ops::rope`: against its reference and finite differences, in any memory, in place, and
//! with bad input.

mod arguments;
mod in_place;
mod layouts;
mod random;
mod tables;

use support::{KINDS, Suite, is_half, leaves};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::nn::{RopeConfig, RopeOp, rope as layer};
use tch_extension::ops::{
    RopeOptions, RopeScaling, f_rope, f_rope_tables, f_scaled_rope_tables, rope, rope_reference,
    rope_tables,
};
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

/// As transformers' `_compute_llama3_parameters`, which has three cases.
#[test]
fn llama_3_divides_low_frequencies_only() {
    let (dim, base, factor, low, high, original) = (64, 500_000.0_f64, 32.0, 1.0, 4.0, 8192.0);
    let scaling = RopeScaling::Llama3 {
        factor,
        low_freq_factor: low,
        high_freq_factor: high,
        original_positions: original as i64,
    };
    let (_, sin) =
        f_scaled_rope_tables(2, dim, base, scaling, (Kind::Double, Device::Cpu)).unwrap();
    let mut cases = [0; 3];
    for pair in 0..dim / 2 {
        let plain = base.powf(-2.0 * pair as f64 / dim as f64);
        let length = std::f64::consts::TAU / plain;
        let (case, expected) = if length < original / high {
            (0, plain)
        } else if length > original / low {
            (1, plain / factor)
        } else {
            let smooth = (original / length - low) / (high - low);
            (2, (1.0 - smooth) * plain / factor + smooth * plain)
        };
        cases[case] += 1;
        let found = sin.double_value(&[1, pair]).asin();
        // The first frequency is 1, of which the sine is precise enough.
        assert!((found / expected - 1.0).abs() < 1e-12, "{pair}: {found} and {expected}");
    }
    assert!(cases.iter().all(|&count| count > 0), "{cases:?}");
    for (scaling, expected) in [
        (RopeScaling::Linear { factor: 0.0 }, "a finite factor greater than 0"),
        (
            RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 4.0,
                high_freq_factor: 4.0,
                original_positions: 8192,
            },
            "0 < low_freq_factor < high_freq_factor",
        ),
    ] {
        let error = f_scaled_rope_tables(2, 4, base, scaling, (Kind::Float, Device::Cpu));
        assert!(error.unwrap_err().to_string().contains(expected), "{scaling:?}");
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
