//! Tests of single values: the formula, and numbers that are not finite.

use super::*;
use tch_extension::testing::assert_as_accurate;

/// One feature, so that both layers pass a number on.
fn through(z: &Tensor, options: GeluMlpOptions) -> (Tensor, Tensor) {
    let one = |size: &[i64]| Tensor::ones(size, (z.kind(), z.device()));
    let z = z.detach().view([-1, 1]).set_requires_grad(true);
    let a = f_gelu_mlp(&z, &one(&[1, 1]), None, &one(&[1, 1]), None, &options).expect("a");
    let dz = grad(&[&a.sum(z.kind())], &[&z], &GradOptions::default()).expect("dz");
    (a.detach().view([-1]), dz.into_vec().remove(0).expect("dz").view([-1]))
}

/// The reference could be wrong in the same way, so these numbers come from the formula.
#[test]
fn the_formula_by_hand() {
    let numbers = [-9.0, -3.0, -1.25, -0.5, -1e-3, 0.0, 1e-3, 0.75, 2.0, 6.5];
    let of = |activation: Activation, z: f64| {
        let root = (2.0 / std::f64::consts::PI).sqrt();
        match activation {
            Activation::GeluTanh => z / 2.0 * (1.0 + (root * (z + 0.044715 * z * z * z)).tanh()),
            // Simpson's rule for Φ(z) = 1 / 2 + ∫ exp(-t² / 2) / √(2 π) from 0 to z.
            Activation::Gelu => {
                let (parts, density) = (4000, |t: f64| (-t * t / 2.0).exp() * root / 2.0);
                let step = z / f64::from(parts);
                let sum: f64 = (0..=parts)
                    .map(|part| {
                        let factor = match part {
                            0 => 1.0,
                            _ if part == parts => 1.0,
                            _ if part % 2 == 1 => 4.0,
                            _ => 2.0,
                        };
                        factor * density(step * f64::from(part))
                    })
                    .sum();
                z * (0.5 + sum * step / 3.0)
            }
            Activation::ReluSquared => z.max(0.0) * z.max(0.0),
            Activation::Silu => z / (1.0 + (-z).exp()),
        }
    };
    for device in devices() {
        for activation in ACTIVATIONS {
            for save_activations in [true, false] {
                let z = Tensor::from_slice(&numbers).to_device(device);
                let options = GeluMlpOptions { activation, save_activations };
                let (a, dz) = through(&z, options);
                for (index, &z) in numbers.iter().enumerate() {
                    let index = [index as i64];
                    let (a, dz) = (a.double_value(&index), dz.double_value(&index));
                    let expected = of(activation, z);
                    assert!((a - expected).abs() < 1e-12, "{activation:?} {z}: {a} {expected}");
                    // The slope of max(z, 0)² has a corner at 0.
                    if activation == Activation::ReluSquared && z == 0.0 {
                        assert_eq!(dz, 0.0);
                        continue;
                    }
                    let slope = (of(activation, z + 1e-5) - of(activation, z - 1e-5)) / 2e-5;
                    assert!((dz - slope).abs() < 1e-8, "{activation:?}' {z}: {dz} {slope}");
                }
            }
        }
    }
}

/// Activations and their derivatives over the range of each kind, where tanh and erf are near -1, too.
#[test]
fn activations_are_as_exact_as_libtorchs() {
    for device in devices() {
        for kind in [Kind::Float, Kind::Half, Kind::BFloat16] {
            for activation in ACTIVATIONS {
                for reach in [12.0, 3.0, 0.05] {
                    let z = Tensor::linspace(-reach, reach, 20_011, (Kind::Double, device));
                    let z = z.to_kind(kind);
                    let options = GeluMlpOptions { activation, ..Default::default() };
                    let of = |kind: Kind| {
                        let z = z.to_kind(kind).detach().set_requires_grad(true);
                        let one = Tensor::ones([1, 1], (kind, device));
                        let column = z.view([-1, 1]);
                        let a = gelu_mlp_reference(&column, &one, None, &one, None, &options);
                        let a = a.expect("a").view([-1]);
                        let dz = grad(&[&a.sum(kind)], &[&z], &GradOptions::default());
                        [a.detach(), dz.expect("dz").into_vec().remove(0).expect("dz")]
                    };
                    let (a, dz) = through(&z, options);
                    let found = [a, dz].into_iter().zip(of(kind)).zip(of(Kind::Double));
                    for ((found, rival), exact) in found {
                        eprintln!("{activation:?} {kind:?} {reach} {device:?}");
                        assert_as_accurate(&found, &rival, &exact);
                    }
                }
            }
        }
    }
}

