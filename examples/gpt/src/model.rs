//! GPT-2's architecture, made of this crate's layers.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use tch::nn::{EmbeddingConfig, Init, VarStore};
use tch::{Device, Kind, Tensor};
use tch_extension::amp::Autocast;
use tch_extension::nn::{
    AttentionCall, Embedding, FeedForwardConfig, KvCache, Norm, Residual, TransformerBlock,
    TransformerBlockConfig, embedding, norm, transformer_block,
};
use tch_extension::ops::f_linear_cross_entropy;

/// The standard deviation of the initial weights, as in GPT-2.
const INITIAL_DEVIATION: f64 = 0.02;

/// The sizes of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// The number of rows of the embedding: at least the number of tokens.
    pub vocabulary: i64,
    /// The longest sequence.
    pub context: i64,
    pub layers: i64,
    pub heads: i64,
    /// The number of features of a token.
    pub dim: i64,
    /// The probability of all dropouts.
    pub dropout: f64,
    /// Whether the backward pass computes the activations of the feed-forward parts again, in place
    /// of keeping them.
    #[serde(default)]
    pub recompute: bool,
}

impl ModelConfig {
    /// Checks what the layers would otherwise panic about, and keeps products of sizes far from
    /// overflow.
    pub fn check(&self) -> Result<()> {
        let sizes = [
            ("--vocabulary-size", self.vocabulary, 1 << 24),
            ("--context", self.context, 1 << 20),
            ("--layers", self.layers, 1 << 10),
            ("--heads", self.heads, 1 << 10),
            ("--dim", self.dim, 1 << 16),
        ];
        for (option, value, most) in sizes {
            ensure!(
                (1..=most).contains(&value),
                "{option} {value} is out of range: give 1 to {most}"
            );
        }
        ensure!(
            self.dim % self.heads == 0,
            "--dim {} is no multiple of --heads {}: give one",
            self.dim,
            self.heads
        );
        ensure!(
            (0.0..1.0).contains(&self.dropout),
            "--dropout {:?} is out of range: give 0 or more, below 1",
            self.dropout
        );
        Ok(())
    }

    /// The number of parameters. The output layer shares the embedding's.
    pub fn parameters(&self) -> i64 {
        let block = 12 * self.dim * self.dim + 13 * self.dim;
        self.vocabulary * self.dim + self.positions() + self.layers * block + 2 * self.dim
    }

    fn positions(&self) -> i64 {
        self.context * self.dim
    }

    /// An estimate of the bytes that training in Float takes: weights, gradients and two moments, and
    /// what the backward pass needs of each token.
    pub fn training_bytes(&self, tokens: i64) -> u64 {
        let kept = 16 * self.dim as u64 * self.layers as u64;
        16 * self.parameters() as u64 + 4 * tokens as u64 * kept
    }

    /// The operations of a training step per token: six for each parameter in a product, and those of
    /// attention, as if it were not causal. nanoGPT and PaLM count in the same way.
    pub fn flops_per_token(&self) -> f64 {
        let products = 6 * (self.parameters() - self.positions());
        (products + 12 * self.layers * self.dim * self.context) as f64
    }
}

/// A GPT-2. Its variables have Hugging Face's names.
pub struct Gpt {
    pub config: ModelConfig,
    pub variables: VarStore,
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<TransformerBlock>,
    norm: Norm,
    /// Empty unless [`Gpt::round`] was called.
    rounded: Vec<Rounded>,
}

/// A weight that the model has in `Float` and computes with in a half kind.
struct Rounded {
    name: String,
    weight: Tensor,
    /// The variable of the layer.
    variable: Tensor,
}

