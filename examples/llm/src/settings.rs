//! What decides a run's curve, and the learning rate of each step.

use crate::apart::Documents;
use crate::device::Precision;
use crate::lora::{Base, Lora};
use crate::model::ModelConfig;
use crate::range;
use anyhow::{Result, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::PathBuf;
use tch_extension::optim::schedule::Schedule;

/// The learning rate ends at this part of its peak.
const LAST_RATE: f64 = 0.1;

/// Everything that the losses of a run depend on, apart from the kind of device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    pub model: ModelConfig,
    pub precision: Precision,
    /// Rows of a batch.
    pub batch: i64,
    /// Batches of a step.
    pub accumulate: i64,
    pub steps: i64,
    /// The peak of the learning rate.
    #[serde(with = "exact")]
    pub lr: f64,
    /// Steps until the peak.
    pub warm_up: i64,
    #[serde(with = "exact")]
    pub weight_decay: f64,
    #[serde(flatten)]
    pub updates: Updates,
    /// The largest norm of all gradients together.
    #[serde(with = "exact")]
    pub clip: f64,
    pub seed: i64,
    pub data: DataId,
    #[serde(default)]
    pub documents: Documents,
    /// The adapters that are trained in place of the weights.
    #[serde(default, skip_serializing_if = "Option::is_none", flatten)]
    pub lora: Option<Lora>,
    #[serde(default)]
    pub source: Source,
}

/// What updates the matrices of blocks. AdamW updates all else.
#[derive(Clone, Copy, Debug, Default, PartialEq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    #[default]
    #[value(name = "adamw")]
    AdamW,
    /// Against the orthogonalised momentum
    Muon,
}

/// How weights are updated, with the names of the options.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Updates {
    #[serde(default)]
    pub optimizer: Optimizer,
    /// The peak of the learning rate of matrices, if not that of all else.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "exact")]
    pub muon_lr: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none", with = "exact")]
    pub muon_momentum: Option<f64>,
}

/// Where data and base came from, which a continued run looks at.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Source {
    /// The folder of `--data`; `None` if the run has its own.
    pub data: Option<PathBuf>,
    /// The text's options, by name, of a run that has data of its own.
    pub text: BTreeMap<String, String>,
    /// The model whose adapters are trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Base>,
}

/// What tells data apart.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DataId {
    /// The hash of the vocabulary, in hexadecimal digits.
    pub vocabulary: String,
    /// The number of tokens to train on.
    pub tokens: usize,
    /// The checksum of all tokens.
    pub checksum: u32,
    /// How many of them are learned, if not all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learned: Option<usize>,
}

impl DataId {
    /// The share of the tokens that are learned, if not all are.
    pub fn learned_share(&self) -> Option<f64> {
        self.learned.map(|learned| learned as f64 / self.tokens as f64)
    }
}

impl Settings {
    pub fn check(&self) -> Result<()> {
        self.model.check()?;
        self.lora.as_ref().map_or(Ok(()), |lora| lora.check(&self.model))?;
        ensure!(
            self.lora.is_some() || self.source.base.is_none(),
            "the settings name a base, but no adapter: they are of another version"
        );
        range::check("--batch", self.batch, [1, 1 << 20])?;
        range::check("--accumulate", self.accumulate, [1, 1 << 20])?;
        range::check("--steps", self.steps, [1, 1 << 40])?;
        range::check("--warm-up", self.warm_up, [0, 1 << 40])?;
        let Updates { optimizer, muon_lr, muon_momentum } = self.updates;
        ensure!(
            optimizer == Optimizer::Muon || muon_lr.or(muon_momentum).is_none(),
            "--muon-lr and --muon-momentum are for --optimizer muon: give it, or leave them out"
        );
        range::check_above_0("--lr", self.lr, 1e30)?;
        range::check_above_0("--muon-lr", muon_lr.unwrap_or(self.lr), 1e30)?;
        range::check_above_0("--clip", self.clip, 1e30)?;
        range::check("--weight-decay", self.weight_decay, [0.0, 1e30])?;
        range::check_below_1("--muon-momentum", muon_momentum.unwrap_or(0.0))
    }

    /// The learning rate of the step after `done` steps: it rises evenly to its peak and then falls
    /// along half a cosine to a tenth of it.
    pub fn learning_rate(&self, done: i64) -> f64 {
        let schedule = Schedule::cosine(self.warm_up as u64, self.steps as u64, LAST_RATE);
        self.lr * schedule.factor(done as u64)
    }

    /// What the learning rate of Muon's matrices is divided by for all else.
    pub fn adamw_lr_ratio(&self) -> f64 {
        self.updates.muon_lr.map_or(1.0, |rate| self.lr / rate)
    }

    /// Tokens of a step.
    pub fn tokens_per_step(&self) -> i64 {
        self.batch * self.accumulate * self.model.context
    }

