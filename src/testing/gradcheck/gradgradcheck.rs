//! Checks of second derivatives: `torch.autograd.gradgradcheck`.

use super::{Gradcheck, GradcheckOptions};
use crate::autograd::{GradOptions, Tensors, grad};
use crate::check::Check;
use crate::testing::replica::Replica;
use crate::{Error, Result};
use tch::Tensor;

const OP: &str = "gradgradcheck";

/// The options of [`gradgradcheck`]. The defaults are those of `torch.autograd.gradgradcheck`.
#[derive(Clone, Copy, Debug, Default)]
pub struct GradgradcheckOptions<'a> {
    /// The incoming gradients, one for each output that requires grad, in order. Those that require
    /// grad are checked like inputs. If the list is empty, random incoming gradients that require
    /// grad are used.
    pub grad_outputs: &'a [&'a Tensor],
    /// Use random incoming gradients that have gaps between their elements in memory.
    pub strided_grad_outputs: bool,
    /// How the gradients are checked.
    pub gradcheck: GradcheckOptions,
}

/// Checks second derivatives, as `torch.autograd.gradgradcheck` does in Python. It runs
/// [`gradcheck`](super::gradcheck()) on the function that takes the inputs and the incoming gradients and returns the
/// gradients of the inputs.
///
/// It checks only the derivatives of the gradients, not the gradients themselves; use
/// [`gradcheck`](super::gradcheck()) for those. The numerical derivatives are those of the gradients
/// without `create_graph`, as training computes them, where PyTorch records a graph each time: an
/// operator may compute the two in different ways.
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
/// As for [`gradcheck`](super::gradcheck()). In its report, output `i` is the gradient of input `i`, and the inputs
/// after `function`'s own are the incoming gradients. Also when no output requires grad, when the
/// number of `grad_outputs` is not the number of outputs that require grad, and when a backward
/// pass that runs has no derivative.
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
    let first_order = |all: &[Tensor], create_graph: bool| {
        let (inputs, vectors) = all.split_at(inputs.len());
        gradients(&call(inputs)?, inputs, vectors, create_graph)
    };
    let recorded = |all: &[Tensor]| first_order(all, true);
    // An operator with a second derivative often computes its gradients twice as slowly with a graph,
    // or more. And the second derivative is that of the gradients that training uses.
    let values = |all: &[Tensor]| first_order(all, false);
    Gradcheck::new(&recorded, Some(&values), &all, &options.gradcheck)
        .and_then(|check| check.run())
        .map_err(|error| renamed(error, inputs.len()))
}

fn differentiable(outputs: &Tensors) -> Vec<Tensor> {
    let present =
        outputs.iter().flatten().filter(|output| output.defined() && output.requires_grad());
    present.map(Tensor::shallow_clone).collect()
}

/// Makes random incoming gradients. Returns an empty list if incoming gradients are given; their
/// number is checked.
fn incoming(
    call: &dyn Fn(&[Tensor]) -> Result<Vec<Tensor>>,
    inputs: &[&Tensor],
    options: &GradgradcheckOptions<'_>,
) -> Result<Vec<Tensor>> {
    // Call it with copies, in case the function writes to its inputs.
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

/// Computes the gradients of the inputs, each at its input's index.
fn gradients(
    outputs: &[Tensor],
    inputs: &[Tensor],
    vectors: &[Tensor],
    create_graph: bool,
) -> Result<Tensors> {
    let outputs: Vec<&Tensor> = outputs.iter().collect();
    let variables: Vec<&Tensor> = inputs.iter().filter(|input| input.requires_grad()).collect();
    let vectors: Vec<Option<&Tensor>> = vectors.iter().map(Some).collect();
    let options = GradOptions {
        grad_outputs: &vectors,
        create_graph,
        allow_unused: true,
        ..Default::default()
    };
    let found = grad(&outputs, &variables, &options)?;
    let mut found = found.iter().map(|gradient| gradient.as_ref().map(Tensor::shallow_clone));
    let in_place =
        |input: &Tensor| if input.requires_grad() { found.next().flatten() } else { None };
    Ok(inputs.iter().map(in_place).collect::<Vec<_>>().into())
}

/// Rewords an error of gradcheck for second derivatives.
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