/// The activation and its derivative of z in `Double`, by formulas that keep their digits where 1 + tanh
/// and 1 + erf lose them.
pub fn exact(activation: Activation, z: &Tensor) -> [Tensor; 2] {
    let z = z.to_kind(Kind::Double).detach().set_requires_grad(true);
    let a = match activation {
        Activation::GeluTanh => {
            let root = (2.0 / std::f64::consts::PI).sqrt();
            &z * ((&z + &z * &z * &z * 0.044715) * (2.0 * root)).sigmoid()
        }
        Activation::Gelu => &z * (&z * -0.5_f64.sqrt()).erfc() * 0.5,
        Activation::ReluSquared => z.relu().square(),
        Activation::Silu => &z * z.sigmoid(),
    };
    let dz = grad(&[&a.sum(Kind::Double)], &[&z], &GradOptions::default());
    [a.detach(), dz.expect("dz").into_vec().remove(0).expect("dz")]
}

/// Asserts that each number is within its bound, which is `relative` of the exact one, plus `by_z` of z,
/// plus `least`.
pub fn assert_each_within(
    found: &Tensor,
    exact: &Tensor,
    z: &Tensor,
    (relative, by_z, least): (f64, f64, f64),
) {
    let wide = |tensor: &Tensor| tensor.to_kind(Kind::Double);
    let allowed = exact.abs() * relative + wide(z).abs() * by_z + least;
    let share = ((wide(found) - exact).abs() / (allowed + 1e-300)).view([-1]);
    let worst = share.argmax(0, false).int64_value(&[]);
    let of = |tensor: &Tensor| tensor.view([-1]).double_value(&[worst]);
    eprintln!("the worst is {:.3} of its bound", of(&share));
    assert!(of(&share) <= 1.0, "at z = {}: {} instead of {}", of(z), of(found), of(exact));
}

/// How a result in this kind is rounded: relative to it, and at least.
pub fn rounding(kind: Kind) -> (f64, f64) {
    match kind {
        Kind::Half => (2_f64.powi(-11), 2_f64.powi(-25)),
        Kind::BFloat16 => (2_f64.powi(-8), 0.0),
        Kind::Float => (2_f64.powi(-24), 0.0),
        _ => (2_f64.powi(-53), 0.0),
    }
}

/// Negative z whose activations are small, which a norm over all values would not see. The bounds are of
/// each number, so that its digits count.
#[test]
fn small_activations_have_their_digits() {
    for (device, kind) in devices().into_iter().flat_map(|d| KINDS.map(|kind| (d, kind))) {
        // The rounding of what the kernels compute with.
        let unit = rounding(if kind == Kind::Double { kind } else { Kind::Float }).0;
        for (activation, (from, to)) in ACTIVATIONS
            .into_iter()
            .flat_map(|activation| [(activation, (-8.0, -6.0)), (activation, (-6.0, -2.0))])
        {
            let is_cuda = device.is_cuda();
            // Relative to the result, and to z.
            let (relative, by_z) = match activation {
                // The exponents are at most 49.3, and their rounding is that of the result.
                Activation::GeluTanh => (256.0 * unit, 0.0),
                // Exponents of at most 8; in the derivative, of two numbers of other signs.
                Activation::Silu => (64.0 * unit, 0.0),
                Activation::ReluSquared => (0.0, 0.0),
                // Formula 7.1.26 is within 1.5e-7 of erfc, and at -8 within 1.1 % of its value.
                Activation::Gelu if is_cuda && support::is_half(kind) => {
                    (if from < -6.0 { 1.1e-2 } else { 4e-3 }, 0.0)
                }
                // A polynomial in the exponent, within 7.3e-5 down to -6, and 1.8 % at -8.
                Activation::Gelu if !is_cuda && kind != Kind::Double => {
                    (if from < -6.0 { 1.8e-2 } else { 1e-4 }, 0.0)
                }
                // 1 + erf, as in libtorch: all digits may be gone.
                Activation::Gelu => (64.0 * unit, 2.0 * unit),
            };
            let (rounded, least) = rounding(kind);
            let z = Tensor::linspace(from, to, 4001, (Kind::Double, device)).to_kind(kind);
            let exact = exact(activation, &z);
            for save_activations in [true, false] {
                let (a, dz) = through(&z, GeluMlpOptions { activation, save_activations });
                eprintln!("{activation:?} {kind:?} {device:?} from {from}");
                let bounds = (relative + 1.01 * rounded, by_z, 1.01 * least);
                assert_each_within(&a, &exact[0], &z, bounds);
                assert_each_within(&dz, &exact[1], &z, bounds);
            }
        }
    }
}

