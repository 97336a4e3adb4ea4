//! One call of an operator and its backward pass, with copies of everything.

use super::ConformanceOptions;
use super::surroundings::Kept;
use crate::autograd::{GradOptions, Tensors, grad};
use crate::ffi::autograd::tch_extension_grad_mode as grad_mode;
use crate::ffi::testing::Canaries;
use crate::testing::close::close;
use crate::testing::compare::is_complex;
use crate::testing::replica::Replica;
use crate::testing::samples::noise;
use crate::testing::tolerance;
use crate::{Error, Result};
use std::sync::OnceLock;
use tch::{Kind, Tensor};

pub(super) type Operator<'a> = dyn Fn(&[Tensor]) -> Result<Tensors> + Sync + 'a;

/// The number of elements of memory on either side of each copy of an input.
const MARGIN: i64 = 64;

/// The results of an operator, detached.
#[derive(Debug)]
pub(super) struct Outcome {
    pub outputs: Vec<Option<Tensor>>,
    /// One entry for each input.
    pub gradients: Vec<Option<Tensor>>,
}

/// An operator that may be called from any thread.
#[derive(Clone, Copy)]
pub(super) struct Runner<'a> {
    pub operator: &'a Operator<'a>,
    pub options: &'a ConformanceOptions<'a>,
    /// Who wrote outside of the memory that was allocated. It is not called again.
    pub overrun: &'a OnceLock<String>,
}

/// An operator, with the inputs to test it with.
pub(super) struct Case<'a> {
    pub runner: Runner<'a>,
    pub inputs: &'a [&'a Tensor],
    /// The inputs that require grad.
    pub variables: Vec<usize>,
    /// Incoming gradients, one for each output; absent for an output that has no derivative.
    pub vectors: Vec<Option<Tensor>>,
    /// The results for the inputs as they are.
    pub expected: Outcome,
}

impl<'a> Case<'a> {
    pub fn new(
        operator: &'a Operator<'a>,
        inputs: &'a [&'a Tensor],
        options: &'a ConformanceOptions<'a>,
        overrun: &'a OnceLock<String>,
    ) -> Result<Self> {
        let runner = Runner { operator, options, overrun };
        let variables = (0..inputs.len()).filter(|&index| inputs[index].requires_grad()).collect();
        let mut case = Case {
            runner,
            inputs,
            variables,
            vectors: Vec::new(),
            expected: Outcome { outputs: Vec::new(), gradients: Vec::new() },
        };
        let outputs = runner.call(&tensors_of(&case.copies()?))?;
        case.vectors = outputs.iter().enumerate().map(vector).collect::<Result<_>>()?;
        case.expected = case.run(&tensors_of(&case.copies()?))?;
        Ok(case)
    }

    /// Copies of the inputs as leaves, surrounded by memory with meaningless values.
    pub fn copies(&self) -> Result<Vec<Replica>> {
        self.inputs.iter().map(|input| Replica::with_margin(input, MARGIN)).collect()
    }

    pub fn run(&self, leaves: &[Tensor]) -> Result<Outcome> {
        self.runner.run(leaves, &self.fresh_vectors())
    }

    /// The inputs that have gradients.
    pub fn connected(&self) -> Vec<usize> {
        let has_gradient = |index: &usize| self.expected.gradients[*index].is_some();
        self.variables.iter().copied().filter(has_gradient).collect()
    }

    /// Copies of the incoming gradients, in case the backward pass writes to them.
    pub fn fresh_vectors(&self) -> Vec<Option<Tensor>> {
        self.vectors.iter().map(|vector| vector.as_ref().map(Tensor::copy)).collect()
    }

    /// Repeats the default run.
    pub fn again(&self) -> Result<Outcome> {
        self.run(&tensors_of(&self.copies()?))
    }

    /// Checks that the results are the expected ones.
    pub fn agrees(&self, what: &str, found: &Outcome) -> Result<()> {
        self.runner.agree(what, found, &self.expected)
    }
}

/// A fixed incoming gradient for an output.
fn vector((index, output): (usize, &Option<Tensor>)) -> Result<Option<Tensor>> {
    let output = output.as_ref().filter(|output| output.defined() && output.requires_grad());
    let like = |output: &Tensor| -> Result<Tensor> {
        let (mut size, kind) = (output.size(), output.f_kind()?);
        if is_complex(kind) {
            size.push(2);
        }
        let values = noise(&size, 100 + index)?.f_add_scalar(0.1)?;
        let values = if is_complex(kind) { values.f_view_as_complex()? } else { values };
        Ok(values.f_to_kind(kind)?.f_to_device(output.device())?)
    };
    output.map(like).transpose()
}

