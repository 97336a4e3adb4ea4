//! The layer `nn::Attention`.

use super::{alone, unchanged};
use std::cell::Cell;
use tch::nn::{Init, ModuleT, OptimizerConfig, Sgd, VarStore};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::nn::{
    Attention, AttentionCall, AttentionConfig, KvCache, Projections, SdpaBackend, attention,
    sdpa_kernel,
};
use tch_extension::testing::{assert_close, devices, gradcheck, recorded};

const C: i64 = 24;
const H: i64 = 4;

fn layer(device: Device, kind: Kind, config: AttentionConfig) -> (VarStore, Attention) {
    tch::manual_seed(5);
    let mut vs = VarStore::new(device);
    let config = AttentionConfig { bs_init: Some(Init::Uniform { lo: -0.5, up: 0.5 }), ..config };
    let layer = attention(vs.root() / "attn", C, H, config);
    vs.set_kind(kind);
    (vs, layer)
}

/// Multi-head attention in plain tch operations, head by head.
fn composite(vs: &VarStore, x: &Tensor, kv_heads: i64, causal: bool) -> Tensor {
    let variables = vs.variables();
    let get = |name: &str| variables.get(&format!("attn.{name}"));
    let (weight, bias) = match get("c_attn.weight") {
        Some(weight) => (weight.shallow_clone(), get("c_attn.bias").map(Tensor::shallow_clone)),
        None => {
            let all = |part: &str| {
                let of = |name| get(&format!("{name}_proj.{part}")).map(Tensor::shallow_clone);
                ["q", "k", "v"].into_iter().map(of).collect::<Option<Vec<_>>>()
            };
            (
                Tensor::cat(&all("weight").expect("weights"), 0),
                all("bias").map(|b| Tensor::cat(&b, 0)),
            )
        }
    };
    let d = C / H;
    let mut qkv = x.matmul(&weight.tr());
    if let Some(bias) = bias {
        qkv += bias;
    }
    let t = x.size()[1];
    let mut heads = vec![];
    for head in 0..H {
        let kv = head / (H / kv_heads);
        let q = qkv.narrow(2, head * d, d);
        let k = qkv.narrow(2, H * d + kv * d, d);
        let v = qkv.narrow(2, H * d + kv_heads * d + kv * d, d);
        let mut scores = q.matmul(&k.transpose(1, 2)) / (d as f64).sqrt();
        if causal {
            let hidden = Tensor::ones([t, t], (Kind::Bool, x.device())).triu(1);
            scores = scores.masked_fill(&hidden, f64::NEG_INFINITY);
        }
        heads.push(scores.softmax(-1, x.kind()).matmul(&v));
    }
    let out =
        ["c_proj", "o_proj"].into_iter().find(|name| get(&format!("{name}.weight")).is_some());
    let out = out.expect("an output layer");
    let mut y = Tensor::cat(&heads, 2).matmul(&get(&format!("{out}.weight")).expect("weight").tr());
    if let Some(bias) = get(&format!("{out}.bias")) {
        y += bias;
    }
    y
}

fn configs() -> [(AttentionConfig, i64); 5] {
    let gpt2 = AttentionConfig::gpt2();
    [
        (gpt2, H),
        (AttentionConfig { causal: false, ..gpt2 }, H),
        (AttentionConfig { num_kv_heads: Some(2), bias: false, ..gpt2 }, 2),
        (AttentionConfig::llama(1), 1),
        (AttentionConfig { bias: true, ..AttentionConfig::llama(2) }, 2),
    ]
}

#[test]
fn it_is_the_composite_with_its_gradients() {
    let _unchanged = unchanged();
    for device in devices() {
        for (config, kv_heads) in configs() {
            let (vs, layer) = layer(device, Kind::Double, config);
            let x = Tensor::randn([2, 7, C], (Kind::Double, device)).set_requires_grad(true);
            let mut results = vec![];
            for fused in [true, false] {
                let y = match fused {
                    true => layer.f_forward_t(&x, true).expect("output"),
                    false => composite(&vs, &x, kv_heads, config.causal),
                };
                let mut leaves: Vec<_> = vs.variables().into_iter().collect();
                leaves.sort_by(|a, b| a.0.cmp(&b.0));
                let leaves: Vec<&Tensor> =
                    leaves.iter().map(|(_, leaf)| leaf).chain([&x]).collect();
                let gradients = Tensor::run_backward(
                    &[(&y * y.sin()).sum(Kind::Double)],
                    &leaves,
                    false,
                    false,
                );
                results.push(std::iter::once(y.detach()).chain(gradients).collect::<Vec<_>>());
            }
            for (found, expected) in results[0].iter().zip(&results[1]) {
                assert_close(found, expected, 1e-10, 1e-10);
            }
        }
    }
}

