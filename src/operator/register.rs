//! How an operator is registered with libtorch's dispatcher.
//!
//! It becomes two registered operators, or three: `x` is the operator, `x_backward` computes its
//! gradients, and `x_forward`, if something is kept, its outputs and what is kept ([`super::traced`]
//! says when). Each kernel is a function that is generic over the operator.

use super::node::{known, reference};
use super::signature::{Part, tensor_argument};
use super::traced::{
    self, Needs, Pair, below, is_eager, is_needed, kernel, returned_list, with_casts,
};
use super::{
    Again, Args, Call, Made, Meta, Metas, Operator, OptionType, Outputs, Slots, Tensor, call,
    constants, known_metas, with_constants,
};
use crate::autograd::Inputs;
use crate::ffi::define::{Borrowed, Call as Frame};
use crate::ffi::tensor::plain;
use crate::library::expansion::{Argument, Definition, Implementation, Kernel, told};
use crate::library::{SymInt, Value, empty, without_key};
use crate::{Error, Result};
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
        kernels: match O::IS_SEEDED {
            true => Kernels::<O>::SEEDED,
            false => Kernels::<O>::OWN,
        },
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
    let kept = traced::kept::<Dispatched<O>>().filter_map(|place| names.clone().nth(place));
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
    const OWN: &'static [Implementation] = &[
        implementation("CPU", own::<O>),
        implementation("CUDA", own::<O>),
        implementation("Meta", fake::<O>),
        implementation("Autograd", autograd::<O>),
        implementation("AutocastCPU", autocast::<O>),
        implementation("AutocastCUDA", autocast::<O>),
    ];
    const SEEDED: &'static [Implementation] = &[
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

fn eager<O: Operator>(operator: O, tensors: &[Option<&Tensor>]) -> Result<Vec<Option<Tensor>>> {
    let outputs = call(operator, &O::In::borrowed(O::NAME, tensors)?)?;
    contiguous(O::Out::owned(outputs))
}

/// The tensors as the rule describes them: contiguous.
fn contiguous(tensors: impl IntoIterator<Item = Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
    let plain = |tensor: Tensor| match tensor.is_contiguous() {
        true => Ok(tensor),
        false => tensor.f_contiguous(),
    };
    tensors.into_iter().map(|tensor| Ok(tensor.map(plain).transpose()?)).collect()
}

/// `x` for a device.
fn own<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let outputs =
        read::<O, _>(frame, &mut 0, |operator, tensors, _| below(|| eager(operator, tensors)))?;
    give(frame, outputs)
}

/// `x` where there may be a graph: the operator with its own node, or the registered operators.
fn autograd<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let outputs = read::<O, _>(frame, &mut 0, |operator, tensors, _| {
        if is_eager(tensors) {
            return eager(operator, tensors);
        }
        if let Some(outputs) = composed(&operator, tensors)? {
            return Ok(outputs);
        }
        // Autocast is off here, or has made its casts: these are the operator's own.
        let cast = operator.cast(&O::In::borrowed(O::NAME, tensors)?)?;
        let cast = cast.as_deref().map(refer_own);
        let tensors = cast.as_deref().unwrap_or(tensors);
        let constants = constants::<O>(tensors)?;
        traced::traced_list(Dispatched(operator), &with_constants(tensors, &constants))
    })?;
    give(frame, outputs)
}

fn composed<O: Operator>(
    operator: &O,
    tensors: &[Option<&Tensor>],
) -> Result<Option<Vec<Option<Tensor>>>> {
    let outputs = operator.composed(&O::In::borrowed(O::NAME, tensors)?, true)?;
    outputs.map(|outputs| contiguous(O::Out::owned(outputs))).transpose()
}

