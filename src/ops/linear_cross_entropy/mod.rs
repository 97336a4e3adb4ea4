//! The cross-entropy of a linear layer's outputs and classes, without all of the outputs in memory.

use super::loss::check::{KINDS, check_options, check_target, loss};
use super::loss::tensors::{
    self, Factor, Mean, Operands, Wanted, add_up, compute_kind, is_ahead, mean_factor, rows,
    size_of, times,
};
use crate::amp::{CastPolicy, autocast_inputs};
use crate::ffi::facts::empty_of;
use crate::ffi::tensor::plain;
use crate::operator::{
    Again, Args, Call, Dim, Each, Gradients, Incoming, Made, Meta, Metas, Needs, Operator, Outputs,
    Signature, Slots, call,
};
use crate::{Error, Result};
use tch::{Kind, Reduction, Tensor};

mod chunks;

use chunks::{Chunks, Sizes};

/// What [`linear_cross_entropy`] may be told besides its tensors.
#[derive(Clone, Copy, Debug)]
pub struct LinearCrossEntropyOptions {
    /// What is made of the rows' losses.
    pub reduction: Reduction,
    /// A row with this target has no part in the loss.
    pub ignore_index: i64,
    /// ε, from 0 to 1: so much of a target's probability is spread over all classes.
    pub label_smoothing: f64,
    /// s > 0: the logits are s tanh(y / s) of the layer's outputs y. `None` for the outputs themselves.
    pub softcap: Option<f64>,
    /// k: so much of the square of each row's lse is added to its loss.
    pub z_loss: f64,
    /// How many bytes of memory the call may take besides its operands, also as autocast rounds them, and
    /// their gradients. `None` for a sixth of what all logits would take, rounded up to 256 rows, but at least 64 MiB and, if
    /// the weight's gradient is computed, two thirds of that gradient.
    pub memory: Option<u64>,
    /// Whether the weight's gradient is added up in `Float` for half kinds, which takes 4 bytes for each
    /// of its elements until it is complete; of a weight in `Float` until the backward pass.
    pub accumulate_in_float: bool,
}

impl Default for LinearCrossEntropyOptions {
    fn default() -> Self {
        LinearCrossEntropyOptions {
            reduction: Reduction::Mean,
            ignore_index: -100,
            label_smoothing: 0.0,
            softcap: None,
            z_loss: 0.0,
            memory: None,
            accumulate_in_float: false,
        }
    }
}

