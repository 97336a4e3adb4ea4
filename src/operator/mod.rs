//! One definition of an operator, from which everything else follows: the node of the graph, casts
//! under autocast, and what torch.compile, torch.func and vmap need.
//!
//! [`signature!`](crate::signature!) writes what an operator takes and returns, once, with names in
//! place of positions. [`Operator`] is what it does: a rule for kinds and sizes, a forward pass, a
//! backward pass, and the same formula in operations of tch. [`call`] runs it, as part of the graph,
//! and [`register!`](crate::register!) registers it with libtorch's dispatcher.
//!
//! ```
//! use tch::{Kind, Tensor};
//! use tch_extension::Result;
//! use tch_extension::operator::*;
//!
//! tch_extension::signature! {
//!     pub Softcap: SoftcapIn -> SoftcapOut = "softcap"(x, cap: f64) -> (y)
//! }
//!
//! impl Operator for Softcap {
//!     type Kept = ();
//!     type Plan = ();
//!
//!     fn rule<D: Dim>(&self, of: &Metas<Self, D>, _: &Needs<Self>) -> Result<Made<Self, Meta<D>>> {
//!         let x = of.x.kind_in(&[Kind::Float, Kind::Double])?;
//!         Ok(Made::only(SoftcapOut { y: x.sized(x.sizes()) }))
//!     }
//!
//!     // A kernel would write to the tensors that `call.allocate()` makes.
//!     fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
//!         call.check()?;
//!         Ok(Made::only(SoftcapOut { y: (call.of.x / self.cap).tanh() * self.cap }))
//!     }
//!
//!     fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
//!         let slope = again.of.x.zip(grads.y).map(|(x, grad)| (1.0 - (x / self.cap).tanh().square()) * grad);
//!         Ok(SoftcapIn { x: slope })
//!     }
//!
//!     fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
//!         Ok(SoftcapOut { y: (of.x / self.cap).tanh() * self.cap })
//!     }
//! }
//!
//! // In Python: torch.ops.operator_example.softcap(x, 30.0)
//! tch_extension::register! { namespace operator_example; Softcap }
//!
//! # fn main() -> Result<()> {
//! let x = Tensor::from_slice(&[1.0, 40.0]).set_requires_grad(true);
//! let y = call(Softcap { cap: 30.0 }, &SoftcapIn { x: &x })?.y;
//! y.sum(Kind::Double).backward();
//! assert!(x.grad().double_value(&[1]) < 0.3);
//! # Ok(())
//! # }
//! ```

mod meta;
mod node;
mod register;
mod signature;
mod slots;
#[doc(hidden)]
mod traced;

pub use meta::{Dim, Meta};
pub use register::dispatched;
pub(crate) use signature::text_option;
pub use signature::{OptionType, Signature};
pub use slots::{Borrowed, Described, Each, Leaf, Names, Own, Slots, bits};
#[doc(no_inline)]
pub use tch::Tensor;

use crate::amp::{CastPolicy, autocast_inputs};
use crate::autograd::apply;
use crate::check::Check;
use crate::ffi::autograd::tch_extension_grad_mode;
use crate::ffi::facts::{Facts, facts_into};
use crate::{Error, Result};
use node::Node;
use std::sync::atomic::{AtomicBool, Ordering};
use tch::Device;

/// What [`signature!`](crate::signature!) and [`register!`](crate::register!) expand to. It is no
/// stable API.
#[doc(hidden)]
pub mod expansion {
    pub use super::register::definitions;
    pub use super::signature::{
        Inputs, Place, Registered, is_keyword, one_of, read_tensor, tensor_argument,
        with_defaults_last,
    };
}

/// The tensors that an operator takes.
pub type Args<'a, O> = <<O as Signature>::In as Slots>::Of<Borrowed<'a>>;
/// Kinds and sizes of the tensors that an operator takes.
pub type Metas<O, D> = <<O as Signature>::In as Slots>::Of<Described<Meta<D>>>;
/// Which of an operator's tensors need a gradient.
pub type Needs<O> = <<O as Signature>::In as Slots>::Of<Each<bool>>;
/// The gradients of an operator's tensors. Those that are not needed may be absent.
pub type Gradients<O> = <<O as Signature>::In as Slots>::Of<Each<Option<Tensor>>>;
/// The incoming gradients, one for each output. They are absent where nothing depends on the output.
pub type Incoming<O> = <<O as Signature>::Out as Slots>::Of<Each<Option<Tensor>>>;
/// The tensors that an operator returns.
pub type Outputs<O> = <<O as Signature>::Out as Slots>::Of<Own>;