/// `x` within vmap if it draws random numbers: its composition, whose operators draw them by the rules
/// of vmap.
fn seeded<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let outputs = read::<O, _>(frame, &mut 0, |operator, tensors, _| {
        if let Some(outputs) = composed(&operator, tensors)? {
            return Ok(outputs);
        }
        let call = || Dispatched(operator).call(Inputs::new(tensors));
        Ok(without_key(VMAP_MODE, call)?.into_iter().map(Some).collect())
    })?;
    give(frame, outputs)
}

/// Calls an operator that is registered by the dispatcher, as its composition does while a program is
/// traced ([`Operator::composed`]).
///
/// # Errors
/// When it is not registered, or an error of the operator.
pub fn dispatched<O: Operator>(operator: &O, of: &Args<'_, O>) -> Result<Outputs<O>> {
    let values = operator.values(O::In::tensors(of).as_ref());
    let outputs: Vec<Tensor> = O::registered().call::<O, _>(Part::Own, values)?;
    let mut outputs = outputs.into_iter();
    O::Out::own(O::NAME, |_| outputs.next())
}

/// `x` under autocast: the operator with casts of its arguments.
fn autocast<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let outputs: Vec<Tensor> = read::<O, _>(frame, &mut 0, |operator, tensors, _| {
        let cast = operator.cast(&O::In::borrowed(O::NAME, tensors)?)?;
        with_casts(tensors, cast, |tensors| Dispatched(operator).call(tensors))
    })?;
    give(frame, outputs.into_iter().map(Some))
}

/// `x` while a program is traced: tensors with kinds and sizes alone.
fn fake<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let outputs = read::<O, _>(frame, &mut 0, |operator, tensors, _| {
        if !O::IS_SEEDED
            && let Some(outputs) = composed(&operator, tensors)?
        {
            return Ok(outputs);
        }
        let made = made::<O>(&operator, tensors, 0, O::Out::NAMES.len())?;
        Ok(made.into_iter().map(Some).collect())
    })?;
    give(frame, outputs)
}

/// The first of the outputs and of what is kept, as the rule says.
fn made<O: Operator>(
    operator: &O,
    tensors: &[Option<&Tensor>],
    needs: Needs,
    count: usize,
) -> Result<Vec<Tensor>> {
    let like = first(tensors)?;
    let needs = O::In::each(|place| is_needed(needs, place));
    let made = operator.rule(&symbols::<O>(tensors)?, &needs)?;
    let outputs = O::Out::descriptions(made.outputs).into_iter();
    let all = outputs.chain(O::Kept::items(made.kept)).take(count);
    all.map(|meta: Option<Meta<SymInt>>| match meta {
        Some(meta) => meta.fake(like),
        None => empty(&[const { 0 }; ABSENT].map(SymInt::from), like.f_kind()?, like),
    })
    .collect()
}

fn symbols<O: Operator>(tensors: &[Option<&Tensor>]) -> Result<Metas<O, SymInt>> {
    O::In::described(O::NAME, |index| {
        let tensor = tensors.get(index).copied().flatten();
        tensor.map(|tensor| Meta::of(O::NAME, O::In::NAMES[index], tensor)).transpose()
    })
}

/// The number of dimensions of an empty tensor in the place of one that was not kept. No operator
/// keeps an empty tensor with so many.
const ABSENT: usize = 16;

fn first<'a>(tensors: &[Option<&'a Tensor>]) -> Result<&'a Tensor> {
    let none = || Error::msg("internal error: an operator without tensors");
    tensors.iter().flatten().next().copied().ok_or_else(none)
}

/// Which gradients are needed: the next argument.
fn read_needs(frame: &Frame<'_>, index: &mut usize) -> Result<Needs> {
    *index += 1;
    frame.argument(*index - 1).int()
}

