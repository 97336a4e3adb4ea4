//! Several sequences in a row of tokens.

use super::{KINDS, alone, assert_near, unchanged};
use support::refusal::assert_refused;
use support::{is_half, leaves};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::cuda::Graph;
use tch_extension::nn::{
    AttentionCall, AttentionConfig, AttentionOptions, Causal, KvCache, Packed, SdpaBackend,
    TransformerBlockConfig, attention, f_scaled_dot_product_attention, f_sdpa_backend,
    scaled_dot_product_attention, scaled_dot_product_attention_reference, sdpa_kernel,
    transformer_block,
};
use tch_extension::testing::{assert_close, cuda_or_skip, devices};

/// Rows of 12 tokens: a border at a row's border and one that a sequence goes over, empty sequences, and
/// one that is a row.
const SIZE: [i64; 2] = [3, 12];
const LENGTHS: [i64; 9] = [0, 5, 7, 0, 0, 1, 14, 9, 0];
/// The row, the first token and the number of tokens of each sequence.
const PARTS: [[i64; 3]; 5] = [[0, 0, 5], [0, 5, 7], [1, 0, 1], [1, 1, 11], [2, 0, 3]];
const LAST: [i64; 3] = [2, 3, 9];

fn packed(device: Device) -> Packed {
    Packed::f_from_lengths(&LENGTHS, SIZE, device).expect("lengths")
}

fn options(packed: Option<&Packed>, causal: bool, enable_gqa: bool) -> AttentionOptions<'_> {
    let causal = causal.then_some(Causal::LowerRight);
    AttentionOptions { packed, causal, enable_gqa, scale: Some(0.7), ..Default::default() }
}

/// Each sequence by itself.
fn by_itself(inputs: &[Tensor], causal: bool) -> Result<Vec<Tensor>> {
    let mut rows = [const { Vec::new() }; 3];
    for [row, first, count] in PARTS.into_iter().chain([LAST]) {
        let part = |x: &Tensor| x.narrow(0, row, 1).narrow(2, first, count);
        let [q, k, v] = [0, 1, 2].map(|index| part(&inputs[index]));
        let options = options(None, causal, q.size()[1] != k.size()[1]);
        rows[row as usize].push(scaled_dot_product_attention_reference(&q, &k, &v, &options)?);
    }
    let rows: Vec<_> = rows.iter().map(|parts| Tensor::cat(parts, 2)).collect();
    Ok(vec![Tensor::cat(&rows, 0)])
}

/// q, k and v, of which so many heads of q share one of k and v.
fn inputs(heads: i64, group: i64, features: i64, kind: Kind, device: Device) -> Vec<Tensor> {
    let [b, t] = SIZE;
    let make = |heads| Tensor::randn([b, t, heads, features], (Kind::Double, device)).to_kind(kind);
    leaves(&[make(heads * group), make(heads), make(heads)])
}

/// The output and the gradients of an operator of `[B, T, H, E]`.
fn all(op: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>, leaves: &[Tensor]) -> Vec<Tensor> {
    let turned: Vec<_> = leaves.iter().map(|leaf| leaf.transpose(1, 2)).collect();
    let y = op(&turned).expect("output").remove(0).transpose(1, 2);
    let numbers = Tensor::arange(y.numel() as i64, (Kind::Double, y.device()));
    let incoming = (numbers * 0.37).sin().to_kind(y.kind()).view_as(&y);
    let sum = (&y * incoming).sum(Kind::Double);
    let gradients = Tensor::run_backward(&[sum], leaves, false, false);
    std::iter::once(y.detach()).chain(gradients).collect()
}

fn exact(leaves: &[Tensor], causal: bool) -> Vec<Tensor> {
    let double: Vec<_> = leaves
        .iter()
        .map(|leaf| leaf.detach().to_kind(Kind::Double).set_requires_grad(true))
        .collect();
    all(|inputs| by_itself(inputs, causal), &double)
}

/// Outputs and gradients, by the operator and by its reference.
#[test]
fn sequences_are_as_if_each_were_alone() {
    let _unchanged = unchanged();
    for device in devices() {
        let packed = packed(device);
        for kind in KINDS {
            for (heads, group, causal) in [(2, 1, true), (1, 3, true), (2, 2, false)] {
                let leaves = inputs(heads, group, 16, kind, device);
                let options = options(Some(&packed), causal, group != 1);
                let run = |op: fn(&_, &_, &_, &AttentionOptions<'_>) -> Result<Tensor>| {
                    all(|x| Ok(vec![op(&x[0], &x[1], &x[2], &options)?]), &leaves)
                };
                let expected = exact(&leaves, causal);
                let rival = run(scaled_dot_product_attention_reference);
                let found = run(f_scaled_dot_product_attention);
                assert_eq!((found.len(), expected.len()), (4, 4));
                for ((found, rival), expected) in found.iter().zip(&rival).zip(&expected) {
                    assert_eq!(found.kind(), kind);
                    if is_half(kind) {
                        assert_near(found, rival, expected);
                        continue;
                    }
                    let bound = if kind == Kind::Float { 1e-4 } else { 1e-12 };
                    assert_close(&found.to_kind(Kind::Double), expected, bound, bound);
                    assert_close(&rival.to_kind(Kind::Double), expected, bound, bound);
                }
            }
        }
    }
}

