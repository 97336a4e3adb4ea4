//! All proofs of an operator that is one definition.

use super::close::close;
use super::{conformance, gradcheck, gradgradcheck, tolerance};
use crate::autograd::{GradOptions, Tensors, grad};
use crate::operator::{Args, Call, Made, Meta, Metas, Needs, Operator, Slots, call, metas_of};
use crate::{Error, Result};
use tch::{Kind, Tensor};

/// Proves an operator, on these arguments:
///
/// 1. Its outputs and gradients are those of its [`reference`](Operator::reference), computed in
///    `Double`, to [`tolerance`].
/// 2. Its [`rule`](Operator::rule) says what [`forward`](Operator::forward) makes, for each gradient
///    alone, for all, and for none: kinds, sizes and devices of the outputs, and of what is kept.
/// 3. Each gradient alone is the same as among all: what it reads is kept and read.
/// 4. [`conformance`](conformance()) and, if all that have a gradient are of kind `Double`, [`gradcheck`](gradcheck())
///    and [`gradgradcheck`] pass.
///
/// The gradients of all arguments of floating point are checked, except those without one (`!`). An
/// operator that draws random numbers cannot be proved in this way.
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
    case.values().map_err(|error| failed::<O>("values", error))?;
    for needed in case.subsets() {
        case.rule(&needed).map_err(|error| failed::<O>("rule", error))?;
    }
    let is_there = &case.is_there;
    let run = |inputs: &[Tensor]| run(operator, is_there, inputs);
    let inputs: Vec<&Tensor> = case.leaves.iter().collect();
    let mut checked = case.leaves.iter().filter(|leaf| leaf.requires_grad()).peekable();
    if checked.peek().is_some() {
        case.gradients().map_err(|error| failed::<O>("gradients", error))?;
        if checked.all(|leaf| leaf.kind() == Kind::Double) {
            gradcheck(run, &inputs, &Default::default())
                .map_err(|error| failed::<O>("gradcheck", error))?;
            gradgradcheck(run, &inputs, &Default::default())
                .map_err(|error| failed::<O>("gradgradcheck", error))?;
        }
    }
    conformance(run, &inputs, &Default::default())
        .map_err(|error| failed::<O>("conformance", error))
}