fn forward<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let results = read::<O, _>(frame, &mut 0, |operator, tensors, index| {
        let asked = read_needs(frame, index)?;
        let needs = O::In::each(|place| is_needed(asked, place));
        let like = first(tensors)?;
        kernel(|| {
            let of = O::In::borrowed(O::NAME, tensors)?;
            let plan = operator.plan(&of, &needs)?;
            let call = Call { operator: &operator, of, needs: &needs, plan, known: None };
            let said = O::Kept::items(call.check()?.kept);
            let made = operator.forward(&call)?;
            let mut results = contiguous(O::Out::descriptions(made.outputs))?;
            let others: Vec<&Tensor> =
                tensors.iter().chain(&refer_own(&results)).flatten().copied().collect();
            let kept = returned_list(O::Kept::items(made.kept), &others)?;
            for ((kept, said), name) in kept.into_iter().zip(said).zip(O::Kept::NAMES) {
                if kept.is_some() && said.is_none() {
                    return Err(Error::msg(format!(
                        "{}: {name} is kept, of which a program that is traced knows nothing; call {}",
                        O::FORWARD,
                        O::NAME
                    )));
                }
                results.push(Some(match kept {
                    Some(kept) => kept,
                    None => Tensor::f_empty([0; ABSENT], (like.f_kind()?, like.device()))?,
                }));
            }
            Ok(results)
        })
    })?;
    give(frame, results)
}

fn fake_forward<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let results = read::<O, _>(frame, &mut 0, |operator, tensors, index| {
        let needs = read_needs(frame, index)?;
        made::<O>(&operator, tensors, needs, O::Out::NAMES.len() + O::Kept::NAMES.len())
    })?;
    give(frame, results.into_iter().map(Some))
}

fn autograd_of_forward<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let results = read::<O, _>(frame, &mut 0, |operator, tensors, index| {
        let needs = read_needs(frame, index)?;
        let constants = constants::<O>(tensors)?;
        traced::forwarded_list(Dispatched(operator), &with_constants(tensors, &constants), needs)
    })?;
    give(frame, results)
}

/// The arguments of `x_backward` before those of `x`: incoming gradients, and what is kept.
struct First<'c> {
    grads: Vec<Option<Borrowed<'c>>>,
    kept: Vec<Option<Borrowed<'c>>>,
}

impl<'c> First<'c> {
    fn read<O: Operator>(frame: &'c Frame<'_>, index: &mut usize) -> Result<Self> {
        let mut tensors = |count: usize| {
            let range = *index..*index + count;
            *index = range.end;
            range.map(|index| frame.argument(index).tensor_or_none()).collect::<Result<Vec<_>>>()
        };
        let grads = tensors(O::Out::NAMES.len())?;
        let mut kept = tensors(traced::kept::<Dispatched<O>>().count())?;
        // Outputs that are read come first. They are never absent.
        let outputs = O::READS_OUTPUTS.count_ones() as usize;
        for kept in &mut kept[outputs..] {
            let _ = kept.take_if(|kept| kept.dim() == ABSENT && kept.numel() == 0);
        }
        Ok(First { grads, kept })
    }
}

fn backward<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let mut index = 0;
    let before = First::read::<O>(frame, &mut index)?;
    let gradients = read::<O, _>(frame, &mut index, |operator, tensors, index| {
        let needs = read_needs(frame, index)?;
        let like = first(tensors)?;
        kernel(|| {
            let found = gradients(&operator, &before, tensors, needs)?;
            let (grads, kept) = (refer(&before.grads), refer(&before.kept));
            let others = tensors.iter().chain(&grads).chain(&kept).flatten().copied();
            let found = returned_list(found, &others.collect::<Vec<_>>())?;
            let nothing = || traced::nothing(like);
            found
                .into_iter()
                .map(|gradient| gradient.map_or_else(nothing, Ok))
                .collect::<Result<Vec<_>>>()
        })
    })?;
    drop(before);
    give(frame, gradients.into_iter().map(Some))
}

