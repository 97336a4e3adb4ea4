//! Tests of `nn::TransformerBlock`: against the same maths in plain tch operations, with a cache, and
//! by training a small language model in bf16.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tch::nn::{self, Module, ModuleT, OptimizerConfig, VarStore};
use tch::{Device, Kind, Reduction, Tensor};
use tch_extension::Result;
use tch_extension::amp::Autocast;
use tch_extension::autograd::{GradOptions, Tensors, grad, register_post_accumulate_grad_hook};
use tch_extension::nn::{
    AttentionCall, Functional, KvCache, Residual, RopeConfig, TransformerBlock,
    TransformerBlockConfig, checkpoint, norm, rope, transformer_block,
};
use tch_extension::ops::{
    LinearCrossEntropyOptions, ProductWay, f_linear_cross_entropy, f_rope_tables, force,
};
use tch_extension::testing::{assert_close, cuda_or_skip, devices, tolerance};

const DIM: i64 = 32;
const HEADS: i64 = 4;

fn configs() -> [TransformerBlockConfig; 2] {
    [TransformerBlockConfig::gpt2(), TransformerBlockConfig::llama(2, 48)]
}

fn block(vs: &VarStore, config: TransformerBlockConfig) -> TransformerBlock {
    transformer_block(vs.root(), DIM, HEADS, config)
}

/// The block by PyTorch's documentation of its parts, from the variables' names alone.
fn by_hand(vs: &VarStore, x: &Tensor, is_llama: bool) -> Tensor {
    let all = vs.variables();
    let of = |name: &str| all.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", all.keys()));
    let linear = |x: &Tensor, name: &str| {
        let product = x.matmul(&of(&format!("{name}.weight")).tr());
        all.get(&format!("{name}.bias")).map_or(product.shallow_clone(), |bias| &product + bias)
    };
    let normal = |x: &Tensor, name: &str| {
        let weight = of(&format!("{name}.weight"));
        match is_llama {
            true => x.rms_norm([DIM], Some(weight), 1e-5),
            false => {
                x.layer_norm([DIM], Some(weight), Some(of(&format!("{name}.bias"))), 1e-5, false)
            }
        }
    };
    let (b, t, _) = x.size3().expect("three dimensions");
    let heads = |x: &Tensor| x.view([b, t, -1, DIM / HEADS]).transpose(1, 2);
    let [first, attention, second] = match is_llama {
        true => ["input_layernorm", "self_attn", "post_attention_layernorm"],
        false => ["ln_1", "attn", "ln_2"],
    };
    let n = normal(x, first);
    let [q, k, v] = match is_llama {
        true => {
            ["q_proj", "k_proj", "v_proj"].map(|name| linear(&n, &format!("{attention}.{name}")))
        }
        false => {
            let all = linear(&n, &format!("{attention}.c_attn")).chunk(3, -1);
            <[Tensor; 3]>::try_from(all).expect("three")
        }
    };
    let (q, k, v) = (heads(&q), heads(&k), heads(&v));
    let repeats = HEADS / k.size()[1];
    let (k, v) = (
        k.repeat_interleave_self_int(repeats, 1, None),
        v.repeat_interleave_self_int(repeats, 1, None),
    );
    let scores = q.matmul(&k.transpose(-2, -1)) / ((DIM / HEADS) as f64).sqrt();
    let future = Tensor::ones([t, t], (Kind::Bool, x.device())).triu(1);
    let weights = scores.masked_fill(&future, f64::NEG_INFINITY).softmax(-1, x.kind());
    let output = weights.matmul(&v).transpose(1, 2).reshape([b, t, -1]);
    let out = if is_llama { "o_proj" } else { "c_proj" };
    let h = x + linear(&output, &format!("{attention}.{out}"));
    let n = normal(&h, second);
    let branch = match is_llama {
        true => {
            let hidden = linear(&n, "mlp.gate_proj").silu() * linear(&n, "mlp.up_proj");
            linear(&hidden, "mlp.down_proj")
        }
        false => linear(&linear(&n, "mlp.c_fc").gelu("tanh"), "mlp.c_proj"),
    };
    h + branch
}

