//! `torch.autograd.gradcheck`, in its slow and its fast mode.

mod combination;
mod fast;
mod gradgradcheck;
mod jacobian;
mod vanishing;

pub use gradgradcheck::{GradgradcheckOptions, gradgradcheck};

use super::compare::{Bound, components, from_components, is_complex, parts};
use super::replica::{Elements, Replica};
use crate::autograd::{GradOptions, Tensors, grad};
use crate::check::Check;
use crate::{Error, Result};
use jacobian::{Disagreement, Jacobian, Sides};
use tch::{Device, Kind, Tensor};

const OP: &str = "gradcheck";

/// The options of [`gradcheck`]. The defaults are those of `torch.autograd.gradcheck`.
#[derive(Clone, Copy, Debug)]
pub struct GradcheckOptions {
    /// How far each element is moved up and down for the numerical derivative.
    pub eps: f64,
    /// The absolute tolerance between analytical and numerical derivatives.
    pub atol: f64,
    /// The relative tolerance between analytical and numerical derivatives.
    pub rtol: f64,
    /// How much the gradients of two backward passes through the same graph may differ.
    pub nondet_tol: f64,
    /// Check that an undefined incoming gradient, which an output gets if nothing depends on it,
    /// counts as zero.
    pub check_undefined_grad: bool,
    /// Check that incoming gradients of zero give gradients of exactly zero.
    pub check_zero_grad: bool,
    /// Check only one number of each Jacobian: a sum of all its entries with fixed weights. This
    /// costs two forward passes for each input and two backward passes for each output, whatever
    /// their sizes. Use it for inputs that are too large for the slow mode. A single wrong entry
    /// among many, such as a vector's last lane, may go unnoticed in the sum.
    pub fast_mode: bool,
}

impl Default for GradcheckOptions {
    fn default() -> Self {
        GradcheckOptions {
            eps: 1e-6,
            atol: 1e-5,
            rtol: 1e-3,
            nondet_tol: 0.0,
            check_undefined_grad: true,
            check_zero_grad: true,
            fast_mode: false,
        }
    }
}

/// Checks the gradients that the backward pass computes against derivatives that are found by
/// moving each input element a little. This is `torch.autograd.gradcheck` in its slow mode, which
/// checks every entry of every Jacobian. [`fast_mode`](GradcheckOptions::fast_mode) checks one sum
/// of them.
///
/// It checks, in this order:
/// 1. The analytical Jacobians, row by row, are the same when computed twice from one graph, up to
///    `nondet_tol`.
/// 2. `|analytical - numerical| <= atol + rtol |numerical|` for each entry. NaN is always wrong.
/// 3. Incoming gradients of zero give gradients of exactly zero, with the input's shape, kind and
///    device.
/// 4. Undefined incoming gradients, for all outputs at once and for one output at a time, give the
///    same gradients as zeros.
/// 5. Incoming gradients of several sizes and both signs, for all outputs at once, give the
///    matching combination of the Jacobians' rows: a backward pass is linear in the incoming
///    gradients and does not mix them up.
///
/// `function` gets copies of `inputs` with the same strides, storage offset and `requires_grad`, so
/// that a kernel takes the same path as for the originals. The originals are never changed. Even if
/// two of `inputs` share memory, their copies do not.
///
/// Derivatives are taken with respect to the inputs that require grad. These inputs must be of kind
/// `Double` or `ComplexDouble`, because differences of `Float` values are meaningless at a step of
/// 1e-6. The other inputs may be of any kind. Outputs that do not require grad are skipped, unless
/// no output requires grad: then no output may depend on an input. Inputs and outputs may be empty,
/// may have any number of dimensions, and may be on any device.
///
/// A complex element counts as two real ones. As in PyTorch, the gradient of a real number `s` with
/// respect to `z = x + iy` is `∂s/∂x + i ∂s/∂y`, the conjugate of what a holomorphic function's
/// derivative would suggest: the gradient for `z·z` is `grad * (z * 2).conj()`. The real and the
/// imaginary part of an output are checked separately, with incoming gradients of 1 and of `i`.
///
/// The check costs two forward passes for each input element and two backward passes for each
/// output element. In fast mode, steps 1 and 2 check one sum of the entries, and step 5 is left
/// out.
///
/// # Example
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_extension::testing::{GradcheckOptions, gradcheck};
///
/// let options = (Kind::Double, Device::Cpu);
/// let x = Tensor::randn([3, 4], options).set_requires_grad(true);
/// let w = Tensor::randn([4, 2], options).set_requires_grad(true);
/// gradcheck(|inputs| Ok(inputs[0].matmul(&inputs[1])), &[&x, &w], &GradcheckOptions::default())?;
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// To check second derivatives, use [`gradgradcheck`](super::gradgradcheck()).
///
/// # Errors
/// When a check fails. The first line of the message names the place, the analytical and the
/// numerical value, and how many entries are wrong; small Jacobians follow. When an input cannot be
/// checked, because it requires grad and is not of kind `Double` or `ComplexDouble`, or because its
/// elements overlap in memory; when no input requires grad; and any error of `function` or its
/// backward pass.
pub fn gradcheck<F, O>(function: F, inputs: &[&Tensor], options: &GradcheckOptions) -> Result<()>
where
    F: Fn(&[Tensor]) -> Result<O>,
    O: Into<Tensors>,
{
    let function = |inputs: &[Tensor]| function(inputs).map(Into::into);
    Gradcheck::new(&function, None, inputs, options)?.run()
}

