//! Layer normalisation of a residual sum.

use super::layer_norm::layer_norm_reference;
use super::norm::tensors::Moments;
use super::norm::{
    AddNorm, Addends, Read, Way, add_rule, cast, dropped_outside, gradients_of_sum, moment,
};
use super::way::forced;
use crate::Result;
use crate::operator::{
    Again, Args, Call, Dim, Each, Gradients, Incoming, Made, Meta, Metas, Needs, Operator, Outputs,
    Second, Signature, Slots, call, dispatched,
};
use tch::Tensor;

mod kernels;

/// What [`add_layer_norm`] may be told besides its tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AddLayerNormOptions {
    /// ε: added to the variance.
    pub eps: f64,
    /// The probability that a value of x becomes zero, from 0 to 1; the others are divided by 1 less that
    /// probability. Pass 0 in evaluation.
    pub dropout: f64,
}

impl Default for AddLayerNormOptions {
    fn default() -> Self {
        AddLayerNormOptions { eps: 1e-5, dropout: 0.0 }
    }
}

/// Adds a branch to a residual stream, and normalises the sum: what stands between two blocks of a
/// transformer.
///
/// ```text
/// h = drop(x) + residual
/// y = layer_norm(h)
/// ```
///
/// * `input`: x, the branch, `[*, normalized_shape]`, of kind `Float`, `Double`, `Half` or
///   `BFloat16`, on the CPU or CUDA
/// * `residual`: the stream, of the input's shape, and of its kind or, with an input of a half kind,
///   `Float`
/// * `normalized_shape`: the trailing sizes of `input`, one or several
/// * `weight`: w, `[normalized_shape]`; `None` for ones
/// * `bias`: b, `[normalized_shape]`; `None` for zeros
/// * `options`: ε, and the probability of dropout
///
/// Returns (h, y), contiguous, both of the input's shape; h has the kind of `residual` and y that
/// of `input`. h is rounded to its kind before it is normalised, as
/// [`layer_norm`](super::layer_norm()) of the stored sum would be, and y is rounded once. Weight
/// and bias have the input's kind or, with an input of a half kind, both `Float`. On CUDA they
/// are rounded to the kind of `residual`. Strides and sizes are arbitrary, and tensors may be
/// empty. Autocast changes nothing, because y already has the kind in which the next product
/// reads it. There are first and second derivatives with respect to each tensor. As those of
/// libtorch's addition, the gradients of `input` and `residual` may be one tensor and, if only h
/// has one, that incoming gradient itself.
///
/// On CUDA the operator works on libtorch's current stream and never waits for the GPU. If rows begin
/// at multiples of 16 bytes and have up to 8192 values (`Double` 4096), the forward pass reads x and
/// residual once and writes h and y once, and the backward pass reads h and both gradients once and
/// writes one gradient once (two with dropout or two kinds). Other rows, and those of which a block of
/// an older GPU cannot hold two in shared memory, are added by libtorch and normalised by
/// [`layer_norm`](super::layer_norm())'s kernels. The kernel draws dropout's random numbers from libtorch's
/// generator, so that a captured graph draws new ones in each replay; the probability is rounded to a
/// multiple of 2⁻¹⁶. It draws other numbers than libtorch's `dropout`, which other rows and the CPU use.
///
/// Equivalent to:
/// ```
/// # use tch::{Kind, Device, Tensor};
/// # use tch_extension::ops::{add_layer_norm, layer_norm};
/// # let options = (Kind::Double, Device::Cpu);
/// # let (x, residual) = (Tensor::randn([5, 6], options), Tensor::randn([5, 6], options));
/// # let w = Tensor::randn([6], options);
/// let sum = x.dropout(0.0, true) + &residual;
/// let output = layer_norm(&sum, &[6], Some(&w), None, 1e-5);
///
/// let (h, y) = add_layer_norm(&x, &residual, &[6], Some(&w), None, &Default::default());
/// assert!(h == sum && y.allclose(&output, 1e-12, 1e-12, false));
/// ```
///
/// Source: Ba, Kiros and Hinton, Layer Normalization, <https://arxiv.org/abs/1607.06450>.
///
/// # Panics
/// If [`f_add_layer_norm`] returns an error.
pub fn add_layer_norm(
    input: &Tensor,
    residual: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    options: &AddLayerNormOptions,
) -> (Tensor, Tensor) {
    super::unwrap(f_add_layer_norm(input, residual, normalized_shape, weight, bias, options))
}

