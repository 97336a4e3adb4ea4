//! The cross-entropy of logits and classes.

use super::loss::kernels::{
    Operands, Wanted, compute_kind, is_on_cpu, mean_factor, rows, scale, total,
};
use crate::amp::{CastPolicy, autocast_inputs};
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply, differentiate_reference};
use crate::ffi::tensor::plain;
use crate::view::view;
use crate::{Error, Result, check};
use tch::{Kind, Reduction, Tensor};

const OP: &str = "cross_entropy";
const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

/// What [`cross_entropy`] may be told besides logits and targets. The defaults are those of PyTorch's
/// `F.cross_entropy`.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyOptions<'a> {
    /// w, `[V]`: the weights of the classes, of the logits' kind; `None` for ones
    pub weight: Option<&'a Tensor>,
    /// What is made of the rows' losses.
    pub reduction: Reduction,
    /// A row with this target has no part in the loss.
    pub ignore_index: i64,
    /// ε, from 0 to 1: so much of a target's probability is spread over all classes.
    pub label_smoothing: f64,
}

impl Default for CrossEntropyOptions<'_> {
    fn default() -> Self {
        CrossEntropyOptions {
            weight: None,
            reduction: Reduction::Mean,
            ignore_index: -100,
            label_smoothing: 0.0,
        }
    }
}

/// The cross-entropy of rows of logits, given the class of each.
///
/// ```text
/// lse = log Σ exp z      W = Σ w
/// loss = (1 - ε) w[t] (lse - z[t]) + ε / V (W lse - Σ w z)        of a row z with target t
/// sum = Σ loss           mean = Σ loss / Σ w[t]                   over rows that are not ignored
/// ```
///
/// * `logits`: z, `[M, V]`, of kind `Float`, `Double`, `Half` or `BFloat16`, on the CPU or CUDA
/// * `targets`: t, `[M]`, of kind `Int64`: a class from 0 to V - 1, or `ignore_index`
///
/// Returns a loss without dimensions, or with `Reduction::None` those of the rows, `[M]`; of the
/// logits' kind. The mean of no rows is NaN, as in libtorch. Strides and sizes are arbitrary. For the
/// half kinds everything is computed in `Float`, and the loss and each gradient are rounded once.
/// Under autocast, logits and weights that are not `Double` are cast to `Float`, as in libtorch. The
/// logits have first and second derivatives; the weights have none, as in libtorch. On CUDA the
/// operator works on libtorch's current stream and never waits for the GPU. It is deterministic.
///
/// A mean or sum that needs a gradient computes it in the forward pass, from logits that are read
/// once: the backward pass then only multiplies it by the incoming gradient, and does nothing if that
/// is 1. With `Reduction::None` the backward pass computes it from the logits.
///
/// Equivalent to:
/// ```
/// # use tch::{Kind, Device, Tensor};
/// # use tch_extension::ops::{CrossEntropyOptions, cross_entropy};
/// # let logits = Tensor::randn([5, 7], (Kind::Double, Device::Cpu));
/// # let targets = Tensor::from_slice(&[0_i64, 6, 3, -100, 2]);
/// let log = logits.log_softmax(-1, Kind::Double);
/// let loss = log.nll_loss(&targets);
///
/// let ours = cross_entropy(&logits, &targets, &CrossEntropyOptions::default());
/// assert!(ours.allclose(&loss, 1e-12, 1e-12, false));
/// ```
///
/// # Panics
/// If [`f_cross_entropy`] returns an error.
pub fn cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    options: &CrossEntropyOptions<'_>,
) -> Tensor {
    super::unwrap(f_cross_entropy(logits, targets, options))
}

/// [`cross_entropy`], with an error instead of a panic.
///
/// # Errors
/// If an argument has another kind, device or shape than stated (the error names the argument); on
/// the CPU if a target is no class; or if libtorch or CUDA fails. A target on CUDA that is no class
/// fails an assertion on the device, as in libtorch, after which the program cannot use CUDA any
/// more.
pub fn f_cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    options: &CrossEntropyOptions<'_>,
) -> Result<Tensor> {
    check_arguments(logits, targets, options)?;
    let cast = autocast_inputs(CastPolicy::Float, &[Some(logits), options.weight])?;
    let (logits, weight) = match cast.as_deref() {
        Some([Some(logits), weight]) => (logits, weight.as_ref()),
        _ => (logits, options.weight),
    };
    if let Some(weight) = weight {
        check!(OP, weight).kind_as(logits.f_kind()?, "logits")?;
    }
    let CrossEntropyOptions { reduction, ignore_index, label_smoothing, .. } = *options;
    let loss = CrossEntropy { reduction, ignore_index, label_smoothing };
    let weight = weight.map(Tensor::detach);
    apply(loss, &[Some(logits), Some(targets), weight.as_ref()])?.single()
}