/// The cross-entropy of a linear layer's outputs, given the class of each row: the last layer of a
/// language model and its loss.
///
/// ```text
/// y = x Wᵀ + b         z = y, or s tanh(y / s) with a softcap s         lse = log Σ exp z
/// loss = (1 - ε) (lse - z[t]) + ε / V (V lse - Σ z) + k lse²            of a row with target t
/// sum = Σ loss         mean = Σ loss / M                                over M rows that are not ignored
/// ```
///
/// * `input`: x, `[N, D]`, of kind `Float`, `Double`, `Half` or `BFloat16`, on the CPU or CUDA
/// * `weight`: W, `[V, D]`
/// * `target`: t, `[N]`, of kind `Int64`: a class from 0 to V - 1, or `ignore_index`
/// * `bias`: b, `[V]`; `None` for zeros
///
/// Returns a loss without dimensions, or with `Reduction::None` those of the rows, `[N]`; of kind
/// `Double` for `Double`, and otherwise `Float`. The mean of no rows is NaN, as in libtorch. Strides
/// and sizes are arbitrary. In the half kinds the outputs y are rounded, as the layer's are, and
/// everything after them is computed in `Float`. Under autocast, input and bias are first cast to
/// autocast's kind, as libtorch's linear does. A weight in `Float` next to an input of a half kind, under
/// autocast or not, is rounded by the operator itself, for the time of a pass, and its gradient is
/// `Float`, too: that of the rounded weight, written in `Float` when it is multiplied by the incoming one.
/// There are first and second derivatives of input,
/// weight and bias. On CUDA the operator works on libtorch's current stream and never waits for the
/// GPU. It is as deterministic as libtorch's products are.
///
/// The logits are computed for a chunk of rows at a time, and their gradient takes their place. A mean
/// or sum computes the gradients in the forward pass, those that are needed: its backward pass only
/// multiplies them by the incoming gradient, and does nothing if that is 1. With `Reduction::None`, and
/// for `Half`, whose gradients need the loss scale, the backward pass computes the logits again. A
/// second derivative takes the memory of all logits.
///
/// [`LinearCrossEntropyOptions::memory`] bounds the memory of a chunk. In the half kinds on CUDA, a
/// number of classes that is no multiple of 8 costs a copy of the weight, if D is a multiple. In the
/// half kinds the weight's gradient is rounded once a chunk: over n chunks its error is about
/// √((n + 1) / 2) times that of one product. If there are more than six chunks, or if
/// [`LinearCrossEntropyOptions::accumulate_in_float`] says so, it is therefore added up in `Float`. If
/// the bound has no room for that sum, it is exceeded: by six chunks without such a sum, or by the sum
/// and chunks of 256 rows, whichever is less.
///
/// Equivalent to:
/// ```
/// # use tch::{Kind, Device, Tensor};
/// # use tch_extension::ops::{LinearCrossEntropyOptions, linear_cross_entropy};
/// # let options = (Kind::Double, Device::Cpu);
/// # let (x, w) = (Tensor::randn([5, 4], options), Tensor::randn([7, 4], options));
/// # let targets = Tensor::from_slice(&[0_i64, 6, 3, -100, 2]);
/// let loss = x.matmul(&w.tr()).log_softmax(-1, Kind::Double).nll_loss(&targets);
///
/// let ours = linear_cross_entropy(&x, &w, &targets, None, &LinearCrossEntropyOptions::default());
/// assert!(ours.allclose(&loss, 1e-12, 1e-12, false));
/// ```
///
/// # Panics
/// If [`f_linear_cross_entropy`] returns an error.
pub fn linear_cross_entropy(
    input: &Tensor,
    weight: &Tensor,
    target: &Tensor,
    bias: Option<&Tensor>,
    options: &LinearCrossEntropyOptions,
) -> Tensor {
    super::unwrap(f_linear_cross_entropy(input, weight, target, bias, options))
}

/// [`linear_cross_entropy`], with an error instead of a panic.
///
/// # Errors
/// If an argument has another kind, device or shape than stated (the error names the argument); on
/// the CPU if a target is no class; or if libtorch or CUDA fails. A target on CUDA that is no class
/// fails an assertion on the device, as in libtorch, after which the program cannot use CUDA any
/// more.
pub fn f_linear_cross_entropy(
    input: &Tensor,
    weight: &Tensor,
    target: &Tensor,
    bias: Option<&Tensor>,
    options: &LinearCrossEntropyOptions,
) -> Result<Tensor> {
    let LinearCrossEntropyOptions {
        reduction,
        ignore_index,
        label_smoothing,
        softcap,
        z_loss,
        memory,
        accumulate_in_float,
    } = *options;
    let operator = LinearCrossEntropy {
        ignore_index,
        reduction,
        label_smoothing,
        softcap,
        z_loss,
        memory: memory.map(|memory| i64::try_from(memory).unwrap_or(i64::MAX)),
        accumulate_in_float,
    };
    Ok(call(operator, &LinearCrossEntropyIn { input, weight, target, bias })?.loss)
}

