//! How an operator is registered with libtorch's dispatcher.
//!
//! It becomes two registered operators, or three: `x` is the operator, `x_backward` computes its
//! gradients, and `x_forward`, if something is kept, its outputs and what is kept ([`super::traced`]
//! says when). Each kernel is a function that is generic over the operator.

mod backward;
mod dispatched;
mod forward;

pub(super) use dispatched::Dispatched;
pub use dispatched::dispatched;

use super::signature::tensor_argument;
use super::traced;
use super::{Operator, OptionType, Slots, Tensor};
use crate::Result;
use crate::ffi::define::{Borrowed, Call as Frame};
use crate::library::expansion::{Argument, Definition, Implementation, Kernel, told};
use backward::{autograd_of_backward, backward, fake_backward};
use forward::{autocast, autograd, autograd_of_forward, fake, fake_forward, forward, own, seeded};
use std::marker::PhantomData;

/// The definitions of an operator in the namespace where it will be.
pub fn definitions<O: Operator>(namespace: &'static str) -> Vec<Definition> {
    const {
        assert!(
            O::Out::OPTIONAL == 0 && O::Out::CONSTANT == 0,
            "register!: the results of a registered operator are never absent, and all have gradients"
        );
    }
    let known = O::registered().is_in(namespace);
    // Whoever registers gets it as an error.
    assert!(known == namespace, "{}: it is registered in the namespace {known} already", O::NAME);
    let mut all = vec![Definition {
        name: O::NAME,
        is_seeded: O::IS_SEEDED,
        arguments: O::arguments(),
        results: results(Dispatched::<O>::OUTPUTS),
        kernels: &Kernels::<O>::OWN[..Kernels::<O>::OWN.len() - usize::from(!O::IS_SEEDED)],
    }];
    let own = || {
        let mut arguments = O::arguments();
        arguments.iter_mut().for_each(|argument| argument.default = None);
        arguments.push(<i64 as OptionType>::argument("needs", None));
        arguments
    };
    if Dispatched::<O>::KEEPS {
        all.push(Definition {
            name: O::FORWARD,
            is_seeded: false,
            arguments: own(),
            results: results(Dispatched::<O>::OUTPUTS + O::Kept::NAMES.len()),
            kernels: Kernels::<O>::FORWARD,
        });
    }
    let optional =
        |name: String| Argument { name: name.into(), default: None, ..tensor_argument("", true) };
    let grads = (0..O::Out::NAMES.len()).map(name_of_grad::<O>);
    let names = O::Out::NAMES.iter().chain(O::Kept::NAMES);
    let kept = traced::kept::<O>().filter_map(|place| names.clone().nth(place));
    let first = grads.chain(kept.map(|name| format!("kept_{name}"))).map(optional);
    all.push(Definition {
        name: O::BACKWARD,
        is_seeded: false,
        arguments: first.chain(own()).collect(),
        results: results(differentiable::<O>().count()),
        kernels: Kernels::<O>::BACKWARD,
    });
    all
}

/// The argument that is the gradient of an output.
fn name_of_grad<O: Operator>(place: usize) -> String {
    match O::Out::NAMES {
        [_] => "grad".to_string(),
        names => format!("grad_{}", names[place]),
    }
}

/// The types of so many results.
fn results(count: usize) -> String {
    match count {
        1 => "Tensor".to_string(),
        count => format!("({})", vec!["Tensor"; count].join(", ")),
    }
}

/// The places of the arguments that have a gradient.
fn differentiable<O: Operator>() -> impl Iterator<Item = usize> {
    (0..O::In::NAMES.len()).filter(|place| O::In::CONSTANT >> place & 1 == 0)
}

/// Those of all gradients that belong to arguments that have one.
fn with_gradient<O: Operator>(
    gradients: impl IntoIterator<Item = Option<Tensor>>,
) -> impl Iterator<Item = Option<Tensor>> {
    let all = gradients.into_iter().enumerate();
    all.filter(|(place, _)| O::In::CONSTANT >> place & 1 == 0).map(|(_, gradient)| gradient)
}