impl Gpt {
    /// A model whose weights are all zero.
    pub fn zeros(config: &ModelConfig, device: Device) -> Result<Gpt> {
        config.check()?;
        let variables = VarStore::new(device);
        let root = variables.root();
        let zero = Init::Const(0.0);
        let of_tokens = EmbeddingConfig { ws_init: zero, ..Default::default() };
        let block = block_config(config, zero);
        let (dim, heads) = (config.dim, config.heads);
        let blocks = (0..config.layers)
            .map(|index| transformer_block(&root / "h" / index, dim, heads, block))
            .collect();
        Ok(Gpt {
            tokens: embedding(&root / "wte", config.vocabulary, dim, of_tokens),
            positions: embedding(&root / "wpe", config.context, dim, of_tokens),
            blocks,
            norm: norm(&root / "ln_f", dim, block.norm),
            rounded: Vec::new(),
            config: config.clone(),
            variables,
        })
    }

    /// Gives the linear layers of the blocks weights of a half kind, rounded from those in `Float`.
    /// Autocast would round them in each step, and cast their gradients back.
    pub fn round(&mut self, kind: Kind) -> Result<()> {
        ensure!(self.rounded.is_empty(), "the weights are rounded already");
        for (name, mut variable) in self.named_variables() {
            if !(name.contains(".attn.") || name.contains(".mlp.")) {
                continue;
            }
            let weight = variable.f_detach_copy()?;
            // The layer has the same tensor, so it gets the new memory, too.
            variable.f_set_data(&weight.f_to_kind(kind)?)?;
            self.rounded.push(Rounded { name, weight, variable });
        }
        Ok(())
    }

    /// Rounds the weights again, after those in `Float` were changed.
    pub fn round_again(&self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for Rounded { weight, variable, .. } in &self.rounded {
            variable.shallow_clone().f_copy_(weight)?;
        }
        Ok(())
    }

    /// The weights in `Float` that are rounded before the model computes with them, by name.
    pub fn masters(&self) -> Vec<(&str, &Tensor)> {
        self.rounded.iter().map(|rounded| (rounded.name.as_str(), &rounded.weight)).collect()
    }

    /// A model with GPT-2's initial weights, which the seed decides on each kind of device: normal
    /// with a deviation of 0.02, which is divided by the square root of the number of branches where
    /// a branch ends.
    pub fn new(config: &ModelConfig, device: Device, seed: i64) -> Result<Gpt> {
        let model = Gpt::zeros(config, device)?;
        tch::manual_seed(seed);
        let _no_grad = tch::no_grad_guard();
        let at_the_end = INITIAL_DEVIATION / ((2 * config.layers) as f64).sqrt();
        for (name, mut weight) in model.named_variables() {
            if weight.dim() == 2 {
                let is_last = name.ends_with("c_proj.weight");
                let deviation = if is_last { at_the_end } else { INITIAL_DEVIATION };
                let _ = weight.f_normal_(0.0, deviation)?;
            }
        }
        Ok(model)
    }

    /// All weights in `Float`, sorted by name.
    pub fn named_variables(&self) -> Vec<(String, Tensor)> {
        let mut all = self.variables.variables();
        for Rounded { name, weight, .. } in &self.rounded {
            all.insert(name.clone(), weight.shallow_clone());
        }
        let mut all: Vec<_> = all.into_iter().collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }

    pub fn device(&self) -> Device {
        self.variables.device()
    }

    /// An empty cache for each layer.
    pub fn caches(&self) -> Vec<KvCache> {
        self.blocks.iter().map(|_| KvCache::new(self.config.context)).collect()
    }

    /// The mean loss of the targets `[B, T]`, which are the tokens after the inputs `[B, T]`. With
    /// `half`, the products are computed in that kind, under autocast. The logits are never whole in
    /// memory.
    pub fn loss(
        &self,
        inputs: &Tensor,
        targets: &Tensor,
        half: Option<Kind>,
        train: bool,
    ) -> tch_extension::Result<Tensor> {
        let _autocast = half.map(|kind| Autocast::new(self.device(), kind)).transpose()?;
        let hidden = self.hidden(inputs, 0, train, None)?.f_reshape([-1, self.config.dim])?;
        let targets = targets.f_reshape([-1])?;
        f_linear_cross_entropy(&hidden, &self.tokens.ws, &targets, None, &Default::default())
    }