/// [`cross_entropy`] in plain tch operations, without checks of its own. It is libtorch's own, except
/// that half kinds are computed in `Float`.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn cross_entropy_reference(
    logits: &Tensor,
    targets: &Tensor,
    options: &CrossEntropyOptions<'_>,
) -> Result<Tensor> {
    let (kind, compute) = (logits.f_kind()?, compute_kind(logits.f_kind()?));
    let weight = options.weight.map(|weight| weight.f_to_kind(compute)).transpose()?;
    let loss = logits.f_to_kind(compute)?.f_cross_entropy_loss(
        targets,
        weight.as_ref(),
        options.reduction,
        options.ignore_index,
        options.label_smoothing,
    )?;
    Ok(loss.f_to_kind(kind)?)
}

fn check_arguments(
    logits: &Tensor,
    targets: &Tensor,
    options: &CrossEntropyOptions<'_>,
) -> Result<()> {
    let logits =
        check!(OP, logits).defined()?.kind_in(&KINDS)?.supported_device()?.dim(2, "[M, V]")?;
    let (rows, classes) = logits.tensor().size2()?;
    let targets = check!(OP, targets).defined()?.same_device_as(&logits)?;
    targets.kind_in(&[Kind::Int64])?.shape("[M]", &[rows])?;
    if let Some(weight) = options.weight {
        let weight = check!(OP, weight).defined()?.same_device_as(&logits)?;
        weight.kind_in(&KINDS)?.shape("[V]", &[classes])?;
    }
    let CrossEntropyOptions { reduction, label_smoothing, .. } = *options;
    if !(0.0..=1.0).contains(&label_smoothing) {
        let got = label_smoothing.to_string();
        return Err(Error::argument(OP, "label_smoothing", "a number from 0 to 1", &got, ""));
    }
    if matches!(reduction, Reduction::Other(_)) {
        let got = format!("{reduction:?}");
        return Err(Error::argument(OP, "reduction", "None, Mean or Sum", &got, ""));
    }
    Ok(())
}

/// On the CPU, refuses a target that is no class. On CUDA the kernel stops the program.
fn check_classes(targets: &Tensor, classes: i64, ignore_index: i64) -> Result<()> {
    if !is_on_cpu(targets) {
        return Ok(());
    }
    let is_right = |target: i64| (0..classes).contains(&target) || target == ignore_index;
    let all = view::<i64, 1>(targets)?;
    let Some((at, wrong)) = all.iter().enumerate().find(|(_, target)| !is_right(*target)) else {
        return Ok(());
    };
    let last = classes - 1;
    let expected = format!("classes from 0 to V - 1 = {last}, or ignore_index {ignore_index}");
    Err(Error::argument(OP, "targets", expected, format!("{wrong} at {at}"), ""))
}

struct CrossEntropy {
    reduction: Reduction,
    ignore_index: i64,
    label_smoothing: f64,
}

/// The positions of the inputs, which are also their slots among the saved tensors.
mod place {
    pub const LOGITS: usize = 0;
    pub const TARGETS: usize = 1;
    pub const WEIGHT: usize = 2;
    pub const LEN: usize = 3;
}

/// Saved after the inputs: the gradient of a mean or sum.
const GRADIENT: usize = place::LEN;

impl Function for CrossEntropy {
    const NAME: &'static str = OP;
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (logits, targets) = (inputs.get(place::LOGITS)?, inputs.get(place::TARGETS)?);
        let weight = inputs.optional(place::WEIGHT);
        check_classes(targets, logits.size2()?.1, self.ignore_index)?;
        let keep = saver.needs_input_grad(place::LOGITS);
        let (loss, gradient) = self.forward_of(logits, targets, weight, keep)?;
        for tensor in [Some(logits), Some(targets), weight, gradient.as_ref()] {
            saver.save_optional(tensor);
        }
        Ok(loss.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let inputs =
            (0..place::LEN).map(|slot| ctx.saved_optional(slot)).collect::<Result<Vec<_>>>()?;
        if ctx.create_graph() {
            return differentiate_reference(ctx, &inputs, grads, |inputs| self.reference(inputs));
        }
        let grad = grads.get(0)?;
        let gradient = match ctx.saved_optional(GRADIENT)? {
            Some(gradient) => scaled(gradient, grad, ctx.is_last_backward())?,
            None => self.gradient_of_rows(&inputs, grad)?,
        };
        Ok([Some(gradient), None, None].into())
    }
}