/// The function whose gradients are checked.
type Checked<'a> = &'a dyn Fn(&[Tensor]) -> Result<Tensors>;

struct Gradcheck<'a> {
    function: Checked<'a>,
    /// Computes the same outputs where only their values are read, for the numerical derivatives. There,
    /// an output of zeros may be absent.
    values: Option<Checked<'a>>,
    options: &'a GradcheckOptions,
    inputs: Vec<Tensor>,
    /// The inputs that require grad.
    variables: Vec<Variable>,
    /// The properties of the outputs of the first call. All later calls must have the same.
    outputs: Vec<Option<Output>>,
}

struct Variable {
    input: usize,
    elements: Elements,
}

#[derive(Clone, Debug, PartialEq)]
struct Output {
    size: Vec<i64>,
    kind: Kind,
    device: Device,
    requires_grad: bool,
}

impl Output {
    /// The number of real numbers that the output consists of.
    fn components(&self) -> usize {
        self.size.iter().product::<i64>().unsigned_abs() as usize * parts(self.kind)
    }
}

impl<'a> Gradcheck<'a> {
    fn new(
        function: Checked<'a>,
        values: Option<Checked<'a>>,
        originals: &[&Tensor],
        options: &'a GradcheckOptions,
    ) -> Result<Self> {
        let (mut inputs, mut variables) = (Vec::new(), Vec::new());
        for (index, &original) in originals.iter().enumerate() {
            let name = format!("inputs[{index}]");
            check_kind(&name, original)?;
            let replica = Replica::of(original)?;
            if original.requires_grad() {
                let elements = replica.elements()?;
                check_overlap(&name, original, &elements)?;
                variables.push(Variable { input: index, elements });
            }
            inputs.push(replica.tensor);
        }
        if variables.is_empty() {
            let (expected, got) = ("at least one that requires grad", "none that does");
            return Err(Error::argument(
                OP,
                "inputs",
                expected,
                got,
                "call set_requires_grad(true)",
            ));
        }
        let outputs = signature(&function(&inputs)?)?;
        if outputs.iter().all(Option::is_none) {
            return Err(Error::argument(
                OP,
                "function",
                "one output or more",
                "none",
                "return its result",
            ));
        }
        Ok(Gradcheck { function, values, options, inputs, variables, outputs })
    }

