//! Generation with a cache, against computing everything anew.

use super::{Mask, unchanged};
use tch::{Device, Kind, Tensor};
use tch_extension::nn::{
    AttentionOptions, Causal, KvCache, f_scaled_dot_product_attention,
    scaled_dot_product_attention_reference,
};
use tch_extension::testing::{assert_close, devices, tolerance};

const PARTS: [i64; 6] = [4, 1, 3, 0, 1, 2];

fn bound(kind: Kind) -> f64 {
    match kind {
        Kind::Double => 1e-12,
        kind => 8.0 * tolerance(kind).0,
    }
}

#[test]
fn parts_give_what_the_whole_gives() {
    let _unchanged = unchanged();
    let _guard = tch::no_grad_guard();
    let total: i64 = PARTS.iter().sum();
    for device in devices() {
        for kind in super::KINDS {
            for (heads, kv_heads) in [(4, 4), (4, 2), (3, 1)] {
                let make = |h| Tensor::randn([2, h, total, 16], (kind, device));
                let (q, k, v) = (make(heads), make(kv_heads), make(kv_heads));
                let gqa = heads != kv_heads;
                let options = |causal| AttentionOptions {
                    causal: Some(causal),
                    enable_gqa: gqa,
                    ..Default::default()
                };
                let whole = f_scaled_dot_product_attention(&q, &k, &v, &options(Causal::UpperLeft));
                let whole = whole.expect("the whole");
                let mut cache = KvCache::new(total);
                let (mut from, mut wrong) = (0, 0);
                for count in PARTS {
                    let part = |x: &Tensor| x.narrow(2, from, count);
                    let (keys, values) = cache.f_append(&part(&k), &part(&v)).expect("appended");
                    assert!(
                        keys.equal(&k.narrow(2, 0, from + count)) && cache.len() == from + count
                    );
                    let call = |causal| {
                        f_scaled_dot_product_attention(&part(&q), &keys, &values, &options(causal))
                            .expect("a part")
                    };
                    let (atol, expected) = (bound(kind), part(&whole));
                    assert_close(&call(Causal::LowerRight), &expected, atol, atol);
                    // The trap: torch's own is_causal begins at the first key.
                    let top_left = call(Causal::UpperLeft);
                    wrong += i32::from(!top_left.allclose(&expected, 0.1, 0.1, false));
                    from += count;
                }
                assert_eq!(wrong, 4, "all parts but the first and the empty one");
            }
        }
    }
}

#[test]
fn views_of_the_memory_do_not_move() {
    let _guard = tch::no_grad_guard();
    for device in devices() {
        let new = |t: i64| Tensor::randn([1, 2, t, 4], (Kind::Float, device));
        let mut cache = KvCache::new(8);
        let (k, v) = (new(5), new(5));
        let (keys, values) = cache.f_append(&k, &v).expect("appended");
        let places = (keys.data_ptr(), values.data_ptr());
        cache.truncate(7);
        assert_eq!(cache.len(), 5);
        cache.truncate(3);
        let (k2, v2) = (new(2), new(2));
        let (keys, values) = cache.f_append(&k2, &v2).expect("appended");
        assert_eq!((keys.data_ptr(), values.data_ptr(), cache.len()), (places.0, places.1, 5));
        let joined =
            |old: &Tensor, new: &Tensor| Tensor::cat(&[old.narrow(2, 0, 3), new.copy()], 2);
        assert!(keys.equal(&joined(&k, &k2)) && values.equal(&joined(&v, &v2)));
        cache.clear();
        assert!(cache.is_empty() && cache.max_length() == 8);
        // After clear, other sizes and kinds may follow.
        let wide = Tensor::randn([3, 1, 2, 6], (Kind::Double, device));
        assert_eq!(cache.f_append(&wide, &wide).expect("appended").0.size(), [3, 1, 2, 6]);
    }
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let new = |size: [i64; 4]| Tensor::randn(size, (Kind::Float, Device::Cpu));
    let mut cache = KvCache::new(4);
    let first = new([1, 2, 3, 4]);
    let _ = cache.f_append(&first, &first).expect("appended");
    let leaf = new([1, 2, 1, 4]).set_requires_grad(true);
    let one = new([1, 2, 1, 4]);
    let cases = [
        (new([1, 2, 2, 4]), new([1, 2, 2, 4]), "key: expected at most 1 more tokens, got 2"),
        (new([2, 2, 1, 4]), new([2, 2, 1, 4]), "key: expected shape [B, H, T, D] = [1, 2, 1, 4]"),
        (one.copy(), new([1, 2, 2, 4]), "value: expected shape [B, H, T, Dv] = [1, 2, 1, 4]"),
        (one.copy(), new([1, 2, 1, 5]), "value: expected shape"),
        (one.copy(), one.to_kind(Kind::Double), "value: expected kind Float, as key"),
        (one.to_kind(Kind::Half), one.to_kind(Kind::Half), "key: expected kind Float, as cache"),
        (leaf.shallow_clone(), leaf, "key: expected a tensor without grad"),
        (one.get(0), one.get(0), "key: expected 4 dimensions [B, H, T, D]"),
        (Tensor::new(), one.copy(), "key: expected a tensor, got an undefined one"),
    ];
    for (key, value, text) in cases {
        let error = cache.f_append(&key, &value).expect_err(text).to_string();
        assert!(error.starts_with(&format!("nn::KvCache: {text}")), "{error}");
        assert!(!error.contains('\n') && cache.len() == 3, "{error}");
    }
    let (keys, _) = cache.f_append(&one, &one).expect("appended");
    assert!(keys.narrow(2, 0, 3).equal(&first));
}

/// The mask that the cache needs is also right where there are fewer keys than queries.
#[test]
fn lower_right_is_the_reference_s_for_all_small_sizes() {
    let _unchanged = unchanged();
    for device in devices() {
        for queries in 0..6 {
            for keys in 0..6 {
                for causal in [Causal::UpperLeft, Causal::LowerRight] {
                    let make = |t| Tensor::randn([1, 2, t, 8], (Kind::Double, device));
                    let (q, k) = (make(queries), make(keys));
                    let options = AttentionOptions { causal: Some(causal), ..Default::default() };
                    let found = f_scaled_dot_product_attention(&q, &k, &k, &options);
                    let expected = scaled_dot_product_attention_reference(&q, &k, &k, &options);
                    let (found, expected) = (found.expect("output"), expected.expect("reference"));
                    eprintln!("{queries} {keys} {:?}", Mask::Causal(causal));
                    assert_close(&found, &expected, 1e-12, 1e-12);
                }
            }
        }
    }
}