    /// The first difference from the settings of an earlier run.
    pub fn difference(&self, earlier: &Settings) -> Option<Difference> {
        let values = |settings: &Settings| serde_json::to_value(settings).unwrap_or_default();
        first_difference("", &values(earlier), &values(self))
    }
}

/// An option that differs from that of an earlier run, and its value there and here.
#[derive(Debug, PartialEq)]
pub struct Difference {
    pub option: String,
    pub before: String,
    pub now: String,
}

/// What stands for the value of an option without one.
pub const NOT_GIVEN: &str = "not given";

fn first_difference(name: &str, earlier: &Value, now: &Value) -> Option<Difference> {
    if earlier == now {
        return None;
    }
    // Their parts are no options of their own.
    let is_whole = ["data", "llama"].contains(&name);
    if let (Value::Object(earlier), Value::Object(now), false) = (earlier, now, is_whole) {
        let of = |all: &Map<String, Value>, name| all.get(name).cloned().unwrap_or_default();
        let mut names = earlier.keys().chain(now.keys());
        return names.find_map(|name| first_difference(name, &of(earlier, name), &of(now, name)));
    }
    let shown = |value: &Value| match value {
        Value::Null => NOT_GIVEN.to_string(),
        value => value.to_string().replace('"', ""),
    };
    let option = format!("--{}", name.replace('_', "-"));
    Some(Difference { option, before: shown(earlier), now: shown(now) })
}

/// Keeps every bit of a number, or of one that may be missing, which JSON's numbers need not.
pub mod exact {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<T: Copy + Into<Option<f64>>, S: Serializer>(
        value: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match (*value).into() {
            Some(value) => serializer.serialize_str(&format!("{value:?}")),
            None => serializer.serialize_none(),
        }
    }

    pub fn deserialize<'de, T: From<f64>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<T, D::Error> {
        let number: f64 = String::deserialize(deserializer)?.parse().map_err(D::Error::custom)?;
        Ok(number.into())
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn settings() -> Settings {
        Settings {
            model: ModelConfig {
                vocabulary: 64,
                context: 8,
                layers: 2,
                heads: 2,
                dim: 8,
                dropout: 0.1,
                ..Default::default()
            },
            precision: Precision::F32,
            batch: 2,
            accumulate: 2,
            steps: 100,
            lr: 1e-3 / 3.0,
            warm_up: 10,
            weight_decay: 0.1,
            updates: Default::default(),
            clip: 1.0,
            seed: 1,
            data: DataId { vocabulary: "ab".into(), tokens: 1000, checksum: 7, learned: None },
            documents: Documents::Together,
            lora: None,
            source: Default::default(),
        }
    }

    #[test]
    fn settings_survive_a_file_bit_by_bit() {
        for lr in [1e-3 / 3.0, f64::MIN_POSITIVE, 0.1 + 0.2, 8.41e21] {
            let updates = Updates { muon_lr: Some(lr), ..Default::default() };
            let settings = Settings { lr, updates, ..settings() };
            let text = serde_json::to_string(&settings).unwrap();
            assert_eq!(serde_json::from_str::<Settings>(&text).unwrap(), settings);
        }
    }

    #[test]
    fn files_of_other_versions_can_be_read() {
        let mut file = serde_json::to_value(settings()).unwrap();
        file.as_object_mut().unwrap().remove("optimizer").unwrap();
        assert!(file["model"].get("recompute_layers").is_none());
        file["model"]["recompute_layers"] = true.into();
        assert_eq!(serde_json::from_value::<Settings>(file).unwrap(), settings());
    }

    #[test]
    fn a_difference_has_the_option_s_name() {
        let earlier = settings();
        let mut now = settings();
        assert_eq!(now.difference(&earlier), None);
        now.warm_up = 20;
        let found = |now: &Settings| {
            let Difference { option, before, now } = now.difference(&earlier).unwrap();
            [option, before, now]
        };
        assert_eq!(found(&now), ["--warm-up", "10", "20"]);
        let mut now = settings();
        now.model.layers = 3;
        assert_eq!(found(&now), ["--layers", "2", "3"]);
        let mut now = settings();
        now.updates.muon_lr = Some(0.5);
        assert_eq!(found(&now), ["--muon-lr", NOT_GIVEN, "0.5"]);
    }

    #[test]
    fn the_rate_rises_and_then_falls_to_a_tenth() {
        let settings = settings();
        let rates: Vec<f64> = (0..100).map(|step| settings.learning_rate(step)).collect();
        assert!(rates[0] > 0.0 && rates[..11].is_sorted());
        assert_eq!(rates[10], settings.lr);
        assert!(rates[10..].is_sorted_by(|a, b| a >= b));
        assert!((settings.learning_rate(100) / settings.lr - 0.1).abs() < 1e-12);
        let one = Settings { steps: 1, warm_up: 0, ..settings };
        assert_eq!(one.learning_rate(0), one.lr);
    }
}
