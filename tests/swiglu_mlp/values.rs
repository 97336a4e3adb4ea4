//! Values by hand, their accuracy, and what is not finite.

use super::*;

/// The reference could be wrong in the same way, so these numbers come from the formula.
#[test]
fn the_formula_by_hand() {
    let (x, gate, up) = ([0.5, -1.0], [[1.0, 0.5], [-2.0, 3.0]], [[0.25, 1.0], [-1.0, 0.5]]);
    let down = [0.5, -3.0];
    let h = |k: usize| {
        let dot = |w: &[f64; 2]| w[0] * x[0] + w[1] * x[1];
        let g = dot(&gate[k]);
        g / (1.0 + (-g).exp()) * dot(&up[k])
    };
    let expected = down[0] * h(0) + down[1] * h(1);
    for device in devices() {
        let of =
            |values: &[f64], size: &[i64]| Tensor::from_slice(values).view(size).to_device(device);
        let inputs = [
            of(&x, &[2]),
            of(gate.as_flattened(), &[2, 2]),
            of(up.as_flattened(), &[2, 2]),
            of(&down, &[1, 2]),
        ];
        for op in [&fused(BOTH[0]) as Op<'_>, &swiglu_mlp_reference] {
            let found = call(op, &inputs).expect("y");
            assert_eq!(found.size(), [1]);
            let found = found.double_value(&[0]);
            assert!((found - expected).abs() < 1e-14, "{found} {expected} on {device:?}");
        }
    }
}

/// One feature, so that g = x and u = x · 2.
fn through(op: Op<'_>, x: &Tensor, vector: &Tensor) -> [Tensor; 2] {
    let of = |value: f64| Tensor::full([1, 1], value, (x.kind(), x.device()));
    let x = x.view([-1, 1]).detach().set_requires_grad(true);
    let y = op(&x, &of(1.0), &of(2.0), &of(1.0)).expect("y");
    let vector = vector.view([-1, 1]);
    let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
    let dx = grad(&[&y], &[&x], &options).expect("dx").into_vec().remove(0);
    [y.detach(), dx.expect("dx")]
}

#[test]
fn values_are_as_exact_as_libtorchs() {
    for device in devices() {
        for kind in [Kind::Float, Kind::Half, Kind::BFloat16] {
            for reach in [12.0, 3.0, 0.05] {
                let x = Tensor::linspace(-reach, reach, 20_011, (Kind::Double, device));
                let x = x.to_kind(kind);
                let ones = x.ones_like();
                let wide = [&x, &ones].map(|tensor| tensor.to_kind(Kind::Double));
                let exact = through(&swiglu_mlp_reference, &wide[0], &wide[1]);
                let rival = through(&swiglu_mlp_reference, &x, &ones);
                for options in BOTH {
                    let found = through(&fused(options), &x, &ones);
                    for ((found, rival), exact) in found.iter().zip(&rival).zip(&exact) {
                        eprintln!("{kind:?} {reach} {device:?}");
                        assert_as_accurate(found, rival, exact);
                    }
                }
            }
        }
    }
}

/// Negative g whose SiLU is small, which a norm over all values would not see: y = silu(g) 2 g. The bounds
/// are of each number: exponents of at most 8, the roundings of products, and in the derivative a sum of
/// two numbers. In half kinds g, u, dg, du and dx are rounded, and dg Wg before du Wu is added to it.
#[test]
fn small_values_have_their_digits() {
    for (device, kind) in devices().into_iter().flat_map(|d| KINDS.map(|kind| (d, kind))) {
        let (unit, rounded, least) = match kind {
            Kind::Half => (2_f64.powi(-24), 2_f64.powi(-11), 2_f64.powi(-25)),
            Kind::BFloat16 => (2_f64.powi(-24), 2_f64.powi(-8), 0.0),
            Kind::Float => (2_f64.powi(-24), 2_f64.powi(-24), 0.0),
            _ => (2_f64.powi(-53), 2_f64.powi(-53), 0.0),
        };
        let x = Tensor::linspace(-8.0, -2.5, 4001, (Kind::Double, device)).to_kind(kind);
        let wide = x.to_kind(Kind::Double);
        let s = wide.sigmoid();
        let y = &wide * &wide * &s * 2.0;
        // dg Wg and du Wu have opposite signs, so that the bound is of their sizes.
        let of_gate = &wide * (&s + &wide * &s * (1.0 - &s)) * 2.0;
        let of_up = &wide * &s * 2.0;
        let (dx, sizes) = (&of_gate + &of_up, of_gate.abs() + of_up.abs());
        for options in BOTH {
            let [found_y, found_dx] = through(&fused(options), &x, &x.ones_like());
            for (found, exact, sizes, times) in
                [(&found_y, &y, &y.abs(), 1.0), (&found_dx, &dx, &sizes, 3.0)]
            {
                let allowed = sizes * (64.0 * unit + 1.01 * times * rounded) + 4.0 * least;
                let error = (found.to_kind(Kind::Double).view([-1]) - exact).abs();
                let worst = (error / allowed).max().double_value(&[]);
                eprintln!("{kind:?} {device:?}: the worst is {worst:.3} of its bound");
                assert!(worst <= 1.0, "{kind:?} {options:?} {device:?}");
            }
        }
    }
}