    /// The logits `[B, V]` of the token after the last one of `inputs`, `[B, T]`. The caches have the
    /// tokens before the inputs.
    pub fn next_logits(
        &self,
        inputs: &Tensor,
        caches: &mut [KvCache],
    ) -> tch_extension::Result<Tensor> {
        let half = self.rounded.first().map(|rounded| rounded.variable.f_kind()).transpose()?;
        let _autocast = half.map(|kind| Autocast::new(self.device(), kind)).transpose()?;
        let start = caches.first().map_or(0, KvCache::len);
        let hidden = self.hidden(inputs, start, false, Some(caches))?;
        let last = hidden.f_select(1, -1)?;
        Ok(last.f_linear::<&Tensor>(&self.tokens.ws, None)?)
    }

    /// The features `[B, T, C]` of tokens `[B, T]`, the first of which is the `start`-th of its
    /// sequence, after the last norm.
    fn hidden(
        &self,
        tokens: &Tensor,
        start: i64,
        train: bool,
        mut caches: Option<&mut [KvCache]>,
    ) -> tch_extension::Result<Tensor> {
        let count = tokens.size2()?.1;
        // The whole table needs no view, whose backward pass would copy its gradient.
        let positions = match count == self.config.context {
            true => self.positions.ws.shallow_clone(),
            false => self.positions.ws.f_narrow(0, start, count)?,
        };
        let mut sum = self.tokens.f_forward(tokens)?.f_add(&positions)?;
        if train && self.config.dropout > 0.0 {
            sum = sum.f_dropout(self.config.dropout, true)?;
        }
        let mut stream = Residual::new(sum);
        for (index, block) in self.blocks.iter().enumerate() {
            let cache = caches.as_mut().and_then(|caches| caches.get_mut(index));
            let call = AttentionCall { train, cache, ..Default::default() };
            stream = block.f_forward(&stream, call)?;
        }
        Ok(self.norm.f_forward(&stream)?.1)
    }
}

