//! Lists of tensors in which some may be absent.

use crate::{Error, Result};
use std::ops::Deref;
use tch::Tensor;

/// The inputs of a forward, borrowed; some may be absent.
#[derive(Clone, Copy)]
pub struct Inputs<'a>(&'a [Option<&'a Tensor>]);

impl<'a> Inputs<'a> {
    /// A view of these inputs.
    pub fn new(inputs: &'a [Option<&'a Tensor>]) -> Self {
        Inputs(inputs)
    }

    /// Input `index`.
    ///
    /// # Errors
    /// When it is absent, or there are fewer inputs.
    pub fn get(&self, index: usize) -> Result<&'a Tensor> {
        self.optional(index).ok_or_else(|| absent("input", index, self.0.len()))
    }

    /// Input `index`, if it is present.
    pub fn optional(&self, index: usize) -> Option<&'a Tensor> {
        self.0.get(index).copied().flatten()
    }
}

impl<'a> Deref for Inputs<'a> {
    type Target = [Option<&'a Tensor>];
    fn deref(&self) -> &Self::Target {
        self.0
    }
}

/// Owned tensors, some of which may be absent: the outputs of a forward, incoming and outgoing gradients.
///
/// Made with `into()` from a tensor, an option, an array, or a vector of either.
#[derive(Debug, Default)]
pub struct Tensors(Vec<Option<Tensor>>);

impl Tensors {
    /// The tensor at `index`.
    ///
    /// # Errors
    /// When it is absent, or the list is shorter.
    pub fn get(&self, index: usize) -> Result<&Tensor> {
        self.optional(index).ok_or_else(|| absent("tensor", index, self.0.len()))
    }

    /// The tensor at `index`, if it is present.
    pub fn optional(&self, index: usize) -> Option<&Tensor> {
        self.0.get(index).and_then(Option::as_ref)
    }

    /// The tensor of a list of one.
    ///
    /// # Errors
    /// When there is another number of tensors, or it is absent.
    pub fn single(self) -> Result<Tensor> {
        let [tensor] = self.exactly()?;
        Ok(tensor)
    }

    /// The tensors of a list of `N`, all present.
    ///
    /// # Errors
    /// When there is another number of tensors, or one is absent.
    pub fn exactly<const N: usize>(self) -> Result<[Tensor; N]> {
        let (len, present) = (self.0.len(), self.0.iter().flatten().count());
        match <[Option<Tensor>; N]>::try_from(self.0) {
            Ok(tensors) if present == N => Ok(tensors.map(|tensor| tensor.expect("all are present"))),
            _ => Err(Error::Autograd(format!(
                "expected {N} tensors, got {len}, of which {present} are present"
            ))),
        }
    }

    /// Undefined tensors made absent.
    pub(super) fn without_undefined(mut self) -> Self {
        for tensor in &mut self.0 {
            if tensor.as_ref().is_some_and(|tensor| !tensor.defined()) {
                *tensor = None;
            }
        }
        self
    }

    /// The list itself.
    pub fn into_vec(self) -> Vec<Option<Tensor>> {
        self.0
    }
}

fn absent(what: &str, index: usize, len: usize) -> Error {
    let reason = if index < len { "it is absent".to_string() } else { format!("there are only {len}") };
    Error::Autograd(format!("{what} {index} was asked for, but {reason}"))
}

impl Deref for Tensors {
    type Target = [Option<Tensor>];
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl From<()> for Tensors {
    fn from((): ()) -> Self {
        Tensors(Vec::new())
    }
}

impl From<Tensor> for Tensors {
    fn from(tensor: Tensor) -> Self {
        Tensors(vec![Some(tensor)])
    }
}

impl From<Option<Tensor>> for Tensors {
    fn from(tensor: Option<Tensor>) -> Self {
        Tensors(vec![tensor])
    }
}

impl From<Vec<Tensor>> for Tensors {
    fn from(tensors: Vec<Tensor>) -> Self {
        Tensors(tensors.into_iter().map(Some).collect())
    }
}

impl From<Vec<Option<Tensor>>> for Tensors {
    fn from(tensors: Vec<Option<Tensor>>) -> Self {
        Tensors(tensors)
    }
}

impl<const N: usize> From<[Tensor; N]> for Tensors {
    fn from(tensors: [Tensor; N]) -> Self {
        Tensors(tensors.into_iter().map(Some).collect())
    }
}

impl<const N: usize> From<[Option<Tensor>; N]> for Tensors {
    fn from(tensors: [Option<Tensor>; N]) -> Self {
        Tensors(tensors.into())
    }
}