/// [`linear_cross_entropy`] in plain tch operations, without checks of its own: it holds all logits.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn linear_cross_entropy_reference(
    input: &Tensor,
    weight: &Tensor,
    target: &Tensor,
    bias: Option<&Tensor>,
    options: &LinearCrossEntropyOptions,
) -> Result<Tensor> {
    let kind = input.f_kind()?;
    let compute = compute_kind(kind);
    let mut logits = input.f_linear(&weight.f_to_kind(kind)?, bias)?.f_to_kind(compute)?;
    if let Some(softcap) = options.softcap {
        logits = logits.f_div_scalar(softcap)?.f_tanh()?.f_mul_scalar(softcap)?;
    }
    let loss = logits.f_cross_entropy_loss::<&Tensor>(
        target,
        None,
        options.reduction,
        options.ignore_index,
        options.label_smoothing,
    )?;
    if options.z_loss == 0.0 {
        return Ok(loss);
    }
    let is_there = target.f_ne(options.ignore_index)?;
    let lse = logits.f_logsumexp([1_i64].as_slice(), false)?;
    let squares = lse.f_square()?.f_where_self(&is_there, &lse.f_zeros_like()?)?;
    let squares = squares.f_mul_scalar(options.z_loss)?;
    Ok(match options.reduction {
        Reduction::Mean => {
            loss.f_add(&squares.f_sum(compute)?.f_div(&is_there.f_sum(compute)?)?)?
        }
        Reduction::Sum => loss.f_add(&squares.f_sum(compute)?)?,
        _ => loss.f_add(&squares)?,
    })
}

crate::signature! {
    /// `cross_entropy(linear(input, weight, bias), target)`, whose logits are never in memory as a whole.
    ///
    /// input `[N, D]`, weight `[V, D]`, target `[N]` (int64), bias `[V]`. The loss is float64 of float64, and
    /// otherwise float32: unlike torch's cross_entropy, also of half precision. The logits are computed for a
    /// chunk of rows at a time; memory is how many bytes the call may take besides its operands and their
    /// gradients. softcap s makes `s tanh(logits / s)` of the logits; z_loss k adds `k lse²` to each row's
    /// loss. accumulate_in_float adds up the weight's gradient in float32, also in half precision. A weight
    /// in float32 next to an input in half precision is rounded, and its gradient is float32.
    pub LinearCrossEntropy: LinearCrossEntropyIn -> LinearCrossEntropyOut = "linear_cross_entropy"(
        input,
        weight,
        target!,
        bias?,
        ignore_index: i64 = -100,
        reduction: Reduction = Reduction::Mean,
        label_smoothing: f64 = 0.0,
        softcap: Option<f64> = None,
        z_loss: f64 = 0.0,
        memory: Option<i64> = None,
        accumulate_in_float: bool = false,
    ) -> (loss)
}

crate::slots! {
    /// The gradients of a layer, for an incoming gradient of 1 if the forward pass computes them.
    pub struct LayerGradients { input?, weight?, bias? }
}

/// Which gradients are computed, and in which kinds.
type Wish = LayerGradients<Each<Option<Kind>>>;
/// The gradients that were.
type Found = LayerGradients<Each<Option<Tensor>>>;

impl Operator for LinearCrossEntropy {
    type Kept = LayerGradients;
    type Plan = ();

    /// A weight in `Float` stays as it is: autocast's cast would make a gradient of the half kind, and
    /// cast it back.
    fn cast(&self, of: &Args<'_, Self>) -> Result<Option<Vec<Option<Tensor>>>> {
        let LinearCrossEntropyIn { input, weight, target, bias } = *of;
        let stays = weight.f_kind()? == Kind::Float;
        let tensors = [Some(input), Some(weight).filter(|_| !stays), Some(target), bias];
        let mut cast = autocast_inputs(CastPolicy::LowerPrecision, &tensors)?;
        if let Some([_, place @ None, ..]) = cast.as_deref_mut() {
            *place = Some(weight.shallow_clone());
        }
        Ok(cast)
    }

