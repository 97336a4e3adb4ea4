//! An operator with a backward pass that its user wrote.

use super::operator::{Inner, Operator};
use super::{Args, FromOutput, FromOutputs, Output};
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply};
use crate::ffi::autograd::tch_extension_grad_mode;
use crate::ffi::library::{self as ffi, Grad};
use crate::{Error, Result};
use std::any::type_name;
use std::ops::Deref;
use std::sync::{Arc, Mutex};
use tch::Tensor;

/// What the backward pass of [`Operator::with_backward`](super::Operator::with_backward), and of an
/// operator of [`operators!`](crate::operators), can ask: everything that a [`Context`] knows, and
/// the call's arguments that are not tensors.
pub struct CallContext<'a> {
    context: &'a Context<'a>,
    call: &'a dyn NamedArguments,
}

/// The arguments of a call that are kept for its backward pass.
pub(super) trait NamedArguments {
    /// The index of the argument with this name, and its type.
    fn find(&self, name: &str) -> Option<(usize, String)>;
    /// The arguments that are no tensors; `None` if there is no graph.
    fn kept(&self) -> Option<&ffi::Arguments>;
}

impl<'a> CallContext<'a> {
    pub(super) fn new(context: &'a Context<'a>, call: &'a dyn NamedArguments) -> Self {
        CallContext { context, call }
    }

    /// The argument of the call that has this name in the schema. It can be of any type that a
    /// result can have: `i64`, `f64`, `bool`, `String`, `Vec<i64>`, `Option<f64>`, `Kind`, …. It is
    /// the value that the operator got: if the argument was left out, it is the schema's default;
    /// an int that was given for a `float` is a float; a `Scalar` can be read as either. A `SymInt`
    /// that is not known while a program is traced is a [`SymInt`](super::SymInt) only. Tensors are
    /// saved instead: [`Context::saved`].
    ///
    /// # Errors
    /// When there is no such argument, or it is of another type.
    pub fn argument<T: FromOutput>(&self, name: &str) -> Result<T> {
        let Some((index, kind)) = self.call.find(name) else {
            return Err(Error::Autograd(format!("it has no argument `{name}`")));
        };
        let Some(value) = self.call.kept().map(|all| all.get(index)).transpose()?.flatten() else {
            return Err(Error::Autograd(format!(
                "its argument `{name}` is of type {kind}, and a backward gets no such argument by name; the tensors \
                 of a call are saved"
            )));
        };
        let converted = T::from_output(value).or_else(|value| match value {
            Output::Int(int) if kind.starts_with("Scalar") => {
                T::from_output(Output::Float(int as f64))
            }
            other => Err(other),
        });
        converted.map_err(|value| {
            let wanted = type_name::<T>();
            Error::Autograd(format!(
                "its argument `{name}` is {value:?}, and {wanted} was asked for"
            ))
        })
    }
}

impl<'a> Deref for CallContext<'a> {
    type Target = Context<'a>;

    fn deref(&self) -> &Context<'a> {
        self.context
    }
}

