//! The families of models, as Hugging Face's `config.json` describes them.

use crate::model::ModelConfig;
use crate::range;
use crate::settings::exact;
use anyhow::{Context, Result, bail, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tch::{Device, Kind};
use tch_extension::ops::{RopeScaling, f_scaled_rope_tables};

/// What a model of Llama's family has that GPT-2 lacks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Llama {
    pub member: Member,
    /// Heads of keys and values.
    pub kv_heads: i64,
    /// Features of a head.
    pub head_dim: i64,
    /// Features between the layers of the feed-forward part.
    pub hidden: i64,
    /// What the norms add to the mean square.
    #[serde(with = "exact")]
    pub eps: f64,
    /// The base of the rotary angles.
    #[serde(with = "exact")]
    pub theta: f64,
    pub scaling: Scaling,
    /// Whether the output layer is the embedding.
    pub tied: bool,
    /// Whether the layers of attention have biases; Qwen 2's output layer has none.
    pub bias: bool,
    /// The longest sequence that the files promise.
    pub positions: i64,
    /// How many tokens before it a token sees, if not all. Sequences are no longer than that here.
    pub window: Option<i64>,
}

/// A member of Llama's family, with its name in the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Member {
    Llama,
    Mistral,
    Qwen2,
    /// It normalises the queries and keys of each head.
    Qwen3,
}

/// How the rotary angles are scaled, with the names of the files.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum Scaling {
    Default,
    Linear {
        factor: f64,
    },
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position_embeddings: i64,
    },
}

/// A longer context is no use: the tables of the angles have a row for each position.
const MOST_CONTEXT: i64 = 1 << 20;

impl Scaling {
    pub fn of_tables(self) -> RopeScaling {
        match self {
            Scaling::Default => RopeScaling::None,
            Scaling::Linear { factor } => RopeScaling::Linear { factor },
            Scaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: original_positions,
            } => RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_positions,
            },
        }
    }
}

impl Llama {
    /// Checks what the layers would otherwise panic about.
    pub fn check(&self, config: &ModelConfig) -> Result<()> {
        let most_context = self.window.unwrap_or(self.positions).min(self.positions);
        range::check("num_key_value_heads", self.kv_heads, [1, config.heads])?;
        range::check("head_dim", self.head_dim, [1, 1 << 10])?;
        range::check("intermediate_size", self.hidden, [1, 1 << 20])?;
        range::check("max_position_embeddings", self.positions, [1, 1 << 30])?;
        range::check("--context", config.context, [1, most_context])?;
        ensure!(
            config.heads % self.kv_heads == 0,
            "{} heads are no multiple of num_key_value_heads {}",
            config.heads,
            self.kv_heads
        );
        ensure!(self.head_dim % 2 == 0, "head_dim {} is odd, and cannot be rotated", self.head_dim);
        range::check_below_1("rms_norm_eps", self.eps)?;
        // What is wrong with the angles, the tables' function says.
        let (scaling, options) = (self.scaling.of_tables(), (Kind::Float, Device::Cpu));
        let _ = f_scaled_rope_tables(1, 2, self.theta, scaling, options)?;
        Ok(())
    }

    /// Whether the output layer of attention has a bias.
    pub fn out_bias(&self) -> bool {
        self.bias && self.member != Member::Qwen2
    }

    /// The parameters of a block of a model with so many features and heads.
    pub fn parameters_of_block(&self, dim: i64, heads: i64) -> i64 {
        let (q, kv) = (heads * self.head_dim, self.kv_heads * self.head_dim);
        let products = dim * (2 * q + 2 * kv + 3 * self.hidden);
        let biases = i64::from(self.bias) * (q + 2 * kv) + i64::from(self.out_bias()) * dim;
        let qk_norms = if self.member == Member::Qwen3 { 2 * self.head_dim } else { 0 };
        products + biases + qk_norms + 2 * dim
    }
}

/// Reads a `config.json` and, where there is one, a `generation_config.json`.
pub fn read(config: &Value, generation: &Value) -> Result<ModelConfig> {
    ensure!(
        config["quantization_config"].is_null(),
        "it has a quantization_config: give a model that is not quantized"
    );
    let name = &config["model_type"];
    ensure!(!name.is_null(), "it lacks the model_type: give gpt2, llama, mistral, qwen2 or qwen3");
    let model = match Member::deserialize(name) {
        Ok(member) => read_llama(config, member)?,
        Err(_) if *name == "gpt2" => read_gpt2(config)?,
        Err(_) => bail!("model_type is {name}, not gpt2, llama, mistral, qwen2 or qwen3"),
    };
    let model = ModelConfig { ends: read_ends(config, generation)?, ..model };
    model.check().context("it has impossible sizes")?;
    Ok(model)
}

