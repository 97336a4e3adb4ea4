//! A registered operator.

use super::kernels::missing;
use super::near::did_you_mean;
use super::schema::Schema;
use super::{Args, CallContext, FromOutputs, Output, WithBackward};
use crate::autograd::Tensors;
use crate::ffi::library::{self as ffi, CallFailure, Grad};
use crate::{Error, Result};
use std::sync::Arc;
use tch::Device;

/// An operator that is registered with libtorch's dispatcher, found once and called often. Cheap to
/// clone, and fine to call from any thread.
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
    /// The operator of this name, as libtorch writes it: `aten::add.Tensor`, `torchvision::nms`.
    /// Without an overload, the one that has no overload's name, or else the only one.
    ///
    /// # Errors
    /// When there is none (the message names those that are spelled alike), or one of several
    /// overloads has to be chosen (the message lists them).
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

    /// `ns::name`, or `ns::name.overload`.
    pub fn name(&self) -> &str {
        &self.inner.schema.name
    }

    /// Its arguments and results, in libtorch's notation.
    pub fn schema(&self) -> &str {
        &self.inner.schema.text
    }

    /// Whether a call on tensors of this device is differentiable: the operator has an autograd
    /// kernel, or is made of operators that have (then it may still do something that has no
    /// gradient).
    ///
    /// # Errors
    /// When libtorch reports one.
    pub fn has_autograd(&self, device: Device) -> Result<bool> {
        self.inner.handle.has_autograd(device)
    }

    /// Calls the operator. The type of the result says what is expected to come back: a `Tensor`, a
    /// tuple, `Vec<Tensor>`, a number, … ([`FromOutputs`]). An argument that is written into is
    /// returned as the same tensor, if at all, and its version is counted up.
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
    /// libtorch warns when an operator without an autograd kernel gets an input that requires grad,
    /// and lets a backward go wrong. Here the call is an error, before anything has run, unless
    /// grad mode is off or you say what you want: [`no_grad`](Operator::no_grad) or
    /// [`with_backward`](Operator::with_backward).
    ///
    /// An operator that is made of others (`CompositeImplicitAutograd`, as every function without a
    /// dispatch key is, and every `m.def` of a Python extension) may launch a kernel that the graph
    /// knows nothing of. That shows only afterwards: an input required grad, and none of the
    /// floating tensors it returned or declared to write does. Then, too, the call is an error and
    /// the results are dropped; what was written stays written. Undeclared writes into arguments
    /// cannot be seen. Operators of `aten` are taken to be right.
    ///
    /// # Errors
    /// Wrong arguments, what the operator throws, results of another type. The message shows the
    /// schema.
    pub fn call<T: FromOutputs>(&self, args: Args<'_>) -> Result<T> {
        let values = self.inner.schema.arrange(args)?;
        let outputs = self.run(&values, self.grad)?;
        T::from_outputs(outputs).map_err(|message| self.inner.schema.error(message))
    }

    /// The same operator, called with grad mode off: whatever its inputs, what it computes is a
    /// constant. A result that *is* an argument, or a view of one, stays in the graph as it was.
    #[must_use]
    pub fn no_grad(&self) -> Operator {
        Operator { inner: Arc::clone(&self.inner), grad: Grad::Off }
    }

    /// The same operator with a backward of yours, which takes the place of any that it has.
    ///
    /// `backward` is [`Function::backward`](crate::autograd::Function::backward). The inputs are
    /// all tensors among the arguments, in the schema's order, those in lists one by one; absent
    /// ones are left out. Saved are, from slot 0 on, these inputs and then all tensors among the
    /// results. Arguments that are no tensors have their names: [`CallContext::argument`]. A second
    /// derivative is an error.
    ///
    /// An argument that the operator writes into must be among its results, and is saved as it is
    /// afterwards.
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
    /// A backward that needs two of the call's arguments, an int and a float:
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
                "an input requires grad, but the operator's results are no part of the graph; {WAYS_OUT}"
            )),
            CallFailure::Operator(message) => {
                schema.error(missing(&message, &schema.name).unwrap_or(message))
            }
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

/// Name and overload of `ns::name.overload`.
pub(super) fn split(name: &str) -> (&str, &str) {
    let start = name.find("::").map_or(0, |place| place + 2);
    match name[start..].split_once('.') {
        Some((base, overload)) => (&name[..start + base.len()], overload),
        None => (name, ""),
    }
}