struct Kernels<O>(PhantomData<O>);

impl<O: Operator> Kernels<O> {
    /// The last one is for an operator that draws random numbers.
    const OWN: &'static [Implementation] = &[
        implementation("CPU", own::<O>),
        implementation("CUDA", own::<O>),
        implementation("Meta", fake::<O>),
        implementation("Autograd", autograd::<O>),
        implementation("AutocastCPU", autocast::<O>),
        implementation("AutocastCUDA", autocast::<O>),
        implementation(VMAP_MODE, seeded::<O>),
    ];
    const FORWARD: &'static [Implementation] = &[
        implementation("CPU", forward::<O>),
        implementation("CUDA", forward::<O>),
        implementation("Meta", fake_forward::<O>),
        implementation("Autograd", autograd_of_forward::<O>),
    ];
    const BACKWARD: &'static [Implementation] = &[
        implementation("CPU", backward::<O>),
        implementation("CUDA", backward::<O>),
        implementation("Meta", fake_backward::<O>),
        implementation("Autograd", autograd_of_backward::<O>),
    ];
}

/// The key at which libtorch refuses random numbers within vmap, or draws them as `randomness` says.
const VMAP_MODE: &str = "FuncTorchVmapMode";

const fn implementation(key: &'static str, kernel: Kernel) -> Implementation {
    Implementation { key, kernel, only_for_graphs: false }
}

/// The tensors of a call that libtorch makes.
type List<'a> = Vec<Option<&'a Tensor>>;

fn refer<'a>(tensors: &'a [Option<Borrowed<'_>>]) -> List<'a> {
    tensors.iter().map(Option::as_deref).collect()
}

fn refer_own(tensors: &[Option<Tensor>]) -> List<'_> {
    tensors.iter().map(Option::as_ref).collect()
}

/// Reads a call's arguments from this index on, and runs `body`.
fn read<O: Operator, T>(
    frame: &Frame<'_>,
    index: &mut usize,
    body: impl FnOnce(O, &[Option<&Tensor>], &mut usize) -> Result<T>,
) -> Result<T> {
    let (operator, tensors) = O::read(frame, index)?;
    told(body(operator, &refer(tensors.as_ref()), index))
}

/// Gives tensors to libtorch, in the place of the arguments.
fn give(frame: &mut Frame<'_>, tensors: impl IntoIterator<Item = Option<Tensor>>) -> Result<()> {
    frame.drop_arguments();
    tensors.into_iter().for_each(|tensor| frame.give_tensor(tensor));
    Ok(())
}

/// Registers operators with libtorch's dispatcher when the program, or the library that Python loads,
/// starts: for `torch.ops`, torch.compile, torch.export, torch.func, vmap and autocast, all of it from
/// their one definition.
///
/// The [module](mod@crate::operator) has an example.
///
/// An error is one line on stderr, and in
/// [`registration_error`](crate::library::registration_error); see [`operators!`](crate::operators).
#[macro_export]
macro_rules! register {
    (namespace $namespace:ident; $($operator:ty),+ $(,)?) => {
        const _: () = {
            fn block() -> $crate::library::expansion::Block {
                let mut operators = Vec::new();
                $(operators.extend($crate::operator::expansion::definitions::<$operator>(stringify!($namespace)));)+
                $crate::library::expansion::Block {
                    namespace: stringify!($namespace),
                    file: file!(),
                    line: line!(),
                    operators,
                }
            }
            extern "C" fn initialize() {
                $crate::library::expansion::register(block);
            }
            $crate::tch_extension_when_loaded!(initialize);
        };
    };
    ($($other:tt)*) => {
        compile_error!("register!: expected `namespace NAME; Operator, …`");
    };
}