#[test]
fn a_token_by_itself_sees_its_value() {
    let _unchanged = unchanged();
    for device in devices() {
        let packed = Packed::f_from_lengths(&[1; 36], SIZE, device).expect("lengths");
        for (kind, causal) in KINDS.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
            let inputs: Vec<_> =
                inputs(2, 2, 16, kind, device).iter().map(|input| input.transpose(1, 2)).collect();
            let options = options(Some(&packed), causal, true);
            let y = scaled_dot_product_attention(&inputs[0], &inputs[1], &inputs[2], &options);
            let bound = if is_half(kind) { 1e-2 } else { 1e-6 };
            assert_close(&y, &inputs[2].repeat_interleave_self_int(2, 1, None), bound, bound);
        }
    }
}

/// Numbers in any order, twice, and outside of the tokens.
#[test]
fn what_begins_sequences_is_a_set() {
    let _unchanged = unchanged();
    for device in devices() {
        let expected = packed(device);
        let sorted: [i64; 11] = [0, 0, 5, 12, 12, 12, 12, 13, 24, 27, 36];
        let places = |packed: &Packed| packed.f_positions().expect("positions");
        let [b, t] = SIZE;
        let mut by_hand = vec![];
        for [row, first, count] in PARTS.into_iter().chain([LAST]) {
            assert_eq!(by_hand.len() as i64, row * t + first);
            by_hand.extend(0..count);
        }
        let by_hand = Tensor::from_slice(&by_hand).view([b, t]).to_device(device);
        assert_eq!(places(&expected), by_hand);
        for begins in [&sorted[..], &[36, 27, 13, 5, i64::MAX, i64::MIN, -3, 12], &[27, 13, 5]] {
            for kind in [Kind::Int64, Kind::Int] {
                let begins = Tensor::from_slice(begins).clamp(-9, 99).to_kind(kind);
                let packed = Packed::f_new(&begins.to_device(device), SIZE, t).expect("packed");
                assert_eq!(places(&packed), by_hand);
                let bounds = Vec::<i64>::try_from(packed.cu_seqlens()).expect("numbers");
                assert!(bounds.is_sorted() && (bounds[0], bounds.last()) == (0, Some(&36)));
                assert_eq!(packed.max_seqlen(), t);
            }
        }
        assert_eq!(expected.max_seqlen(), 12, "no sequence is longer than a row");
        let none = Tensor::zeros([0], (Kind::Int64, device));
        let whole = Packed::f_new(&none, SIZE, t).expect("packed");
        assert_eq!(places(&whole), Tensor::arange(t, (Kind::Int64, device)).expand([b, t], false));
        let _ = Packed::f_from_lengths(&[], [3, 0], device).expect("packed");
        let empty = Packed::f_from_lengths(&[0, 0], [0, 5], device).expect("packed");
        assert_eq!(places(&empty).size(), [0, 5]);
        let q = Tensor::zeros([0, 2, 5, 8], (Kind::Float, device));
        let y = scaled_dot_product_attention(&q, &q, &q, &options(Some(&empty), true, false));
        assert_eq!(y.size(), [0, 2, 5, 8]);
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let _unchanged = unchanged();
    let begins = |kind| Tensor::zeros([4], (kind, Device::Cpu));
    let refused = |of: &str, argument: &str, text: &str, result: Result<Packed>| {
        let error = result.expect_err("refused").to_string();
        assert!(error.starts_with(&format!("nn::Packed::{of}: {argument}: ")), "{error}");
        assert!(error.contains(text), "{error}");
    };
    let new = |argument: &str, text: &str, begins: &Tensor, size, longest| {
        refused("f_new", argument, text, Packed::f_new(begins, size, longest));
    };
    let ints = begins(Kind::Int);
    new("cu_seqlens", "kind Int or Int64", &begins(Kind::Float), SIZE, 12);
    new("cu_seqlens", "[N]", &ints.view([2, 2]), SIZE, 12);
    new("cu_seqlens", "undefined", &Tensor::new(), SIZE, 12);
    new("size", "[-1, 3]", &ints, [-1, 3], 12);
    new("size", "less than 2³¹", &ints, [1 << 20, 1 << 20], 12);
    new("size", "less than 2³¹", &ints, [i64::MAX, 2], 12);
    new("size", "less than 2³¹", &ints, [i64::MAX, 0], 12);
    new("max_seqlen", "T is always enough", &ints, SIZE, 0);
    for (lengths, text) in [
        (&[12, 12][..], "B·T = 36, got 24"),
        (&[36, 1], "got 37"),
        (&[37, -1], "not negative, got -1"),
        (&[i64::MAX, i64::MAX], "B·T = 36"),
        (&[], "got 0"),
    ] {
        let made = Packed::f_from_lengths(lengths, SIZE, Device::Cpu);
        refused("f_from_lengths", "lengths", text, made);
    }

    let packed = packed(Device::Cpu);
    let make = |size: &[i64]| Tensor::zeros(size, (Kind::Float, Device::Cpu));
    let x = make(&[3, 2, 12, 8]);
    let mask = make(&[12, 12]);
    let plain = options(Some(&packed), true, false);
    let masked = AttentionOptions { attn_mask: Some(&mask), ..plain };
    for (argument, text, [q, k, v], options) in [
        ("query", "B = 3 and T = 12", [&make(&[2, 2, 12, 8]); 3], plain),
        ("query", "B = 3 and T = 12", [&make(&[2, 12, 8]); 3], plain),
        ("query", "[1, 3, 2, 12, 8]", [&x.unsqueeze(0); 3], plain),
        ("query", "[3, 2, 1, 8]", [&make(&[3, 2, 1, 8]), &x, &x], plain),
        ("key", "[1, 2, 12, 8]", [&x, &make(&[1, 2, 12, 8]), &x], plain),
        ("attn_mask", "leave one of them out", [&x; 3], masked),
    ] {
        let place = format!("scaled_dot_product_attention: {argument}");
        let found = f_scaled_dot_product_attention(q, k, v, &options);
        let panicking =
            std::panic::AssertUnwindSafe(|| scaled_dot_product_attention(q, k, v, &options));
        assert_refused(&place, &[text], found, panicking);
    }
}

#[test]
fn layer_and_block_keep_sequences_apart() {
    let _unchanged = unchanged();
    let _guard = tch::no_grad_guard();
    for device in devices() {
        let mut vs = VarStore::new(device);
        let layer = attention(vs.root() / "a", 24, 4, AttentionConfig::llama(2));
        let block = transformer_block(vs.root() / "b", 24, 4, TransformerBlockConfig::gpt2());
        vs.double();
        let packed = packed(device);
        let x = Tensor::randn([SIZE[0], SIZE[1], 24], (Kind::Double, device));
        let call = || AttentionCall { packed: Some(&packed), ..Default::default() };
        let stream = tch_extension::nn::Residual::new(x.shallow_clone());
        let y = layer.f_attend(&x, call()).expect("output");
        let of_block = block.f_forward(&stream, call()).and_then(|y| y.f_total()).expect("output");
        for [row, first, count] in PARTS {
            let part = |x: &Tensor| x.narrow(0, row, 1).narrow(1, first, count);
            let alone = layer.f_forward_t(&part(&x), false).expect("output");
            assert_close(&part(&y), &alone, 1e-12, 1e-12);
            let alone = block.f_forward_t(&part(&x), false).expect("output");
            assert_close(&part(&of_block), &alone, 1e-12, 1e-12);
        }
        let mask = Tensor::ones([12, 12], (Kind::Bool, device));
        let mut cache = KvCache::new(12);
        let places = Tensor::zeros([3], (Kind::Int64, device));
        for (text, call) in [
            ("got a mask", AttentionCall { attn_mask: Some(&mask), ..call() }),
            ("got a cache", AttentionCall { cache: Some(&mut cache), ..call() }),
            ("places", AttentionCall { places: Some(&places), ..call() }),
        ] {
            let error = layer.f_attend(&x, call).expect_err("refused").to_string();
            assert!(error.starts_with("nn::Attention: ") && error.contains(text), "{error}");
        }
    }
}

#[test]
fn dropped_weights_leave_the_mean() {
    let _unchanged = unchanged();
    for device in devices() {
        let kind = if device.is_cuda() { Kind::BFloat16 } else { Kind::Float };
        let packed = Packed::f_from_lengths(&[32, 32, 64], [2, 64], device).expect("packed");
        let q = Tensor::randn([2, 8, 64, 16], (kind, device));
        let ones = Tensor::ones([2, 8, 64, 16], (kind, device));
        let options = AttentionOptions { dropout_p: 0.5, ..options(Some(&packed), false, false) };
        let y = scaled_dot_product_attention(&q, &q, &ones, &options).to_kind(Kind::Double);
        let (mean, deviation) =
            (y.mean(Kind::Double).double_value(&[]), y.std(false).double_value(&[]));
        assert!((mean - 1.0).abs() < 0.1 && deviation > 0.1, "{mean} {deviation}");
    }
}

/// FlashAttention's kernels against a mask, which other back ends get.
#[test]
fn cuda_flash_agrees_with_the_mask() {
    let Some(device) = cuda_or_skip("cuda_flash_agrees_with_the_mask") else { return };
    let _alone = alone();
    let packed = packed(device);
    for kind in [Kind::Half, Kind::BFloat16] {
        for (features, group, causal) in
            [(64, 4, true), (64, 1, false), (128, 2, true), (8, 1, true)]
        {
            let leaves = inputs(2, group, features, kind, device);
            let options = options(Some(&packed), causal, group != 1);
            let run = |backend| {
                let op = |x: &[Tensor]| {
                    assert_eq!(f_sdpa_backend(&x[0], &x[1], &x[2], &options)?, backend);
                    Ok(vec![f_scaled_dot_product_attention(&x[0], &x[1], &x[2], &options)?])
                };
                sdpa_kernel(&[backend], || all(op, &leaves)).expect("the switch")
            };
            let expected = exact(&leaves, causal);
            let reference = |x: &[Tensor]| {
                Ok(vec![scaled_dot_product_attention_reference(&x[0], &x[1], &x[2], &options)?])
            };
            let rival = all(reference, &leaves);
            let (flash, mask) = (run(SdpaBackend::FlashAttention), run(SdpaBackend::Math));
            for (((flash, mask), rival), exact) in
                flash.iter().zip(&mask).zip(&rival).zip(&expected)
            {
                assert_near(flash, rival, exact);
                assert_near(mask, rival, exact);
            }
        }
    }
    // What FlashAttention does not take gets a mask.
    for (kind, features) in [(Kind::Half, 12), (Kind::Half, 256), (Kind::Float, 64)] {
        let x = inputs(2, 1, features, kind, device).remove(0).transpose(1, 2);
        let options = options(Some(&packed), true, false);
        let _ = f_scaled_dot_product_attention(&x, &x, &x, &options).expect("output");
    }
}

/// The values of `cu_seqlens` decide in each replay, and not those of the capture. Sequences that are
/// longer than `max_seqlen` do no harm.
#[test]
fn cuda_a_captured_call_follows_the_values() {
    let Some(device) = cuda_or_skip("cuda_a_captured_call_follows_the_values") else { return };
    let _unchanged = unchanged();
    for kind in [Kind::BFloat16, Kind::Float] {
        let [q, k, v] = [4, 2, 2].map(|heads| {
            Tensor::randn([2, heads, 256, 64], (kind, device)).set_requires_grad(true)
        });
        let begins = Tensor::full([7], 512, (Kind::Int64, device));
        let step = |longest| {
            let packed = Packed::f_new(&begins, [2, 256], longest)?;
            let y =
                f_scaled_dot_product_attention(&q, &k, &v, &options(Some(&packed), true, true))?;
            let loss = y.square().sum(Kind::Float);
            let mut all = Tensor::f_run_backward(&[loss], &[&q, &k, &v], false, false)?;
            all.push(y.detach());
            all.push(packed.f_positions()?);
            Ok(all)
        };
        let _ = step(256).expect("a step before the capture");
        let (graph, captured) = Graph::capture(device, || step(256)).expect("a graph");
        for values in
            [[512; 7], [0, 3, 100, 256, 300, 301, 512], [64, 128, 192, 320, 384, 448, 500]]
        {
            begins.shallow_clone().copy_(&Tensor::from_slice(&values.map(i64::from)));
            graph.replay().expect("a replay");
            for (found, expected) in captured.iter().zip(step(256).expect("a step")) {
                let bound = if kind == Kind::Float { 1e-4 } else { 3e-2 };
                let [found, expected] = [found, &expected].map(|x| x.to_kind(Kind::Double));
                assert_close(&found, &expected, bound, bound);
            }
        }
        begins.shallow_clone().copy_(&Tensor::from_slice(&[
            i64::MIN,
            i64::MAX,
            7,
            -1,
            600,
            300,
            2,
        ]));
        step(1).expect("a step");
        tch_extension::cuda::synchronize(device).expect("no fault");
    }
}
