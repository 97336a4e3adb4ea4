//! Tests of tensors that share memory with others or have another order.

use super::*;

/// A tensor `[B, T, H, D]`, and what its memory is.
fn memories(size: [i64; 4], options: (Kind, Device)) -> Vec<(&'static str, Tensor)> {
    let [b, t, h, d] = size;
    let random = |size: &[i64]| Tensor::randn(size, (Kind::Float, options.1)).to_kind(options.0);
    vec![
        ("its own", random(&[b, t, h, d])),
        ("packed by tensor", random(&[b, t, 3, h, d]).select(2, 1)),
        ("packed by head", random(&[b, t, h, 3, d]).select(3, 2)),
        ("heads of a longer row", random(&[b, t, h + 3, d]).narrow(2, 1, h)),
        ("parts of heads", random(&[b, t, h, 2 * d]).narrow(3, d, d)),
        ("parts that begin anywhere", random(&[b, t, h, d + 3]).narrow(3, 1, d)),
        ("[B, H, T, D]", random(&[b, h, t, d]).transpose(1, 2)),
        ("[T, B, H, D]", random(&[t, b, h, d]).transpose(0, 1)),
        ("a cache", random(&[b, h, t + 4, d]).narrow(2, 3, t).transpose(1, 2)),
        ("expanded heads", random(&[b, t, 1, d]).expand([b, t, h, d], false)),
        ("expanded sequences", random(&[1, t, h, d]).expand([b, t, h, d], false)),
        ("[B, T, D, H]", random(&[b, t, d, h]).transpose(2, 3)),
        ("every second value", random(&[b, t, h, 2 * d]).slice(3, 0, None, 2)),
        ("negated", random(&[b, t, h, d]).internal_neg_view()),
    ]
}

/// The bits, forward and backward, do not depend on the memory.
#[test]
fn memory_changes_no_bit() {
    for (device, kind) in devices().into_iter().flat_map(|d| KINDS.map(|kind| (d, kind))) {
        for (size, interleaved) in [[2, 3, 4, 64], [3, 1, 2, 32], [2, 5, 3, 20], [2, 3, 2, 7]]
            .into_iter()
            .flat_map(|size| [(size, false), (size, true)])
        {
            let case = Case { interleaved, rest: size[3] / 4, float_tables: true };
            for (name, q) in memories(size, (kind, device)) {
                for (other, k) in memories(size, (kind, device)).into_iter().take(7) {
                    let what = format!("{name}, {other} {kind:?} {size:?} on {device:?}");
                    let run = |q: &Tensor, k: &Tensor, vectors: &[Tensor]| {
                        let inputs = leaves(&[q.shallow_clone(), k.shallow_clone()]);
                        let outputs = case.call(f_rope, &inputs, case.options()).expect("outputs");
                        let of: Vec<&Tensor> = outputs.iter().collect();
                        let vectors: Vec<Option<&Tensor>> = vectors.iter().map(Some).collect();
                        let options = GradOptions { grad_outputs: &vectors, ..Default::default() };
                        let at: Vec<&Tensor> = inputs.iter().collect();
                        let gradients = grad(&of, &at, &options).expect("gradients").into_vec();
                        let outputs = outputs.iter().map(Tensor::detach);
                        outputs.chain(gradients.into_iter().flatten()).collect::<Vec<_>>()
                    };
                    let plain = |x: &Tensor| x.resolve_neg().contiguous();
                    let (q, k) = (q.detach(), k.detach());
                    let vectors = [&k, &q].map(Tensor::shallow_clone);
                    let found = run(&q, &k, &vectors);
                    let expected =
                        run(&plain(&q), &plain(&k), &vectors.map(|vector| plain(&vector)));
                    for (found, expected) in found.iter().zip(&expected) {
                        assert!(found.equal(expected), "{what}");
                    }
                }
            }
        }
    }
}

/// Results are dense, in the order that the docs say.
#[test]
fn results_have_the_order_of_the_arguments() {
    for device in devices() {
        let size = [2, 3, 4, 8];
        for (name, x) in memories(size, (Kind::Float, device)) {
            let (cos, sin) = rope_tables(3, 8, 10000.0, (Kind::Float, device));
            let (q, k) = rope(&x, &x, &cos, &sin, &RopeOptions::default());
            let expected = match name {
                "[B, H, T, D]" | "a cache" => vec![96, 8, 24, 1],
                "[T, B, H, D]" => vec![32, 64, 8, 1],
                _ => vec![96, 32, 8, 1],
            };
            assert_eq!((q.stride(), k.stride()), (expected.clone(), expected), "{name}");
        }
    }
}
