//! All proofs of an operator that is one definition.

use super::close::close;
use super::{conformance, gradcheck, gradgradcheck, tolerance};
use crate::autograd::{GradOptions, Tensors, grad};
use crate::operator::{Args, Call, Made, Meta, Metas, Needs, Operator, Slots, call, metas_of};
use crate::{Error, Result};
use tch::Tensor;

/// Proves an operator, on these arguments:
///
/// 1. It computes what its [`reference`](Operator::reference) computes, to [`tolerance`].
/// 2. Its [`rule`](Operator::rule) says what [`forward`](Operator::forward) makes, for each gradient
///    alone, for all, and for none: kinds, sizes and devices of the outputs, and of what is kept.
/// 3. Each gradient alone is the same as among all: what it reads is kept and read.
/// 4. [`gradcheck`](gradcheck()), [`gradgradcheck`] and [`conformance`] pass.
///
/// The arguments whose gradients are checked are of kind `Double`. All that have gradients are taken for
/// leaves that require grad, except those of kinds that cannot.
///
/// ```
/// # use tch::{Device, Kind, Tensor};
/// # use tch_extension::operator::*;
/// # tch_extension::signature! { pub Twice: TwiceIn -> TwiceOut = "twice"(x) -> (y) }
/// # impl Operator for Twice {
/// #     type Kept = ();
/// #     type Plan = ();
/// #     fn rule<D: Dim>(&self, of: &Metas<Self, D>, _: &Needs<Self>) -> tch_extension::Result<Made<Self, Meta<D>>> {
/// #         Ok(Made::only(TwiceOut { y: of.x.clone() }))
/// #     }
/// #     fn forward(&self, call: &Call<'_, Self>) -> tch_extension::Result<Made<Self, Tensor>> {
/// #         call.check()?;
/// #         Ok(Made::only(TwiceOut { y: call.of.x * 2.0 }))
/// #     }
/// #     fn backward(&self, grads: Incoming<Self>, _: Again<'_, Self>) -> tch_extension::Result<Gradients<Self>> {
/// #         Ok(TwiceIn { x: grads.y.map(|grad| grad * 2.0) })
/// #     }
/// #     fn reference(&self, of: &Args<'_, Self>) -> tch_extension::Result<Outputs<Self>> {
/// #         Ok(TwiceOut { y: of.x * 2.0 })
/// #     }
/// # }
/// use tch_extension::testing::prove;
///
/// let x = Tensor::randn([3, 4], (Kind::Double, Device::Cpu));
/// prove(&Twice {}, &TwiceIn { x: &x })?;
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// The first proof that fails, and any error of the operator.
pub fn prove<O: Operator>(operator: &O, of: &Args<'_, O>) -> Result<()> {
    let case = Case::<O>::new(operator, of)?;
    case.values().map_err(|error| case.failed("values", error))?;
    for needed in case.subsets() {
        case.rule(&needed).map_err(|error| case.failed("rule", error))?;
    }
    let checked = case.leaves.iter().any(|leaf| leaf.requires_grad());
    if checked {
        case.gradients().map_err(|error| case.failed("reads", error))?;
    }
    let is_there = &case.is_there;
    let run = |inputs: &[Tensor]| run(operator, is_there, inputs);
    let inputs: Vec<&Tensor> = case.leaves.iter().collect();
    if checked {
        gradcheck(run, &inputs, &Default::default())?;
        gradgradcheck(run, &inputs, &Default::default())?;
    }
    conformance(run, &inputs, &Default::default())
}

/// An operator with arguments. Of those, `leaves` are the ones that are there.
struct Case<'a, O: Operator> {
    operator: &'a O,
    is_there: Vec<bool>,
    leaves: Vec<Tensor>,
}

/// All arguments, with these in the places of those that are there.
fn arguments<'t>(is_there: &[bool], present: &'t [Tensor]) -> Vec<Option<&'t Tensor>> {
    let mut present = present.iter();
    is_there.iter().map(|&is_there| if is_there { present.next() } else { None }).collect()
}

fn run<O: Operator>(operator: &O, is_there: &[bool], inputs: &[Tensor]) -> Result<Tensors> {
    let tensors = arguments(is_there, inputs);
    let outputs = call(operator.clone(), &O::In::borrowed(O::NAME, &tensors)?)?;
    Ok(O::Out::owned(outputs).into_iter().collect::<Vec<_>>().into())
}

impl<'a, O: Operator> Case<'a, O> {
    fn new(operator: &'a O, of: &Args<'_, O>) -> Result<Self> {
        let tensors = O::In::tensors(of);
        let mut leaves = Vec::new();
        for (place, tensor) in tensors.as_ref().iter().enumerate() {
            let Some(tensor) = tensor else { continue };
            let is_leaf = O::In::CONSTANT >> place & 1 == 0 && tensor.is_floating_point();
            leaves.push(tensor.f_detach_copy()?.f_set_requires_grad(is_leaf)?);
        }
        let is_there = tensors.as_ref().iter().map(Option::is_some).collect();
        Ok(Case { operator, is_there, leaves })
    }

    fn failed(&self, proof: &str, error: Error) -> Error {
        Error::msg(format!("prove: {}: {proof}: {error}", O::NAME))
    }

    /// The arguments.
    fn arguments(&self) -> Vec<Option<&Tensor>> {
        arguments(&self.is_there, &self.leaves)
    }