/// What an operator does.
///
/// A value is what the operator takes besides tensors. It becomes a part of the graph, and several
/// threads may read it.
pub trait Operator: Signature {
    /// What the forward pass keeps for the backward pass, besides arguments and outputs: `()`, or a
    /// list of [`slots!`](crate::slots!).
    type Kept: Slots;
    /// What the forward pass decides and the backward pass must know, such as which of several
    /// kernels runs. `()` if there is nothing.
    type Plan: Copy + Default + Send + Sync + 'static;

    /// The kind to which autocast casts the arguments on the CPU, and on CUDA. In forward and backward
    /// pass, autocast is off.
    const AUTOCAST: [Option<CastPolicy>; 2] = [None; 2];
    /// Where second derivatives come from.
    const SECOND: Second = Second::Reference;
    /// The outputs that the backward pass reads: one bit for each, the first one lowest.
    const READS_OUTPUTS: u64 = 0;
    /// Outputs that the registered operator lays out like an argument of the same sizes, as an elementwise
    /// operation of libtorch does, each with that argument. The argument's gradient is laid out like the
    /// output's. By default all are contiguous.
    const LAID_OUT_LIKE: &'static [(usize, usize)] = &[];
    /// What an argument without a gradient is expected to be, if it is an error that it requires grad, such
    /// as "weights without gradient". By default it becomes a constant.
    const MUST_BE_CONSTANT: Option<&'static str> = None;
    /// Whether it draws random numbers. The registered operator then has libtorch's tag for them.
    const IS_SEEDED: bool = false;

    /// The outputs as a composition of other operators, for arguments that the kernels do not take;
    /// `None` if they do. In Rust it sees the arguments before autocast, in Python after it. While a
    /// program is traced or transformed, the composition calls the operator itself by [`dispatched`].
    ///
    /// # Errors
    /// When the arguments do not fit, or an error of libtorch.
    fn composed(&self, _of: &Args<'_, Self>, _is_traced: bool) -> Result<Option<Outputs<Self>>> {
        Ok(None)
    }

    /// Casts arguments where it does not suffice to cast each to one kind: `None` if there is nothing
    /// to cast. By default it does what [`AUTOCAST`](Operator::AUTOCAST) says.
    ///
    /// # Errors
    /// An error of libtorch.
    fn cast(&self, of: &Args<'_, Self>) -> Result<Option<Vec<Option<Tensor>>>> {
        autocast::<Self>(Self::In::tensors(of).as_ref())
    }

    /// Decides how a call is computed. While a program is traced, the backward pass decides anew, for
    /// the gradients that it computes, so what is kept must not depend on it.
    ///
    /// # Errors
    /// When it cannot be computed.
    fn plan(&self, _of: &Args<'_, Self>, _needs: &Needs<Self>) -> Result<Self::Plan> {
        Ok(Self::Plan::default())
    }

    /// Checks kinds and sizes of the arguments, and says those of the outputs and of what is kept for
    /// the gradients that are needed. It runs before a kernel ([`Call::check`],
    /// [`Call::allocate`]), and in place of the operator while a program is traced. Sizes may be
    /// symbols then. Where it compares two with `==`, what is traced holds for the same answer only; the
    /// checks of [`Meta`] compare numbers alone.
    ///
    /// # Errors
    /// When an argument has another kind, device or size than the operator takes.
    fn rule<D: Dim>(&self, of: &Metas<Self, D>, needs: &Needs<Self>)
    -> Result<Made<Self, Meta<D>>>;

    /// Which arguments the backward pass reads, if these gradients are needed. By default all. The others
    /// are absent in it.
    fn reads(&self, _needs: &Needs<Self>) -> <Self::In as Slots>::Of<Each<bool>> {
        Self::In::each(|_| true)
    }

    /// Which it reads while a program is traced, such as all to compute the forward pass again. By default
    /// those that [`reads`](Operator::reads) says.
    fn reads_in_trace(&self, needs: &Needs<Self>) -> <Self::In as Slots>::Of<Each<bool>> {
        self.reads(needs)
    }

