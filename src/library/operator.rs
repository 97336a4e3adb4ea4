//! A registered operator.

use super::kernels::missing;
use super::near::did_you_mean;
use super::schema::Schema;
use super::{Args, CallContext, FromOutputs, Output, WithBackward};
use crate::autograd::Tensors;
use crate::ffi::exceptions;
use crate::ffi::library::{self as ffi, CallFailure, Grad};
use crate::{Error, Result};
use std::sync::Arc;
use tch::Device;

/// An operator that is registered with libtorch's dispatcher. Find it once and call it often. It is
/// cheap to clone, and any thread may call it.
#[derive(Clone)]
pub struct Operator {
    pub(super) inner: Arc<Inner>,
    grad: Grad,
}

pub(super) struct Inner {
    pub handle: ffi::Operator,
    pub schema: Schema,
}

impl Operator {
    /// Finds the operator with this name, written as in libtorch: `aten::add.Tensor`,
    /// `torchvision::nms`. A name without an overload means the overload with the empty name or, if
    /// there is none, the only overload.
    ///
    /// # Errors
    /// When there is no such operator (the message suggests similar names), or when there are
    /// several overloads to choose from (the message lists them).
    pub fn find(name: &str) -> Result<Operator> {
        let (base, overload) = split(name);
        if let Some(handle) = ffi::Operator::find(base, overload)? {
            return Operator::new(name.to_string(), handle);
        }
        let all = super::all_operators()?;
        let overloads: Vec<&str> =
            all.iter().map(String::as_str).filter(|found| split(found).0 == base).collect();
        match overloads[..] {
            [] => {
                let hint = did_you_mean(name, &all).unwrap_or_else(|| {
                    "load the library that registers it, or look for it in library::operators"
                        .to_string()
                });
                Err(Error::msg(format!("there is no operator {name}; {hint}")))
            }
            [only] if overload.is_empty() => Operator::find(only),
            _ => Err(Error::msg(format!(
                "there is no operator {name}, but {}",
                overloads.join(", ")
            ))),
        }
    }

    fn new(name: String, handle: ffi::Operator) -> Result<Operator> {
        let schema = Schema::read(name, &handle)?;
        Ok(Operator { inner: Arc::new(Inner { handle, schema }), grad: Grad::Checked })
    }

    /// The name, as `ns::name` or `ns::name.overload`.
    pub fn name(&self) -> &str {
        &self.inner.schema.name
    }

    /// The schema: its arguments and results in libtorch's notation.
    pub fn schema(&self) -> &str {
        &self.inner.schema.text
    }

    /// Whether a call on tensors of this device is differentiable: the operator has an autograd
    /// kernel, or is composed of operators that have one. (A composite operator may still do
    /// something that has no gradient.)
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn has_autograd(&self, device: Device) -> Result<bool> {
        self.inner.handle.has_autograd(device)
    }

    /// Calls the operator. The type of the result states what the operator is expected to return: a
    /// `Tensor`, a tuple, a `Vec<Tensor>`, a number, … ([`FromOutputs`]). If the operator writes to
    /// an argument and returns it, the result is the same tensor. The version counter of such an
    /// argument is increased.
    ///
    /// ```
    /// use tch::Tensor;
    /// use tch_extension::{args, library::Operator};
    ///
    /// let topk = Operator::find("aten::topk")?;
    /// let (values, indices): (Tensor, Tensor) = topk.call(args![&Tensor::from_slice(&[1, 7, 5]), 2])?;
    /// assert_eq!((values, indices), (Tensor::from_slice(&[7, 5]), Tensor::from_slice(&[1_i64, 2])));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Gradients
    /// If an operator without an autograd kernel gets an input that requires grad, libtorch only
    /// warns, and the backward pass goes wrong. Here the call is an error, before anything has run,
    /// unless grad mode is off or you choose what to do: [`no_grad`](Operator::no_grad) or
    /// [`with_backward`](Operator::with_backward).
    ///
    /// An operator that is composed of others (`CompositeImplicitAutograd`, which includes every
    /// function without a dispatch key and every `m.def` of a Python extension) may launch a kernel
    /// that the graph does not know. That can be seen only after the call: an input required grad,
    /// but none of the floating-point tensors that the operator returned or declared to write to
    /// requires grad. The call is then an error, too, and its results are dropped; what was written
    /// stays written. Writes to arguments that the schema does not declare cannot be detected.
    /// Operators of `aten` are trusted.
    ///
    /// # Errors
    /// Wrong arguments, an error that the operator throws, or results of another type. The message
    /// shows the schema.
    pub fn call<T: FromOutputs>(&self, args: Args<'_>) -> Result<T> {
        let values = self.inner.schema.arrange(args)?;
        let outputs = self.run(&values, self.grad)?;
        T::from_outputs(outputs).map_err(|message| self.inner.schema.error(message))
    }