#[test]
fn gradcheck_and_second_derivatives() {
    let _alone = alone();
    let (_vs, layer) = layer(Device::Cpu, Kind::Double, AttentionConfig::llama(2));
    let x = Tensor::randn([1, 3, C], (Kind::Double, Device::Cpu)).set_requires_grad(true);
    // The layer is not Sync, as tch's layers are not; gradcheck does not need that.
    let run = |inputs: &[Tensor]| Ok([layer.f_forward_t(&inputs[0], true)?]);
    gradcheck(run, &[&x], &Default::default()).expect("first derivatives");
    let second = || tch_extension::testing::gradgradcheck(run, &[&x], &Default::default());
    sdpa_kernel(&[SdpaBackend::Math], second).expect("the switch").expect("second derivatives");
}

#[test]
fn parameters_have_the_names_and_shapes_of_gpt2_and_llama() {
    let shapes = |config| -> Vec<(String, Vec<i64>)> {
        let (vs, _) = layer(Device::Cpu, Kind::Float, config);
        let mut all: Vec<_> = vs.variables().into_iter().map(|(n, t)| (n, t.size())).collect();
        all.sort();
        all
    };
    let expect = |config, expected: &[(&str, &[i64])]| {
        let expected: Vec<_> =
            expected.iter().map(|(n, s)| (format!("attn.{n}"), s.to_vec())).collect();
        assert_eq!(shapes(config), expected);
    };
    expect(
        AttentionConfig::gpt2(),
        &[
            ("c_attn.bias", &[72]),
            ("c_attn.weight", &[72, 24]),
            ("c_proj.bias", &[24]),
            ("c_proj.weight", &[24, 24]),
        ],
    );
    expect(
        AttentionConfig { head_dim: Some(16), ..AttentionConfig::llama(2) },
        &[
            ("k_proj.weight", &[32, 24]),
            ("o_proj.weight", &[24, 64]),
            ("q_proj.weight", &[64, 24]),
            ("v_proj.weight", &[32, 24]),
        ],
    );
    let names = Projections::Separate { q: "wq", k: "wk", v: "wv" };
    let config = AttentionConfig { projections: names, out: "wo", ..AttentionConfig::llama(4) };
    assert!(shapes(config).iter().any(|(name, _)| name == "attn.wq.weight"));
    let (_, layer) = layer(Device::Cpu, Kind::Float, AttentionConfig::llama(2));
    assert_eq!(
        (layer.embed_dim(), layer.num_heads(), layer.num_kv_heads(), layer.head_dim()),
        (24, 4, 2, 6)
    );
}

#[test]
fn queries_keys_and_values_are_views_of_one_projection() {
    let _unchanged = unchanged();
    let (_vs, layer) = layer(Device::Cpu, Kind::Float, AttentionConfig::gpt2());
    let x = Tensor::randn([2, 7, C], (Kind::Float, Device::Cpu));
    let seen = Cell::new(false);
    let look = |q: &Tensor, k: &Tensor, first: i64| -> Result<(Tensor, Tensor)> {
        assert_eq!((q.size(), k.size(), first), (vec![2, 7, 4, 6], vec![2, 7, 4, 6], 0));
        assert_eq!((q.stride(), k.stride()), (vec![7 * 72, 72, 6, 1], vec![7 * 72, 72, 6, 1]));
        assert_eq!(k.data_ptr().addr() - q.data_ptr().addr(), 24 * 4);
        seen.set(true);
        Ok((q.shallow_clone(), k.shallow_clone()))
    };
    let call = AttentionCall { transform: Some(&look), ..Default::default() };
    let y = layer.f_attend(&x, call).expect("output");
    assert!(seen.get() && y.equal(&layer.f_forward_t(&x, false).expect("output")));
}

/// Turns pairs of features by an angle that grows with the place, as a rotary embedding does.
fn rotate(x: &Tensor, first: i64) -> Tensor {
    let t = x.size()[1];
    let angles = (Tensor::arange(t, (x.kind(), x.device())) + first as f64) * 0.3;
    let (sin, cos) = (angles.sin().view([1, t, 1, 1]), angles.cos().view([1, t, 1, 1]));
    let halves = x.chunk(2, -1);
    let (a, b) = (&halves[0], &halves[1]);
    Tensor::cat(&[a * &cos - b * &sin, a * &sin + b * &cos], -1)
}

fn rope(q: &Tensor, k: &Tensor, first: i64) -> Result<(Tensor, Tensor)> {
    Ok((rotate(q, first), rotate(k, first)))
}

