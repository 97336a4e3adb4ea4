//! What is refused, and what may be empty.

use super::*;
use support::refusal::assert_refused;

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
                ["2 dimensions", "[5, 1, 1, 4]"],
                &q,
                &k,
                &table.view([5, 1, 1, 4]),
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