#[test]
fn values_and_gradients_are_those_of_the_formula() {
    for device in devices() {
        for (index, config) in configs().into_iter().enumerate() {
            let mut vs = VarStore::new(device);
            let layer = block(&vs, config);
            vs.set_kind(Kind::Double);
            let x = Tensor::randn([2, 7, DIM], (Kind::Double, device)).set_requires_grad(true);
            let (found, expected) = (layer.forward_t(&x, true), by_hand(&vs, &x, index == 1));
            assert_close(&found.detach(), &expected.detach(), 1e-10, 1e-10);
            let variables = vs.trainable_variables();
            let leaves: Vec<&Tensor> = std::iter::once(&x).chain(&variables).collect();
            let weight = x.randn_like().detach();
            let of = |output: &Tensor| {
                let loss = (output * &weight).sum(Kind::Double);
                grad(&[&loss], &leaves, &GradOptions::default()).expect("gradients").into_vec()
            };
            for (found, expected) in of(&found).iter().zip(of(&expected)) {
                let (found, expected) = (found.as_ref().expect("one"), expected.expect("one"));
                assert_close(found, &expected, 1e-8, 1e-9);
            }
        }
    }
}

#[test]
fn a_stream_through_blocks_is_the_blocks_one_after_another() {
    for device in devices() {
        for config in configs() {
            let vs = VarStore::new(device);
            let layers: Vec<TransformerBlock> = (0..3)
                .map(|index| transformer_block(vs.root() / index, DIM, HEADS, config))
                .collect();
            let last = norm(vs.root() / "last", DIM, config.norm);
            let x = Tensor::randn([2, 5, DIM], (Kind::Float, device));
            let mut stream = Residual::new(x.shallow_clone());
            for layer in &layers {
                stream = layer.f_forward(&stream, AttentionCall::default()).expect("a stream");
            }
            let (total, output) = last.f_forward(&stream).expect("a norm");
            let one_by_one = layers.iter().fold(x, |x, layer| layer.forward_t(&x, false));
            assert_close(&total.sum.detach(), &one_by_one.detach(), 1e-5, 1e-5);
            let (_, expected) = last.f_forward(&Residual::new(one_by_one)).expect("a norm");
            assert_close(&output.detach(), &expected.detach(), 1e-5, 1e-5);
        }
    }
}

/// With a frozen parameter. The gradients come once.
#[test]
fn a_block_that_is_computed_again_has_the_same_gradients() {
    for device in devices() {
        for config in configs() {
            let vs = VarStore::new(device);
            let layer = block(&vs, config);
            let mut all: Vec<_> = vs.variables().into_iter().collect();
            all.sort_by(|a, b| a.0.cmp(&b.0));
            let frozen = all.remove(0).1.set_requires_grad(false);
            let x = Tensor::randn([2, 7, DIM], (Kind::Float, device)).set_requires_grad(true);
            all.push(("x".to_string(), x.shallow_clone()));
            let calls = Arc::new(AtomicUsize::new(0));
            let hooks: Vec<_> = all
                .iter()
                .map(|(_, leaf)| {
                    let calls = Arc::clone(&calls);
                    let count = move |_: &Tensor| {
                        calls.fetch_add(1, Ordering::SeqCst);
                        Ok(())
                    };
                    register_post_accumulate_grad_hook(leaf, count).expect("a hook")
                })
                .collect();
            let run = |layer: &TransformerBlock, inputs: &[Option<Tensor>]| match inputs {
                [Some(x)] => Ok(layer.f_forward_t(x, true)?.into()),
                _ => unreachable!("one input"),
            };
            let mut of = |is_kept: bool| {
                let y = match is_kept {
                    true => layer.f_forward_t(&x, true),
                    false => checkpoint(&layer, run, &[Some(&x)]).and_then(Tensors::single),
                }
                .expect("an output");
                y.square().sum(Kind::Float).backward();
                let grads: Vec<Tensor> = all.iter().map(|(_, leaf)| leaf.grad().copy()).collect();
                all.iter_mut().for_each(|(_, leaf)| leaf.zero_grad());
                (y.detach(), grads)
            };
            let ((y, expected), (again, found)) = (of(true), of(false));
            assert_eq!(y, again);
            for (found, expected) in found.iter().zip(&expected) {
                match device {
                    Device::Cpu => assert_eq!(found, expected),
                    _ => assert_close(found, expected, 1e-5, 1e-5),
                }
            }
            assert!(!frozen.grad().defined());
            assert_eq!(calls.load(Ordering::SeqCst), 2 * hooks.len());
        }
    }
}

