//! `torch.autograd.gradgradcheck`.

use super::{GradcheckOptions, gradcheck};
use crate::autograd::{GradOptions, Tensors, grad};
use crate::check::Check;
use crate::testing::replica::Replica;
use crate::{Error, Result};
use tch::Tensor;

const OP: &str = "gradgradcheck";

/// What [`gradgradcheck`] can be told; the default is what `torch.autograd.gradgradcheck` does by
/// default.
#[derive(Clone, Copy, Debug, Default)]
pub struct GradgradcheckOptions<'a> {
    /// The incoming gradients, one for each output that requires grad, in their order; those that
    /// require grad are checked as inputs are. None at all for random ones that require grad.
    pub grad_outputs: &'a [&'a Tensor],
    /// Random incoming gradients with gaps between their elements in memory.
    pub strided_grad_outputs: bool,
    /// How the gradients are checked.
    pub gradcheck: GradcheckOptions,
}

/// Checks second derivatives: [`gradcheck`] of the function that takes the inputs and the incoming
/// gradients, and returns the gradients of the inputs. What `torch.autograd.gradgradcheck` is in
/// Python.
///
/// It says whether the gradients' own derivatives are right, and nothing of the gradients
/// themselves: those are [`gradcheck`]'s.
///
/// # Example
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_extension::testing::gradgradcheck;
///
/// let x = Tensor::randn([3, 4], (Kind::Double, Device::Cpu)).set_requires_grad(true);
/// gradgradcheck(|inputs| Ok(inputs[0].tanh()), &[&x], &Default::default())?;
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// As [`gradcheck`]'s, in whose report output `i` is the gradient of input `i`, and inputs beyond
/// `function`'s own are the incoming gradients. Also when no output requires grad, when there are
/// not as many `grad_outputs` as outputs that do, and when a backward on the way has no derivative.
pub fn gradgradcheck<F, O>(
    function: F,
    inputs: &[&Tensor],
    options: &GradgradcheckOptions<'_>,
) -> Result<()>
where
    F: Fn(&[Tensor]) -> Result<O>,
    O: Into<Tensors>,
{
    let call = |inputs: &[Tensor]| function(inputs).map(|outputs| differentiable(&outputs.into()));
    for (index, &input) in inputs.iter().enumerate() {
        Check::new(OP, &format!("inputs[{index}]"), input).defined()?;
    }
    let random = incoming(&call, inputs, options)?;
    let vectors = random.iter().chain(options.grad_outputs.iter().copied());
    let all: Vec<&Tensor> = inputs.iter().copied().chain(vectors).collect();
    let gradients = |all: &[Tensor]| {
        let (inputs, vectors) = all.split_at(inputs.len());
        gradients(&call(inputs)?, inputs, vectors)
    };
    gradcheck(gradients, &all, &options.gradcheck).map_err(|error| renamed(error, inputs.len()))
}

fn differentiable(outputs: &Tensors) -> Vec<Tensor> {
    let present =
        outputs.iter().flatten().filter(|output| output.defined() && output.requires_grad());
    present.map(Tensor::shallow_clone).collect()
}

/// Random incoming gradients; none when there are given ones, which are as many as there have to
/// be.
fn incoming(
    call: &dyn Fn(&[Tensor]) -> Result<Vec<Tensor>>,
    inputs: &[&Tensor],
    options: &GradgradcheckOptions<'_>,
) -> Result<Vec<Tensor>> {
    // Copies, in case the function writes to its inputs.
    let copies =
        inputs.iter().map(|input| Ok(Replica::of(input)?.tensor)).collect::<Result<Vec<_>>>()?;
    let outputs = call(&copies)?;
    if outputs.is_empty() {
        let (expected, hint) =
            ("an output that requires grad", "is grad mode off, or the graph cut?");
        return Err(Error::argument(OP, "function", expected, "none that does", hint));
    }
    let given = options.grad_outputs.len();
    if given == 0 {
        return outputs
            .iter()
            .map(|output| random_like(output, options.strided_grad_outputs))
            .collect();
    }
    if given == outputs.len() {
        return Ok(Vec::new());
    }
    let expected = format!("{}, one for each output that requires grad", outputs.len());
    Err(Error::argument(OP, "grad_outputs", expected, given.to_string(), ""))
}

fn random_like(output: &Tensor, strided: bool) -> Result<Tensor> {
    let mut size = output.size();
    size.extend(strided.then_some(2));
    let random = Tensor::f_randn(&size, (output.f_kind()?, output.device()))?;
    let random = if strided { random.f_select(-1, 0)? } else { random };
    Ok(random.f_set_requires_grad(true)?)
}

/// The gradients of the inputs, each in its input's place, as part of the graph.
fn gradients(outputs: &[Tensor], inputs: &[Tensor], vectors: &[Tensor]) -> Result<Tensors> {
    let outputs: Vec<&Tensor> = outputs.iter().collect();
    let variables: Vec<&Tensor> = inputs.iter().filter(|input| input.requires_grad()).collect();
    let vectors: Vec<Option<&Tensor>> = vectors.iter().map(Some).collect();
    let options = GradOptions {
        grad_outputs: &vectors,
        create_graph: true,
        allow_unused: true,
        ..Default::default()
    };
    let found = grad(&outputs, &variables, &options)?;
    let mut found = found.iter().map(|gradient| gradient.as_ref().map(Tensor::shallow_clone));
    let in_place =
        |input: &Tensor| if input.requires_grad() { found.next().flatten() } else { None };
    Ok(inputs.iter().map(in_place).collect::<Vec<_>>().into())
}

/// What gradcheck says, said of second derivatives.
fn renamed(error: Error, inputs: usize) -> Error {
    if let Error::Argument { argument, expected, got, hint, op } = error {
        let op = if op == super::OP { OP.to_string() } else { op };
        return Error::Argument { op, argument, expected, got, hint };
    }
    let text = error.to_string();
    let Some(text) = text.strip_prefix("gradcheck: ") else { return error };
    Error::msg(format!(
        "{OP} (output i is the gradient of input i; inputs from {inputs} on are the incoming gradients): {text}"
    ))
}