/// [`add_layer_norm`], with an error instead of a panic.
///
/// # Errors
/// If an argument has another kind, device, shape or value than stated (the error names the argument),
/// or if libtorch or CUDA fails.
pub fn f_add_layer_norm(
    input: &Tensor,
    residual: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    options: &AddLayerNormOptions,
) -> Result<(Tensor, Tensor)> {
    let AddLayerNormOptions { eps, dropout } = *options;
    let norm = AddLayerNorm { normalized_shape: normalized_shape.to_vec(), eps, dropout };
    let AddLayerNormOut { sum, output } =
        call(norm, &AddLayerNormIn { input, residual, weight, bias })?;
    Ok((sum, output))
}

/// [`add_layer_norm`] in plain tch operations, without checks of its own.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn add_layer_norm_reference(
    input: &Tensor,
    residual: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    options: &AddLayerNormOptions,
) -> Result<(Tensor, Tensor)> {
    let AddLayerNormOptions { eps, dropout } = *options;
    let sum = input.f_dropout(dropout, true)?.f_add(residual)?;
    let output = layer_norm_reference(&sum, normalized_shape, weight, bias, eps)?;
    Ok((sum, output.f_to_kind(input.f_kind()?)?))
}

crate::signature! {
    /// `sum = dropout(input) + residual` and `layer_norm(sum)`; returns both.
    ///
    /// input and residual have one shape; the residual may be float32 next to an input in half precision. A
    /// dropout of 0 is none: pass `p if self.training else 0.0`.
    pub AddLayerNorm: AddLayerNormIn -> AddLayerNormOut = "add_layer_norm"(
        input, residual, normalized_shape: Vec<i64>, weight?, bias?, eps: f64 = 1e-5, dropout: f64 = 0.0
    ) -> (sum, output)
}

crate::slots! {
    /// The moments of each row, and what dropout leaves.
    pub struct KeptAddLayerNorm { mean?, rstd?, dropped? }
}

impl AddLayerNorm {
    fn norm<'a>(&'a self, branch: &'a Meta<i64>, stream: &'a Meta<i64>, way: Way) -> AddNorm<'a> {
        AddNorm {
            kernels: &kernels::KERNELS,
            formula: layer_norm_reference,
            normalized_shape: &self.normalized_shape,
            eps: self.eps,
            dropout: self.dropout,
            way,
            branch,
            stream,
        }
    }
}

impl Operator for AddLayerNorm {
    type Kept = KeptAddLayerNorm;
    type Plan = Way;

    const SECOND: Second = Second::Itself;
    const READS_OUTPUTS: u64 = 0b1;
    const IS_SEEDED: bool = true;

    fn composed(&self, of: &Args<'_, Self>, is_traced: bool) -> Result<Option<Outputs<Self>>> {
        let dropped = dropped_outside(Self::NAME, of.input, self.dropout, is_traced)?;
        let Some(input) = &dropped else { return Ok(None) };
        let others = AddLayerNorm { dropout: 0.0, ..self.clone() };
        dispatched(&others, &AddLayerNormIn { input, ..of.clone() }).map(Some)
    }

    fn cast(&self, of: &Args<'_, Self>) -> Result<Option<Vec<Option<Tensor>>>> {
        cast(AddLayerNormIn::tensors(of).as_ref())
    }