/// A value of the configuration, if it is there.
pub fn given<T: DeserializeOwned>(config: &Value, key: &str) -> Result<Option<T>> {
    let value = &config[key];
    if value.is_null() {
        return Ok(None);
    }
    let kind = std::any::type_name::<T>();
    T::deserialize(value).map(Some).with_context(|| format!("{key} is {value}, not of kind {kind}"))
}

/// A value that must be there.
pub fn required<T: DeserializeOwned>(config: &Value, key: &str) -> Result<T> {
    given(config, key)?.with_context(|| format!("it lacks {key:?}"))
}

/// Tokens after which a text ends: one, or a list. Those of a `generation_config.json` come first.
fn read_ends(config: &Value, generation: &Value) -> Result<Vec<i64>> {
    let key = "eos_token_id";
    let file = if generation[key].is_null() { config } else { generation };
    match file[key].is_array() {
        true => Ok(given(file, key)?.unwrap_or_default()),
        false => Ok(given(file, key)?.into_iter().collect()),
    }
}

/// Refuses variants that would give other logits. What is absent is as in the first value.
fn check_variant(config: &Value, expected: &[(&str, &[Value])]) -> Result<()> {
    for (key, values) in expected {
        let found = &config[key];
        ensure!(
            found.is_null() || values.contains(found),
            "{key} is {found}, not {}",
            values.iter().map(Value::to_string).collect::<Vec<_>>().join(" or ")
        );
    }
    Ok(())
}

fn read_gpt2(config: &Value) -> Result<ModelConfig> {
    let dim: i64 = required(config, "n_embd")?;
    let expected: [(&str, &[Value]); 6] = [
        ("activation_function", &[json!("gelu_new"), json!("gelu_pytorch_tanh")]),
        ("n_inner", &[json!(dim.saturating_mul(4))]),
        ("layer_norm_epsilon", &[json!(1e-5)]),
        ("scale_attn_weights", &[json!(true)]),
        ("scale_attn_by_inverse_layer_idx", &[json!(false)]),
        ("tie_word_embeddings", &[json!(true)]),
    ];
    check_variant(config, &expected)?;
    Ok(ModelConfig {
        vocabulary: required(config, "vocab_size")?,
        context: required(config, "n_positions")?,
        layers: required(config, "n_layer")?,
        heads: required(config, "n_head")?,
        dim,
        dropout: given(config, "resid_pdrop")?.unwrap_or(0.0),
        ..Default::default()
    })
}

fn read_llama(config: &Value, member: Member) -> Result<ModelConfig> {
    check_variant(
        config,
        &[
            ("hidden_act", &[json!("silu")]),
            ("mlp_bias", &[json!(false)]),
            ("partial_rotary_factor", &[json!(1.0), json!(1)]),
        ],
    )?;
    let dim: i64 = required(config, "hidden_size")?;
    let heads: i64 = required(config, "num_attention_heads")?;
    let (theta, scaling) = rope(config)?;
    let positions: i64 = required(config, "max_position_embeddings")?;
    // Absent values are those of transformers' classes.
    let is = |key: &str| Ok::<_, anyhow::Error>(given(config, key)?.unwrap_or(false));
    let head_dim = if member == Member::Qwen3 { 128 } else { dim / heads.max(1) };
    let kv_heads = if member == Member::Mistral { 8 } else { heads };
    let window: Option<i64> = match member {
        Member::Llama => None,
        // Null is not the same as absent: it switches the window off.
        Member::Mistral if config.get("sliding_window").is_none() => Some(4096),
        Member::Mistral => given(config, "sliding_window")?,
        _ if !is("use_sliding_window")? => None,
        _ => Some(given(config, "sliding_window")?.unwrap_or(4096)),
    };
    Ok(ModelConfig {
        vocabulary: required(config, "vocab_size")?,
        // Up to the window, every token sees all before it.
        context: window.unwrap_or(positions).min(positions).min(MOST_CONTEXT),
        layers: required(config, "num_hidden_layers")?,
        heads,
        dim,
        llama: Some(Llama {
            member,
            kv_heads: given(config, "num_key_value_heads")?.unwrap_or(kv_heads),
            head_dim: given(config, "head_dim")?.unwrap_or(head_dim),
            hidden: required(config, "intermediate_size")?,
            eps: given(config, "rms_norm_eps")?.unwrap_or(1e-6),
            theta,
            scaling,
            tied: is("tie_word_embeddings")?,
            bias: member == Member::Qwen2 || is("attention_bias")?,
            positions,
            window,
        }),
        ..Default::default()
    })
}