/// Checks that incoming gradients are like the outputs, and what was kept as the rule says: kernels read
/// them by address, and anybody may call the registered operator. Returns which of what was kept the rule
/// knows, for these gradients or, since the forward pass may have been asked for more, for all.
fn fits<O: Operator>(
    operator: &O,
    before: &First<'_>,
    metas: &Metas<O, i64>,
    needs: &super::Needs<O>,
) -> Result<Vec<bool>> {
    let like = |tensor: Option<&Tensor>, said: Option<&Meta<i64>>, name: String| {
        let Some((tensor, said)) = tensor.zip(said) else { return Ok(()) };
        let found = (tensor.f_kind()?, tensor.device(), tensor.size());
        if (found.0, found.1, &found.2[..]) == (said.kind(), said.device(), said.sizes()) {
            return Ok(());
        }
        let expected = format!("{:?} {:?} {:?}", said.kind(), said.device(), said.sizes());
        let got = format!("{:?} {:?} {:?}", found.0, found.1, found.2);
        Err(Error::argument(O::BACKWARD, &name, expected, got, ""))
    };
    let all = O::In::each(|_| true);
    let [of_needed, of_all] =
        [operator.rule(metas, needs)?, operator.rule(metas, &all)?].map(|said: Made<O, _>| {
            let outputs = O::Out::descriptions(said.outputs).into_iter();
            outputs.chain(O::Kept::items(said.kept)).collect::<Vec<Option<Meta<i64>>>>()
        });
    for (place, grad) in refer(&before.grads).into_iter().enumerate() {
        like(grad, of_all[place].as_ref(), name_of_grad::<O>(place))?;
    }
    let names: Vec<_> = O::Out::NAMES.iter().chain(O::Kept::NAMES).collect();
    let mut is_known = Vec::new();
    for (place, kept) in traced::kept::<Dispatched<O>>().zip(refer(&before.kept)) {
        let said = of_needed[place].as_ref().or(of_all[place].as_ref());
        like(kept, said, format!("kept_{}", names[place]))?;
        is_known.push(said.is_some());
    }
    Ok(is_known)
}

/// The gradients of the arguments that have some; those that are not needed are absent.
fn gradients<O: Operator>(
    operator: &O,
    before: &First<'_>,
    tensors: &[Option<&Tensor>],
    asked: Needs,
) -> Result<Vec<Option<Tensor>>> {
    let of_call = O::In::borrowed(O::NAME, tensors)?;
    let needs = O::In::each(|place| is_needed(asked, place));
    let reads = O::In::items(operator.reads(&needs));
    let known = known::<O>(tensors)?;
    let is_known = fits(operator, before, &known_metas::<O>(&known)?, &needs)?;
    let own = |tensor: Option<&Tensor>| tensor.map(Tensor::shallow_clone);
    let mut results: Vec<Option<Tensor>> = (0..Dispatched::<O>::RESULTS).map(|_| None).collect();
    let kept = traced::kept::<Dispatched<O>>().zip(refer(&before.kept));
    for ((place, tensor), _) in kept.zip(is_known).filter(|(_, is_known)| *is_known) {
        // As the forward pass made it, also if the caller has laid it out in another way.
        results[place] = tensor.map(plain).transpose()?;
    }
    let (outputs, kept) = results.split_at_mut(Dispatched::<O>::OUTPUTS);
    let again = Again {
        of: O::In::each(|place| own(tensors[place].filter(|_| reads.as_ref()[place]))),
        kept: O::Kept::each(|place| kept[place].take()),
        outputs: O::Out::each(|place| outputs[place].take()),
        known: &known,
        plan: operator.plan(&of_call, &needs)?,
        needs,
        is_recorded: false,
        is_last: false,
    };
    let grads = O::Out::each(|place| own(before.grads[place].as_deref()));
    let gradients = O::In::items(operator.backward(grads, again)?).into_iter().enumerate();
    let needed = gradients.map(|(place, gradient)| match (gradient, tensors[place]) {
        (gradient, Some(tensor)) if is_needed(asked, place) => match gradient {
            Some(gradient) => Ok(Some(gradient)),
            // An absent gradient means zero. What is traced expects its shape.
            None => Ok(Some(tensor.f_zeros_like()?)),
        },
        _ => Ok(None),
    });
    let needed = needed.collect::<Result<Vec<_>>>()?;
    Ok(with_gradient::<O>(needed).collect())
}