    fn plan(&self, _: &Args<'_, Self>, _: &Needs<Self>) -> Result<Way> {
        Ok(forced())
    }

    /// What dropout leaves depends on the way. While a program is traced there is none.
    fn rule<D: Dim>(
        &self,
        of: &Metas<Self, D>,
        needs: &Needs<Self>,
    ) -> Result<Made<Self, Meta<D>>> {
        let AddLayerNormIn { input, residual, weight, bias } = of;
        let parameters = [weight.as_ref(), bias.as_ref()];
        let (shape, dropout) = (&self.normalized_shape, self.dropout);
        let rows = add_rule(Self::NAME, [input, residual], parameters, shape, dropout)?;
        let is_kept = needs.input || needs.residual || needs.weight || needs.bias;
        let moment = || is_kept.then(|| moment(input, &rows));
        Ok(Made {
            outputs: AddLayerNormOut { sum: residual.clone(), output: input.clone() },
            kept: KeptAddLayerNorm { mean: moment(), rstd: moment(), dropped: None },
        })
    }

    /// The bias' gradient is a sum of the incoming one alone, and h stands for what was added.
    fn reads(&self, _: &Needs<Self>) -> Needs<Self> {
        AddLayerNormIn { input: false, residual: false, weight: true, bias: false }
    }

    /// h depends on no parameter.
    fn constant_outputs(&self, needs: &Needs<Self>) -> u64 {
        u64::from(!needs.input && !needs.residual)
    }

    fn shared_gradients(&self, of: &Args<'_, Self>) -> &'static [(usize, usize)] {
        gradients_of_sum(of.input, of.residual, self.dropout)
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        let AddLayerNormIn { input, residual, weight, bias } = call.of;
        let Made { outputs, kept } = call.check()?;
        let norm = self.norm(&outputs.output, &outputs.sum, call.plan);
        let addends = Addends { input, residual, weight, bias };
        let moments = Moments { mean: kept.mean, rstd: kept.rstd };
        let found = norm.forward(&addends, moments)?;
        let Moments { mean, rstd } = found.moments;
        Ok(Made {
            outputs: AddLayerNormOut { sum: found.sum, output: found.output },
            kept: KeptAddLayerNorm { mean, rstd, dropped: found.dropped },
        })
    }

    /// The gradients of h alone go through dropout only.
    fn reads_for(&self, grads: &AddLayerNormOut<Each<bool>>, _: &Needs<Self>, _: &Way) -> [u64; 3] {
        if grads.output { [u64::MAX; 3] } else { [0, 0, 0b100] }
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        let (metas, needs, kept) = (again.metas()?, &again.needs, &again.kept);
        let read = Read {
            sum: again.outputs.sum.as_ref(),
            weight: again.of.weight.as_ref(),
            moments: Moments { mean: kept.mean.as_ref(), rstd: kept.rstd.as_ref() },
            dropped: kept.dropped.as_ref(),
        };
        let wanted = [
            needs.input.then_some(&metas.input),
            needs.residual.then_some(&metas.residual),
            metas.weight.as_ref().filter(|_| needs.weight),
            metas.bias.as_ref().filter(|_| needs.bias),
        ];
        let norm = self.norm(&metas.input, &metas.residual, again.plan);
        let grads = [grads.sum.as_ref(), grads.output.as_ref()];
        let [input, residual, weight, bias] =
            norm.backward(grads, &read, wanted, again.is_recorded)?;
        Ok(AddLayerNormIn { input, residual, weight, bias })
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        let AddLayerNormIn { input, residual, weight, bias } = *of;
        let options = AddLayerNormOptions { eps: self.eps, dropout: self.dropout };
        let shape = &self.normalized_shape;
        let (sum, output) =
            add_layer_norm_reference(input, residual, shape, weight, bias, &options)?;
        Ok(AddLayerNormOut { sum, output })
    }
}