    fn rule<D: Dim>(
        &self,
        of: &Metas<Self, D>,
        needs: &Needs<Self>,
    ) -> Result<Made<Self, Meta<D>>> {
        let input = of.input.kind_in(&KINDS)?.supported_device()?.dim(2, "[N, D]")?;
        let weight = of.weight.same_device_as(input)?;
        if !is_rounded(weight.kind(), input.kind()) {
            weight.kind_as(input.kind(), "input")?;
        }
        weight.dim(2, "[V, D]")?;
        let classes = &weight.sizes()[0];
        weight.shape("[V, D]", &[classes.clone(), input.sizes()[1].clone()])?;
        let bias = of.bias.as_ref().map(|bias| bias.like(input)).transpose()?;
        bias.map(|bias| bias.shape("[V]", std::slice::from_ref(classes))).transpose()?;
        let loss = loss(input, &of.target, "[N]", self.reduction)?;
        self.check_options(input.kind())?;
        let is_ahead = is_ahead(self.reduction, input.kind());
        // The backward pass writes a gradient in `Float`. Only if it is added up in that kind, it takes as
        // much memory from now on.
        let of_weight = if self.accumulate_in_float { weight.kind() } else { input.kind() };
        let like = |of: &Meta<D>, is_needed: bool| (is_ahead && is_needed).then(|| of.clone());
        Ok(Made {
            outputs: LinearCrossEntropyOut { loss: loss.of_kind(compute_kind(input.kind())) },
            kept: LayerGradients {
                input: like(input, needs.input),
                weight: like(&weight.of_kind(of_weight), needs.weight),
                bias: bias.and_then(|bias| like(bias, needs.bias)),
            },
        })
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        let LayerGradients { input, weight, bias } = call.check()?.kept;
        let classes = call.of.weight.size2()?.0;
        check_target(Self::NAME, call.of.target, classes, self.ignore_index)?;
        let kind = |of: Option<Meta<i64>>| of.map(|of| of.kind());
        let wanted: Wish =
            LayerGradients { input: kind(input), weight: kind(weight), bias: kind(bias) };
        let (loss, kept) = self.losses(&Layer::new(&call.of)?, &wanted)?;
        Ok(Made { outputs: LinearCrossEntropyOut { loss }, kept })
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        let Some(grad) = &grads.loss else { return Ok(LinearCrossEntropyIn::none()) };
        let LinearCrossEntropyIn { input, weight, target, bias } = &again.of;
        let of = [input, weight, target, bias].map(Option::as_ref);
        let of = LinearCrossEntropyIn::borrowed(Self::NAME, &of)?;
        let LinearCrossEntropyIn { input, weight, bias, .. } = again.needs;
        let wanted: Wish = LayerGradients {
            input: input.then(|| of.input.f_kind()).transpose()?,
            weight: weight.then(|| of.weight.f_kind()).transpose()?,
            bias: of.bias.filter(|_| bias).map(Tensor::f_kind).transpose()?,
        };
        let kept = &again.kept;
        let is_kept = (kept.input.is_some() || wanted.input.is_none())
            && (kept.weight.is_some() || wanted.weight.is_none())
            && (kept.bias.is_some() || wanted.bias.is_none());
        let LayerGradients { input, weight, bias } = if is_kept {
            let in_place = again.may_overwrite()?;
            let LayerGradients { input, weight, bias } = again.kept;
            let of = [input.zip(wanted.input), weight.zip(wanted.weight), bias.zip(wanted.bias)];
            let [input, weight, bias] = times(&of, grad, in_place)?;
            LayerGradients { input, weight, bias }
        } else {
            let layer = Layer::new(&of)?;
            let classes = layer.weight.size2()?.0;
            check_target(Self::NAME, &layer.targets, classes, self.ignore_index)?;
            self.chunked(&layer, None, None, Some(grad), &wanted)?
        };
        Ok(LinearCrossEntropyIn { input, weight, target: None, bias })
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        let LinearCrossEntropy {
            reduction, ignore_index, label_smoothing, softcap, z_loss, ..
        } = *self;
        let options = LinearCrossEntropyOptions {
            reduction,
            ignore_index,
            label_smoothing,
            softcap,
            z_loss,
            ..Default::default()
        };
        let LinearCrossEntropyIn { input, weight, target, bias } = *of;
        let loss = linear_cross_entropy_reference(input, weight, target, bias, &options)?;
        Ok(LinearCrossEntropyOut { loss })
    }
}

