//! `KvCache::f_decode`: a token of each row at places that are on the device.

use super::{KINDS, unchanged};
use tch::{Device, Kind, Tensor};
use tch_extension::nn::{
    AttentionCall, AttentionConfig, AttentionOptions, DecodeOptions, KvCache, attention,
    scaled_dot_product_attention_reference,
};
use tch_extension::ops::{RopeOptions, f_rope, f_rope_tables};
use tch_extension::testing::{assert_close, cuda_or_skip, devices, tolerance};

/// The shapes of a step: rows, heads of keys, how many heads of queries share one, values, memory.
const SHAPES: [[i64; 5]; 17] = [
    [1, 1, 1, 64, 40],
    [2, 2, 4, 64, 300],
    [1, 8, 4, 64, 1500],
    [3, 1, 3, 128, 65],
    [2, 3, 8, 128, 130],
    [1, 2, 7, 80, 77],
    [2, 1, 16, 96, 50],
    [1, 1, 11, 256, 90],
    [40, 16, 2, 64, 33],
    [2, 2, 2, 8, 17],
    [2, 2, 1, 20, 9],
    [1, 1, 2, 300, 12],
    // Several numbers of thread blocks for a row and a head, and several tiles for a warp.
    [8, 8, 4, 64, 900],
    [4, 8, 2, 128, 1300],
    [1, 2, 4, 128, 2600],
    [6, 4, 5, 96, 2100],
    // More blocks than a cluster has.
    [1, 1, 2, 64, 10000],
];

/// The next number of a fixed sequence, below `end`.
fn drawn(state: &mut u64, end: i64) -> i64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    ((*state >> 33) % end as u64) as i64
}

fn randn(size: &[i64], kind: Kind, device: Device) -> Tensor {
    Tensor::randn(size, (Kind::Double, device)).to_kind(kind)
}

/// Row by row, in `Double`.
fn expected(
    q: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    places: &[i64],
    scale: Option<f64>,
) -> Tensor {
    let options = AttentionOptions { scale, enable_gqa: true, ..Default::default() };
    let rows = places.iter().enumerate().map(|(row, place)| {
        let of = |tensor: &Tensor, count: i64| {
            tensor.narrow(0, row as i64, 1).narrow(2, 0, count).to_kind(Kind::Double)
        };
        let (keys, values) = (of(keys, place + 1), of(values, place + 1));
        scaled_dot_product_attention_reference(&of(q, 1), &keys, &values, &options).expect("a row")
    });
    Tensor::cat(&rows.collect::<Vec<_>>(), 0)
}

fn near(found: &Tensor, expected: &Tensor, kind: Kind) {
    let bound = if kind == Kind::Double { 1e-12 } else { 4.0 * tolerance(kind).0 };
    assert_close(&found.to_kind(Kind::Double), expected, bound, bound);
}

#[test]
fn each_row_sees_its_own_tokens() {
    let _unchanged = unchanged();
    let _guard = tch::no_grad_guard();
    let mut state = 1;
    for device in devices() {
        for kind in KINDS {
            for [b, kv, group, d, length] in SHAPES {
                let prompt = randn(&[b, kv, length - 3, d], kind, device);
                let mut cache = KvCache::new(length);
                let (keys, values) = cache.f_append(&prompt, &-&prompt).expect("appended");
                // The whole memory, as a view of what was appended.
                let whole = |part: &Tensor| part.as_strided([b, kv, length, d], part.stride(), 0);
                let (keys, values) = (whole(&keys), whole(&values));
                for step in 0..4 {
                    let mut places: Vec<i64> = (0..b).map(|_| drawn(&mut state, length)).collect();
                    if step == 3 {
                        places[0] = length - 1;
                    }
                    let on_device = Tensor::from_slice(&places).to_device(device);
                    let scale = (step == 1).then_some(0.3);
                    // Queries, keys and values are views of one product, as in a layer.
                    let all = randn(&[b, 1, (group + 2) * kv * d], kind, device);
                    let heads = |from: i64, count: i64| {
                        all.narrow(2, from * d, count * d).view([b, 1, count, d]).transpose(1, 2)
                    };
                    let (q, k, v) =
                        (heads(0, group * kv), heads(group * kv, kv), heads((group + 1) * kv, kv));
                    let before = (keys.copy(), values.copy());
                    let options = DecodeOptions { scale, ..Default::default() };
                    let y = cache.f_decode(&q, &k, &v, &on_device, options).expect("a step");
                    assert_eq!(y.size(), [b, group * kv, 1, d]);
                    assert_eq!(cache.len(), length - 3);
                    for (memory, before, new) in [(&keys, &before.0, &k), (&values, &before.1, &v)]
                    {
                        for (row, &place) in (0_i64..).zip(&places) {
                            let here = before.narrow(0, row, 1).narrow(2, place, 1);
                            here.shallow_clone().copy_(&new.narrow(0, row, 1));
                        }
                        assert!(memory.equal(before), "{kind:?} {:?}", [b, kv, group, d, length]);
                    }
                    near(&y, &expected(&q, &keys, &values, &places, scale), kind);
                    let again = cache.f_decode(&q, &k, &v, &on_device, options).expect("again");
                    assert!(again.equal(&y), "the same bits");
                }
            }
        }
    }
}