fn fake_backward<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let mut index = 0;
    let before = First::read::<O>(frame, &mut index)?;
    let gradients = read::<O, _>(frame, &mut index, |_, tensors, index| {
        let needs = read_needs(frame, index)?;
        let like = first(tensors)?;
        differentiable::<O>()
            .map(|place| match tensors[place].filter(|_| is_needed(needs, place)) {
                Some(tensor) => empty(&crate::library::sizes(tensor), tensor.f_kind()?, tensor),
                None => empty(&[SymInt::from(0)], like.f_kind()?, like),
            })
            .collect::<Result<Vec<_>>>()
    })?;
    drop(before);
    give(frame, gradients.into_iter().map(Some))
}

fn autograd_of_backward<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let mut index = 0;
    let before = First::read::<O>(frame, &mut index)?;
    let gradients = read::<O, _>(frame, &mut index, |operator, tensors, index| {
        let needs = read_needs(frame, index)?;
        let (grads, kept) = (refer(&before.grads), refer(&before.kept));
        let constants = constants::<O>(tensors)?;
        let tensors = with_constants(tensors, &constants);
        let all = traced::gradients_list(Dispatched(operator), &grads, &kept, &tensors, needs)?;
        Ok(with_gradient::<O>(all).collect::<Vec<_>>())
    })?;
    drop(before);
    give(frame, gradients)
}

/// An operator as calls of the registered operators.
#[derive(Clone)]
struct Dispatched<O>(O);

impl<O: Operator> Dispatched<O> {
    const KEEPS: bool = !O::Kept::NAMES.is_empty();
    const RESULTS: usize = O::Out::NAMES.len() + O::Kept::NAMES.len();
}

fn values<'a>(tensors: &[Option<&'a Tensor>]) -> impl Iterator<Item = Value<'a>> {
    tensors.iter().map(|tensor| Value::from(*tensor))
}

impl<O: Operator> Pair for Dispatched<O> {
    const NAME: &'static str = O::NAME;
    const BACKWARD: &'static str = O::BACKWARD;
    const INPUTS: usize = O::In::NAMES.len();
    const OUTPUTS: usize = O::Out::NAMES.len();
    const KEPT: u64 = O::READS_OUTPUTS | ((1 << O::Kept::NAMES.len()) - 1) << O::Out::NAMES.len();

    fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
        O::registered().call::<O, _>(Part::Own, self.0.values(&inputs))
    }

    fn forward(&self, inputs: Inputs<'_>, needs: Needs) -> Result<Vec<Tensor>> {
        if !Self::KEEPS {
            return self.call(inputs);
        }
        let mut all = self.0.values(&inputs);
        all.push(needs.into());
        O::registered().call::<O, _>(Part::Forward, all)
    }

    fn backward(
        &self,
        grads: Inputs<'_>,
        kept: Inputs<'_>,
        inputs: Inputs<'_>,
        needs: Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let own = self.0.values(&inputs).into_iter();
        let all = values(&grads).chain(values(&kept)).chain(own).chain([needs.into()]);
        let found: Vec<Tensor> = O::registered().call::<O, _>(Part::Backward, all.collect())?;
        let mut gradients: Vec<Option<Tensor>> = (0..Self::INPUTS).map(|_| None).collect();
        for (place, gradient) in differentiable::<O>().zip(found) {
            gradients[place] = Some(gradient);
        }
        Ok(gradients)
    }

    fn reference(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
        Ok(reference(&self.0, &inputs)?.into_iter().flatten().collect())
    }

    fn shared_gradients(&self, inputs: Inputs<'_>) -> Result<&'static [(usize, usize)]> {
        Ok(self.0.shared_gradients(&O::In::borrowed(O::NAME, &inputs)?))
    }
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