    /// Pairs of arguments that have one gradient. While a program is traced, it is computed as that of the
    /// second, because a registered operator cannot return one tensor twice.
    fn shared_gradients(&self, _of: &Args<'_, Self>) -> &'static [(usize, usize)] {
        &[]
    }

    /// What the backward pass reads where only these outputs have a gradient, and only these arguments need
    /// one: of the arguments, of the outputs and of what is kept, one bit for each, the first one lowest.
    /// What is not read is absent, so that it may have been changed in place. By default it reads all that
    /// is saved.
    fn reads_for(
        &self,
        _grads: &<Self::Out as Slots>::Of<Each<bool>>,
        _needs: &Needs<Self>,
        _plan: &Self::Plan,
    ) -> [u64; 3] {
        [u64::MAX; 3]
    }

    /// The outputs that have no gradient if only these arguments need one: one bit for each, the first
    /// one lowest.
    fn constant_outputs(&self, _needs: &Needs<Self>) -> u64 {
        0
    }

    /// The arguments in whose memory their gradients may be written, each with the option that allows
    /// it. Whether libtorch allows it is checked before the forward pass. Where something is kept, it is
    /// in their place, and they are not saved.
    fn overwrites(&self) -> &'static [(usize, &'static str)] {
        &[]
    }

    /// Computes the outputs, and what is kept. Grad mode and autocast are off.
    ///
    /// # Errors
    /// When the arguments do not fit, or libtorch or CUDA fails.
    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>>;

    /// Computes the gradients that are needed.
    ///
    /// # Errors
    /// When libtorch or CUDA fails.
    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>>;

    /// Computes the outputs by differentiable operations of tch.
    ///
    /// # Errors
    /// An error of libtorch.
    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>>;
}

/// Where second derivatives come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Second {
    /// From [`Operator::reference`], which is differentiated in place of the backward pass whenever a
    /// graph of the gradients is recorded. All arguments are saved.
    Reference,
    /// From the backward pass itself, which then consists of differentiable operations
    /// ([`Again::is_recorded`]) of arguments and outputs. What is kept are constants there, such as a
    /// mask of random numbers. Only the arguments that it reads are saved.
    Itself,
    /// As [`Itself`](Second::Itself), for an operator that is linear in all arguments that have a gradient
    /// taken together, and reads only others in its backward pass. While a program is traced, the derivative
    /// of the backward pass is the operator itself, and no argument is kept alive that is not read.
    Linear,
}

/// What a forward pass makes: tensors, or their kinds and sizes.
pub struct Made<O: Operator, T> {
    /// The outputs.
    pub outputs: <O::Out as Slots>::Of<Described<T>>,
    /// What the backward pass will read.
    pub kept: <O::Kept as Slots>::Of<Each<Option<T>>>,
}

impl<O: Operator<Kept = ()>, T> Made<O, T> {
    /// Outputs alone.
    pub fn only(outputs: <O::Out as Slots>::Of<Described<T>>) -> Self {
        Made { outputs, kept: () }
    }
}

/// A call of an operator, as its forward pass sees it.
pub struct Call<'a, O: Operator> {
    /// The operator.
    pub operator: &'a O,
    /// The arguments.
    pub of: Args<'a, O>,
    /// Which of them need a gradient.
    pub needs: &'a Needs<O>,
    /// What [`Operator::plan`] decided.
    pub plan: O::Plan,
    /// Whether a program is traced. What is kept then has the kinds and sizes that the rule says, whatever
    /// the device.
    pub is_traced: bool,
    /// Kinds and sizes of the arguments, if they were looked up already.
    pub(crate) known: Option<&'a [Option<Meta<i64>>]>,
}

impl<O: Operator> Call<'_, O> {
    /// Runs the operator's rule.
    ///
    /// # Errors
    /// The rule's.
    pub fn check(&self) -> Result<Made<O, Meta<i64>>> {
        let metas = match self.known {
            Some(known) => known_metas::<O>(known)?,
            None => metas_of::<O>(O::In::tensors(&self.of).as_ref())?,
        };
        self.operator.rule(&metas, self.needs)
    }

    /// Runs the operator's rule and makes what it says: contiguous tensors, for a kernel that writes
    /// every element.
    ///
    /// # Errors
    /// The rule's, or one of libtorch.
    pub fn allocate(&self) -> Result<Made<O, Tensor>> {
        self.check()?.allocate()
    }
}

