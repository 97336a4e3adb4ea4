//! The tensors of a model, and whether they are the same on all ranks.

use super::super::ProcessGroup;
use super::super::agree::{exchange, lines_that_differ};
use crate::ffi::amp::identity;
use crate::ffi::tensor::is_strided;
use crate::{Error, Result};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use tch::nn::{VarStore, Variables};
use tch::{Device, Tensor};

/// The tensors of a model.
#[derive(Debug, Default)]
pub(super) struct Model {
    /// In the order of their creation, with those that are frozen.
    pub parameters: Vec<(String, Tensor)>,
    pub buffers: Vec<(String, Tensor)>,
}

/// A store whose variables are those of a model, as long as none is added.
#[derive(Debug)]
pub(super) struct Source {
    variables: Arc<Mutex<Variables>>,
    trainable: usize,
    named: usize,
}

impl Source {
    /// Whether variables were added to the store since.
    pub fn has_grown(&self) -> bool {
        let variables = self.variables.lock().unwrap_or_else(PoisonError::into_inner);
        variables.trainable_variables.len() != self.trainable
            || variables.named_variables.len() != self.named
    }
}

impl Model {
    /// The variables of a store. Its buffers are those that were made without training, in the
    /// order of their names, because the store does not know another one.
    pub fn of_store(vs: &VarStore) -> (Model, Source) {
        let variables = vs.variables_.lock().unwrap_or_else(PoisonError::into_inner);
        let named = variables.named_variables.iter();
        let mut others: HashMap<usize, (&String, &Tensor)> =
            named.map(|(name, tensor)| (identity(tensor), (name, tensor))).collect();
        let mut model = Model::default();
        for (place, variable) in variables.trainable_variables.iter().enumerate() {
            let named = others.remove(&identity(&variable.tensor));
            let name = named.map_or_else(|| format!("parameter {place}"), |(name, _)| name.clone());
            model.parameters.push((name, variable.tensor.shallow_clone()));
        }
        let copy = |(name, tensor): (&String, &Tensor)| (name.clone(), tensor.shallow_clone());
        model.buffers = others.into_values().map(copy).collect();
        model.buffers.sort_by(|(left, _), (right, _)| left.cmp(right));
        let source = Source {
            variables: Arc::clone(&vs.variables_),
            trainable: variables.trainable_variables.len(),
            named: variables.named_variables.len(),
        };
        (model, source)
    }

    pub fn of_tensors(parameters: &[(&str, &Tensor)], buffers: &[(&str, &Tensor)]) -> Model {
        let copy = |tensors: &[(&str, &Tensor)]| -> Vec<(String, Tensor)> {
            let copy =
                |(name, tensor): &(&str, &Tensor)| ((*name).to_string(), tensor.shallow_clone());
            tensors.iter().map(copy).collect()
        };
        Model { parameters: copy(parameters), buffers: copy(buffers) }
    }

    /// The parameters that are trained.
    pub fn trained(&self) -> impl Iterator<Item = &(String, Tensor)> {
        self.parameters.iter().filter(|(_, tensor)| tensor.requires_grad())
    }

    /// Checks what can be checked on this rank.
    pub fn check(&self, op: &str, group: &ProcessGroup) -> Result<()> {
        let (mut names, mut known) = (HashSet::new(), HashSet::new());
        for (name, tensor) in self.parameters.iter().chain(&self.buffers) {
            let refuse = |expected: &str, got: &str, hint: &str| {
                Err(Error::argument(op, name, expected, got, hint))
            };
            if !tensor.defined() {
                return refuse("a tensor", "an undefined one", "");
            }
            if !is_strided(tensor) {
                return refuse("a dense tensor", "a sparse or other layout", "");
            }
            if !matches!(tensor.device(), Device::Cpu | Device::Cuda(_)) {
                return refuse("a CPU or CUDA tensor", &format!("{:?}", tensor.device()), "");
            }
            if tensor.requires_grad() && !tensor.is_leaf() {
                let hint = "give the tensors from which it was computed";
                return refuse("a leaf", "the result of an operation", hint);
            }
            if !names.insert(name.as_str()) {
                return refuse("a name for each tensor", "the same name twice", "");
            }
            if !known.insert(identity(tensor)) {
                return refuse("each tensor once", "a tensor with another name, too", "");
            }
        }
        let mut devices = self.parameters.iter().map(|(_, tensor)| is_cuda(tensor));
        let first = devices.next();
        if devices.any(|device| Some(device) != first) {
            let (expected, got) = ("parameters on the CPU or on CUDA", "parameters on both");
            return Err(Error::argument(op, "parameters", expected, got, ""));
        }
        // With one rank, nothing is sent.
        let elsewhere = self.parameters.iter().chain(&self.buffers);
        let elsewhere = elsewhere.filter(|(_, tensor)| is_cuda(tensor) && group.size() > 1);
        if let Some((name, tensor)) =
            elsewhere.into_iter().find(|(_, tensor)| tensor.device() != group.device())
        {
            let hint = "make the model on `group.device()`";
            let (expected, got) =
                (format!("{:?}, that of the group", group.device()), tensor.device());
            return Err(Error::argument(op, name, expected, format!("{got:?}"), hint));
        }
        if self.trained().next().is_none() {
            let (expected, got) = ("at least one that requires a gradient", "none");
            let hint = "make the Ddp after the model; a model that is not trained needs none";
            return Err(Error::argument(op, "parameters", expected, got, hint));
        }
        Ok(())
    }