    /// The same operator, called with grad mode off: whatever its inputs are, its results are
    /// constants. A result that *is* an argument, or a view of one, keeps its place in the graph.
    #[must_use]
    pub fn no_grad(&self) -> Operator {
        Operator { inner: Arc::clone(&self.inner), grad: Grad::Off }
    }

    /// The same operator with your own backward pass, which replaces any that it has.
    ///
    /// `backward` is [`Function::backward`](crate::autograd::Function::backward). The inputs are
    /// all tensors among the arguments, in the order of the schema. Tensors in lists count one by
    /// one, and absent tensors are left out. The saved tensors are, from slot 0 on, these inputs
    /// and then all tensors among the results. Arguments that are not tensors are found by name
    /// with [`CallContext::argument`]. A second derivative is an error.
    ///
    /// An argument that the operator writes to must be among its results. It is saved with its new
    /// value.
    ///
    /// ```
    /// use tch::{Kind, Tensor};
    /// use tch_extension::{args, library::Operator};
    ///
    /// let sign_free = Operator::find("aten::abs")?.with_backward(|ctx, grads| {
    ///     // Straight through, say.
    ///     assert_eq!(ctx.saved(1)?, ctx.saved(0)?.abs());
    ///     Ok(grads.get(0)?.shallow_clone().into())
    /// });
    /// let x = Tensor::from_slice(&[-2.0, 3.0]).set_requires_grad(true);
    /// let y: Tensor = sign_free.call(args![&x])?;
    /// y.sum(Kind::Double).backward();
    /// assert_eq!(x.grad(), Tensor::from_slice(&[1.0, 1.0]));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// A backward pass that needs two arguments of the call, an int and a float:
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor};
    /// use tch_extension::library::Operator;
    /// use tch_extension::{args, testing};
    ///
    /// // index_add(Tensor self, int dim, Tensor index, Tensor source, *, Scalar alpha=1) -> Tensor
    /// let index_add = Operator::find("aten::index_add")?.with_backward(|ctx, grads| {
    ///     let (dim, alpha): (i64, f64) = (ctx.argument("dim")?, ctx.argument("alpha")?);
    ///     let (grad, index) = (grads.get(0)?, ctx.saved(1)?);
    ///     Ok([Some(grad.shallow_clone()), None, Some(grad.f_index_select(dim, &index)? * alpha)].into())
    /// });
    /// let leaf = |rows| Tensor::randn([rows, 2], (Kind::Double, Device::Cpu)).set_requires_grad(true);
    /// let (x, source, index) = (leaf(3), leaf(2), Tensor::from_slice(&[2_i64, 0]));
    /// let call = |inputs: &[Tensor]| {
    ///     index_add.call::<Tensor>(args![&inputs[0], 0, &index, &inputs[1], alpha = 0.5])
    /// };
    /// testing::gradcheck(call, &[&x, &source], &Default::default())?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn with_backward<F>(&self, backward: F) -> WithBackward
    where
        F: Fn(&CallContext<'_>, &Tensors) -> Result<Tensors> + Send + Sync + 'static,
    {
        WithBackward::new(self.no_grad(), Arc::new(backward))
    }

    pub(super) fn run(&self, values: &[ffi::Value<'_>], grad: Grad) -> Result<Vec<Output>> {
        let schema = &self.inner.schema;
        self.inner.handle.call(values, grad).map_err(|failure| match failure {
            CallFailure::Argument(index, got) => match schema.arguments.get(index) {
                Some(argument) => schema.wrong(argument, got),
                None => schema.error(got),
            },
            CallFailure::NoBackward => schema
                .error(format_args!("it has no autograd kernel, and an input requires grad; {WAYS_OUT}")),
            CallFailure::LostGraph => schema.error(format_args!(
                "an input requires grad, but the operator's results are not part of the graph; {WAYS_OUT}"
            )),
            CallFailure::Operator(message) => match missing(&message, &schema.name) {
                Some(better) => {
                    exceptions::known_as(&message, &better);
                    schema.error(better)
                }
                None => schema.error(message),
            },
            CallFailure::Output(error) => schema.error(error),
        })
    }
}

const WAYS_OUT: &str =
    "choose .no_grad() for constants, or .with_backward(f) for a gradient of your own";

impl std::fmt::Display for Operator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.schema())
    }
}

impl std::fmt::Debug for Operator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// The name and the overload of `ns::name.overload`.
pub(super) fn split(name: &str) -> (&str, &str) {
    let start = name.find("::").map_or(0, |place| place + 2);
    match name[start..].split_once('.') {
        Some((base, overload)) => (&name[..start + base.len()], overload),
        None => (name, ""),
    }
}
