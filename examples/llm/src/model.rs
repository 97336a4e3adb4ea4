//! The architectures of GPT-2 and Llama's family, made of this crate's layers.

use crate::apart::Apart;
pub use crate::config::ModelConfig;
use crate::device::Precision;
use crate::export::name_in_files;
use crate::lora::Lora;
use crate::positions::{At, Rotary};
use anyhow::{Result, ensure};
use std::collections::BTreeMap;
use tch::nn::{EmbeddingConfig, Init, VarStore};
use tch::{Device, Reduction, Tensor};
use tch_extension::amp::Autocast;
use tch_extension::nn::{
    AttentionCall, Embedding, FeedForwardConfig, Functional, KvCache, Norm, NormConfig, Packed,
    QkTransform, Residual, RmsNormConfig, TransformerBlock, TransformerBlockConfig, checkpoint,
    embedding, norm, transformer_block,
};
use tch_extension::ops::{LinearCrossEntropyOptions, f_linear, f_linear_cross_entropy};

/// The standard deviation of the initial weights, as in GPT-2.
const INITIAL_DEVIATION: f64 = 0.02;

/// A language model. Its variables have Hugging Face's names, without what they all begin with.
pub struct Model {
    pub config: ModelConfig,
    pub variables: VarStore,
    /// Adapters that are trained next to frozen variables.
    adapters: Option<VarStore>,
    tokens: Embedding,
    /// What is added to them at each place, in GPT-2.
    places: Option<Embedding>,
    rotary: Option<Rotary>,
    blocks: Vec<TransformerBlock>,
    norm: Norm,
    /// The output layer, unless it is the embedding.
    head: Option<Tensor>,
    /// What it is computed in.
    precision: Precision,
    /// The weights that are trained, if they have master weights.
    rounded: Vec<Rounded>,
}

/// A block and what rotates its queries and keys, to be computed again.
struct Layer {
    block: TransformerBlock,
    rotary: Option<Rotary>,
    /// The rows of the tables, if tokens have some of their own.
    rows: Option<[Tensor; 2]>,
    packed: Option<Packed>,
}

impl Functional for Layer {
    fn with_tensors(&self, replace: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        Layer {
            block: self.block.with_tensors(replace),
            rotary: self.rotary.as_ref().map(|rotary| rotary.with_tensors(replace)),
            rows: self.rows.as_ref().map(|rows| rows.each_ref().map(&mut *replace)),
            packed: self.packed.as_ref().map(|packed| packed.with_tensors(replace)),
        }
    }
}

/// A weight in `Float`, and the variable that has its rounded values.
struct Rounded {
    name: String,
    weight: Tensor,
    variable: Tensor,
}

impl Model {
    /// A model whose weights are all zero.
    pub fn zeros(config: &ModelConfig, device: Device) -> Result<Model> {
        config.check()?;
        let variables = VarStore::new(device);
        let root = variables.root();
        let zero = Init::Const(0.0);
        let of_tokens = EmbeddingConfig { ws_init: zero, ..Default::default() };
        let block = block_config(config, zero);
        let (dim, heads) = (config.dim, config.heads);
        let [of_embedding, of_blocks, of_norm] = match &config.llama {
            None => ["wte", "h", "ln_f"],
            Some(_) => ["embed_tokens", "layers", "norm"],
        };
        let llama = config.llama.as_ref();
        let of_places = || embedding(&root / "wpe", config.context, dim, of_tokens);
        let rotary = llama.map(|llama| Rotary::new(&root, config, llama)).transpose()?;
        let has_head = llama.is_some_and(|llama| !llama.tied);
        let blocks = (0..config.layers)
            .map(|index| transformer_block(&root / of_blocks / index, dim, heads, block))
            .collect();
        Ok(Model {
            tokens: embedding(&root / of_embedding, config.vocabulary, dim, of_tokens),
            places: llama.is_none().then(of_places),
            rotary,
            blocks,
            norm: norm(&root / of_norm, dim, block.norm),
            head: has_head
                .then(|| (&root / "lm_head").var("weight", &[config.vocabulary, dim], zero)),
            precision: Precision::F32,
            rounded: Vec::new(),
            config: config.clone(),
            adapters: None,
            variables,
        })
    }