pub(super) type Backward = dyn Fn(&CallContext<'_>, &Tensors) -> Result<Tensors> + Send + Sync;

/// An operator with a backward pass that its user wrote; see [`Operator::with_backward`].
#[derive(Clone)]
pub struct WithBackward {
    operator: Operator,
    backward: Arc<Backward>,
}

impl WithBackward {
    /// `operator` must run with grad mode off.
    pub(super) fn new(operator: Operator, backward: Arc<Backward>) -> Self {
        WithBackward { operator, backward }
    }

    /// Calls the operator like [`Operator::call`], and makes the call part of the graph.
    ///
    /// # Errors
    /// As for [`Operator::call`]. Also when the operator writes to an argument that it does not
    /// return, or to a leaf that requires grad.
    pub fn call<T: FromOutputs>(&self, args: Args<'_>) -> Result<T> {
        let schema = &self.operator.inner.schema;
        let values = schema.arrange(args)?;
        let (mut inputs, mut written) = (Vec::new(), Vec::new());
        for (value, argument) in values.iter().zip(&schema.arguments) {
            let first = inputs.len();
            value.tensors(&mut inputs);
            written.extend((first..inputs.len()).filter(|_| argument.is_written));
        }
        self.check_leaves(&inputs, &written)?;
        let mut outputs = self.operator.run(&values, Grad::Off)?;
        let mut results = Vec::new();
        outputs.iter_mut().for_each(|output| {
            tensors_of(output, &mut |tensor| results.push(tensor.shallow_clone()))
        });
        let returned =
            |index: &usize| results.iter().any(|result| ffi::is_same(result, &inputs[*index]));
        if !written.iter().all(returned) {
            return Err(schema.error(
                "it writes into an argument that it does not return, so with_backward cannot make it part of the graph",
            ));
        }
        let given: Vec<Option<&Tensor>> = inputs.iter().map(Some).collect();
        // Without a graph, nobody would read the arguments.
        let needs_graph = tch_extension_grad_mode() && inputs.iter().any(Tensor::requires_grad);
        let arguments = needs_graph.then(|| self.operator.inner.handle.keep_arguments(&values));
        let arguments = arguments.transpose()?;
        let node = Node {
            operator: Arc::clone(&self.operator.inner),
            arguments,
            results: Mutex::new(results),
            written,
            backward: Arc::clone(&self.backward),
        };
        let mut in_graph = apply(node, &given)?.into_vec().into_iter();
        for output in &mut outputs {
            tensors_of(output, &mut |tensor| {
                if let Some(wrapped) = in_graph.next().flatten() {
                    *tensor = wrapped;
                }
            });
        }
        T::from_outputs(outputs).map_err(|message| schema.error(message))
    }

    /// libtorch refuses this, too, but only after the values are overwritten.
    fn check_leaves(&self, inputs: &[Tensor], written: &[usize]) -> Result<()> {
        let is_leaf = |&&index: &&usize| inputs[index].requires_grad() && inputs[index].is_leaf();
        if !tch_extension_grad_mode() || !written.iter().any(|index| is_leaf(&index)) {
            return Ok(());
        }
        Err(self
            .operator
            .inner
            .schema
            .error("a leaf Variable that requires grad cannot be written into"))
    }
}

impl std::fmt::Debug for WithBackward {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.operator.fmt(f)
    }
}

/// Visits the tensors of an output in order.
pub(super) fn tensors_of(output: &mut Output, visit: &mut dyn FnMut(&mut Tensor)) {
    match output {
        Output::Tensor(tensor) => visit(tensor),
        Output::List(items) => items.iter_mut().for_each(|item| tensors_of(item, visit)),
        _ => {}
    }
}

/// A call that has run and is about to become part of the graph.
struct Node {
    operator: Arc<Inner>,
    /// `None` when there is no graph.
    arguments: Option<ffi::Arguments>,
    /// The forward pass takes them.
    results: Mutex<Vec<Tensor>>,
    written: Vec<usize>,
    backward: Arc<Backward>,
}

impl NamedArguments for Node {
    fn find(&self, name: &str) -> Option<(usize, String)> {
        let arguments = &self.operator.schema.arguments;
        let index = arguments.iter().position(|argument| argument.name == name)?;
        Some((index, arguments[index].kind.clone()))
    }

    fn kept(&self) -> Option<&ffi::Arguments> {
        self.arguments.as_ref()
    }
}

impl Function for Node {
    const NAME: &'static str = "library_operator";

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let results = self.results.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        let results = std::mem::take(results);
        inputs.iter().for_each(|&input| saver.save_optional(input));
        results.iter().for_each(|result| saver.save(result));
        self.written.iter().for_each(|&index| saver.mark_dirty(index));
        Ok(results.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        (self.backward)(&CallContext::new(ctx, self), grads)
            .map_err(|error| Error::Autograd(format!("{}: {error}", self.operator.schema.name)))
    }
}