    fn run(&self) -> Result<()> {
        let differentiable = self.outputs_where(|output| output.requires_grad);
        if differentiable.is_empty() {
            return self.check_independence();
        }
        let jacobians = if self.options.fast_mode {
            self.check_fast(&differentiable)?;
            None
        } else {
            Some(self.check_jacobians(&differentiable)?)
        };
        if self.options.check_zero_grad {
            self.check_zero_grad(&differentiable)?;
        }
        if self.options.check_undefined_grad {
            self.check_undefined_grad(&differentiable)?;
        }
        jacobians.map_or(Ok(()), |jacobians| self.check_combination(&differentiable, &jacobians))
    }

    fn outputs_where(&self, wanted: impl Fn(&Output) -> bool) -> Vec<usize> {
        let is_wanted = |&index: &usize| self.outputs[index].as_ref().is_some_and(&wanted);
        (0..self.outputs.len()).filter(is_wanted).collect()
    }

    fn call(&self) -> Result<Tensors> {
        let outputs = (self.function)(&self.inputs)?;
        self.compare_signature(signature(&outputs)?)?;
        Ok(outputs)
    }

    /// The components of each of `outputs`, at the inputs' present values.
    fn components_at(&self, outputs: &[usize]) -> Result<Vec<Vec<f64>>> {
        let Some(values) = self.values else {
            let found = self.call()?;
            return outputs.iter().map(|&index| components(found.get(index)?)).collect();
        };
        let found = values(&self.inputs)?;
        let mut now = signature(&found)?;
        for (index, (now, first)) in now.iter_mut().zip(&self.outputs).enumerate() {
            match (now.as_mut(), first) {
                (Some(now), Some(first)) => now.requires_grad = first.requires_grad,
                (Some(_), None) if is_zero(found.get(index)?)? => *now = None,
                (Some(_), None) => {}
                (None, _) => now.clone_from(first),
            }
        }
        self.compare_signature(now)?;
        let zeros = |index: usize| vec![0.0; self.components_of_output(index)];
        let of =
            |&index: &usize| found.optional(index).map_or_else(|| Ok(zeros(index)), components);
        outputs.iter().map(of).collect()
    }

    fn compare_signature(&self, now: Vec<Option<Output>>) -> Result<()> {
        if now == self.outputs {
            return Ok(());
        }
        let nothing = &None;
        let differing = (0..now.len().max(self.outputs.len()))
            .map(|index| {
                (
                    index,
                    self.outputs.get(index).unwrap_or(nothing),
                    now.get(index).unwrap_or(nothing),
                )
            })
            .find(|(_, first, now)| first != now);
        let (index, first, now) = differing.unwrap_or((0, nothing, nothing));
        Err(Error::msg(format!(
            "gradcheck: output {index} was {first:?} in the function's first call and is {now:?} in a later \
             one; shapes and kinds must not depend on the inputs' values"
        )))
    }

    /// Checks the Jacobians and returns the analytical ones: for each output, one for each
    /// variable.
    fn check_jacobians(&self, differentiable: &[usize]) -> Result<Vec<Vec<Jacobian>>> {
        let numerical =
            self.variables.iter().map(|variable| self.numerical(variable, differentiable));
        let numerical = numerical.collect::<Result<Vec<_>>>()?;
        let outputs = self.call()?;
        let mut checked = Vec::new();
        for (place, &index) in differentiable.iter().enumerate() {
            let analytical = self.analytical(&outputs, index)?;
            for (variable, [first, second]) in analytical.iter().enumerate() {
                self.compare_runs(index, variable, first, second)?;
                self.compare_with_numerical(index, variable, first, &numerical[variable][place])?;
            }
            checked.push(analytical.into_iter().map(|[first, _]| first).collect());
        }
        Ok(checked)
    }

