//! Functions, and their calls.

use crate::autograd::{Inputs, Saver, Tensors, apply_with};
use crate::ffi::library::{Arguments, Value, is_same};
use crate::ffi::tvm_ffi::{self as ffi, CallFailure};
use crate::library::with_backward::{Backward, NamedArguments, tensors_of};
use crate::library::{Args, CallContext, FromOutputs, Output};
use crate::overlap::{overlaps, share_memory};
use crate::{Error, Result};
use std::sync::Arc;
use tch::Tensor;

/// A function of a [`Module`](super::Module). It is cheap to clone, and any thread may call it.
#[derive(Clone)]
pub struct Function {
    inner: Arc<Inner>,
    without_grad: bool,
}

struct Inner {
    name: String,
    handle: ffi::Function,
}

impl Inner {
    fn error(&self, message: impl std::fmt::Display) -> Error {
        // An error of a function may have several lines.
        Error::msg(format!("{}: {message}", self.name).replace('\n', " "))
    }
}

impl Function {
    pub(super) fn new(name: String, handle: ffi::Function) -> Function {
        Function { inner: Arc::new(Inner { name, handle }), without_grad: false }
    }

    /// The function's name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Calls the function. Arguments are tensors, numbers, strings, a [`Device`](tch::Device), a
    /// [`Kind`](tch::Kind), lists of these, and `None`. [`out`](super::out) marks tensors that the
    /// function writes to. The type of the result states what it is expected to return: `()`, a
    /// `Tensor`, a number, a `String`, a tuple, a `Vec`, or an `Option` of one of them.
    ///
    /// ```no_run
    /// use tch::Tensor;
    /// use tch_extension::{args, tvm_ffi::Module};
    ///
    /// let add_one = Module::load("libadd_one.so")?.function("add_one_alloc")?;
    /// let y: Tensor = add_one.call(args![&Tensor::from_slice(&[1.0_f32, 2.0])])?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Gradients
    /// A function of TVM FFI has no gradient. If a tensor requires grad, the call is an error, before
    /// anything has run, unless grad mode is off, as in the forward pass of an operator or an
    /// [`autograd::Function`](crate::autograd::Function), or you choose what to do:
    /// [`no_grad`](Function::no_grad) or [`with_backward`](Function::with_backward).
    ///
    /// # Errors
    /// Wrong arguments, an error that the function reports, or a result of another type. The message
    /// begins with the function's name. What the function wrote before it failed stays written.
    pub fn call<T: FromOutputs>(&self, args: Args<'_>) -> Result<T> {
        let outputs = self.run(&self.values(args)?)?;
        self.convert(outputs)
    }

    /// The same function, for which all tensors are constants. A result that *is* an argument keeps its
    /// place in the graph.
    #[must_use]
    pub fn no_grad(&self) -> Function {
        Function { inner: Arc::clone(&self.inner), without_grad: true }
    }