/// Whether a weight of this kind is rounded to that of the input.
fn is_rounded(weight: Kind, input: Kind) -> bool {
    weight == Kind::Float && matches!(input, Kind::Half | Kind::BFloat16)
}

/// The tensors of a call, as the kernels and products need them.
struct Layer {
    input: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    targets: Tensor,
}

impl Layer {
    fn new(of: &Args<'_, LinearCrossEntropy>) -> Result<Self> {
        Ok(Layer {
            input: of.input.f_detach()?,
            weight: of.weight.f_detach()?.f_to_kind(of.input.f_kind()?)?,
            bias: of.bias.map(Tensor::f_detach).transpose()?,
            targets: plain(of.target)?,
        })
    }

    /// The layer with a few more classes, of zeros, if its products are so much faster: in half kinds on
    /// CUDA, where the logits' rows would otherwise not begin at 16 bytes, but those of input and weight
    /// do. A copy of the weight costs as much as a product with a few hundred rows.
    fn padded(&self) -> Result<Option<Layer>> {
        const ENOUGH_ROWS: i64 = 128;
        let (rows, (classes, features)) = (self.input.size2()?.0, self.weight.size2()?);
        let (kind, device) = (self.input.f_kind()?, self.input.device());
        let lanes = 16 / size_of(kind);
        let missing = (lanes - classes % lanes) % lanes;
        let is_half = matches!(kind, Kind::Half | Kind::BFloat16);
        let is_worth_it = rows >= ENOUGH_ROWS && features % lanes == 0;
        if !device.is_cuda() || !is_half || missing == 0 || !is_worth_it {
            return Ok(None);
        }
        let zeros = Tensor::f_zeros([missing, features], (kind, device))?;
        let weight = Tensor::f_cat(&[&self.weight, &zeros], 0)?;
        let bias = match &self.bias {
            Some(bias) => {
                Some(Tensor::f_cat(&[bias, &Tensor::f_zeros([missing], (kind, device))?], 0)?)
            }
            None => None,
        };
        let (input, targets) = (self.input.shallow_clone(), self.targets.shallow_clone());
        Ok(Some(Layer { input, weight, bias, targets }))
    }
}

impl LinearCrossEntropy {
    /// Checks what the operator is told, for an input of this kind.
    fn check_options(&self, kind: Kind) -> Result<()> {
        check_options(Self::NAME, self.reduction, self.label_smoothing)?;
        // The kernels compute in `Float`, which must not make a zero or an infinity of them.
        let computed = |number: f64| match compute_kind(kind) {
            Kind::Double => number,
            _ => f64::from(number as f32),
        };
        let refuse = |argument: &str, expected: &str, got: String, hint: &str| {
            Err(Error::argument(Self::NAME, argument, expected, got, hint))
        };
        let (softcap, z_loss) = (self.softcap.map(computed), computed(self.z_loss));
        if softcap.is_some_and(|softcap| !(softcap > 0.0 && softcap.is_finite())) {
            let got = format!("{softcap:?}");
            return refuse("softcap", "a finite number above 0", got, "use None for no cap");
        }
        if !z_loss.is_finite() {
            return refuse("z_loss", "a finite number", z_loss.to_string(), "use 0");
        }
        match self.memory {
            Some(memory) if memory < 0 => {
                let expected = "a number of bytes that is not negative";
                refuse("memory", expected, memory.to_string(), "use None for the default")
            }
            _ => Ok(()),
        }
    }

    /// The loss, and those gradients that are wanted.
    fn losses(&self, layer: &Layer, wanted: &Wish) -> Result<(Tensor, Found)> {
        let like = (compute_kind(layer.input.f_kind()?), layer.input.device());
        let mut losses = empty_of(&[layer.input.size2()?.0], like)?;
        let is_one = self.reduction != Reduction::None;
        let mut total = is_one.then(|| empty_of(&[], like)).transpose()?;
        let gradients = self.chunked(layer, Some(&mut losses), total.as_mut(), None, wanted)?;
        Ok((total.unwrap_or(losses), gradients))
    }