#[test]
fn a_token_at_a_time_with_rotary_positions_is_the_whole() {
    for device in devices() {
        let vs = VarStore::new(device);
        let layer = block(&vs, TransformerBlockConfig::llama(2, 48));
        let positions =
            rope(DIM / HEADS, device, RopeConfig { positions: 16, ..Default::default() });
        let turn = |q: &Tensor, k: &Tensor, from: i64| positions.f_forward(q, k, from);
        let _guard = tch::no_grad_guard();
        let x = Tensor::randn([2, 9, DIM], (Kind::Float, device));
        let run = |part: Tensor, cache: Option<&mut KvCache>| -> Result<Tensor> {
            let call = AttentionCall { cache, transform: Some(&turn), ..Default::default() };
            layer.f_forward(&Residual::new(part), call)?.f_total()
        };
        let whole = run(x.shallow_clone(), None).expect("the whole");
        let mut cache = KvCache::new(16);
        for (from, count) in [(0, 4), (4, 1), (5, 3), (8, 1)] {
            let part = run(x.narrow(1, from, count), Some(&mut cache)).expect("a part");
            assert_close(&part, &whole.narrow(1, from, count), 1e-4, 1e-5);
        }
    }
}

#[test]
fn dropout_is_on_in_training_only() {
    for device in devices() {
        let vs = VarStore::new(device);
        let layer =
            block(&vs, TransformerBlockConfig { dropout: 0.5, ..TransformerBlockConfig::gpt2() });
        let x = Tensor::randn([2, 5, DIM], (Kind::Float, device));
        let run = |train| layer.forward_t(&x, train).detach();
        assert!(run(false).equal(&run(false)));
        assert!(!run(true).equal(&run(true)));
    }
}

/// A branch that is still to be added keeps the dropout of the block that computed it. With a
/// probability of 1 that block adds nothing.
#[test]
fn dropout_belongs_to_the_block_that_computed_the_branch() {
    for device in devices() {
        for config in configs() {
            let vs = VarStore::new(device);
            let layer = |name: &str, dropout| {
                let config = TransformerBlockConfig { dropout, ..config };
                transformer_block(vs.root() / name, DIM, HEADS, config)
            };
            let (all, none) = (layer("all", 1.0), layer("none", 0.0));
            let last = norm(vs.root() / "last", DIM, config.norm);
            let x = Tensor::randn([2, 5, DIM], (Kind::Float, device));
            assert!(all.forward_t(&x, true).equal(&x), "nothing is added");
            assert!(!all.forward_t(&x, false).equal(&x), "dropout is off");

            let run = |layers: &[&TransformerBlock], train| {
                let mut stream = Residual::new(x.shallow_clone());
                for layer in layers {
                    let call = AttentionCall { train, ..Default::default() };
                    stream = layer.f_forward(&stream, call).expect("a stream");
                }
                stream
            };
            let of_last = |stream: &Residual| {
                let (sum, output) = last.f_forward(stream).expect("a norm");
                assert_close(
                    &sum.sum.detach(),
                    &stream.f_total().expect("a sum").detach(),
                    0.0,
                    0.0,
                );
                output.detach()
            };
            let expected = of_last(&run(&[&none], false));
            for layers in [&[&all, &none][..], &[&none, &all], &[&all, &none, &all]] {
                assert_close(&of_last(&run(layers, true)), &expected, 1e-5, 1e-5);
            }
            assert_close(
                &of_last(&run(&[&all], true)),
                &of_last(&Residual::new(x.copy())),
                1e-6,
                1e-6,
            );
            let differs = of_last(&run(&[&all, &none], false));
            assert!(!differs.allclose(&expected, 1e-3, 1e-3, false), "without training all count");
        }
    }
}

/// An error after attention, here of a feed-forward part whose weight another kind was given, leaves
/// no token in the cache.
#[test]
fn an_error_after_attention_leaves_the_cache() {
    let _guard = tch::no_grad_guard();
    let vs = VarStore::new(Device::Cpu);
    let layer = block(&vs, TransformerBlockConfig::gpt2());
    let mut cache = KvCache::new(8);
    let mut run = |batch, is_broken| {
        let mut weight = vs.variables().remove("mlp.c_fc.weight").expect("a weight");
        let whole = weight.detach().copy();
        if is_broken {
            weight.set_data(&whole.to_kind(Kind::Double));
        }
        let x = Tensor::randn([batch, 2, DIM], (Kind::Float, Device::Cpu));
        let call = AttentionCall { cache: Some(&mut cache), ..Default::default() };
        let done = layer.f_forward(&Residual::new(x), call).map(|_| ());
        weight.set_data(&whole);
        (done.map_err(|error| error.to_string()), cache.len())
    };
    let (error, len) = run(1, true);
    assert!(error.expect_err("another kind").contains("mlp") && len == 0);
    // The cache may still be used for tensors of another size.
    assert_eq!(run(3, false), (Ok(()), 2));
    let (error, len) = run(3, true);
    assert!(error.is_err() && len == 2);
    assert_eq!(run(3, false), (Ok(()), 4));
}