    /// The same function with your own backward pass.
    ///
    /// `backward` is [`Function::backward`](crate::autograd::Function::backward). The inputs are all
    /// tensors among the arguments in order, with those that are marked with [`out`](super::out).
    /// Tensors in lists count one by one. The outputs are all tensors that the function returns, and
    /// then the marked ones. The saved tensors are, from slot 0 on, the inputs and then the outputs. A
    /// second derivative is an error. Arguments that are no tensors have no names, so the closure keeps
    /// those that it needs.
    ///
    /// A marked tensor becomes part of the graph, as one that is changed in place does. Make it anew for
    /// each step, or `detach_` it: otherwise the next backward pass goes through the last step's graph.
    ///
    /// ```no_run
    /// use tch::{Kind, Tensor};
    /// use tch_extension::args;
    /// use tch_extension::tvm_ffi::{Module, out};
    ///
    /// let add_one = Module::load("libadd_one.so")?.function("add_one")?;
    /// let add_one = add_one.with_backward(|_, grads| Ok([Some(grads.get(0)?.shallow_clone()), None].into()));
    /// let x = Tensor::from_slice(&[1.0_f32, 2.0]).set_requires_grad(true);
    /// let mut y = x.empty_like();
    /// add_one.call::<()>(args![&x, out(&mut y)])?;
    /// y.sum(Kind::Float).backward();
    /// assert_eq!(x.grad(), Tensor::from_slice(&[1.0_f32, 1.0]));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn with_backward<F>(&self, backward: F) -> WithBackward
    where
        F: Fn(&CallContext<'_>, &Tensors) -> Result<Tensors> + Send + Sync + 'static,
    {
        WithBackward { function: self.no_grad(), backward: Arc::new(backward) }
    }

    #[inline]
    fn values<'a>(&self, args: Args<'a>) -> Result<Vec<Value<'a>>> {
        match args.named.first() {
            None => Ok(args.positional),
            Some((name, _)) => Err(self.inner.error(format_args!(
                "{name}: expected an argument by position, got one by name; arguments of TVM FFI have no names"
            ))),
        }
    }

    #[inline]
    fn run(&self, values: &[Value<'_>]) -> Result<Vec<Output>> {
        match self.inner.handle.call(values, self.without_grad, false) {
            Ok(outputs) => Ok(outputs),
            Err(failure) => self.run_again(values, *failure),
        }
    }

    /// Says what is wrong, unless it only seemed so.
    #[cold]
    fn run_again(&self, values: &[Value<'_>], failure: CallFailure) -> Result<Vec<Output>> {
        if !matches!(failure, CallFailure::MayOverlap) {
            return Err(self.error(failure));
        }
        self.check_overlap(values)?;
        let outcome = self.inner.handle.call(values, self.without_grad, true);
        outcome.map_err(|failure| self.error(*failure))
    }

    fn error(&self, failure: CallFailure) -> Error {
        let inner = &self.inner;
        match failure {
            CallFailure::Function(message) => inner.error(message),
            CallFailure::Argument(index, got) => inner.error(format_args!(
                "argument {index}: expected a value that TVM FFI can pass, got {got}"
            )),
            CallFailure::RequiresGrad => inner.error(
                "it has no gradient, and a tensor requires grad; choose .no_grad() for constants, or \
                 .with_backward(f) for a gradient of your own",
            ),
            CallFailure::MayOverlap => inner.error("internal error: overlap is checked twice"),
            CallFailure::Output(error) => inner.error(error),
        }
    }

    /// Refuses memory that is written and is memory of another argument, or has elements that share
    /// memory. C++ only finds out that this may be so.
    fn check_overlap(&self, values: &[Value<'_>]) -> Result<()> {
        let given = given(values);
        for (index, written) in given.iter().enumerate().filter(|(_, given)| given.is_written) {
            let Given { tensor, argument, .. } = written;
            if overlaps(&tensor.size(), &tensor.stride()) {
                return Err(self.inner.error(format_args!(
                    "argument {argument}: expected elements that do not share memory to write to, got strides {:?} for sizes \
                     {:?}; copy it",
                    tensor.stride(),
                    tensor.size()
                )));
            }
            for (_, other) in given.iter().enumerate().filter(|(other, _)| *other != index) {
                let shared = share_memory(tensor, &other.tensor);
                if shared.map_err(|error| self.inner.error(error))? {
                    return Err(self.inner.error(format_args!(
                        "argument {argument}: expected memory of its own to write to, got memory of argument {}; copy one \
                         of them",
                        other.argument
                    )));
                }
            }
        }
        Ok(())
    }

    #[inline]
    fn convert<T: FromOutputs>(&self, outputs: Vec<Output>) -> Result<T> {
        let is_none = outputs.is_empty();
        let converted = match T::from_outputs(outputs) {
            // No result is `None`, too.
            Err(_) if is_none => T::from_outputs(vec![Output::None]),
            converted => converted,
        };
        converted.map_err(|message| self.inner.error(message))
    }
}

/// A tensor among the arguments.
struct Given {
    tensor: Tensor,
    /// The place of the argument that it is, or in whose list it is.
    argument: usize,
    is_written: bool,
}

/// All tensors of the values, those in lists one by one.
fn given(values: &[Value<'_>]) -> Vec<Given> {
    let mut all = Vec::new();
    for (argument, value) in values.iter().enumerate() {
        let (mut tensors, mut are_written) = (Vec::new(), Vec::new());
        value.tensors(&mut tensors);
        value.are_written(&mut are_written);
        let tensors = tensors.into_iter().zip(are_written);
        all.extend(tensors.map(|(tensor, is_written)| Given { tensor, argument, is_written }));
    }
    all
}

impl std::fmt::Debug for Function {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Function").field("name", &self.name()).finish()
    }
}

/// The arguments of these functions have no names.
struct NoNames;

impl NamedArguments for NoNames {
    fn find(&self, _: &str) -> Option<(usize, String)> {
        None
    }

    fn kept(&self) -> Option<&Arguments> {
        None
    }
}

/// A function with a backward pass that its user wrote; see [`Function::with_backward`].
#[derive(Clone)]
pub struct WithBackward {
    function: Function,
    backward: Arc<Backward>,
}

impl WithBackward {
    /// Calls the function like [`Function::call`], and makes the call part of the graph. Tensors that
    /// are marked with [`out`](super::out) become part of it, too.
    ///
    /// # Errors
    /// As for [`Function::call`]. Also, before anything has run, when libtorch's graph does not allow a
    /// marked tensor to be changed in place, as [`Saver::in_place`] describes: a leaf that requires
    /// grad, or a view that is not the first tensor. And when nothing is returned or marked.
    pub fn call<T: FromOutputs>(&self, args: Args<'_>) -> Result<T> {
        let function = &self.function;
        let values = function.values(args)?;
        let inputs = given(&values);
        let mut outputs = Vec::new();
        let forward = |saver: &mut Saver<'_>, _: Inputs<'_>| {
            let written = || inputs.iter().enumerate().filter(|(_, given)| given.is_written);
            for (index, given) in written() {
                let what = format_args!("argument {}", given.argument);
                saver.check_in_place(index, what).map_err(|error| {
                    function.inner.error(format_args!("{error}; write to a new tensor and copy it"))
                })?;
            }
            outputs = function.run(&values)?;
            let mut results = Vec::new();
            let mut note = |tensor: &mut Tensor| results.push(tensor.shallow_clone());
            outputs.iter_mut().for_each(|output| tensors_of(output, &mut note));
            for (index, Given { tensor, .. }) in written() {
                saver.mark_dirty(index);
                if !results.iter().any(|result| is_same(result, tensor)) {
                    results.push(tensor.shallow_clone());
                }
            }
            if results.is_empty() {
                return Err(function.inner.error(
                    "it has a backward pass and no output; mark the tensors that it writes to with out(&mut tensor)",
                ));
            }
            let inputs = inputs.iter().map(|given| &given.tensor);
            inputs.chain(&results).for_each(|tensor| saver.save(tensor));
            Ok(results.into())
        };
        let (inner, backward) = (Arc::clone(&function.inner), Arc::clone(&self.backward));
        let tensors: Vec<_> = inputs.iter().map(|given| Some(&given.tensor)).collect();
        let results = apply_with("tvm_ffi_function", &tensors, forward, move |ctx, grads| {
            backward(&CallContext::new(ctx, &NoNames), grads).map_err(|error| inner.error(error))
        })?;
        let mut in_graph = results.into_vec().into_iter().flatten();
        let mut replace = |tensor: &mut Tensor| {
            if let Some(wrapped) = in_graph.next() {
                *tensor = wrapped;
            }
        };
        outputs.iter_mut().for_each(|output| tensors_of(output, &mut replace));
        function.convert(outputs)
    }
}

impl std::fmt::Debug for WithBackward {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.function.fmt(f)
    }
}