fn block_config(config: &ModelConfig, init: Init) -> TransformerBlockConfig {
    let (dropout, recompute) = (config.dropout, config.recompute);
    let mut config = TransformerBlockConfig { dropout, ..TransformerBlockConfig::gpt2() };
    config.attention.dropout = dropout;
    config.attention.ws_init = init;
    config.attention.bs_init = Some(init);
    if let FeedForwardConfig::Mlp(mlp) = &mut config.feed_forward {
        mlp.options.save_activations = !recompute;
        mlp.linear.ws_init = init;
        mlp.linear.bs_init = Some(init);
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> ModelConfig {
        ModelConfig {
            vocabulary: 11,
            context: 8,
            layers: 2,
            heads: 2,
            dim: 8,
            dropout: 0.0,
            recompute: false,
        }
    }

    #[test]
    fn parameters_are_counted_as_they_are() {
        let model = Gpt::zeros(&config(), Device::Cpu).unwrap();
        let numbers: usize = model.named_variables().iter().map(|(_, weight)| weight.numel()).sum();
        assert_eq!(numbers as i64, config().parameters());
    }

    #[test]
    fn the_seed_decides_the_weights() {
        let weights = |seed| Gpt::new(&config(), Device::Cpu, seed).unwrap().named_variables();
        let (first, again, other) = (weights(1), weights(1), weights(2));
        assert!(first.iter().zip(&again).all(|(a, b)| a == b));
        assert!(first.iter().zip(&other).any(|(a, b)| a != b));
        let deviation = |name: &str| {
            let (_, weight) = first.iter().find(|(found, _)| found == name).unwrap();
            weight.std(true).double_value(&[])
        };
        assert!((deviation("h.0.mlp.c_fc.weight") - 0.02).abs() < 0.004);
        assert!((deviation("h.0.mlp.c_proj.weight") - 0.01).abs() < 0.002);
    }

    #[test]
    fn tokens_one_by_one_give_the_logits_of_the_whole() {
        let _no_grad = tch::no_grad_guard();
        let model = Gpt::new(&config(), Device::Cpu, 3).unwrap();
        let tokens = Tensor::randint(11, [2, 8], (Kind::Int64, Device::Cpu));
        let mut caches = model.caches();
        for place in 0..8 {
            let one = model.next_logits(&tokens.narrow(1, place, 1), &mut caches).unwrap();
            let whole = tokens.narrow(1, 0, place + 1);
            let whole = model.next_logits(&whole, &mut model.caches()).unwrap();
            assert!(one.allclose(&whole, 1e-4, 1e-5, false), "at {place}");
        }
    }

    /// Autocast rounds in the same places, so the numbers are the same.
    #[test]
    fn rounded_weights_give_the_loss_and_gradients_of_autocast() {
        let of = |rounds: bool| {
            let mut model = Gpt::new(&config(), Device::Cpu, 3).unwrap();
            if rounds {
                model.round(Kind::BFloat16).unwrap();
                assert!(model.round(Kind::BFloat16).is_err(), "twice");
            }
            tch::manual_seed(5);
            let tokens = Tensor::randint(11, [2, 9], (Kind::Int64, Device::Cpu));
            let (inputs, targets) = (tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8));
            let loss = model.loss(&inputs, &targets, Some(Kind::BFloat16), true).unwrap();
            loss.backward();
            let variables = model.variables.variables().into_iter();
            let mut gradients: Vec<_> =
                variables.map(|(name, variable)| (name, variable.grad())).collect();
            gradients.sort_by(|a, b| a.0.cmp(&b.0));
            let logits = tch::no_grad(|| model.next_logits(&inputs, &mut model.caches()).unwrap());
            (loss, gradients, logits, model.masters().len())
        };
        let (rounded, cast) = (of(true), of(false));
        assert_eq!((rounded.3, cast.3), (16, 0));
        assert_eq!(rounded.0.double_value(&[]), cast.0.double_value(&[]));
        for ((name, found), (_, expected)) in rounded.1.iter().zip(&cast.1) {
            assert_eq!(found.to_kind(Kind::Float), expected.to_kind(Kind::Float), "{name}");
        }
        assert_eq!(rounded.1[0].1.kind(), Kind::BFloat16, "{}", rounded.1[0].0);
        assert!(rounded.2.to_kind(Kind::Float).allclose(&cast.2, 2e-2, 2e-2, false));
    }

    #[test]
    fn the_loss_is_that_of_the_logits() {
        let model = Gpt::new(&config(), Device::Cpu, 3).unwrap();
        let tokens = Tensor::randint(11, [2, 9], (Kind::Int64, Device::Cpu));
        let (inputs, targets) = (tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8));
        let loss = model.loss(&inputs, &targets, None, true).unwrap();
        let hidden = model.hidden(&inputs, 0, true, None).unwrap();
        let logits = hidden.linear::<&Tensor>(&model.tokens.ws, None);
        let expected = logits.flatten(0, 1).cross_entropy_for_logits(&targets.flatten(0, 1));
        assert!(loss.allclose(&expected, 1e-5, 1e-6, false));
    }

    #[test]
    fn sizes_that_do_not_fit_are_errors_that_name_the_option() {
        let refused =
            |config: ModelConfig| Gpt::zeros(&config, Device::Cpu).err().unwrap().to_string();
        assert!(refused(ModelConfig { heads: 3, ..config() }).contains("--heads 3"));
        assert!(refused(ModelConfig { dim: 0, ..config() }).contains("--dim 0"));
        assert!(refused(ModelConfig { dropout: 1.0, ..config() }).contains("--dropout 1.0"));
    }
}