#[test]
fn wrong_sizes_are_refused_by_name() {
    let vs = VarStore::new(Device::Cpu);
    let layer = block(&vs, TransformerBlockConfig::gpt2());
    let error = layer.f_forward_t(&Tensor::zeros([2, 5, 31], (Kind::Float, Device::Cpu)), false);
    let error = error.expect_err("an error").to_string();
    assert!(error.starts_with("layer_norm: input") && !error.contains('\n'), "{error}");
    let config = TransformerBlockConfig { dropout: 1.5, ..TransformerBlockConfig::gpt2() };
    let panic = std::panic::catch_unwind(|| block(&VarStore::new(Device::Cpu), config));
    let text = *panic.expect_err("a panic").downcast::<String>().expect("a text");
    assert!(text.contains("dropout: expected a probability, got 1.5"), "{text}");
}

const VOCABULARY: i64 = 29;
const CONTEXT: i64 = 16;

/// A small language model.
struct Model {
    tokens: nn::Embedding,
    positions: nn::Embedding,
    blocks: Vec<TransformerBlock>,
    last: tch_extension::nn::Norm,
    is_composite: bool,
}

impl Model {
    fn new(vs: &nn::Path<'_>, config: TransformerBlockConfig, is_composite: bool) -> Model {
        let config = if is_composite { config.composite() } else { config };
        let embedding =
            |name: &str, count| nn::embedding(vs / name, count, DIM, Default::default());
        Model {
            tokens: embedding("tokens", VOCABULARY),
            positions: embedding("positions", CONTEXT),
            blocks: (0..2).map(|index| transformer_block(vs / index, DIM, HEADS, config)).collect(),
            last: norm(vs / "last", DIM, config.norm),
            is_composite,
        }
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let places = Tensor::arange(CONTEXT, (Kind::Int64, tokens.device()));
        let embedded = self.tokens.forward(tokens) * 0.1 + self.positions.forward(&places) * 0.1;
        let mut stream = Residual::new(embedded);
        for block in &self.blocks {
            let call = AttentionCall { train: true, ..Default::default() };
            stream = block.f_forward(&stream, call)?;
        }
        let (_, output) = self.last.f_forward(&stream)?;
        let rows = output.f_reshape([-1, DIM])?;
        let targets = targets.f_reshape([-1])?;
        if self.is_composite {
            let logits = rows.f_linear::<&Tensor>(&self.tokens.ws, None)?.f_to_kind(Kind::Float)?;
            return Ok(logits.f_cross_entropy_loss::<Tensor>(
                &targets,
                None,
                Reduction::Mean,
                -100,
                0.0,
            )?);
        }
        let options = LinearCrossEntropyOptions::default();
        f_linear_cross_entropy(&rows, &self.tokens.ws, &targets, None, &options)
    }
}

/// The losses of some steps with AdamW on batches that do not depend on anything.
fn losses(
    device: Device,
    config: TransformerBlockConfig,
    is_composite: bool,
    lower: Option<Kind>,
    initial: &VarStore,
) -> Vec<f64> {
    let mut vs = VarStore::new(device);
    let model = Model::new(&vs.root(), config, is_composite);
    vs.copy(initial).expect("the same variables");
    let mut optimizer = nn::AdamW::default().build(&vs, 3e-3).expect("an optimizer");
    let step = |index: i64| {
        // The next token depends on the two before it.
        let first = Tensor::arange(16, (Kind::Int64, device)).unsqueeze(1) * 7 + index * 3;
        let place = Tensor::arange(CONTEXT + 1, (Kind::Int64, device));
        let text = (&first + &place * &place * 5 + &first * &place).remainder(VOCABULARY);
        let (tokens, targets) = (text.narrow(1, 0, CONTEXT), text.narrow(1, 1, CONTEXT));
        let _autocast = lower.map(|kind| Autocast::new(device, kind).expect("autocast"));
        model.loss(&tokens, &targets).expect("a loss")
    };
    (0..60)
        .map(|index| {
            let loss = step(index);
            optimizer.backward_step(&loss);
            loss.double_value(&[])
        })
        .collect()
}

