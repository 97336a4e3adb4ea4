//! The cross-entropy of logits and classes.

use super::loss::check::{check_options, check_targets};
use super::loss::kernels::{
    Gradients, Operands, Wanted, compute_kind, is_in_range_without_scale, mean_factor, rows, scale,
    scaled, times_gradient, total,
};
use crate::amp::{CastPolicy, autocast_inputs};
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply, differentiate_reference};
use crate::ffi::tensor::{bump_version, is_plain, plain};
use crate::{Error, Result, check};
use tch::{Kind, Reduction, Tensor};

pub(super) mod parts;

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
    /// Whether the gradient may take the logits' memory, which saves as many bytes. The logits must not
    /// be read after the call. If autograd saved them before it, the backward pass is an error; what
    /// reads them later finds the gradient. There are no second derivatives then. The logits must be a
    /// tensor that libtorch allows to be changed in place, which a leaf that requires grad is not; if
    /// they are slices of one tensor, the call for one of them invalidates the others' gradients, and
    /// the backward pass says so.
    pub reuse_logits: bool,
}

impl Default for CrossEntropyOptions<'_> {
    fn default() -> Self {
        CrossEntropyOptions {
            weight: None,
            reduction: Reduction::Mean,
            ignore_index: -100,
            label_smoothing: 0.0,
            reuse_logits: false,
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
/// A mean or sum that needs a gradient computes it in the forward pass: the backward pass then only
/// multiplies it by the incoming gradient, and does nothing if that is 1. With `Reduction::None` the
/// backward pass computes it from the logits; so it does for logits of `Half`, whose gradients need
/// the loss scale. On a GPU of compute capability 9.0 a row of logits is read once, unless it exceeds
/// about 850 KB.
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
    let CrossEntropyOptions { reduction, ignore_index, label_smoothing, reuse_logits, .. } =
        *options;
    let loss = CrossEntropy { reduction, ignore_index, label_smoothing, reuse_logits };
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
    check_options(OP, options.reduction, options.label_smoothing)?;
    Ok(())
}

struct CrossEntropy {
    reduction: Reduction,
    ignore_index: i64,
    label_smoothing: f64,
    reuse_logits: bool,
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
    const WITHOUT_AUTOCAST: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (logits, targets) = (inputs.get(place::LOGITS)?, inputs.get(place::TARGETS)?);
        let weight = inputs.optional(place::WEIGHT);
        check_targets(OP, targets, logits.size2()?.1, self.ignore_index)?;
        let keep = saver.needs_input_grad(place::LOGITS);
        if keep && self.reuse_logits {
            saver.check_in_place(place::LOGITS, "logits: reuse_logits")?;
        }
        let keep = keep && is_in_range_without_scale(logits.f_kind()?);
        let (loss, gradient) = self.forward_of(logits, targets, weight, keep)?;
        let is_gone = self.reuse_logits && gradient.is_some();
        let logits = Some(logits).filter(|_| !is_gone);
        for tensor in [logits, Some(targets), weight, gradient.as_ref()] {
            saver.save_optional(tensor);
        }
        Ok(loss.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let inputs =
            (0..place::LEN).map(|slot| ctx.saved_optional(slot)).collect::<Result<Vec<_>>>()?;
        if ctx.create_graph() {
            if inputs[place::LOGITS].is_none() {
                return Err(Error::msg(
                    "cross_entropy: logits: expected to be there for a second derivative, got their \
                     gradient in their place; leave reuse_logits off",
                ));
            }
            return differentiate_reference(ctx, &inputs, grads, |inputs| self.reference(inputs));
        }
        let grad = grads.get(0)?;
        let gradient = match ctx.saved_optional(GRADIENT)? {
            Some(mut gradient) if ctx.is_last_backward() => {
                scale(&mut gradient, grad)?;
                gradient
            }
            Some(gradient) => scaled(&gradient, grad)?,
            None => self.gradient_of_rows(&inputs, grad, ctx.is_last_backward())?,
        };
        Ok([Some(gradient), None, None].into())
    }
}

impl CrossEntropy {
    fn operands<'a>(
        &self,
        logits: &'a Tensor,
        targets: &'a Tensor,
        weight: Option<&'a Tensor>,
    ) -> Operands<'a> {
        let CrossEntropy { ignore_index, label_smoothing, .. } = *self;
        Operands {
            logits,
            targets,
            weight,
            ignore_index,
            label_smoothing,
            softcap: 0.0,
            z_loss: 0.0,
        }
    }

    /// The loss and, if it is kept, the gradient of a mean or sum.
    fn forward_of(
        &self,
        logits: &Tensor,
        targets: &Tensor,
        weight: Option<&Tensor>,
        keep: bool,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let is_copied = !is_plain(logits);
        let (mut logits, targets) = (plain(logits)?, plain(targets)?);
        let (kind, device) = (logits.f_kind()?, logits.device());
        let compute = (compute_kind(kind), device);
        let weight = weight.map(|weight| plain(&weight.f_to_kind(compute.0)?)).transpose()?;
        let operands = self.operands(&logits, &targets, weight.as_ref());
        let mut losses = Tensor::f_empty([logits.size2()?.0], compute)?;
        let Some(factor) = self.factor(&targets, weight.as_ref(), compute.0)? else {
            rows(&operands, Wanted { losses: Some(&mut losses), gradients: None })?;
            return Ok((losses.f_to_kind(kind)?, None));
        };
        // A copy is nobody else's.
        let in_place = keep && (is_copied || self.reuse_logits);
        let mut own = (keep && !in_place).then(|| logits.f_empty_like()).transpose()?;
        let gradients = match own.as_mut() {
            Some(own) => Some(Gradients::To(own)),
            None => in_place.then_some(Gradients::InPlace),
        };
        let gradients = gradients.map(|gradients| (&factor, gradients));
        rows(&operands, Wanted { losses: Some(&mut losses), gradients })?;
        if in_place {
            bump_version(&mut logits)?;
            own = Some(logits.f_detach()?);
        }
        Ok((total(&losses, &factor, kind)?, own))
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

    /// The gradient, from the logits. Nobody needs them after the last one.
    fn gradient_of_rows(
        &self,
        inputs: &[Option<Tensor>],
        grad: &Tensor,
        is_last: bool,
    ) -> Result<Tensor> {
        let inputs: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
        let inputs = Inputs::new(&inputs);
        let logits = inputs.get(place::LOGITS)?;
        let in_place = !is_plain(logits) || (self.reuse_logits && is_last);
        let mut logits = plain(logits)?;
        let targets = plain(inputs.get(place::TARGETS)?)?;
        let compute = compute_kind(logits.f_kind()?);
        let weight = inputs.optional(place::WEIGHT);
        let weight = weight.map(|weight| plain(&weight.f_to_kind(compute)?)).transpose()?;
        let factors = match self.factor(&targets, weight.as_ref(), compute)? {
            Some(factor) => times_gradient(&factor, grad)?,
            None => plain(&grad.f_to_kind(compute)?)?,
        };
        let operands = self.operands(&logits, &targets, weight.as_ref());
        if in_place {
            rows(
                &operands,
                Wanted { losses: None, gradients: Some((&factors, Gradients::InPlace)) },
            )?;
            bump_version(&mut logits)?;
            return Ok(logits.f_detach()?);
        }
        let mut gradient = logits.f_empty_like()?;
        let gradients = Some((&factors, Gradients::To(&mut gradient)));
        rows(&operands, Wanted { losses: None, gradients })?;
        Ok(gradient)
    }

    fn reference(&self, inputs: &[Option<Tensor>]) -> Result<Tensors> {
        let inputs: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
        let inputs = Inputs::new(&inputs);
        let CrossEntropy { reduction, ignore_index, label_smoothing, .. } = *self;
        let weight = inputs.optional(place::WEIGHT);
        let options = CrossEntropyOptions {
            weight,
            reduction,
            ignore_index,
            label_smoothing,
            ..Default::default()
        };
        let (logits, targets) = (inputs.get(place::LOGITS)?, inputs.get(place::TARGETS)?);
        Ok(cross_entropy_reference(logits, targets, &options)?.into())
    }
}