    /// Computes one Jacobian for each of `outputs`, by central differences.
    fn numerical(&self, variable: &Variable, outputs: &[usize]) -> Result<Vec<Jacobian>> {
        let elements = &variable.elements;
        let mut jacobians: Vec<Jacobian> = outputs
            .iter()
            .map(|&index| Jacobian::zeros(self.components_of_output(index), elements.len()))
            .collect();
        for column in 0..elements.len() {
            let value = elements.value(column);
            let (below, above) = (value - self.options.eps, value + self.options.eps);
            let low = self.outputs_at(elements, column, below, outputs)?;
            let high = self.outputs_at(elements, column, above, outputs)?;
            elements.restore(column)?;
            for (jacobian, (low, high)) in jacobians.iter_mut().zip(low.iter().zip(&high)) {
                let derivative = |(low, high): (&f64, &f64)| (high - low) / (above - below);
                jacobian.set_column(column, low.iter().zip(high).map(derivative));
            }
        }
        Ok(jacobians)
    }

    fn outputs_at(
        &self,
        elements: &Elements,
        element: usize,
        value: f64,
        outputs: &[usize],
    ) -> Result<Vec<Vec<f64>>> {
        elements.set(element, value)?;
        self.components_at(outputs)
    }

    /// For each variable, computes the Jacobian of output `index` with backward passes, twice.
    fn analytical(&self, outputs: &Tensors, index: usize) -> Result<Vec<[Jacobian; 2]>> {
        let output = outputs.get(index)?;
        let rows = self.components_of_output(index);
        let zeros = |variable: &Variable| Jacobian::zeros(rows, variable.elements.len());
        let mut jacobians: Vec<[Jacobian; 2]> =
            self.variables.iter().map(|variable| [zeros(variable), zeros(variable)]).collect();
        for row in 0..rows {
            for run in 0..2 {
                // Make a new one each time, in case the backward pass writes to it.
                let unit = unit_vector(output, row)?;
                let gradients = self
                    .gradients(&[output], &[Some(&unit)])
                    .map_err(|error| failed(&format!("for row {row} of output {index}"), &error))?;
                for (jacobians, gradient) in jacobians.iter_mut().zip(gradients.iter()) {
                    // An absent gradient means zero, and the entries are zero already.
                    if let Some(gradient) = gradient {
                        jacobians[run].set_row(row, &components(gradient)?);
                    }
                }
            }
        }
        Ok(jacobians)
    }

    /// Computes the gradients of the variables, and keeps the graph.
    fn gradients(&self, outputs: &[&Tensor], vectors: &[Option<&Tensor>]) -> Result<Tensors> {
        let inputs: Vec<&Tensor> =
            self.variables.iter().map(|variable| &self.inputs[variable.input]).collect();
        let options = GradOptions {
            grad_outputs: vectors,
            retain_graph: Some(true),
            create_graph: false,
            allow_unused: true,
        };
        grad(outputs, &inputs, &options)
    }

    fn compare_runs(
        &self,
        output: usize,
        variable: usize,
        first: &Jacobian,
        second: &Jacobian,
    ) -> Result<()> {
        let problem =
            "backward is not deterministic or not reentrant, two runs on one graph differ";
        // NaN in both runs is deterministic; the comparison with the numerical Jacobian rejects it.
        let bound = Bound { rtol: 0.0, atol: self.options.nondet_tol, equal_nan: true };
        self.agree(output, variable, problem, [("first", first), ("second", second)], bound)
    }

    fn compare_with_numerical(
        &self,
        output: usize,
        variable: usize,
        analytical: &Jacobian,
        numerical: &Jacobian,
    ) -> Result<()> {
        let bound = Bound { rtol: self.options.rtol, atol: self.options.atol, equal_nan: false };
        let sides = [("analytical", analytical), ("numerical", numerical)];
        self.agree(output, variable, "the gradient is wrong", sides, bound)
    }