    /// Computes the losses of all rows, their total, and the gradients that are wanted, for incoming ones
    /// of `[N]`, of one number, or of 1; chunk after chunk.
    fn chunked(
        &self,
        layer: &Layer,
        mut losses: Option<&mut Tensor>,
        mut total: Option<&mut Tensor>,
        grads: Option<&Tensor>,
        wanted: &Wish,
    ) -> Result<Found> {
        let (kind, device) = (layer.input.f_kind()?, layer.input.device());
        let (all, features) = layer.input.size2()?;
        let own_classes = layer.weight.size2()?.0;
        let padded = layer.padded()?;
        let layer = padded.as_ref().unwrap_or(layer);
        let classes = layer.weight.size2()?.0;
        let is_cuda = device.is_cuda();
        let kind_of = crate::ops::kinds::Kind::of(kind)?;
        let of_weight = wanted.weight.map(crate::ops::kinds::Kind::of).transpose()?;
        let sizes = Sizes { rows: all, classes, features, kind: kind_of, is_cuda, of_weight };
        let chunks = Chunks::new(&sizes, self.memory, self.accumulate_in_float);
        // Then one call computes the factor, the rows and the total.
        let is_whole = 0 < all && all <= chunks.rows;
        let mean = Mean { targets: &layer.targets, weight: None, ignore_index: self.ignore_index };
        let compute = compute_kind(kind);
        let computed = match self.reduction {
            Reduction::Mean if is_whole => Some(empty_of(&[1], (compute, device))?),
            Reduction::Mean => Some(mean_factor(mean, compute)?),
            _ => None,
        };
        let factor = match &computed {
            Some(factor) if is_whole => Factor::OfMean(factor),
            Some(factor) => Factor::Known(factor),
            None => Factor::One,
        };
        let logits = empty_of(&[chunks.rows.min(all), classes], (kind, device))?;
        let mut gradients = Accumulated::new(layer, wanted, &chunks)?;
        for first in (0..all).step_by(usize::try_from(chunks.rows).unwrap_or(usize::MAX)) {
            let len = chunks.rows.min(all - first);
            let part = |tensor: &Tensor| tensor.f_narrow(0, first, len);
            let (input, logits) = (part(&layer.input)?, logits.f_narrow(0, 0, len)?);
            let _ = match &layer.bias {
                Some(bias) => {
                    bias.f_addmm_out(&logits, &input, &layer.weight.f_transpose(0, 1)?)?
                }
                None => input.f_mm_out(&logits, &layer.weight.f_transpose(0, 1)?)?,
            };
            let targets = part(&layer.targets)?;
            let mut of_chunk = losses.as_deref_mut().map(|losses| part(losses)).transpose()?;
            let is_each = |grads: &&Tensor| grads.dim() == 1 && grads.numel() > 1;
            let own = grads.filter(is_each).map(part).transpose()?;
            let own_logits = logits.f_narrow(1, 0, own_classes)?;
            let operands = self.operands(&own_logits, &targets);
            let has_gradients =
                [wanted.input, wanted.weight, wanted.bias].iter().any(Option::is_some);
            let of_logits = Wanted {
                losses: of_chunk.as_mut(),
                total: total.as_deref_mut().filter(|_| is_whole),
                factor,
                grads: own.as_ref().or(grads),
                gradients: has_gradients.then_some(tensors::Gradients::InPlace),
            };
            rows(&operands, of_logits)?;
            if has_gradients {
                // What stands beyond the classes is no gradient: NaN, if the input has one.
                let _ = logits.f_narrow(1, own_classes, classes - own_classes)?.f_zero_()?;
                gradients.add(layer, &input, &logits, first)?;
            }
        }
        drop(logits);
        if let (Some(losses), Some(total), false) = (losses, total, is_whole) {
            add_up(losses, factor.tensor(), total)?;
        }
        gradients.finish(wanted, own_classes)
    }

