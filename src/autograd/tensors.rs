//! Lists of tensors in which some may be absent.

use crate::ffi::autograd::tch_extension_defined;
use crate::{Error, Result};
use std::ops::Deref;
use tch::Tensor;

/// The inputs of a forward pass, borrowed. Some may be absent.
#[derive(Clone, Copy)]
pub struct Inputs<'a>(&'a [Option<&'a Tensor>]);

impl<'a> Inputs<'a> {
    /// Wraps a slice of inputs.
    #[inline]
    pub fn new(inputs: &'a [Option<&'a Tensor>]) -> Self {
        Inputs(inputs)
    }

    /// Input `index`.
    ///
    /// # Errors
    /// When it is absent, or the list is shorter.
    #[inline]
    pub fn get(&self, index: usize) -> Result<&'a Tensor> {
        self.optional(index).ok_or_else(|| absent("input", index, self.0.len()))
    }

    /// Input `index`, if it is present.
    #[inline]
    pub fn optional(&self, index: usize) -> Option<&'a Tensor> {
        self.0.get(index).copied().flatten()
    }
}

impl<'a> Deref for Inputs<'a> {
    type Target = [Option<&'a Tensor>];
    #[inline]
    fn deref(&self) -> &Self::Target {
        self.0
    }
}

/// A list of owned tensors, some of which may be absent. It holds the outputs of a forward pass, or
/// the incoming or outgoing gradients of a backward pass.
///
/// `into()` makes it from a tensor, an `Option` of a tensor, or an array or vector of either.
#[derive(Debug, Default)]
pub struct Tensors(List);

/// Most operators have a list of one tensor, which `One` holds without an allocation.
#[derive(Debug)]
enum List {
    One([Option<Tensor>; 1]),
    Any(Vec<Option<Tensor>>),
}

impl Default for List {
    fn default() -> Self {
        List::Any(Vec::new())
    }
}

impl List {
    #[inline]
    fn as_slice(&self) -> &[Option<Tensor>] {
        match self {
            List::One(one) => one,
            List::Any(any) => any,
        }
    }

    fn as_mut_slice(&mut self) -> &mut [Option<Tensor>] {
        match self {
            List::One(one) => one,
            List::Any(any) => any,
        }
    }
}

impl Tensors {
    /// The tensor at `index`.
    ///
    /// # Errors
    /// When it is absent, or the list is shorter.
    pub fn get(&self, index: usize) -> Result<&Tensor> {
        self.optional(index).ok_or_else(|| absent("tensor", index, self.len()))
    }

    /// The tensor at `index`, if it is present.
    pub fn optional(&self, index: usize) -> Option<&Tensor> {
        self.0.as_slice().get(index).and_then(Option::as_ref)
    }

    /// Takes the tensor at `index` out of the list.
    pub(crate) fn take(&mut self, index: usize) -> Option<Tensor> {
        self.0.as_mut_slice().get_mut(index)?.take()
    }

    /// The only tensor of a list of one.
    ///
    /// # Errors
    /// When the list does not have exactly one entry, or the entry is absent.
    #[inline]
    pub fn single(self) -> Result<Tensor> {
        match self.0 {
            List::One([Some(tensor)]) => Ok(tensor),
            other => Tensors(other).exactly().map(|[tensor]| tensor),
        }
    }

    /// The tensors of a list of `N` tensors, all of which are present.
    ///
    /// # Errors
    /// When the list does not have exactly `N` entries, or one is absent.
    pub fn exactly<const N: usize>(self) -> Result<[Tensor; N]> {
        let (len, present) = (self.len(), self.iter().flatten().count());
        match <[Option<Tensor>; N]>::try_from(self.into_vec()) {
            Ok(tensors) if present == N => {
                Ok(tensors.map(|tensor| tensor.expect("all are present")))
            }
            _ => Err(Error::Autograd(format!(
                "expected {N} tensors, got {len}, of which {present} are present"
            ))),
        }
    }

    /// Calls `body` with the index and the tensor of each entry that is present.
    pub(super) fn for_each(self, mut body: impl FnMut(usize, Tensor)) {
        let mut body = |(place, tensor): (usize, Option<Tensor>)| {
            if let Some(tensor) = tensor {
                body(place, tensor);
            }
        };
        match self.0 {
            List::One(one) => one.into_iter().enumerate().for_each(&mut body),
            List::Any(any) => any.into_iter().enumerate().for_each(&mut body),
        }
    }

    /// Makes undefined tensors absent.
    pub(super) fn without_undefined(mut self) -> Self {
        for tensor in self.0.as_mut_slice() {
            if tensor.as_ref().is_some_and(|tensor| !is_defined(tensor)) {
                *tensor = None;
            }
        }
        self
    }

    /// The list as a vector.
    pub fn into_vec(self) -> Vec<Option<Tensor>> {
        match self.0 {
            List::One(one) => one.into(),
            List::Any(any) => any,
        }
    }
}

/// Whether libtorch considers the tensor defined. tch's own `defined` costs more, because it also
/// checks for an error.
fn is_defined(tensor: &Tensor) -> bool {
    // SAFETY: the pointer is borrowed from a live tensor.
    unsafe { tch_extension_defined(tensor.as_ptr()) }
}

fn absent(what: &str, index: usize, len: usize) -> Error {
    let reason =
        if index < len { "it is absent".to_string() } else { format!("there are only {len}") };
    Error::Autograd(format!("{what} {index} was asked for, but {reason}"))
}

impl Deref for Tensors {
    type Target = [Option<Tensor>];
    #[inline]
    fn deref(&self) -> &Self::Target {
        self.0.as_slice()
    }
}

impl From<()> for Tensors {
    fn from((): ()) -> Self {
        Tensors::default()
    }
}

impl From<Tensor> for Tensors {
    #[inline]
    fn from(tensor: Tensor) -> Self {
        Some(tensor).into()
    }
}

impl From<Option<Tensor>> for Tensors {
    #[inline]
    fn from(tensor: Option<Tensor>) -> Self {
        Tensors(List::One([tensor]))
    }
}

impl From<Vec<Tensor>> for Tensors {
    fn from(tensors: Vec<Tensor>) -> Self {
        tensors.into_iter().map(Some).collect::<Vec<_>>().into()
    }
}

impl From<Vec<Option<Tensor>>> for Tensors {
    fn from(tensors: Vec<Option<Tensor>>) -> Self {
        Tensors(List::Any(tensors))
    }
}

impl<const N: usize> From<[Tensor; N]> for Tensors {
    fn from(tensors: [Tensor; N]) -> Self {
        tensors.map(Some).into()
    }
}

impl<const N: usize> From<[Option<Tensor>; N]> for Tensors {
    fn from(tensors: [Option<Tensor>; N]) -> Self {
        Tensors(List::Any(tensors.into()))
    }
}