/// Values and gradients where z is not finite, or so large that its powers are not.
#[test]
fn what_is_not_finite_comes_through() {
    let infinity = f64::INFINITY;
    for device in devices() {
        for kind in KINDS {
            let large = match kind {
                Kind::Half => 6e4,
                Kind::Double => 1e300,
                _ => 1e38,
            };
            let numbers = [infinity, -infinity, f64::NAN, large, -large, large / 1e3, 0.0, -0.0];
            let z = Tensor::from_slice(&numbers).to_kind(kind).to_device(device);
            for activation in ACTIVATIONS {
                for save_activations in [true, false] {
                    let options = GeluMlpOptions { activation, save_activations };
                    let (a, dz) = through(&z, options);
                    let leaf = z.view([-1, 1]).detach().set_requires_grad(true);
                    let one = Tensor::ones([1, 1], (kind, device));
                    let expected = gelu_mlp_reference(&leaf, &one, None, &one, None, &options);
                    let expected = expected.expect("a");
                    // oneDNN's exact GELU of infinity is NaN.
                    let is_exact_on_cpu = activation == Activation::Gelu && device == Device::Cpu;
                    if is_exact_on_cpu {
                        let _ = tch::no_grad(|| expected.get(0).fill_(infinity));
                    }
                    let slope = grad(&[&expected.sum(kind)], &[&leaf], &GradOptions::default());
                    let slope = slope.expect("dz").into_vec().remove(0).expect("dz").view([-1]);
                    eprintln!("{activation:?} {kind:?} {device:?} {dz} {slope}");
                    let bound = if support::is_half(kind) { 1e-2 } else { 1e-6 };
                    assert_close(&a, &expected.detach().view([-1]), bound, 0.0);
                    assert_close(&dz, &slope, bound, 0.0);
                }
            }
        }
    }
}

/// A gradient that is not finite reaches only where the composite lets it.
#[test]
fn gradients_that_are_not_finite_come_through() {
    for device in devices() {
        for kind in KINDS {
            for activation in ACTIVATIONS {
                let options = GeluMlpOptions { activation, ..Default::default() };
                let z = Tensor::from_slice(&[-2.0, -0.5, 0.0, 0.5, 2.0]).to_kind(kind);
                let z = z.view([-1, 1]).to_device(device);
                for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                    let vector = Tensor::full([5, 1], bad, (kind, device));
                    let of = |op: Op| {
                        let leaf = z.detach().set_requires_grad(true);
                        let one = Tensor::ones([1, 1], (kind, device));
                        let a = op(&leaf, &one, None, &one, None, &options).expect("a");
                        let options =
                            GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
                        let dz = grad(&[&a], &[&leaf], &options).expect("dz");
                        dz.into_vec().remove(0).expect("dz")
                    };
                    eprintln!("{activation:?} {kind:?} {bad} {device:?}");
                    assert_close(&of(f_gelu_mlp), &of(gelu_mlp_reference), 0.0, 0.0);
                }
            }
        }
    }
}