    /// A line for each tensor.
    fn describe(&self) -> Result<String> {
        let mut text = String::new();
        for (name, tensor) in &self.parameters {
            let role = if tensor.requires_grad() { "parameter" } else { "frozen parameter" };
            text.push_str(&describe(role, name, tensor)?);
        }
        for (name, tensor) in &self.buffers {
            text.push_str(&describe("buffer", name, tensor)?);
        }
        Ok(text)
    }
}

fn is_cuda(tensor: &Tensor) -> bool {
    tensor.device() != Device::Cpu
}

fn describe(role: &str, name: &str, tensor: &Tensor) -> Result<String> {
    let place = if is_cuda(tensor) { " on CUDA" } else { "" };
    let strides = if tensor.is_contiguous() {
        String::new()
    } else {
        format!(" with strides {:?}", tensor.stride())
    };
    let (kind, size) = (tensor.f_kind()?, tensor.size());
    // A name with a line break would look like two tensors.
    Ok(format!("{role} {:?}: {kind:?} {size:?}{strides}{place}\n", name))
}

/// The first character of the message of a rank that cannot take part.
const REFUSES: char = '!';

/// Compares the model with those of the other ranks. All ranks get an error if there is a
/// difference, or if a rank's own check failed.
pub(super) fn compare(
    op: &str,
    group: &ProcessGroup,
    checked: Result<&Model>,
    options: &str,
) -> Result<()> {
    let own = checked.and_then(|model| Ok(format!("options {options}\n{}", model.describe()?)));
    let text = match &own {
        Ok(text) => text.clone(),
        Err(error) => format!("{REFUSES}{error}"),
    };
    let others = exchange(group, &text)?;
    own?;
    match difference(&others) {
        None => Ok(()),
        Some(reason) => Err(Error::Distributed {
            op: op.to_string(),
            reason: format!("rank {} of {}: {reason}", group.rank(), group.size()),
        }),
    }
}

/// Says how the ranks' texts differ from that of rank 0, if they do.
fn difference(texts: &[String]) -> Option<String> {
    for (rank, text) in texts.iter().enumerate() {
        if let Some(reason) = text.strip_prefix(REFUSES) {
            return Some(format!("rank {rank} cannot take part: {reason}"));
        }
    }
    let (first, others) = texts.split_first()?;
    let differ: Vec<usize> = (1..texts.len()).filter(|&rank| others[rank - 1] != *first).collect();
    let one = *differ.first()?;
    let ranks = |ranks: &[usize]| {
        let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
        let word = if ranks.len() == 1 { "rank" } else { "ranks" };
        format!("{word} {}", numbers.join(", "))
    };
    let (left, right) = lines_that_differ(first, &texts[one]);
    let [left, right] = [left, right].map(|line| line.unwrap_or("nothing"));
    // Ranks that differ in this line in the same way.
    let alike: Vec<usize> =
        differ.iter().copied().filter(|&rank| texts[rank] == texts[one]).collect();
    let further: Vec<usize> = differ.iter().copied().filter(|rank| !alike.contains(rank)).collect();
    let further = match further.is_empty() {
        true => String::new(),
        false => format!("; {} differ from rank 0, too", ranks(&further)),
    };
    Some(format!(
        "the models differ: rank 0 has {left}, and {} {right}{further}; make the same model, in the same order, on all ranks",
        ranks(&alike) + if alike.len() == 1 { " has" } else { " have" },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_string()).collect()
    }

    #[test]
    fn the_first_difference_is_named_with_its_ranks() {
        assert_eq!(difference(&texts(&["a\nb\n", "a\nb\n"])), None);
        assert_eq!(difference(&texts(&["a\n"])), None);
        let reason = difference(&texts(&["a\nb\n", "a\nb\n", "a\nc\n", "a\nc\n"]));
        let reason = reason.expect("they differ");
        assert!(reason.contains("rank 0 has b, and ranks 2, 3 have c; make"), "{reason}");
        let reason = difference(&texts(&["a\nb\n", "a\n", "d\nb\n"])).expect("they differ");
        assert!(reason.contains("rank 0 has b, and rank 1 has nothing; rank 2 differ"), "{reason}");
        let reason = difference(&texts(&["a\n", "!layer: not a leaf"])).expect("they differ");
        assert_eq!(reason, "rank 1 cannot take part: layer: not a leaf");
    }

    #[test]
    fn descriptions_tell_names_kinds_shapes_and_strides_apart() {
        let like = (Kind::Float, Device::Cpu);
        let model = |name: &str, tensor: Tensor| {
            Model { parameters: vec![(name.to_string(), tensor)], buffers: Vec::new() }
                .describe()
                .expect("described")
        };
        let base = model("w", Tensor::zeros([2, 3], like).set_requires_grad(true));
        assert_eq!(base, "parameter \"w\": Float [2, 3]\n");
        let others = [
            model("v", Tensor::zeros([2, 3], like).set_requires_grad(true)),
            model("w", Tensor::zeros([3, 2], like).set_requires_grad(true)),
            model("w", Tensor::zeros([2, 3], (Kind::Double, Device::Cpu)).set_requires_grad(true)),
            model("w", Tensor::zeros([3, 2], like).tr().set_requires_grad(true)),
            model("w", Tensor::zeros([2, 3], like)),
        ];
        for other in others {
            assert_ne!(base, other);
        }
    }
}