#[test]
fn generation_with_a_cache_gives_what_the_whole_gives() {
    let _unchanged = unchanged();
    let _guard = tch::no_grad_guard();
    for device in devices() {
        for (config, _) in configs().into_iter().filter(|(config, _)| config.causal) {
            let (_vs, layer) = layer(device, Kind::Double, config);
            let x = Tensor::randn([3, 9, C], (Kind::Double, device));
            let whole = AttentionCall { transform: Some(&rope), ..Default::default() };
            let whole = layer.f_attend(&x, whole).expect("the whole");
            let mut cache = KvCache::new(16);
            let mut from = 0;
            for count in [4, 3, 1, 1] {
                let part = x.narrow(1, from, count);
                let call = AttentionCall {
                    cache: Some(&mut cache),
                    transform: Some(&rope),
                    ..Default::default()
                };
                let y = layer.f_attend(&part, call).expect("a part");
                assert_close(&y, &whole.narrow(1, from, count), 1e-10, 1e-10);
                from += count;
            }
            assert_eq!(cache.len(), 9);
        }
    }
}

/// A mask of padding leaves a causal layer causal, also with a cache.
#[test]
fn a_mask_of_padding_leaves_the_layer_causal() {
    let _unchanged = unchanged();
    let _guard = tch::no_grad_guard();
    for device in devices() {
        let (vs, layer) = layer(device, Kind::Double, AttentionConfig::gpt2());
        let x = Tensor::randn([2, 6, C], (Kind::Double, device));
        let run = |x: &Tensor, mask: &Tensor, cache: Option<&mut KvCache>| {
            let call = AttentionCall { attn_mask: Some(mask), cache, ..Default::default() };
            layer.f_attend(x, call).expect("output")
        };
        let all = Tensor::ones([6, 6], (Kind::Bool, device));
        let plain = layer.forward_t(&x, false);
        let zeros = Tensor::zeros([1, 6], (Kind::Double, device));
        for mask in [&all, &all.tril(0), &zeros, &zeros.to_kind(Kind::Float)] {
            assert_close(&run(&x, mask, None), &plain, 1e-12, 1e-12);
        }
        // Two tokens of padding at the left of the second sequence: the rest is as without them.
        let seen = Tensor::ones([2, 1, 1, 6], (Kind::Bool, device));
        let _ = seen.get(1).narrow(-1, 0, 2).fill_(0.0);
        let added = Tensor::zeros([2, 1, 1, 6], (Kind::Double, device))
            .masked_fill(&seen.logical_not(), f64::NEG_INFINITY);
        let alone = layer.forward_t(&x.get(1).narrow(0, 2, 4).unsqueeze(0), false);
        for mask in [&seen, &added] {
            let found = run(&x, mask, None);
            assert_close(&found.get(0), &plain.get(0), 1e-12, 1e-12);
            assert_close(&found.get(1).narrow(0, 2, 4), &alone.get(0), 1e-12, 1e-12);
            let mut cache = KvCache::new(6);
            for (from, count) in [(0, 3), (3, 2), (5, 1)] {
                let mask = mask.narrow(-1, 0, from + count);
                let part = run(&x.narrow(1, from, count), &mask, Some(&mut cache));
                assert_close(&part, &found.narrow(1, from, count), 1e-12, 1e-12);
            }
        }
        // Without causality the mask is all there is.
        let config = AttentionConfig { causal: false, ..AttentionConfig::gpt2() };
        let (mut of_free, free) = self::layer(device, Kind::Double, config);
        // Other tests draw random numbers meanwhile.
        of_free.copy(&vs).expect("the same weights");
        let call = AttentionCall { attn_mask: Some(&all.tril(0)), ..Default::default() };
        assert_close(&free.f_attend(&x, call).expect("output"), &plain, 1e-12, 1e-12);
    }
}