impl<O: Operator> Made<O, Meta<i64>> {
    /// Makes what the operator's rule says, as [`Call::allocate`] does.
    ///
    /// # Errors
    /// One of libtorch.
    pub fn allocate(self) -> Result<Made<O, Tensor>> {
        self.map(Meta::allocate)
    }
}

impl<O: Operator, T> Made<O, T> {
    fn map<U>(self, make: impl Fn(&T) -> Result<U>) -> Result<Made<O, U>> {
        let mut outputs = O::Out::descriptions(self.outputs).into_iter();
        let outputs = O::Out::described(O::NAME, |_| {
            outputs.next().flatten().as_ref().map(&make).transpose()
        })?;
        let mut kept = O::Kept::array(|_| None);
        for (kept, made) in kept.as_mut().iter_mut().zip(O::Kept::items(self.kept)) {
            *kept = made.as_ref().map(&make).transpose()?;
        }
        let mut kept = kept.into_iter();
        Ok(Made { outputs, kept: O::Kept::each(|_| kept.next().flatten()) })
    }
}

/// A call of an operator, as its backward pass sees it.
pub struct Again<'a, O: Operator> {
    /// The arguments that the backward pass reads, according to [`Operator::reads`].
    pub of: Gradients<O>,
    /// What the forward pass kept.
    pub kept: <O::Kept as Slots>::Of<Each<Option<Tensor>>>,
    /// The outputs that the backward pass reads, according to
    /// [`READS_OUTPUTS`](Operator::READS_OUTPUTS).
    pub outputs: Incoming<O>,
    known: &'a [Option<Meta<i64>>],
    /// Which gradients are needed.
    pub needs: Needs<O>,
    /// What [`Operator::plan`] decided.
    pub plan: O::Plan,
    /// Whether the gradients become a part of the graph. They must then be computed by differentiable
    /// operations. It is never set with [`Second::Reference`].
    pub is_recorded: bool,
    /// Whether a program is traced ([`Call::is_traced`]).
    pub is_traced: bool,
    /// Whether no other backward pass of the call reads what was kept.
    is_last: bool,
    /// The incoming gradients that nobody else holds: one bit for each.
    owned: u64,
    /// Whether an earlier one was allowed to overwrite it; nothing is shared with one while a program is traced.
    is_spent: Option<&'a AtomicBool>,
}

impl<O: Operator> Again<'_, O> {
    /// Whether what was kept may be overwritten, because no other backward pass of the call reads it.
    /// Ask once, and just before the first write: after an answer of yes, nobody reads it again.
    ///
    /// # Errors
    /// When an earlier backward pass got leave to overwrite, and failed after that.
    pub fn may_overwrite(&self) -> Result<bool> {
        let is_spent = |flag: &AtomicBool| flag.fetch_or(self.is_last, Ordering::Relaxed);
        if self.is_spent.is_some_and(is_spent) {
            return Err(Error::Autograd(format!(
                "{}: an earlier backward pass of this call failed after it had begun to change what \
                 the forward pass saved: run the forward pass again",
                O::NAME
            )));
        }
        Ok(self.is_last)
    }

    /// Whether the incoming gradient of this output may be overwritten, because nobody else holds it or
    /// its memory: neither the caller of the backward pass nor a hook nor another node. It never may
    /// while gradients become a part of the graph or a program is traced.
    pub fn may_overwrite_gradient(&self, output: usize) -> bool {
        let bit = u32::try_from(output).ok().and_then(|output| self.owned.checked_shr(output));
        !self.is_recorded && bit.is_some_and(|owned| owned & 1 == 1)
    }

    /// Kinds and sizes of all arguments, also of those that were not saved.
    ///
    /// # Errors
    /// When an argument was absent that must be there.
    pub fn metas(&self) -> Result<Metas<O, i64>> {
        known_metas::<O>(self.known)
    }
}

fn known_metas<O: Operator>(known: &[Option<Meta<i64>>]) -> Result<Metas<O, i64>> {
    O::In::described(O::NAME, |index| Ok(known.get(index).cloned().flatten()))
}

/// Kinds and sizes of arguments.
pub(crate) fn metas_of<O: Operator>(tensors: &[Option<&Tensor>]) -> Result<Metas<O, i64>> {
    O::In::described(O::NAME, describe::<O>(tensors)?)
}