#[test]
fn what_is_not_finite_comes_through() {
    let (infinity, nan) = (f64::INFINITY, f64::NAN);
    for device in devices() {
        for kind in KINDS {
            let of = |values: &[f64]| Tensor::from_slice(values).to_kind(kind).to_device(device);
            let odd = of(&[infinity, -infinity, nan, 0.0, -0.0, 100.0, -100.0]);
            let plain = of(&[-2.0, -0.5, 0.0, 0.5, 2.0]);
            let bad = [infinity, -infinity, nan].map(|bad| plain.full_like(bad));
            let calls = std::iter::once((odd.copy(), odd.ones_like()))
                .chain(bad.into_iter().map(|bad| (plain.copy(), bad)));
            for (x, vector) in calls {
                let expected = through(&swiglu_mlp_reference, &x, &vector);
                for options in BOTH {
                    let found = through(&fused(options), &x, &vector);
                    for (found, expected) in found.iter().zip(&expected) {
                        eprintln!("{kind:?} {device:?} {vector}");
                        let bound = if support::is_half(kind) { 1e-2 } else { 1e-6 };
                        assert_close(found, expected, bound, 1e-30);
                    }
                }
            }
        }
    }
}

/// The gradient of the input is a sum of two products. Its error is about that of libtorch's, or less.
#[test]
fn the_inputs_gradient_is_as_exact_as_libtorchs() {
    for device in devices() {
        for kind in [Kind::Float, Kind::Half, Kind::BFloat16] {
            let inputs: Vec<Tensor> =
                [([256, 64], 1.4), ([128, 64], 0.2), ([128, 64], 0.2), ([64, 128], 0.2)]
                    .into_iter()
                    .zip([1.0, 1.3, 1.7, 2.1])
                    .map(|((size, scale), step): (([i64; 2], f64), f64)| {
                        let numbers = Tensor::arange(size[0] * size[1], (Kind::Double, device));
                        ((numbers * step).sin() * scale).view(size).to_kind(kind)
                    })
                    .collect();
            let gradient = |op: Op<'_>, inputs: &[Tensor]| {
                let leaves = leaves(inputs);
                let y = call(op, &leaves).expect("y");
                let sum = (&y * &y).sum(y.kind());
                let found = grad(&[&sum], &[&leaves[0]], &GradOptions::default());
                let found = found.expect("dx").into_vec().remove(0).expect("dx");
                found.to_kind(Kind::Double)
            };
            let wide: Vec<Tensor> =
                inputs.iter().map(|input| input.to_kind(Kind::Double)).collect();
            let exact = gradient(&swiglu_mlp_reference, &wide);
            let error = |op: Op<'_>| (gradient(op, &inputs) - &exact).norm().double_value(&[]);
            let rival = error(&swiglu_mlp_reference);
            for options in BOTH {
                let ours = error(&fused(options));
                eprintln!("{kind:?} on {device:?}: {ours:e}, libtorch's {rival:e}");
                assert!(ours <= 1.1 * rival, "{kind:?} {options:?} on {device:?}: {ours} {rival}");
            }
        }
    }
}

/// Without a graph, few rows of half kinds take two kernels: one for both gated products, one for the last.
#[test]
fn cuda_few_rows_are_two_kernels() {
    let Some(device) = caching_or_skip("cuda_few_rows_are_two_kernels") else { return };
    let _no_grad = tch::no_grad_guard();
    for kind in [Kind::Half, Kind::BFloat16] {
        for (features, hidden) in [(1024, 4096), (2048, 8192), (512, 4099), (4096, 1001)] {
            let random = |size: [i64; 2]| {
                let scale = (size[1] as f64).sqrt().recip();
                (Tensor::randn(size, (Kind::Float, device)) * scale).to_kind(kind)
            };
            let [gate, up] = [0, 1].map(|_| random([hidden, features]) * 4.0);
            let down = random([features, hidden]);
            for rows in [1, 3, 8] {
                let x = Tensor::randn([rows, features], (kind, device));
                let reference = |kind: Kind| {
                    let [x, gate, up, down] = [&x, &gate, &up, &down].map(|of| of.to_kind(kind));
                    swiglu_mlp_reference(&x, &gate, &up, &down).expect("y")
                };
                let options = SwigluMlpOptions::default();
                let (graph, found) =
                    Graph::capture(device, || f_swiglu_mlp(&x, &gate, &up, &down, &options))
                        .expect("a graph");
                graph.replay().expect("a replay");
                assert_as_accurate(&found, &reference(kind), &reference(Kind::Double));
                // The last product may be libtorch's where rows do not begin at 16 bytes.
                let is_odd = hidden % 8 != 0;
                assert!(is_odd || graph.kernels() == 2, "{rows} {features} {hidden}");
            }
        }
    }
}