    /// Freezes the weights and gives layers adapters, whose output is zero at first.
    pub fn adapt(&mut self, lora: &Lora, seed: i64) -> Result<()> {
        ensure!(self.precision == Precision::F32, "the weights are rounded already");
        let adapters = VarStore::new(self.device());
        tch::manual_seed(seed);
        let blocks = if self.config.llama.is_some() { "layers" } else { "h" };
        for (index, block) in self.blocks.iter_mut().enumerate() {
            for (name, layer) in block.linears_mut() {
                let name = format!("{blocks}.{index}.{name}");
                if lora.is_target(&name_in_files(&self.config, &name)) {
                    let path = name.split('.').fold(adapters.root(), |path, part| path / part);
                    layer.add_lora(path, lora.rank, lora.scale());
                }
            }
        }
        ensure!(!adapters.is_empty(), "no layer has an adapter: give other --lora-targets");
        self.variables.freeze();
        self.adapters = Some(adapters);
        Ok(())
    }

    /// Makes the adapters a part of the weights.
    pub fn merge(&mut self) -> Result<()> {
        for (_, layer) in self.blocks.iter_mut().flat_map(TransformerBlock::linears_mut) {
            layer.f_merge_lora()?;
        }
        self.adapters = None;
        Ok(())
    }

    /// The variables that are trained: the adapters, if there are any.
    pub fn trained(&self) -> &VarStore {
        self.adapters.as_ref().unwrap_or(&self.variables)
    }

    /// The variables that are not trained.
    #[cfg(feature = "distributed")]
    pub fn frozen(&self) -> Vec<Tensor> {
        let all = self.adapters.is_some().then(|| self.variables.variables());
        all.unwrap_or_default().into_iter().collect::<BTreeMap<_, _>>().into_values().collect()
    }