/// Describes the argument with an index by kind and sizes.
fn describe<O: Operator>(
    tensors: &[Option<&Tensor>],
) -> Result<impl Fn(usize) -> Result<Option<Meta<i64>>>> {
    let mut facts = O::In::array(|_| Facts::NONE);
    facts_into(tensors, facts.as_mut())?;
    Ok(move |index: usize| {
        let Some(tensor) = tensors[index] else { return Ok(None) };
        let name = O::In::NAMES[index];
        match Meta::from_facts(O::NAME, name, &facts.as_ref()[index]) {
            Some(meta) => Ok(Some(meta)),
            // Another kind, or more dimensions.
            None => Meta::of(O::NAME, name, tensor).map(Some),
        }
    })
}

/// Runs an operator and, if grad mode is on and an argument requires grad, makes it part of the graph.
/// Under autocast, the arguments are cast first.
///
/// # Errors
/// When the arguments do not fit, and when libtorch or CUDA fails.
#[track_caller]
pub fn call<O: Operator>(operator: O, of: &Args<'_, O>) -> Result<Outputs<O>> {
    let tensors = O::In::tensors(of);
    let tensors = tensors.as_ref();
    for (tensor, name) in tensors.iter().zip(O::In::NAMES) {
        if let Some(tensor) = tensor {
            Check::new(O::NAME, name, tensor).defined()?;
        }
    }
    if let Some(outputs) = operator.composed(of, false)? {
        return Ok(outputs);
    }
    match operator.cast(of)? {
        Some(cast) if cast.len() != tensors.len() => Err(Error::msg(format!(
            "{}: its cast returned {} tensors, and it takes {}",
            O::NAME,
            cast.len(),
            tensors.len()
        ))),
        Some(cast) => {
            let cast: Vec<Option<&Tensor>> = cast.iter().map(Option::as_ref).collect();
            applied(operator, &cast)
        }
        None => applied(operator, tensors),
    }
}

#[track_caller]
fn applied<O: Operator>(operator: O, tensors: &[Option<&Tensor>]) -> Result<Outputs<O>> {
    let constants = constants::<O>(tensors)?;
    let mut outputs = match constants.is_empty() {
        true => apply(Node::new(operator), tensors)?,
        false => apply(Node::new(operator), &with_constants(tensors, &constants))?,
    };
    O::Out::own(O::NAME, |index| outputs.take(index))
}

/// The arguments without a gradient that require grad, detached, with their places.
fn constants<O: Operator>(tensors: &[Option<&Tensor>]) -> Result<Vec<(usize, Tensor)>> {
    let mut constants = Vec::new();
    if O::In::CONSTANT != 0 {
        for (place, tensor) in tensors.iter().enumerate() {
            let tensor = tensor.filter(|tensor| tensor.requires_grad());
            if let Some(tensor) = tensor.filter(|_| O::In::CONSTANT >> place & 1 == 1) {
                if let Some(expected) = O::MUST_BE_CONSTANT
                    && tch_extension_grad_mode()
                {
                    let (name, got) = (O::In::NAMES[place], "one that requires grad");
                    return Err(Error::argument(O::NAME, name, expected, got, "detach it"));
                }
                constants.push((place, tensor.f_detach()?));
            }
        }
    }
    Ok(constants)
}

fn with_constants<'a>(
    tensors: &[Option<&'a Tensor>],
    constants: &'a [(usize, Tensor)],
) -> Vec<Option<&'a Tensor>> {
    let mut all = tensors.to_vec();
    constants.iter().for_each(|(place, tensor)| all[*place] = Some(tensor));
    all
}

/// The casts of an operator's arguments that its policy asks for.
fn autocast<O: Operator>(tensors: &[Option<&Tensor>]) -> Result<Option<Vec<Option<Tensor>>>> {
    let [cpu, cuda] = O::AUTOCAST;
    if cpu == cuda {
        return cpu.map_or(Ok(None), |policy| autocast_inputs(policy, tensors));
    }
    let policy = match tensors.iter().flatten().next().map(|tensor| tensor.device()) {
        Some(Device::Cpu) => cpu,
        Some(Device::Cuda(_)) => cuda,
        _ => None,
    };
    policy.map_or(Ok(None), |policy| autocast_inputs(policy, tensors))
}