/// The curve in bf16 under autocast is as near to that of `Float` as the composite's, and the model
/// learns.
#[test]
fn a_loss_curve_in_bf16_lies_on_the_composite_s() {
    for device in devices() {
        for config in configs() {
            let mut initial = VarStore::new(device);
            Model::new(&initial.root(), config, false);
            initial.freeze();
            let run = |is_composite, lower| losses(device, config, is_composite, lower, &initial);
            let exact = run(true, None);
            let (ours, theirs) =
                (run(false, Some(Kind::BFloat16)), run(true, Some(Kind::BFloat16)));
            let distance = |curve: &[f64]| {
                curve.iter().zip(&exact).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
            };
            let (of_ours, of_theirs) = (distance(&ours), distance(&theirs));
            println!("from the curve of Float: ours {of_ours:.4}, the composite's {of_theirs:.4}");
            assert!(exact[0] - exact[59] > 0.5, "the model does not learn: {exact:?}");
            assert!(
                of_ours <= 2.0 * of_theirs + 0.02,
                "{of_ours} {of_theirs}\n{ours:?}\n{exact:?}"
            );
        }
    }
}

#[test]
fn the_curve_in_float_is_the_composite_s() {
    for device in devices() {
        for config in configs() {
            let mut initial = VarStore::new(device);
            Model::new(&initial.root(), config, false);
            initial.freeze();
            let run = |is_composite| losses(device, config, is_composite, None, &initial);
            for (step, (ours, theirs)) in run(false).iter().zip(run(true)).enumerate().take(20) {
                assert!((ours - theirs).abs() < 1e-3, "step {step}: {ours} {theirs}");
            }
        }
    }
}

/// The layers one by one, with adapters, compute what the operators do with them in the weights.
#[test]
fn adapters_act_as_parts_of_the_weights() {
    for device in devices() {
        for (config, expected) in configs().into_iter().zip([
            &["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"][..],
            &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"],
        ]) {
            let [vs, adapters] = [VarStore::new(device), VarStore::new(device)];
            let mut block = block(&vs, config);
            let mut names = Vec::new();
            for (name, layer) in block.linears_mut() {
                layer.add_lora(adapters.root() / name.replace('.', "_"), 2, 0.5);
                names.push(name);
            }
            assert_eq!(names[..4], *expected);
            tch::no_grad(|| {
                for (_, mut adapter) in adapters.variables() {
                    let _ = adapter.normal_(0.0, 0.3);
                }
            });
            let _no_grad = tch::no_grad_guard();
            let x = Tensor::randn([2, 5, DIM], (Kind::Float, device));
            let (before, adapted) =
                (by_hand(&vs, &x, config.names[1] == "self_attn"), block.forward_t(&x, false));
            assert!(
                (&before - &adapted).abs().max().double_value(&[]) > 0.1,
                "adapters do nothing"
            );
            for (_, layer) in block.linears_mut() {
                layer.f_merge_lora().expect("merged");
            }
            assert_close(&adapted, &block.forward_t(&x, false), 1e-4, 1e-4);
        }
    }
}

/// A module with a tensor that is absent gets each of the others in its own place.
#[test]
fn a_checkpointed_module_may_have_an_absent_tensor() {
    struct Layers(Vec<Tensor>);
    impl Functional for Layers {
        fn with_tensors(&self, replace: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
            Layers(self.0.iter().map(replace).collect())
        }
    }
    let like = (Kind::Double, Device::Cpu);
    let x = Tensor::randn([3], like).set_requires_grad(true);
    let [first, second] =
        [2.0, 5.0].map(|value| Tensor::full([3], value, like).set_requires_grad(true));
    let layers = Layers(vec![Tensor::new(), first.shallow_clone(), second.shallow_clone()]);
    let product = |layers: &Layers, inputs: &[Option<Tensor>]| {
        let x = inputs[0].as_ref().expect("an input");
        assert!(!layers.0[0].defined());
        Ok((x * &layers.0[1] + &layers.0[2]).into())
    };
    let y = checkpoint(&layers, product, &[Some(&x)]).and_then(Tensors::single).expect("a sum");
    assert!(y.equal(&(&x * 2.0 + 5.0)));
    y.sum(Kind::Double).backward();
    assert!(first.grad().equal(&x) && second.grad().equal(&x.ones_like()));
}