    fn values(&self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let tensors = self.arguments();
        let of = O::In::borrowed(O::NAME, &tensors)?;
        let found = O::Out::owned(call(self.operator.clone(), &of)?);
        let expected = O::Out::owned(self.operator.reference(&of)?);
        for (place, (found, expected)) in found.into_iter().zip(expected).enumerate() {
            let name = O::Out::NAMES[place];
            match (found, expected) {
                (Some(found), Some(expected)) => {
                    let (rtol, atol) = tolerance(expected.f_kind()?);
                    close(&found, &expected, rtol, atol).map_err(|error| {
                        Error::msg(format!("{name} and the reference's: {error}"))
                    })?;
                }
                (None, None) => {}
                _ => {
                    return Err(Error::msg(format!(
                        "{name} is absent in one of forward and reference"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Each gradient alone, all, and none: whether each argument needs one.
    fn subsets(&self) -> Vec<Vec<bool>> {
        let mut present = self.leaves.iter().map(Tensor::requires_grad);
        let all: Vec<bool> = self
            .is_there
            .iter()
            .map(|is_there| *is_there && present.next() == Some(true))
            .collect();
        let alone = (0..all.len())
            .filter(|&place| all[place])
            .map(|place| (0..all.len()).map(|other| other == place).collect());
        alone.chain([all.clone(), vec![false; all.len()]]).collect()
    }

    fn rule(&self, needed: &[bool]) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let tensors = self.arguments();
        let needs: Needs<O> = O::In::each(|place| needed[place]);
        let of = O::In::borrowed(O::NAME, &tensors)?;
        let plan = self.operator.plan(&of, &needs)?;
        let metas: Metas<O, i64> = metas_of::<O>(&tensors)?;
        let said: Made<O, Meta<i64>> = self.operator.rule(&metas, &needs)?;
        let made =
            self.operator.forward(&Call { operator: self.operator, of, needs: &needs, plan })?;
        let said = O::Out::descriptions(said.outputs).into_iter().chain(O::Kept::items(said.kept));
        let made = O::Out::descriptions(made.outputs).into_iter().chain(O::Kept::items(made.kept));
        let names = O::Out::NAMES.iter().chain(O::Kept::NAMES);
        for ((said, made), name) in said.zip(made).zip(names) {
            let said = said.map(|meta| (meta.kind(), meta.device(), meta.sizes().to_vec()));
            let made = match made {
                Some(made) => Some((made.f_kind()?, made.device(), made.size())),
                None => None,
            };
            if said != made {
                let text = |of: Option<_>| of.map_or("nothing".to_string(), |of| format!("{of:?}"));
                return Err(Error::msg(format!(
                    "{name}: expected {}, as the rule says, got {} from forward, if a gradient is needed of {}",
                    text(said),
                    text(made),
                    self.names(needed),
                )));
            }
        }
        Ok(())
    }

    fn names(&self, needed: &[bool]) -> String {
        let names = O::In::NAMES.iter().zip(needed).filter(|(_, needed)| **needed);
        let names: Vec<&str> = names.map(|(name, _)| *name).collect();
        if names.is_empty() { "no arguments".to_string() } else { names.join(" and ") }
    }

    fn gradients(&self) -> Result<()> {
        let mut incoming: Vec<Option<Tensor>> = Vec::new();
        let all = self.gradients_of(|_| true, &mut incoming)?;
        for (leaf, expected) in all.iter().enumerate() {
            let Some(expected) = expected else { continue };
            let alone = self.gradients_of(|other| other == leaf, &mut incoming)?;
            let place = self.places().nth(leaf).unwrap_or_default();
            let wrong = |what: String| {
                Error::msg(format!("the gradient of {} alone: {what}", O::In::NAMES[place]))
            };
            let Some(found) = &alone[leaf] else { return Err(wrong("it is absent".to_string())) };
            let (rtol, atol) = tolerance(expected.f_kind()?);
            close(found, expected, rtol, atol).map_err(|error| wrong(error.to_string()))?;
        }
        Ok(())
    }

    /// The places of the arguments that are there.
    fn places(&self) -> impl Iterator<Item = usize> {
        self.is_there.iter().enumerate().filter(|(_, is_there)| **is_there).map(|(place, _)| place)
    }

    /// The gradients of those leaves that are wanted, for the same incoming ones.
    fn gradients_of(
        &self,
        wanted: impl Fn(usize) -> bool,
        incoming: &mut Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let mut leaves = Vec::new();
        for (index, leaf) in self.leaves.iter().enumerate() {
            let is_wanted = wanted(index) && leaf.requires_grad();
            leaves.push(leaf.f_detach()?.f_set_requires_grad(is_wanted)?);
        }
        let outputs = run(self.operator, &self.is_there, &leaves)?.into_vec();
        if incoming.is_empty() {
            for output in &outputs {
                incoming
                    .push(output.as_ref().map(|output| output.f_detach()?.f_cos()).transpose()?);
            }
        }
        let of = outputs.iter().zip(&*incoming).filter_map(|(output, grad)| {
            output
                .as_ref()
                .filter(|output| output.requires_grad())
                .map(|output| (output, grad.as_ref()))
        });
        let (of, along): (Vec<&Tensor>, Vec<Option<&Tensor>>) = of.unzip();
        let variables: Vec<&Tensor> = leaves.iter().filter(|leaf| leaf.requires_grad()).collect();
        let options =
            GradOptions { grad_outputs: &along, allow_unused: true, ..Default::default() };
        let mut found = grad(&of, &variables, &options)?.into_vec().into_iter();
        Ok(leaves
            .iter()
            .map(|leaf| if leaf.requires_grad() { found.next().flatten() } else { None })
            .collect())
    }
}