/// The gradient times a number, in place if nobody else reads it.
fn scaled(gradient: Tensor, factor: &Tensor, is_last: bool) -> Result<Tensor> {
    let mut own = match is_last {
        true => gradient,
        false => gradient.f_to_dtype(gradient.f_kind()?, false, true)?,
    };
    scale(&mut own, factor)?;
    Ok(own)
}

impl CrossEntropy {
    fn operands<'a>(
        &self,
        logits: &'a Tensor,
        targets: &'a Tensor,
        weight: Option<&'a Tensor>,
    ) -> Operands<'a> {
        let CrossEntropy { ignore_index, label_smoothing, .. } = *self;
        Operands { logits, targets, weight, ignore_index, label_smoothing }
    }

    /// The loss and, if it is kept, the gradient of a mean or sum.
    fn forward_of(
        &self,
        logits: &Tensor,
        targets: &Tensor,
        weight: Option<&Tensor>,
        keep: bool,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (logits, targets) = (plain(logits)?, plain(targets)?);
        let (kind, device) = (logits.f_kind()?, logits.device());
        let compute = (compute_kind(kind), device);
        let weight = weight.map(|weight| plain(&weight.f_to_kind(compute.0)?)).transpose()?;
        let operands = self.operands(&logits, &targets, weight.as_ref());
        let mut losses = Tensor::f_empty([logits.size2()?.0], compute)?;
        let Some(factor) = self.factor(&targets, weight.as_ref(), compute.0)? else {
            rows(&operands, Wanted { losses: Some(&mut losses), gradients: None })?;
            return Ok((losses.f_to_kind(kind)?, None));
        };
        let mut gradient =
            keep.then(|| Tensor::f_empty(logits.size(), (kind, device))).transpose()?;
        let gradients = gradient.as_mut().map(|gradient| (&factor, gradient));
        rows(&operands, Wanted { losses: Some(&mut losses), gradients })?;
        Ok((total(&losses, &factor, kind)?, gradient))
    }

    /// By what the sum of the losses is multiplied, `[1]`; `None` without a reduction.
    fn factor(
        &self,
        targets: &Tensor,
        weight: Option<&Tensor>,
        kind: Kind,
    ) -> Result<Option<Tensor>> {
        Ok(match self.reduction {
            Reduction::Mean => Some(mean_factor(targets, weight, self.ignore_index, kind)?),
            Reduction::Sum => Some(Tensor::f_ones([1], (kind, targets.device()))?),
            _ => None,
        })
    }

    /// The gradient of losses without a reduction.
    fn gradient_of_rows(&self, inputs: &[Option<Tensor>], grad: &Tensor) -> Result<Tensor> {
        let inputs: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
        let inputs = Inputs::new(&inputs);
        let logits = plain(inputs.get(place::LOGITS)?)?;
        let targets = plain(inputs.get(place::TARGETS)?)?;
        let compute = compute_kind(logits.f_kind()?);
        let weight = inputs.optional(place::WEIGHT);
        let weight = weight.map(|weight| plain(&weight.f_to_kind(compute)?)).transpose()?;
        let factors = plain(&grad.f_to_kind(compute)?)?;
        let mut gradient = logits.f_empty_like()?;
        let operands = self.operands(&logits, &targets, weight.as_ref());
        let gradients = Some((&factors, &mut gradient));
        rows(&operands, Wanted { losses: None, gradients })?;
        Ok(gradient)
    }

    fn reference(&self, inputs: &[Option<Tensor>]) -> Result<Tensors> {
        let inputs: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
        let inputs = Inputs::new(&inputs);
        let CrossEntropy { reduction, ignore_index, label_smoothing } = *self;
        let weight = inputs.optional(place::WEIGHT);
        let options = CrossEntropyOptions { weight, reduction, ignore_index, label_smoothing };
        let (logits, targets) = (inputs.get(place::LOGITS)?, inputs.get(place::TARGETS)?);
        Ok(cross_entropy_reference(logits, targets, &options)?.into())
    }
}