    fn operands<'a>(&self, logits: &'a Tensor, targets: &'a Tensor) -> Operands<'a> {
        let LinearCrossEntropy { ignore_index, label_smoothing, softcap, z_loss, .. } = *self;
        let softcap = softcap.unwrap_or(0.0);
        Operands { logits, targets, weight: None, ignore_index, label_smoothing, softcap, z_loss }
    }
}

/// The gradients so far.
struct Accumulated {
    input: Option<Tensor>,
    weight: Option<Tensor>,
    /// In the compute kind.
    bias: Option<Tensor>,
    /// Whether the weight's gradient is `Float` although its products are of a half kind.
    in_float: bool,
}

impl Accumulated {
    fn new(layer: &Layer, wanted: &Wish, chunks: &Chunks) -> Result<Self> {
        let (kind, device) = (layer.input.f_kind()?, layer.input.device());
        let of = |tensor: &Tensor, kind: Kind| -> Result<Tensor> {
            Ok(Tensor::f_zeros(tensor.size(), (kind, device))?)
        };
        let of_products = if chunks.in_float { Kind::Float } else { kind };
        // The first chunk's product is written over what is here, unless there is no chunk, or it is
        // added on the CPU.
        let is_added = chunks.in_float && !device.is_cuda();
        let empty = |tensor: &Tensor, kind: Kind, is_zero: bool| {
            if is_zero || layer.input.size2()?.0 == 0 {
                return of(tensor, kind);
            }
            empty_of(&tensor.size(), (kind, device))
        };
        let bias = layer.bias.as_ref().filter(|_| wanted.bias.is_some());
        Ok(Accumulated {
            input: wanted.input.map(|_| empty(&layer.input, kind, false)).transpose()?,
            weight: wanted
                .weight
                .map(|_| empty(&layer.weight, of_products, is_added))
                .transpose()?,
            bias: bias.map(|bias| empty(bias, compute_kind(kind), false)).transpose()?,
            in_float: chunks.in_float,
        })
    }

    /// Adds those of a chunk, which begins with row `first`; `grad` is that of its logits.
    fn add(&mut self, layer: &Layer, input: &Tensor, grad: &Tensor, first: i64) -> Result<()> {
        if let Some(of_input) = &self.input {
            let part = of_input.f_narrow(0, first, grad.size2()?.0)?;
            let _ = grad.f_mm_out(&part, &layer.weight)?;
        }
        if let Some(sum) = &mut self.weight {
            let grad = grad.f_transpose(0, 1)?;
            let is_cuda = input.device().is_cuda();
            let _ = match (first == 0, self.in_float) {
                (true, false) => grad.f_mm_out(sum, input)?,
                (false, false) => sum.f_addmm_(&grad, input)?,
                // Only on CUDA does libtorch multiply half kinds into `Float`.
                (true, true) if is_cuda => grad.f_mm_dtype_out(sum, input, Kind::Float)?,
                (false, true) if is_cuda => {
                    sum.f_addmm_dtype_out(sum, &grad, input, Kind::Float)?
                }
                (_, true) => sum.f_add_(&grad.f_mm(input)?)?,
            };
        }
        if let Some(sum) = &mut self.bias {
            let of_chunk = grad.f_sum_dim_intlist([0_i64].as_slice(), false, sum.f_kind()?)?;
            if first == 0 {
                *sum = of_chunk;
            } else {
                let _ = sum.f_add_(&of_chunk)?;
            }
        }
        Ok(())
    }

    /// The gradients in these kinds, of so many classes.
    fn finish(self, wanted: &Wish, classes: i64) -> Result<Found> {
        let of = |gradient: Option<Tensor>, kind: Option<Kind>| {
            let as_wanted = |(gradient, kind): (Tensor, Kind)| {
                gradient.f_narrow(0, 0, classes)?.f_to_kind(kind)
            };
            gradient.zip(kind).map(as_wanted).transpose()
        };
        Ok(LayerGradients {
            input: self.input,
            weight: of(self.weight, wanted.weight)?,
            bias: of(self.bias, wanted.bias)?,
        })
    }
}