impl Runner<'_> {
    /// Computes the outputs for these inputs.
    pub fn call(&self, leaves: &[Tensor]) -> Result<Tensors> {
        let _kept = Kept::of(leaves)?;
        self.call_as_it_is(leaves)
    }

    /// Like [`Runner::call`], but leaves grad mode and the like as the operator left them.
    pub fn call_as_it_is(&self, leaves: &[Tensor]) -> Result<Tensors> {
        let given = leaves.iter().enumerate().map(|(index, leaf)| {
            let changed =
                self.options.changed_inputs.contains(&index) && leaf.requires_grad() && grad_mode();
            if changed { no_leaf(leaf) } else { Ok(leaf.shallow_clone()) }
        });
        let given = given.collect::<Result<Vec<_>>>()?;
        let what = if grad_mode() { "the forward" } else { "the forward without a graph" };
        self.watched(what, || (self.operator)(&given))
    }

    /// Calls the operator or its backward pass, whose allocations have canaries, and looks at them.
    fn watched<T>(&self, what: &str, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let refuse = |text: &String| Err(Error::msg(text.clone()));
        if let Some(text) = self.overrun.get() {
            return refuse(text);
        }
        let result = call();
        match Canaries::overwritten() {
            0 => result,
            places => refuse(self.overrun.get_or_init(|| {
                format!(
                    "{what} wrote outside of the memory that was allocated, in {places} places; \
                     nothing more was checked"
                )
            })),
        }
    }

    /// Computes the outputs, and the gradients of the leaves that require grad.
    pub fn run(&self, leaves: &[Tensor], vectors: &[Option<Tensor>]) -> Result<Outcome> {
        let _kept = Kept::of(leaves)?;
        self.run_as_it_is(leaves, vectors)
    }

    /// Like [`Runner::run`], but leaves grad mode and the like as the backward pass left them.
    pub fn run_as_it_is(&self, leaves: &[Tensor], vectors: &[Option<Tensor>]) -> Result<Outcome> {
        // Find the variables before the call, because an operator that changes an input in place
        // makes it require grad.
        let variables: Vec<usize> =
            (0..leaves.len()).filter(|&index| leaves[index].requires_grad()).collect();
        let outputs = self.call(leaves)?;
        let gradients = self.gradients(leaves, &variables, &outputs, vectors)?;
        Ok(Outcome { outputs: detached(&outputs)?, gradients })
    }

    fn gradients(
        &self,
        leaves: &[Tensor],
        variables: &[usize],
        outputs: &Tensors,
        vectors: &[Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>> {
        let mut gradients: Vec<Option<Tensor>> = leaves.iter().map(|_| None).collect();
        let (mut of, mut with) = (Vec::new(), Vec::new());
        for (output, vector) in outputs.iter().zip(vectors) {
            if let (Some(output), Some(vector)) = (output, vector)
                && output.requires_grad()
            {
                of.push(output);
                with.push(Some(vector));
            }
        }
        if of.is_empty() || variables.is_empty() {
            return Ok(gradients);
        }
        let inputs: Vec<&Tensor> = variables.iter().map(|&index| &leaves[index]).collect();
        let options = GradOptions { grad_outputs: &with, allow_unused: true, ..Default::default() };
        let found = self.watched("the backward", || grad(&of, &inputs, &options))?;
        for (&index, gradient) in variables.iter().zip(found.into_vec()) {
            gradients[index] = gradient;
        }
        Ok(gradients)
    }

    /// Checks that two results are the same except for rounding.
    pub fn agree(&self, what: &str, found: &Outcome, expected: &Outcome) -> Result<()> {
        self.outputs_agree(what, &found.outputs, &expected.outputs)?;
        for (index, (found, expected)) in
            found.gradients.iter().zip(&expected.gradients).enumerate()
        {
            if let (Some(found), Some(expected)) =
                (or_zeros(found, expected)?, or_zeros(expected, found)?)
            {
                self.close(&format!("{what}, the gradient of input {index}"), &found, &expected)?;
            }
        }
        Ok(())
    }

    pub fn outputs_agree(
        &self,
        what: &str,
        found: &[Option<Tensor>],
        expected: &[Option<Tensor>],
    ) -> Result<()> {
        if found.len() != expected.len() {
            return Err(Error::msg(format!(
                "{what}: {} outputs, expected {}",
                found.len(),
                expected.len()
            )));
        }
        for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
            match (found, expected) {
                (Some(found), Some(expected)) => {
                    self.close(&format!("{what}, output {index}"), found, expected)?;
                }
                (None, None) => {}
                _ => {
                    return Err(Error::msg(format!(
                        "{what}, output {index} is there in one run only"
                    )));
                }
            }
        }
        Ok(())
    }

    pub fn close(&self, what: &str, found: &Tensor, expected: &Tensor) -> Result<()> {
        let (rtol, atol) = self.options.tolerance.unwrap_or(tolerance(found.f_kind()?));
        close(found, expected, rtol, atol).map_err(|error| Error::msg(format!("{what}: {error}")))
    }
}

/// A copy with the same values and layout that is not a leaf, because a leaf that requires grad
/// cannot be changed in place.
fn no_leaf(leaf: &Tensor) -> Result<Tensor> {
    let mut copy = Replica::with_margin(&leaf.f_detach()?, MARGIN)?.tensor;
    copy.f_copy_(leaf)?;
    Ok(copy)
}

/// An absent gradient means zeros. Returns zeros if there is another gradient to compare with.
fn or_zeros(gradient: &Option<Tensor>, other: &Option<Tensor>) -> Result<Option<Tensor>> {
    Ok(match gradient {
        Some(gradient) => Some(gradient.shallow_clone()),
        None => other.as_ref().map(Tensor::f_zeros_like).transpose()?,
    })
}

pub(super) fn tensors_of(copies: &[Replica]) -> Vec<Tensor> {
    copies.iter().map(|copy| copy.tensor.shallow_clone()).collect()
}

pub(super) fn detached(tensors: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> {
    let detach = |tensor: &Option<Tensor>| -> Result<Option<Tensor>> {
        Ok(tensor.as_ref().filter(|tensor| tensor.defined()).map(Tensor::f_detach).transpose()?)
    };
    tensors.iter().map(detach).collect()
}

/// Whether the elements are the same bit by bit: NaN equals NaN, and zero does not equal minus
/// zero.
pub(super) fn same_bits(a: &Tensor, b: &Tensor) -> Result<bool> {
    let bytes = |tensor: &Tensor| -> Result<Tensor> {
        let flat = crate::ffi::tensor::plain(&tensor.f_detach()?)?.f_reshape([-1])?;
        Ok(flat.f_view_dtype(Kind::Uint8)?)
    };
    Ok(a.size() == b.size() && a.f_kind()? == b.f_kind()? && bytes(a)?.f_equal(&bytes(b)?)?)
}