fn failed<O: Operator>(proof: &str, error: Error) -> Error {
    Error::msg(format!("prove: {}: {proof}: {error}", O::NAME))
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
            // No two elements of a leaf share memory.
            let sizes = tensor.size().into_iter().zip(tensor.stride());
            let is_expanded = sizes.into_iter().any(|(size, stride)| size > 1 && stride == 0);
            let leaf = if is_expanded { tensor.f_contiguous()? } else { tensor.shallow_clone() };
            leaves.push(leaf.f_detach()?.f_set_requires_grad(is_leaf)?);
        }
        let is_there = tensors.as_ref().iter().map(Option::is_some).collect();
        Ok(Case { operator, is_there, leaves })
    }

    /// The arguments.
    fn arguments(&self) -> Vec<Option<&Tensor>> {
        arguments(&self.is_there, &self.leaves)
    }

    /// The outputs of the reference, and its arguments, in `Double`.
    fn exact(&self) -> Result<(Vec<Option<Tensor>>, Vec<Tensor>)> {
        let mut exact = Vec::new();
        for leaf in &self.leaves {
            let values = leaf.f_detach()?;
            exact.push(match leaf.is_floating_point() {
                true => {
                    values.f_to_kind(Kind::Double)?.f_set_requires_grad(leaf.requires_grad())?
                }
                false => values,
            });
        }
        let of = arguments(&self.is_there, &exact);
        let outputs = self.operator.reference(&O::In::borrowed(O::NAME, &of)?)?;
        Ok((O::Out::owned(outputs).into_iter().collect(), exact))
    }

    fn values(&self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let found = run(self.operator, &self.is_there, &self.leaves)?.into_vec();
        let (expected, _) = self.exact()?;
        let pairs = found.iter().zip(&expected).zip(O::Out::NAMES);
        for ((found, expected), name) in pairs {
            same(found.as_ref(), expected.as_ref(), &format!("{name} and the reference's"))?;
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
        if self.operator.composed(&of, false)?.is_some() {
            // The kernels do not take these arguments.
            return Ok(());
        }
        let cast = self.operator.cast(&of)?;
        let cast: Option<Vec<_>> =
            cast.as_ref().map(|cast| cast.iter().map(Option::as_ref).collect());
        let tensors = cast.as_deref().unwrap_or(&tensors);
        let of = O::In::borrowed(O::NAME, tensors)?;
        let plan = self.operator.plan(&of, &needs)?;
        let metas: Metas<O, i64> = metas_of::<O>(tensors)?;
        let said: Made<O, Meta<i64>> = self.operator.rule(&metas, &needs)?;
        let made = self.operator.forward(&Call {
            operator: self.operator,
            of,
            needs: &needs,
            plan,
            is_traced: true,
            known: None,
        })?;
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
        let (outputs, exact) = self.exact()?;
        let kind = self.leaves.iter().find(|leaf| leaf.requires_grad()).map(Tensor::kind);
        let mut incoming = Vec::new();
        for output in &outputs {
            // Rounded, so that both get the same.
            incoming.push(match (output, kind) {
                (Some(output), Some(kind)) => Some(output.f_detach()?.f_cos()?.f_to_kind(kind)?),
                _ => None,
            });
        }
        let expected = gradients(&outputs, &exact, &incoming)?;
        let all = self.gradients_of(|_| true, &incoming)?;
        for (leaf, place) in self.places().enumerate() {
            let name = O::In::NAMES[place];
            let what = format!("the gradient of {name} and the reference's");
            same(all[leaf].as_ref(), expected[leaf].as_ref(), &what)?;
            if self.leaves[leaf].requires_grad() {
                let alone = self.gradients_of(|other| other == leaf, &incoming)?;
                let what = format!("the gradient of {name} alone and among all");
                same(alone[leaf].as_ref(), all[leaf].as_ref(), &what)?;
            }
        }
        Ok(())
    }

    /// The places of the arguments that are there.
    fn places(&self) -> impl Iterator<Item = usize> {
        self.is_there.iter().enumerate().filter(|(_, is_there)| **is_there).map(|(place, _)| place)
    }

    /// The gradients of those leaves that are wanted.
    fn gradients_of(
        &self,
        is_wanted: impl Fn(usize) -> bool,
        incoming: &[Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>> {
        let mut leaves = Vec::new();
        for (index, leaf) in self.leaves.iter().enumerate() {
            let is_wanted = is_wanted(index) && leaf.requires_grad();
            leaves.push(leaf.f_detach()?.f_set_requires_grad(is_wanted)?);
        }
        let outputs = run(self.operator, &self.is_there, &leaves)?.into_vec();
        gradients(&outputs, &leaves, incoming)
    }
}

/// The gradients of those leaves that require grad.
fn gradients(
    outputs: &[Option<Tensor>],
    leaves: &[Tensor],
    incoming: &[Option<Tensor>],
) -> Result<Vec<Option<Tensor>>> {
    let (mut of, mut along) = (Vec::new(), Vec::new());
    for (output, grad) in outputs.iter().zip(incoming) {
        if let (Some(output), Some(grad)) = (output, grad)
            && output.requires_grad()
        {
            of.push(output);
            along.push(grad.f_to_kind(output.f_kind()?)?);
        }
    }
    let along: Vec<Option<&Tensor>> = along.iter().map(Some).collect();
    let variables: Vec<&Tensor> = leaves.iter().filter(|leaf| leaf.requires_grad()).collect();
    let options = GradOptions { grad_outputs: &along, allow_unused: true, ..Default::default() };
    let mut found = grad(&of, &variables, &options)?.into_vec().into_iter();
    let next = |leaf: &Tensor| if leaf.requires_grad() { found.next().flatten() } else { None };
    Ok(leaves.iter().map(next).collect())
}

/// Whether two tensors are there and equal to the tolerance of the first one's kind, or both absent.
fn same(found: Option<&Tensor>, expected: Option<&Tensor>, what: &str) -> Result<()> {
    match (found, expected) {
        (Some(found), Some(expected)) => {
            let kind = found.f_kind()?;
            let (rtol, atol) = tolerance(kind);
            close(found, &expected.f_to_kind(kind)?, rtol, atol)
                .map_err(|error| Error::msg(format!("{what}: {error}")))
        }
        (None, None) => Ok(()),
        (None, Some(_)) => Err(Error::msg(format!("{what}: the former is absent"))),
        (Some(_), None) => Err(Error::msg(format!("{what}: the latter is absent"))),
    }
}
