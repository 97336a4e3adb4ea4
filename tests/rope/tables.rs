//! Tests of the tables: their kinds, gradients, memory and values.

use super::*;
use support::refusal::assert_refused;
use tch_extension::amp::Autocast;

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

/// Tokens at positions of their own, by the operator and by the layer.
#[test]
fn tables_may_have_a_row_for_each_token() {
    for device in devices() {
        let positions = Tensor::from_slice(&[0_i64, 1, 0, 7, 2, 2]).view([2, 3]).to_device(device);
        for (kind, interleaved) in KINDS.into_iter().flat_map(|kind| [(kind, false), (kind, true)])
        {
            let of = |heads| Tensor::randn([2, heads, 3, 16], (kind, device)).transpose(1, 2);
            let inputs = leaves(&[of(4), of(2).contiguous()]);
            let [q, k] = &inputs[..] else { unreachable!("two") };
            let config = RopeConfig { positions: 8, interleaved, ..Default::default() };
            let layer = layer(12, device, config);
            let at = layer.f_at(&positions).expect("positions");
            assert_eq!(at.cos.size(), [2, 3, 6]);
            let options = RopeOptions { interleaved, ..Default::default() };
            let (of_q, of_k) = at.forward(q, k, 0);
            let by_reference = rope_reference(q, k, &at.cos, &at.sin, &options).expect("it");
            let mut sum = Tensor::zeros([], (Kind::Double, device));
            let mut alone = Tensor::zeros([], (Kind::Double, device));
            for (found, rival) in [(&of_q, &by_reference.0), (&of_k, &by_reference.1)] {
                assert_close(found, rival, 1e-2, 1e-2);
                sum += found.to_kind(Kind::Double).square().sum(Kind::Double) * 0.5;
                sum += found.to_kind(Kind::Double).sum(Kind::Double);
            }
            for (place, at) in [0_i64, 1, 0, 7, 2, 2].into_iter().enumerate() {
                let part =
                    |x: &Tensor| x.narrow(0, place as i64 / 3, 1).narrow(1, place as i64 % 3, 1);
                let (one_q, one_k) = layer.forward(&part(q), &part(k), at);
                assert!(one_q.equal(&part(&of_q)) && one_k.equal(&part(&of_k)), "the same bits");
                for one in [one_q, one_k] {
                    alone += one.to_kind(Kind::Double).square().sum(Kind::Double) * 0.5;
                    alone += one.to_kind(Kind::Double).sum(Kind::Double);
                }
            }
            let gradients = |sum: Tensor| Tensor::run_backward(&[sum], &[q, k], false, false);
            for (found, expected) in gradients(sum).iter().zip(&gradients(alone)) {
                assert_close(found, expected, 2e-2, 2e-2);
            }
        }
    }
}

#[test]
fn rows_of_tokens_that_do_not_fit_are_named() {
    let of = |size: &[i64]| Tensor::zeros(size, (Kind::Float, Device::Cpu));
    let (q, k, table) = (of(&[2, 3, 4, 8]), of(&[2, 3, 2, 8]), of(&[2, 3, 4]));
    let default = RopeOptions::default();
    for (place, text, [q, k, cos, sin], options) in [
        ("rope: cos", "[2, 3, 4]", [&q, &k, &of(&[1, 3, 4]), &of(&[1, 3, 4])], default),
        ("rope: sin", "[2, 3, 4]", [&q, &k, &table, &of(&[3, 4])], default),
        ("rope: k", "[2, 3, 2, 8]", [&q, &of(&[2, 1, 2, 8]), &table, &table], default),
        ("rope: q", "4 dimensions", [&of(&[6, 4, 8]), &k, &table, &table], default),
        ("rope: cos", "4 columns", [&q, &k, &of(&[2, 3, 5]), &of(&[2, 3, 5])], default),
        (
            "rope: options",
            "offset 1",
            [&q, &k, &table, &table],
            RopeOptions { offset: 1, ..default },
        ),
        (
            "rope: options",
            "in_place true",
            [&q, &k, &table, &table],
            RopeOptions { in_place: true, ..default },
        ),
    ] {
        let found = f_rope(q, k, cos, sin, &options);
        assert_refused(place, &[text], found, || rope(q, k, cos, sin, &options));
    }
    let layer = layer(8, Device::Cpu, RopeConfig::default());
    for (positions, text) in [(of(&[2, 3]), "Int64"), (of(&[6]).to_kind(Kind::Int64), "[B, T]")] {
        let error = layer.f_at(&positions).expect_err("refused").to_string();
        assert!(error.starts_with("nn::Rope: positions: ") && error.contains(text), "{error}");
    }
}