    /// Outputs without a graph claim that no output depends on an input; check that.
    fn check_independence(&self) -> Result<()> {
        let problem = "no output requires grad (is grad mode off, or the graph cut?), but this one depends on \
                       the input,";
        let exact = Bound { rtol: 0.0, atol: 0.0, equal_nan: false };
        let present = self.outputs_where(|_| true);
        for (index, variable) in self.variables.iter().enumerate() {
            for (&output, numerical) in present.iter().zip(self.numerical(variable, &present)?) {
                let zeros =
                    Jacobian::zeros(self.components_of_output(output), variable.elements.len());
                let sides = [("analytical", &zeros), ("numerical", &numerical)];
                self.agree(output, index, problem, sides, exact)?;
            }
        }
        Ok(())
    }

    fn agree(
        &self,
        output: usize,
        variable: usize,
        problem: &str,
        sides: Sides<'_>,
        bound: Bound,
    ) -> Result<()> {
        let Some(mismatch) = sides[0].1.mismatch(sides[1].1, bound) else { return Ok(()) };
        let input = self.variables[variable].input;
        let disagreement = Disagreement {
            output: self.outputs[output]
                .as_ref()
                .map_or((output, &[], Kind::Double), |found| (output, &found.size, found.kind)),
            input: (input, &self.inputs[input].size(), self.inputs[input].f_kind()?),
            problem,
            sides,
            mismatch,
            bound,
        };
        Err(Error::msg(disagreement.to_string().trim_end()))
    }

    fn components_of_output(&self, index: usize) -> usize {
        self.outputs[index].as_ref().map_or(0, Output::components)
    }
}

fn is_zero(tensor: &Tensor) -> Result<bool> {
    Ok(components(tensor)?.iter().all(|value| *value == 0.0))
}

fn check_kind(name: &str, input: &Tensor) -> Result<()> {
    Check::new(OP, name, input).defined()?;
    let kind = input.f_kind()?;
    if [Kind::Double, Kind::ComplexDouble].contains(&kind) || !input.requires_grad() {
        return Ok(());
    }
    let wide = if is_complex(kind) { Kind::ComplexDouble } else { Kind::Double };
    let expected = format!("kind {wide:?}, as it requires grad");
    let hint = format!(
        "smaller kinds are too coarse for numerical derivatives: cast it with to_kind(Kind::{wide:?})"
    );
    Err(Error::argument(OP, name, expected, format!("{kind:?}"), hint))
}

fn check_overlap(name: &str, input: &Tensor, elements: &Elements) -> Result<()> {
    if !elements.overlap() {
        return Ok(());
    }
    Err(Error::argument(
        OP,
        name,
        "elements that do not overlap in memory, as it requires grad",
        format!("strides {:?} for shape {:?}", input.stride(), input.size()),
        "they cannot be moved one at a time: call contiguous()",
    ))
}

fn signature(outputs: &Tensors) -> Result<Vec<Option<Output>>> {
    let describe = |tensor: &Tensor| -> Result<Output> {
        Ok(Output {
            size: tensor.size(),
            kind: tensor.f_kind()?,
            device: tensor.device(),
            requires_grad: tensor.requires_grad(),
        })
    };
    let present = |output: &Option<Tensor>| -> Result<Option<Output>> {
        output.as_ref().filter(|tensor| tensor.defined()).map(describe).transpose()
    };
    outputs.iter().map(present).collect()
}

fn failed(when: &str, error: &Error) -> Error {
    Error::msg(format!("gradcheck: backward failed {when}: {error}"))
}

/// A tensor in the shape of `tensor` whose components are zero except for a one at `position`. For
/// a complex output, that is the incoming gradient of an element's real part, or `i`, that of its
/// imaginary part.
fn unit_vector(tensor: &Tensor, position: usize) -> Result<Tensor> {
    let mut unit = vec![0.0; tensor.numel() * parts(tensor.f_kind()?)];
    unit[position] = 1.0;
    from_components(&unit, tensor)
}