#[test]
fn an_infinite_value_stays_infinite() {
    let _unchanged = unchanged();
    let _guard = tch::no_grad_guard();
    for device in devices() {
        for kind in KINDS {
            for (b, kv, d) in [(4, 8, 64), (3, 2, 128), (1, 1, 64)] {
                let prompt = randn(&[b, kv, 300, d], kind, device);
                let mut cache = KvCache::new(301);
                let (_, values) = cache.f_append(&prompt, &prompt.copy()).expect("appended");
                let _ = values.get(0).get(0).get(0).narrow(0, 1, 1).fill_(f64::INFINITY);
                let new = randn(&[b, kv, 1, d], kind, device);
                let places = Tensor::full([b], 300, (Kind::Int64, device));
                let y = cache.f_decode(&new, &new, &new, &places, Default::default());
                let y = y.expect("a step").to_kind(Kind::Double);
                assert_eq!(
                    y.double_value(&[0, 0, 0, 1]),
                    f64::INFINITY,
                    "{kind:?} {:?}",
                    [b, kv, d]
                );
                assert_eq!(y.isfinite().logical_not().sum(Kind::Int64).int64_value(&[]), 1);
            }
        }
    }
}

#[test]
fn queries_and_new_keys_are_rotated() {
    let _unchanged = unchanged();
    let _guard = tch::no_grad_guard();
    // Rows, heads of keys, heads of queries for each, values, and how many of them are rotated.
    let shapes = [[2, 2, 4, 64, 64], [1, 3, 1, 128, 128], [3, 1, 2, 80, 80], [1, 2, 2, 64, 32]];
    for device in devices() {
        for kind in KINDS {
            for [b, kv, group, d, rotated] in shapes.into_iter().chain([[2, 1, 3, 20, 12]]) {
                let new = |heads| randn(&[b, heads, 1, d], kind, device);
                let (q, k, v) = (new(group * kv), new(kv), new(kv));
                let places = Tensor::from_slice(&[7_i64, 0, 2][..b as usize]).to_device(device);
                let tables = f_rope_tables(9, rotated, 100.0, (Kind::Float, device));
                let (cos, sin) = tables.expect("tables");
                let rows = [&cos, &sin].map(|table| table.index_select(0, &places).unsqueeze(1));
                let [of_cos, of_sin] = &rows;

                let tokens_first = |heads: &Tensor| heads.permute([2, 0, 1, 3]);
                let heads_first = |tokens: &Tensor| tokens.permute([1, 2, 0, 3]).contiguous();
                let options = RopeOptions::default();
                let (wide, table_kind) = match kind {
                    Kind::Double => (Kind::Double, Kind::Double),
                    kind => (kind, Kind::Float),
                };
                let [of_q, of_k] = [&q, &k].map(|heads| tokens_first(heads).to_kind(wide));
                let [to_cos, to_sin] =
                    [of_cos, of_sin].map(|table| table.squeeze_dim(1).to_kind(table_kind));
                let apart = f_rope(&of_q, &of_k, &to_cos, &to_sin, &options).expect("rotated");
                let (of_q, of_k) = (heads_first(&apart.0), heads_first(&apart.1));

                let prompt = randn(&[b, kv, 8, d], kind, device);
                let step = |q: &Tensor, k: &Tensor, options: DecodeOptions<'_>| {
                    let mut cache = KvCache::new(9);
                    let (keys, _) = cache.f_append(&prompt, &prompt).expect("appended");
                    (cache.f_decode(q, k, &v, &places, options).expect("a step"), keys)
                };
                let rope = Some([of_cos, of_sin]);
                let (y, keys) = step(&q, &k, DecodeOptions { rope, ..Default::default() });
                let (expected, expected_keys) = step(&of_q, &of_k, DecodeOptions::default());
                let what = format!("{kind:?} {:?}", [b, kv, group, d, rotated]);
                assert!(
                    !keys.equal(&prompt) && !y.equal(&step(&q, &k, Default::default()).0),
                    "{what}"
                );
                let bound = if kind == Kind::Double { 1e-12 } else { 2.0 * tolerance(kind).0 };
                assert_close(&keys, &expected_keys, bound, bound);
                assert_close(&y, &expected, bound, bound);
                // The kernels round alike.
                if device.is_cuda() && kind != Kind::Double && d % 8 == 0 {
                    assert!(keys.equal(&expected_keys) && y.equal(&expected), "{what}");
                }
            }
        }
    }
    let (table, wide) = (
        Tensor::zeros([1, 1, 8], tch::kind::FLOAT_CPU),
        Tensor::zeros([1, 1, 9], tch::kind::FLOAT_CPU),
    );
    let (double, rows) =
        (table.to_kind(Kind::Double), Tensor::zeros([2, 1, 8], tch::kind::FLOAT_CPU));
    let leaf = table.copy().set_requires_grad(true);
    let new = Tensor::zeros([1, 2, 1, 16], tch::kind::FLOAT_CPU);
    let places = Tensor::zeros([1], tch::kind::INT64_CPU);
    for (rope, text) in [
        ([&table, &double], "rope's sin: expected kind Float"),
        (
            [&wide, &wide],
            "rope's cos: expected 1 or more columns, and no more than half of a head's 16",
        ),
        ([&rows, &rows], "rope's cos: expected shape [B, 1, R/2] = [1, 1, 8]"),
        ([&leaf, &table], "rope's cos: expected a tensor without grad"),
    ] {
        let options = DecodeOptions { rope: Some(rope), ..Default::default() };
        let error = KvCache::new(4).f_decode(&new, &new, &new, &places, options);
        let error = error.expect_err(text).to_string();
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn cuda_a_captured_step_goes_on_from_place_to_place() {
    let Some(device) = cuda_or_skip("cuda_a_captured_step_goes_on_from_place_to_place") else {
        return;
    };
    let _unchanged = unchanged();
    let _guard = tch::no_grad_guard();
    let like = (Kind::BFloat16, device);
    let (new, mut cache) = (Tensor::zeros([2, 12, 1, 64], like), KvCache::new(400));
    let mut places = Tensor::from_slice(&[3_i64, 0]).to_device(device);
    let prompt = Tensor::randn([2, 2, 4, 64], like);
    let (keys, values) = cache.f_append(&prompt, &prompt).expect("the prompt");
    let whole = |part: &Tensor| part.as_strided([2, 2, 400, 64], part.stride(), 0);
    let (keys, values) = (whole(&keys), whole(&values));
    let part = |from, count| new.narrow(1, from, count);
    let mut step =
        || cache.f_decode(&part(0, 8), &part(8, 2), &part(10, 2), &places, Default::default());
    let _ = step().expect("a step before the capture");
    let (graph, y) = tch_extension::cuda::Graph::capture(device, step).expect("a graph");
    for place in [3, 4, 5, 300, 398] {
        places.copy_(&Tensor::from_slice(&[place, place - 3]));
        new.shallow_clone().copy_(&Tensor::randn([2, 12, 1, 64], like));
        graph.replay().expect("a replay");
        let q = part(0, 8);
        near(&y, &expected(&q, &keys, &values, &[place, place - 3], None), Kind::BFloat16);
        assert!(keys.narrow(0, 1, 1).narrow(2, place - 3, 1).equal(&part(8, 2).narrow(0, 1, 1)));
    }
}

#[test]
fn cuda_a_place_outside_of_the_cache_changes_nothing() {
    let Some(device) = cuda_or_skip("cuda_a_place_outside_of_the_cache_changes_nothing") else {
        return;
    };
    let _unchanged = unchanged();
    let _guard = tch::no_grad_guard();
    for (kind, dim) in [(Kind::Half, 16), (Kind::BFloat16, 64), (Kind::Double, 16)] {
        let new = Tensor::randn([1, 2, 1, dim], (kind, device));
        let mut cache = KvCache::new(5);
        let prompt = Tensor::randn([1, 2, 5, dim], (kind, device));
        let (keys, values) = cache.f_append(&prompt, &prompt).expect("the prompt");
        for place in [-1_i64, 5, i64::MAX, i64::MIN] {
            let places = Tensor::from_slice(&[place]).to_device(device);
            let _ = cache.f_decode(&new, &new, &new, &places, Default::default()).expect("a step");
            assert!(keys.equal(&prompt) && values.equal(&prompt), "{place}");
        }
        let places = Tensor::from_slice(&[2_i64]).to_device(device);
        let y = cache.f_decode(&new, &new, &new, &places, Default::default()).expect("a step");
        near(&y, &expected(&new, &keys, &values, &[2], None), kind);
    }
}

#[test]
fn the_layer_gives_what_it_gives_with_the_host_s_length() {
    let _unchanged = unchanged();
    let _guard = tch::no_grad_guard();
    for device in devices() {
        let vs = tch::nn::VarStore::new(device);
        for (name, config) in [("a", AttentionConfig::gpt2()), ("b", AttentionConfig::llama(2))] {
            let layer = attention(vs.root() / name, 64, 4, config);
            let tokens = Tensor::randn([3, 7, 64], (Kind::Float, device));
            let (mut known, mut placed) = (KvCache::new(9), KvCache::new(9));
            for cache in [&mut known, &mut placed] {
                let call = AttentionCall { cache: Some(cache), ..Default::default() };
                let _ = layer.f_attend(&tokens.narrow(1, 0, 4), call).expect("the prompt");
            }
            for place in 4..7 {
                let token = tokens.narrow(1, place, 1);
                let call = AttentionCall { cache: Some(&mut known), ..Default::default() };
                let expected = layer.f_attend(&token, call).expect("a step");
                let places = Tensor::full([3], place, (Kind::Int64, device));
                let call = AttentionCall {
                    cache: Some(&mut placed),
                    places: Some(&places),
                    ..Default::default()
                };
                let found = layer.f_attend(&token, call).expect("a step");
                assert_close(&found, &expected, 1e-5, 1e-5);
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let _unchanged = unchanged();
    let new = |size: [i64; 4]| Tensor::randn(size, (Kind::Float, Device::Cpu));
    let places = |places: &[i64]| Tensor::from_slice(places);
    let mut cache = KvCache::new(4);
    let first = new([2, 2, 3, 4]);
    let (keys, _) = cache.f_append(&first, &first).expect("appended");
    let before = keys.copy();
    let (q, k) = (new([2, 4, 1, 4]), new([2, 2, 1, 4]));
    let leaf = q.copy().set_requires_grad(true);
    let cases = [
        (new([2, 4, 2, 4]), k.copy(), places(&[3, 3]), "query: expected shape [B, H, 1, D]"),
        (
            new([2, 3, 1, 4]),
            k.copy(),
            places(&[3, 3]),
            "query: expected a multiple of the cache's 2",
        ),
        (q.to_kind(Kind::Double), k.copy(), places(&[3, 3]), "query: expected kind Float, as key"),
        (leaf, k.copy(), places(&[3, 3]), "query: expected a tensor without grad"),
        (q.copy(), new([2, 2, 2, 4]), places(&[3, 3]), "key: expected shape [B, Hkv, 1, D]"),
        (q.copy(), new([2, 1, 1, 4]), places(&[3, 3]), "key: expected shape [B, H, T, D]"),
        (q.copy(), k.copy(), places(&[3]), "places: expected shape [B] = [2]"),
        (q.copy(), k.copy(), places(&[3, 4]), "places: expected numbers from 0 to 3, got 3 to 4"),
        (q.copy(), k.copy(), places(&[-1, 0]), "places: expected numbers from 0 to 3, got -1 to 0"),
        (q.copy(), k.copy(), places(&[3, 3]).to_kind(Kind::Int), "places: expected kind Int64"),
        (q.copy(), k.copy(), Tensor::new(), "places: expected a tensor, got an undefined one"),
    ];
    for (query, key, places, text) in cases {
        let error = cache
            .f_decode(&query, &key, &key, &places, Default::default())
            .expect_err(text)
            .to_string();
        assert!(error.starts_with(&format!("nn::KvCache: {text}")), "{error}");
        assert!(!error.contains('\n') && keys.equal(&before), "{error}");
    }
    // A new cache takes tensors of other sizes after an error.
    let mut cache = KvCache::new(4);
    assert!(cache.f_decode(&q, &k, &k, &places(&[4, 0]), Default::default()).is_err());
    let other = new([1, 1, 1, 6]);
    assert!(cache.f_append(&other, &other).is_ok());

    let vs = tch::nn::VarStore::new(Device::Cpu);
    let layer = attention(vs.root(), 8, 2, AttentionConfig::gpt2());
    let tokens = |t: i64| Tensor::randn([1, t, 8], (Kind::Float, Device::Cpu));
    let place = places(&[0]);
    let mut refused = |t: i64, mask: Option<&Tensor>, has_cache: bool| {
        let cache = has_cache.then_some(&mut cache);
        let call =
            AttentionCall { cache, attn_mask: mask, places: Some(&place), ..Default::default() };
        layer.f_attend(&tokens(t), call).expect_err("refused").to_string()
    };
    assert!(refused(2, None, true).contains("places: expected one token of each row, got 2"));
    let mask = Tensor::ones([1, 1], (Kind::Bool, Device::Cpu));
    for text in [refused(1, Some(&mask), true), refused(1, None, false)] {
        assert!(
            text.contains(
                "places: expected places only in a causal layer with a cache, and without"
            ),
            "{text}"
        );
    }
}