/// A block for one token of each row computes norms and sums with products, where there are kernels.
#[test]
fn cuda_a_token_of_few_rows_agrees() {
    let Some(device) = cuda_or_skip("cuda_a_token_of_few_rows_agrees") else { return };
    let _guard = tch::no_grad_guard();
    tch::manual_seed(8);
    let (heads, head_dim) = (8, 64);
    for kind in [Kind::BFloat16, Kind::Half, Kind::Float] {
        // Kernels with 8, 4 and 16 warps, and a last vector of few values.
        let cases = [
            (false, 1, 520, 1024),
            (true, 3, 512, 2240),
            (false, 8, 4096, 512),
            (true, 9, 512, 1024),
        ];
        for (bias, rows, dim, hidden) in cases {
            let mut vs = VarStore::new(device);
            let mut config = TransformerBlockConfig::llama(2, hidden);
            (config.attention.bias, config.attention.head_dim) = (bias, Some(head_dim));
            let block = transformer_block(vs.root(), dim, heads, config);
            for mut weight in
                vs.trainable_variables().into_iter().filter(|weight| weight.dim() == 1)
            {
                let _ = weight.uniform_(0.5, 2.0);
            }
            vs.set_kind(kind);
            let token =
                || (Tensor::randn([rows, 1, dim], (Kind::Float, device)) * 1e-2).to_kind(kind);
            let places: Vec<i64> = (0..rows).map(|row| 20 - row).collect();
            let places = Tensor::from_slice(&places).to_device(device);
            let (cos, sin) =
                f_rope_tables(21, head_dim, 1e4, (Kind::Float, device)).expect("tables");
            let angles = [cos, sin].map(|table| table.index_select(0, &places).unsqueeze(1));
            let step = |block: &TransformerBlock, prompt: &Tensor, stream: &Residual| {
                let kind = stream.sum.kind();
                let mut cache = KvCache::new(32);
                let call = AttentionCall { cache: Some(&mut cache), ..Default::default() };
                let prompt = Residual::new(prompt.to_kind(kind));
                let _ = block.f_forward(&prompt, call).expect("the prompt");
                let rope = Some([&angles[0], &angles[1]]);
                let (cache, places) = (Some(&mut cache), Some(&places));
                let call = AttentionCall { cache, places, rope, ..Default::default() };
                // The way, which costs could decide otherwise.
                force(ProductWay::Skinny, || block.f_forward(stream, call)).expect("a step")
            };
            let total = |stream: &Residual| stream.f_total().expect("a sum").to_kind(Kind::Double);
            // The sum of a branch is left to a norm of its own.
            let with_branch =
                |sum: &Tensor| Residual { sum: sum.copy(), branch: Some((sum.zeros_like(), 0.0)) };
            let mut wide = VarStore::new(device);
            let exact = transformer_block(wide.root(), dim, heads, config);
            wide.copy(&vs).expect("the same weights");
            wide.double();
            let (mut of_found, mut of_apart, mut size) = (0.0, 0.0, 0.0);
            for _ in 0..4 {
                let prompt = Tensor::randn([rows, 20, dim], (Kind::Float, device));
                let sum = token();
                let found = step(&block, &prompt, &Residual::new(sum.copy()));
                let apart = step(&block, &prompt, &with_branch(&sum));
                assert!(apart.branch.is_some());
                let is_fused = kind == Kind::BFloat16 && rows <= 8;
                assert_eq!(found.branch.is_none(), is_fused, "{kind:?} {rows}");
                let again = step(&block, &prompt, &Residual::new(sum.copy()));
                assert!(total(&again).equal(&total(&found)), "the same bits");
                let expected =
                    total(&step(&exact, &prompt, &with_branch(&sum.to_kind(Kind::Double))));
                let squares = |x: &Tensor| x.square().sum(Kind::Double).double_value(&[]);
                of_found += squares(&(total(&found) - &expected));
                of_apart += squares(&(total(&apart) - &expected));
                size += squares(&expected);
            }
            // Neither is further from the block in double precision.
            let [of_found, of_apart, size] = [of_found, of_apart, size].map(f64::sqrt);
            assert!(of_found <= 1.2 * of_apart, "{kind:?} {rows}: {of_found}, apart {of_apart}");
            assert!(
                of_apart < 2.0 * tolerance(kind).0 * size,
                "{kind:?} {rows}: {of_apart} of {size}"
            );
        }
    }
}
