//! Reads and writes weights as `.safetensors` files, which also contain the vocabulary that the
//! weights belong to.

use crate::model::{CharModel, shapes};
use crate::options::Family;
use crate::output::write_whole;
use anyhow::{Context, Result, bail, ensure};
use std::collections::HashMap;
use std::path::Path;
use tch::{Device, Kind, TchError, Tensor};

/// The tensor of the vocabulary's code points, `[V]` Int64. Without them, the rows of the embedding
/// and of the output layer would mean nothing.
const VOCABULARY: &str = "vocabulary";

/// Writes the model's weights to `path`. An existing file is replaced only by a complete file of
/// finite numbers.
pub fn save(model: &CharModel, vocabulary: &[char], path: &Path) -> Result<()> {
    let mut tensors = Vec::new();
    for (name, tensor) in model.variables.variables() {
        ensure!(
            is_finite(&tensor),
            "{name} is no longer finite: lower --lr; {} is as before",
            path.display()
        );
        tensors.push((name, tensor.detach().to_device(Device::Cpu).contiguous()));
    }
    tensors.push((VOCABULARY.to_string(), Tensor::from_slice(&code_points(vocabulary))));
    write_whole(path, |partial| Ok(Tensor::write_safetensors(&tensors, partial)?))
}

/// The weights of an earlier run, which were checked to fit this one.
pub struct Checkpoint(HashMap<String, Tensor>);

impl Checkpoint {
    /// Reads `path`. Unless it holds a model of this family, vocabulary and hidden size, the error
    /// names what differs.
    pub fn load(
        path: &Path,
        family: Family,
        vocabulary: &[char],
        hidden: i64,
    ) -> Result<Checkpoint> {
        let checkpoint = Checkpoint(read(path)?.into_iter().collect());
        checkpoint
            .check(family, vocabulary, hidden)
            .with_context(|| format!("cannot resume from {}", path.display()))?;
        Ok(checkpoint)
    }

    /// Checks the vocabulary, the family and the hidden size first: if one of them differs, many
    /// names or shapes differ, and only these checks can say why.
    fn check(&self, family: Family, vocabulary: &[char], hidden: i64) -> Result<()> {
        self.check_vocabulary(vocabulary)?;
        self.check_family(family)?;
        self.check_hidden(hidden)?;
        let expected = shapes(family, vocabulary.len() as i64, hidden);
        for (name, shape) in &expected {
            self.check_tensor(name, shape)?;
        }
        let known =
            |name: &str| name == VOCABULARY || expected.iter().any(|(other, _)| *other == name);
        if let Some(name) = self.0.keys().find(|name| !known(name)) {
            bail!(
                "it has a tensor {name:?} that this model lacks: give a file written by this example"
            );
        }
        Ok(())
    }

    fn check_vocabulary(&self, expected: &[char]) -> Result<()> {
        let tensor = self.tensor(VOCABULARY)?;
        ensure!(
            tensor.kind() == Kind::Int64 && tensor.dim() == 1,
            "its tensor {VOCABULARY:?} is no list of code points: give a file written by this example"
        );
        let found = Vec::<i64>::try_from(tensor)?;
        ensure!(
            found == code_points(expected),
            "its vocabulary has {} characters, the text's has {}{}: give the text it was trained on, or leave \
             out --resume",
            found.len(),
            expected.len(),
            first_difference(&found, expected)
        );
        Ok(())
    }

    /// Compares the family with that of the tensors' names. A file without a recurrent layer
    /// passes, because the check of each tensor says what it lacks.
    fn check_family(&self, expected: Family) -> Result<()> {
        let is_here =
            |family: &Family| self.0.keys().any(|name| name.starts_with(&family.prefix()));
        let families = [Family::Lltm, Family::Lstm, Family::Gru];
        let found = families.into_iter().find(is_here).unwrap_or(expected);
        ensure!(
            found == expected,
            "its recurrent layer is of --op {0}, not {1}: give --op {0}",
            found.name(),
            expected.name()
        );
        Ok(())
    }

    fn check_hidden(&self, expected: i64) -> Result<()> {
        let found = self.tensor("output.weight")?.size().last().copied().unwrap_or(0);
        ensure!(
            found == expected,
            "its hidden size is {found}, not {expected}: give --hidden {found}"
        );
        Ok(())
    }

    fn check_tensor(&self, name: &str, shape: &[i64]) -> Result<()> {
        let tensor = self.tensor(name)?;
        let (found, kind) = (tensor.size(), tensor.kind());
        ensure!(
            found == shape && kind == Kind::Float,
            "its {name} is {kind:?} {found:?}, this model's is Float {shape:?}: give a file of the same model"
        );
        ensure!(is_finite(tensor), "its {name} holds NaN or infinity: give an earlier file");
        Ok(())
    }

    fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.0.get(name).with_context(|| {
            format!("it has no tensor {name:?}: give a file written by this example")
        })
    }

    /// Overwrites the model's weights.
    pub fn copy_into(&self, model: &CharModel) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for (name, mut variable) in model.variables.variables() {
            variable.f_copy_(self.tensor(&name)?)?;
        }
        Ok(())
    }
}

fn read(path: &Path) -> Result<Vec<(String, Tensor)>> {
    let name = path.display();
    ensure!(path.exists(), "the resume file {name} does not exist: check --resume");
    ensure!(
        path.is_file(),
        "the resume file {name} is not a file: give a .safetensors file to --resume"
    );
    Tensor::read_safetensors(path).map_err(|error| match error {
        TchError::SafeTensorError { err, .. } => anyhow::anyhow!(
            "the resume file {name} is not a whole safetensors file ({err}): give one written by this example"
        ),
        other => anyhow::Error::new(other).context(format!("cannot read the resume file {name}")),
    })
}

fn first_difference(found: &[i64], expected: &[char]) -> String {
    let known = code_points(expected);
    let character =
        |point: i64| u32::try_from(point).ok().and_then(char::from_u32).unwrap_or('\u{fffd}');
    if let Some(c) = expected.iter().find(|c| !found.contains(&i64::from(u32::from(**c)))) {
        return format!(" ({c:?} is in the text only)");
    }
    match found.iter().find(|point| !known.contains(point)) {
        Some(point) => format!(" ({:?} is in the file only)", character(*point)),
        None => String::new(),
    }
}

fn code_points(vocabulary: &[char]) -> Vec<i64> {
    vocabulary.iter().map(|&c| i64::from(u32::from(c))).collect()
}

fn is_finite(tensor: &Tensor) -> bool {
    tensor.isfinite().all().int64_value(&[]) != 0
}
