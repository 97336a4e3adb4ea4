//! The cross-entropy of logits and classes.

use super::loss::check::{KINDS, check_options, check_target, loss};
use super::loss::tensors::{self, Factor, Operands, Wanted, compute_kind, is_ahead, rows, times};
use crate::Result;
use crate::amp::CastPolicy;
use crate::ffi::facts::empty_of;
use crate::ffi::tensor::{bump_version, is_plain, plain};
use crate::operator::{
    Again, Args, Call, Dim, Gradients, Incoming, Made, Meta, Metas, Needs, Operator, Outputs,
    Signature, Slots, call,
};
use tch::{Device, Kind, Reduction, Tensor};

/// What [`cross_entropy`] may be told besides logits and their classes. The defaults are those of PyTorch's
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
/// * `input`: the logits z, `[M, V]`, of kind `Float`, `Double`, `Half` or `BFloat16`, on the CPU or CUDA
/// * `target`: t, `[M]`, of kind `Int64`: a class from 0 to V - 1, or `ignore_index`
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
pub fn cross_entropy(input: &Tensor, target: &Tensor, options: &CrossEntropyOptions<'_>) -> Tensor {
    super::unwrap(f_cross_entropy(input, target, options))
}

/// [`cross_entropy`], with an error instead of a panic.
///
/// # Errors
/// If an argument has another kind, device or shape than stated (the error names the argument); on
/// the CPU if a target is no class; or if libtorch or CUDA fails. A target on CUDA that is no class
/// fails an assertion on the device, as in libtorch, after which the program cannot use CUDA any
/// more.
pub fn f_cross_entropy(
    input: &Tensor,
    target: &Tensor,
    options: &CrossEntropyOptions<'_>,
) -> Result<Tensor> {
    let CrossEntropyOptions { weight, reduction, ignore_index, label_smoothing, reuse_logits } =
        *options;
    let constant =
        weight.filter(|weight| weight.requires_grad()).map(Tensor::f_detach).transpose()?;
    let weight = constant.as_ref().or(weight);
    let operator = CrossEntropy { ignore_index, reduction, label_smoothing, reuse_logits };
    Ok(call(operator, &CrossEntropyIn { input, target, weight })?.loss)
}

/// [`cross_entropy`] in plain tch operations, without checks of its own. It is libtorch's own, except
/// that half kinds are computed in `Float`.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn cross_entropy_reference(
    input: &Tensor,
    target: &Tensor,
    options: &CrossEntropyOptions<'_>,
) -> Result<Tensor> {
    let (kind, compute) = (input.f_kind()?, compute_kind(input.f_kind()?));
    let weight = options.weight.map(|weight| weight.f_to_kind(compute)).transpose()?;
    let loss = input.f_to_kind(compute)?.f_cross_entropy_loss(
        target,
        weight.as_ref(),
        options.reduction,
        options.ignore_index,
        options.label_smoothing,
    )?;
    Ok(loss.f_to_kind(kind)?)
}

crate::signature! {
    /// The cross-entropy of logits `[M, V]` and classes `[M]` (int64), as torch.nn.functional.cross_entropy.
    ///
    /// Returns a scalar, or `[M]` if reduction is "none". A mean or sum has its gradient when the forward pass
    /// ends.
    pub CrossEntropy: CrossEntropyIn -> CrossEntropyOut = "cross_entropy"(
        input,
        target!,
        weight?!,
        ignore_index: i64 = -100,
        reduction: Reduction = Reduction::Mean,
        label_smoothing: f64 = 0.0,
    ) -> (loss) {
        /// [`CrossEntropyOptions::reuse_logits`].
        reuse_logits: bool,
    }
}

crate::slots! {
    /// The gradient for an incoming one of 1, if the forward pass computes it.
    pub struct Ahead { input? }
}

impl Operator for CrossEntropy {
    type Kept = Ahead;
    type Plan = ();

    const AUTOCAST: [Option<CastPolicy>; 2] = [Some(CastPolicy::Float); 2];
    const MUST_BE_CONSTANT: Option<&'static str> = Some("weights of classes without gradient");

    fn rule<D: Dim>(
        &self,
        of: &Metas<Self, D>,
        needs: &Needs<Self>,
    ) -> Result<Made<Self, Meta<D>>> {
        let input = of.input.kind_in(&KINDS)?.supported_device()?.dim(2, "[M, V]")?;
        let loss = loss(input, &of.target, "[M]", self.reduction)?;
        let classes = &input.sizes()[1..];
        let weight = of.weight.as_ref().map(|weight| weight.like(input)).transpose()?;
        weight.map(|weight| weight.shape("[V]", classes)).transpose()?;
        check_options(Self::NAME, self.reduction, self.label_smoothing)?;
        let is_kept = needs.input && is_ahead(self.reduction, input.kind());
        Ok(Made {
            outputs: CrossEntropyOut { loss },
            kept: Ahead { input: is_kept.then(|| input.clone()) },
        })
    }