    /// From now on the model is computed in these kinds. It had been in `Float`. Frozen weights are kept
    /// in one kind only.
    pub fn set_precision(&mut self, precision: Precision) -> Result<()> {
        ensure!(self.precision == Precision::F32, "the weights are rounded already");
        self.precision = precision;
        let Some(kind) = precision.half().filter(|_| precision != Precision::Bf16Mixed) else {
            return Ok(());
        };
        let frozen = self.adapters.is_some().then(|| self.variables.variables());
        let trained = self.trained().variables();
        for (name, mut variable) in frozen.into_iter().flatten().chain(trained) {
            let weight = variable.f_detach()?;
            // The layer has the same tensor, so it gets the new memory, too.
            variable.f_set_data(&weight.f_to_kind(kind)?)?;
            if variable.requires_grad() && precision == Precision::Bf16 {
                self.rounded.push(Rounded { name, weight, variable });
            }
        }
        self.rounded.sort_by(|a, b| a.name.cmp(&b.name));
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
    pub fn new(config: &ModelConfig, device: Device, seed: i64) -> Result<Model> {
        let model = Model::zeros(config, device)?;
        tch::manual_seed(seed);
        let _no_grad = tch::no_grad_guard();
        let at_the_end = INITIAL_DEVIATION / ((2 * config.layers) as f64).sqrt();
        for (name, mut weight) in model.named_variables() {
            if weight.dim() == 2 {
                let ends = ["c_proj.weight", "o_proj.weight", "down_proj.weight"];
                let is_last = ends.iter().any(|end| name.ends_with(end));
                let deviation = if is_last { at_the_end } else { INITIAL_DEVIATION };
                let _ = weight.f_normal_(0.0, deviation)?;
            }
        }
        Ok(model)
    }

    /// All weights that are trained, sorted by name, or their master weights, where there are some.
    pub fn named_variables(&self) -> Vec<(String, Tensor)> {
        let mut all: BTreeMap<_, _> = self.trained().variables().into_iter().collect();
        let masters = self.masters().into_iter();
        all.extend(masters.map(|(name, weight)| (name.to_string(), weight.shallow_clone())));
        all.into_iter().collect()
    }

    pub fn device(&self) -> Device {
        self.variables.device()
    }

    /// An empty cache for each layer, for at most so many tokens.
    pub fn caches(&self, tokens: i64) -> Vec<KvCache> {
        self.blocks.iter().map(|_| KvCache::new(tokens.min(self.config.context))).collect()
    }

    /// The weight of the embedding, `[V, C]`.
    pub fn embedding(&self) -> &Tensor {
        &self.tokens.ws
    }

    /// The weight of the output layer, `[V, C]`.
    fn head(&self) -> &Tensor {
        self.head.as_ref().unwrap_or(&self.tokens.ws)
    }

    /// The mean or the sum of the losses of a batch: of the targets `[B, T]`, which are the tokens after the
    /// inputs `[B, T]`, without those that are not learned. Its documents may be apart. The logits are never
    /// whole in memory.
    pub fn loss(
        &self,
        batch: &[Tensor],
        apart: Option<Apart>,
        train: bool,
        reduction: Reduction,
    ) -> tch_extension::Result<Tensor> {
        let _autocast = self.autocast()?;
        let [inputs, targets, ..] = batch else {
            return Err(tch_extension::Error::msg("a batch has inputs and targets"));
        };
        let packed = apart.map(|apart| apart.packed(batch)).transpose()?;
        // The gradient of an embedding that is also the output layer is then made once.
        let (rows, tied) = self.tokens.f_forward_tied(inputs)?;
        let at = packed.as_ref().map_or(At::Start(0), At::Packed);
        let hidden = self.hidden_of(rows, at, train, None)?.f_reshape([-1, self.config.dim])?;
        let targets = targets.f_reshape([-1])?;
        let options = LinearCrossEntropyOptions { reduction, ..Default::default() };
        let head = self.head.as_ref().unwrap_or(&tied);
        f_linear_cross_entropy(&hidden, head, &targets, None, &options)
    }

    /// The logits `[B, V]` of the token after the last one of `inputs`, `[B, T]`. The caches have the
    /// tokens before the inputs.
    pub fn next_logits(
        &self,
        inputs: &Tensor,
        caches: &mut [KvCache],
    ) -> tch_extension::Result<Tensor> {
        self.logits(&self.continued(inputs, caches)?.f_select(1, -1)?)
    }

    /// Features `[B, T, C]` of tokens after those that are in the caches, without dropout.
    pub fn continued(
        &self,
        inputs: &Tensor,
        caches: &mut [KvCache],
    ) -> tch_extension::Result<Tensor> {
        let start = At::Start(caches.first().map_or(0, KvCache::len));
        self.hidden(inputs, start, caches)
    }

    /// Features `[B, 1, C]` of one token of each row, `[B, 1]`, at places `[B]` that the host does not
    /// know; see [`KvCache::f_decode`].
    pub fn placed(
        &self,
        inputs: &Tensor,
        places: &Tensor,
        caches: &mut [KvCache],
    ) -> tch_extension::Result<Tensor> {
        self.hidden(inputs, At::Places(places), caches)
    }

    /// The logits of features.
    pub fn logits(&self, hidden: &Tensor) -> tch_extension::Result<Tensor> {
        let _autocast = self.autocast()?;
        f_linear(hidden, self.head(), None)
    }

    /// Whether it is computed under autocast, which keeps casts of weights.
    pub fn autocasts(&self) -> bool {
        self.precision == Precision::Bf16Mixed
    }

    fn autocast(&self) -> tch_extension::Result<Option<Autocast>> {
        let kind = self.precision.half().filter(|_| self.autocasts());
        kind.map(|kind| Autocast::new(self.device(), kind)).transpose()
    }

    /// The features `[B, T, C]` of tokens `[B, T]` after those that are in the caches.
    fn hidden(
        &self,
        tokens: &Tensor,
        at: At<'_>,
        caches: &mut [KvCache],
    ) -> tch_extension::Result<Tensor> {
        let _autocast = self.autocast()?;
        self.hidden_of(self.tokens.f_forward(tokens)?, at, false, Some(caches))
    }

    /// The features of tokens whose rows of the embedding are `sum`, `[B, T, C]`, after the last norm.
    fn hidden_of(
        &self,
        mut sum: Tensor,
        at: At<'_>,
        train: bool,
        mut caches: Option<&mut [KvCache]>,
    ) -> tch_extension::Result<Tensor> {
        let count = sum.size3()?.1;
        let (positions, places, packed) = match at {
            At::Start(_) => (None, None, None),
            At::Places(places) => (Some(places.f_unsqueeze(1)?), Some(places), None),
            At::Packed(packed) => (Some(packed.f_positions()?), None, Some(packed)),
        };
        if let Some(table) = &self.places {
            let features = match (&positions, at) {
                (Some(positions), _) => table.f_forward(positions)?,
                (None, At::Start(start)) if count != self.config.context => {
                    table.ws.f_narrow(0, start, count)?
                }
                // The whole table needs no view, whose backward pass would copy its gradient.
                _ => table.ws.shallow_clone(),
            };
            sum = sum.f_add(&features)?;
        }
        if train && self.config.dropout > 0.0 {
            sum = sum.f_dropout(self.config.dropout, true)?;
        }
        let rotary = self.rotary.as_ref();
        let rows =
            rotary.zip(positions.as_ref()).map(|(rotary, at)| rotary.rows(at)).transpose()?;
        let rows = rows.as_ref();
        let mut stream = Residual::new(sum);
        // Attention rotates a token by itself, unless heads have norms.
        let rope = rotary.filter(|rotary| rotary.norms.is_empty()).and(places).and(rows);
        let rope = rope.map(|[cos, sin]| [cos, sin]);
        for (index, block) in self.blocks.iter().enumerate() {
            stream = if self.config.recompute_layers && caches.is_none() {
                self.recomputed(index, &stream, train, rows, packed)?
            } else {
                let cache = caches.as_mut().and_then(|caches| caches.get_mut(index));
                let call =
                    AttentionCall { train, cache, places, rope, packed, ..Default::default() };
                forward(block, rotary.map(|rotary| (rotary, index)), rows, &stream, call)?
            };
        }
        Ok(self.norm.f_forward(&stream)?.1)
    }

    /// What a layer makes of the stream, which the backward pass computes again.
    fn recomputed(
        &self,
        index: usize,
        stream: &Residual,
        train: bool,
        rows: Option<&[Tensor; 2]>,
        packed: Option<&Packed>,
    ) -> tch_extension::Result<Residual> {
        let same = &mut |tensor: &Tensor| tensor.shallow_clone();
        let layer = Layer {
            block: self.blocks[index].with_tensors(same),
            rotary: self.rotary.as_ref().map(|rotary| rotary.of_layer(index)),
            rows: rows.map(|rows| rows.each_ref().map(&mut *same)),
            packed: packed.map(|packed| packed.with_tensors(same)),
        };
        let (branch, dropout) = stream.branch.as_ref().map(|(branch, p)| (branch, *p)).unzip();
        let run = move |layer: &Layer, inputs: &[Option<Tensor>]| {
            let [Some(sum), branch] = inputs else {
                return Err(tch_extension::Error::msg("a stream is its sum and its branch"));
            };
            let branch = branch.as_ref().map(Tensor::shallow_clone).zip(dropout);
            let stream = Residual { sum: sum.shallow_clone(), branch };
            let rotary = layer.rotary.as_ref().map(|rotary| (rotary, 0));
            let packed = layer.packed.as_ref();
            let call = AttentionCall { train, packed, ..Default::default() };
            let Residual { sum, branch } =
                forward(&layer.block, rotary, layer.rows.as_ref(), &stream, call)?;
            Ok([Some(sum), branch.map(|(branch, _)| branch)].into())
        };
        let outputs = checkpoint(&layer, run, &[Some(&stream.sum), branch])?;
        let [sum, branch] = outputs.exactly()?;
        let dropout = if train { self.config.dropout } else { 0.0 };
        Ok(Residual { sum, branch: Some((branch, dropout)) })
    }
}

/// What a block makes of the stream. Queries and keys are rotated as those of this layer, unless
/// attention does so itself.
fn forward(
    block: &TransformerBlock,
    rotary: Option<(&Rotary, usize)>,
    rows: Option<&[Tensor; 2]>,
    stream: &Residual,
    call: AttentionCall<'_>,
) -> tch_extension::Result<Residual> {
    let rotated = rotary.filter(|_| call.rope.is_none()).map(|(rotary, layer)| {
        move |q: &Tensor, k: &Tensor, offset| rotary.rotated(layer, q, k, offset, rows)
    });
    let transform = rotated.as_ref().map(|rotated| rotated as QkTransform<'_>);
    block.f_forward(stream, AttentionCall { transform, ..call })
}

fn block_config(config: &ModelConfig, init: Init) -> TransformerBlockConfig {
    let mut block = TransformerBlockConfig::gpt2();
    if let Some(llama) = &config.llama {
        block = TransformerBlockConfig::llama(llama.kv_heads, llama.hidden);
        let eps = RmsNormConfig { eps: Some(llama.eps), ..Default::default() };
        block.norm = NormConfig::Rms(eps);
        block.attention.head_dim = Some(llama.head_dim);
        (block.attention.bias, block.attention.out_bias) = (llama.bias, llama.out_bias());
    }
    (block.dropout, block.attention.dropout) = (config.dropout, config.dropout);
    block.attention.ws_init = init;
    block.attention.bs_init = Some(init);
    match &mut block.feed_forward {
        FeedForwardConfig::Mlp(mlp) => {
            mlp.options.save_activations = !config.recompute;
            mlp.linear.ws_init = init;
            mlp.linear.bs_init = Some(init);
        }
        FeedForwardConfig::SwiGlu(swiglu) => {
            // One more array is written by a kernel that reads the factors of it anyway.
            swiglu.options.save_activations = false;
            swiglu.linear.ws_init = init;
        }
    }
    block
}

#[cfg(test)]
#[path = "../tests/unit/model.rs"]
mod tests;