/// The base of the rotary angles and their scaling: `rope_parameters` of newer files, `rope_theta` and
/// `rope_scaling` of others.
fn rope(config: &Value) -> Result<(f64, Scaling)> {
    let key = if config["rope_scaling"].is_null() { "rope_parameters" } else { "rope_scaling" };
    let mut parameters = given(config, key)?.unwrap_or_else(Map::new);
    let nested = parameters.values().any(Value::is_object);
    ensure!(!nested, "{key} is not the same in all layers, which this program lacks");
    if !parameters.contains_key("rope_type") {
        // The key of the oldest files.
        let old = parameters.get("type").cloned().unwrap_or(json!("default"));
        parameters.insert("rope_type".to_string(), old);
    }
    let parameters = Value::Object(parameters);
    let scaling = Scaling::deserialize(&parameters)
        .with_context(|| format!("{key} is {parameters}, which this program lacks"))?;
    let theta = match given(&parameters, "rope_theta")? {
        Some(theta) => Some(theta),
        None => given(config, "rope_theta")?,
    };
    Ok((theta.unwrap_or(10_000.0), scaling))
}

/// The `config.json` of a model, for transformers of versions 4 and 5. A text begins and ends with these
/// tokens, unless the model has ends of its own.
pub fn to_json(config: &ModelConfig, begin: Option<u32>, end: Option<u32>) -> Result<Value> {
    let Some(llama) = &config.llama else { return Ok(gpt2_to_json(config, begin, end)) };
    let class = match llama.member {
        Member::Llama => "LlamaForCausalLM",
        Member::Mistral => "MistralForCausalLM",
        Member::Qwen2 => "Qwen2ForCausalLM",
        Member::Qwen3 => "Qwen3ForCausalLM",
    };
    let scaling = serde_json::to_value(llama.scaling)?;
    let mut parameters = scaling.clone();
    parameters["rope_theta"] = json!(llama.theta);
    Ok(json!({
        "architectures": [class],
        "attention_bias": llama.bias,
        "attention_dropout": 0.0,
        "bos_token_id": begin,
        "eos_token_id": ends(config, end),
        "head_dim": llama.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.dim,
        "initializer_range": 0.02,
        "intermediate_size": llama.hidden,
        "max_position_embeddings": llama.positions,
        "mlp_bias": false,
        "model_type": llama.member,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": llama.kv_heads,
        "rms_norm_eps": llama.eps,
        "rope_parameters": parameters,
        "rope_scaling": if llama.scaling == Scaling::Default { Value::Null } else { scaling },
        "rope_theta": llama.theta,
        "sliding_window": llama.window,
        "tie_word_embeddings": llama.tied,
        "torch_dtype": "float32",
        "use_sliding_window": llama.window.is_some(),
        "vocab_size": config.vocabulary
    }))
}

/// The tokens after which a text ends, as the files have them: none, one, or a list.
fn ends(config: &ModelConfig, end: Option<u32>) -> Value {
    match &config.ends[..] {
        [] => json!(end),
        [one] => json!(one),
        several => json!(several),
    }
}

fn gpt2_to_json(config: &ModelConfig, begin: Option<u32>, end: Option<u32>) -> Value {
    json!({
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": config.dropout,
        "bos_token_id": begin,
        "embd_pdrop": config.dropout,
        "eos_token_id": ends(config, end),
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "model_type": "gpt2",
        "n_embd": config.dim,
        "n_head": config.heads,
        "n_inner": null,
        "n_layer": config.layers,
        "n_positions": config.context,
        "resid_pdrop": config.dropout,
        "scale_attn_weights": true,
        "tie_word_embeddings": true,
        "torch_dtype": "float32",
        "vocab_size": config.vocabulary
    })
}

#[cfg(test)]
#[path = "../tests/families/config.rs"]
mod tests;