    fn overwrites(&self) -> &'static [(usize, &'static str)] {
        if self.reuse_logits { &[(0, "reuse_logits")] } else { &[] }
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        let is_kept = call.check()?.kept.input.is_some();
        let (input, target) = (call.of.input, call.of.target);
        check_target(Self::NAME, target, input.size2()?.1, self.ignore_index)?;
        let (loss, gradient) = self.losses(&call.of, is_kept)?;
        Ok(Made { outputs: CrossEntropyOut { loss }, kept: Ahead { input: gradient } })
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        let Some(grad) = &grads.loss else { return Ok(CrossEntropyIn::none()) };
        let input = match &again.kept.input {
            Some(gradient) => {
                let gradients = [Some((gradient.shallow_clone(), gradient.f_kind()?)), None, None];
                let [product, ..] = times(&gradients, grad, again.may_overwrite()?)?;
                product
            }
            None => {
                let CrossEntropyIn { input, target, weight } = &again.of;
                let of = [input, target, weight].map(Option::as_ref);
                let of = CrossEntropyIn::borrowed(Self::NAME, &of)?;
                Some(self.gradient_of_rows(&of, grad, || again.may_overwrite())?)
            }
        };
        Ok(CrossEntropyIn { input, target: None, weight: None })
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        let CrossEntropy { reduction, ignore_index, label_smoothing, .. } = *self;
        let CrossEntropyIn { input, target, weight } = *of;
        let options = CrossEntropyOptions {
            weight,
            reduction,
            ignore_index,
            label_smoothing,
            ..Default::default()
        };
        Ok(CrossEntropyOut { loss: cross_entropy_reference(input, target, &options)? })
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
    fn losses(&self, of: &Args<'_, Self>, keep: bool) -> Result<(Tensor, Option<Tensor>)> {
        let is_copied = !is_plain(of.input);
        let (mut logits, targets) = (plain(of.input)?, plain(of.target)?);
        let (kind, device) = (logits.f_kind()?, logits.device());
        let compute = (compute_kind(kind), device);
        let weight = of.weight.map(|weight| plain(&weight.f_to_kind(compute.0)?)).transpose()?;
        let operands = self.operands(&logits, &targets, weight.as_ref());
        let mut losses = empty_of(&[logits.size2()?.0], compute)?;
        let factor = self.factor(compute)?;
        let is_one = self.reduction != Reduction::None;
        let mut total = is_one.then(|| empty_of(&[], (kind, device))).transpose()?;
        // A copy is nobody else's.
        let in_place = keep && (is_copied || self.reuse_logits);
        let mut own = (keep && !in_place).then(|| logits.f_empty_like()).transpose()?;
        let gradients = match own.as_mut() {
            Some(own) => Some(tensors::Gradients::To(own)),
            None => in_place.then_some(tensors::Gradients::InPlace),
        };
        let wanted = Wanted {
            losses: Some(&mut losses),
            total: total.as_mut(),
            factor: factor.as_ref().map_or(Factor::One, Factor::OfMean),
            grads: None,
            gradients,
        };
        rows(&operands, wanted)?;
        if in_place {
            bump_version(&mut logits)?;
            own = Some(logits.f_detach()?);
        }
        let loss = total.map_or_else(|| losses.f_to_kind(kind), Ok)?;
        Ok((loss, own))
    }

    /// Memory for the factor of a mean.
    fn factor(&self, compute: (Kind, Device)) -> Result<Option<Tensor>> {
        let is_mean = self.reduction == Reduction::Mean;
        is_mean.then(|| empty_of(&[1], compute)).transpose()
    }

    /// The gradient, from the logits, and in their place if they are reused and may be overwritten.
    fn gradient_of_rows(
        &self,
        of: &Args<'_, Self>,
        grad: &Tensor,
        may_overwrite: impl Fn() -> Result<bool>,
    ) -> Result<Tensor> {
        let (mut logits, targets) = (plain(of.input)?, plain(of.target)?);
        // A row of a target that is no class would be left as it is.
        check_target(Self::NAME, &targets, logits.size2()?.1, self.ignore_index)?;
        let compute = compute_kind(logits.f_kind()?);
        let weight = of.weight.map(|weight| plain(&weight.f_to_kind(compute)?)).transpose()?;
        let factor = self.factor((compute, logits.device()))?;
        let operands = self.operands(&logits, &targets, weight.as_ref());
        // A copy is nobody else's.
        let in_place = !is_plain(of.input) || (self.reuse_logits && may_overwrite()?);
        let mut own = (!in_place).then(|| logits.f_empty_like()).transpose()?;
        let gradients = own.as_mut().map_or(tensors::Gradients::InPlace, tensors::Gradients::To);
        let wanted = Wanted {
            losses: None,
            total: None,
            factor: factor.as_ref().map_or(Factor::One, Factor::OfMean),
            grads: Some(grad),
            gradients: Some(gradients),
        };
        rows(&operands, wanted)?;
        if let Some(gradient) = own {
            return Ok(gradient);
        }
        bump_version(&mut logits)?;
        Ok(logits.f_detach()?)
    }
}