/// Three slices would fill three tensors of the projection's size, and add them.
#[test]
fn the_gradient_of_a_packed_projection_is_one_concatenation() {
    let _alone = alone();
    let (_vs, layer) = layer(Device::Cpu, Kind::Float, AttentionConfig::gpt2());
    let x = Tensor::randn([2, 7, C], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let train = || layer.forward_t(&x, true).sum(Kind::Float).backward();
    let ((), events) = recorded(train);
    let count = |name: &str| events.iter().filter(|(event, _)| event.ends_with(name)).count();
    assert!(count("addmm") + count("mm") > 0, "the backward pass was seen: {events:?}");
    assert_eq!((count("aten::cat"), count("slice_backward")), (1, 0), "{events:?}");
}

#[test]
fn dropout_only_in_training() {
    let _unchanged = unchanged();
    let config = AttentionConfig { dropout: 0.5, ..AttentionConfig::gpt2() };
    let (_vs, layer) = layer(Device::Cpu, Kind::Float, config);
    let x = Tensor::randn([2, 9, C], (Kind::Float, Device::Cpu));
    let run = |train| layer.forward_t(&x, train);
    assert!(run(false).equal(&run(false)) && !run(true).equal(&run(true)));
}

#[test]
fn it_learns_to_look_at_the_first_token() {
    let _unchanged = unchanged();
    for device in devices() {
        let (vs, layer) = layer(device, Kind::Float, AttentionConfig::llama(2));
        let mut optimizer =
            Sgd { momentum: 0.9, ..Default::default() }.build(&vs, 0.1).expect("SGD");
        let mut losses = vec![];
        for _ in 0..150 {
            let x = Tensor::randn([16, 6, C], (Kind::Float, device));
            let target = x.narrow(1, 0, 1).expand([16, 6, C], false);
            let loss = (layer.forward_t(&x, true) - target).square().mean(Kind::Float);
            optimizer.backward_step(&loss);
            losses.push(loss.double_value(&[]));
        }
        assert!(losses[149] < 0.8 * losses[0], "{} to {}", losses[0], losses[149]);
    }
}

#[test]
fn bad_input_is_refused_and_leaves_the_cache() {
    let _unchanged = unchanged();
    let _guard = tch::no_grad_guard();
    let (_vs, layer) = layer(Device::Cpu, Kind::Float, AttentionConfig::gpt2());
    let make = |size: &[i64]| Tensor::randn(size, (Kind::Float, Device::Cpu));
    let error = |x: &Tensor| layer.f_forward_t(x, false).expect_err("refused").to_string();
    assert!(error(&make(&[7, C])).starts_with("nn::Attention: input: expected 3 dimensions"));
    let wide = error(&make(&[2, 7, 25]));
    assert_eq!(wide, "nn::Attention: input: expected shape [B, T, C] = [2, 7, 24], got [2, 7, 25]");
    assert_eq!(layer.f_forward_t(&make(&[2, 0, C]), false).expect("no tokens").size(), [2, 0, C]);
    assert_eq!(layer.f_forward_t(&make(&[0, 3, C]), false).expect("no rows").size(), [0, 3, C]);

    let mut cache = KvCache::new(8);
    let call = AttentionCall { cache: Some(&mut cache), ..Default::default() };
    let _ = layer.f_attend(&make(&[1, 3, C]), call).expect("output");
    // The mask does not cover the tokens in the cache.
    let mask = make(&[2, 2]);
    let call =
        AttentionCall { cache: Some(&mut cache), attn_mask: Some(&mask), ..Default::default() };
    let error = layer.f_attend(&make(&[1, 2, C]), call).expect_err("a short mask").to_string();
    assert!(error.contains("attn_mask: expected") && cache.len() == 3, "{error}");

    // A cache that was unused before the error takes other sizes.
    let mut cache = KvCache::new(8);
    let call =
        AttentionCall { cache: Some(&mut cache), attn_mask: Some(&mask), ..Default::default() };
    let _ = layer.f_attend(&make(&[1, 3, C]), call).expect_err("a short mask");
    assert!(cache.is_empty());
    let call = AttentionCall { cache: Some(&mut cache), ..Default::default() };
    assert_eq!(layer.f_attend(&make(&[2, 3, C]), call).expect("output").size(), [2, 3, C]);

    let short = |q: &Tensor, k: &Tensor, _: i64| -> Result<(Tensor, Tensor)> {
        Ok((q.shallow_clone(), k.narrow(1, 0, 1)))
    };
    let call = AttentionCall { transform: Some(&short), ..Default::default() };
    let error = layer.f_attend(&make(&[1, 2, C]), call).expect_err("a short key").to_string();
    assert!(error.starts_with("nn::Attention: transform's k: expected shape"), "{error}");
}

#[test]
fn impossible_configurations_panic_by_name() {
    let message = |embed: i64, heads: i64, config: AttentionConfig| {
        let vs = VarStore::new(Device::Cpu);
        let make = std::panic::AssertUnwindSafe(|| attention(vs.root(), embed, heads, config));
        let panic = std::panic::catch_unwind(make).map(|_| ()).expect_err("a panic");
        *panic.downcast::<String>().expect("a text")
    };
    let gpt2 = AttentionConfig::gpt2();
    assert!(message(0, 1, gpt2).starts_with("nn::Attention: embed_dim: expected at least 1"));
    assert!(message(10, 4, gpt2).contains("a multiple of the 4 heads, got 10"));
    assert!(message(8, 0, gpt2).contains("num_heads: expected at least 1"));
    assert!(message(8, 4, AttentionConfig::llama(3)).contains("a divisor of the 4 heads, got 3"));
    let dropout = AttentionConfig { dropout: 2.0, ..gpt2 };
    assert!(message(8, 4, dropout).contains("dropout: expected a probability, got 2"));
    let head_dim = AttentionConfig { head_dim: Some(0), ..gpt2 };
    assert!(message(8, 4, head_dim).contains("head_dim: expected at least 1"));
}
