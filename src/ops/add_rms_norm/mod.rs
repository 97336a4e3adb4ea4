//! RMS normalisation of a residual sum.

use super::norm::tensors::Moments;
use super::norm::{
    AddNorm, Addends, Read, Way, add_rule, cast, dropped_outside, gradients_of_sum, moment,
};
use super::rms_norm::{default_eps, rms_norm_reference};
use super::way::forced;
use crate::Result;
use crate::operator::{
    Again, Args, Call, Dim, Each, Gradients, Incoming, Made, Meta, Metas, Needs, Operator, Outputs,
    Second, Signature, Slots, call, dispatched,
};
use tch::Tensor;

pub(crate) mod kernels;

/// What [`add_rms_norm`] may be told besides its tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AddRmsNormOptions {
    /// ε: added to the mean square; `None` as for [`rms_norm`](super::rms_norm()), of the kind of h.
    pub eps: Option<f64>,
    /// The probability that a value of x becomes zero, from 0 to 1; the others are divided by 1 less that
    /// probability. Pass 0 in evaluation.
    pub dropout: f64,
}

impl Default for AddRmsNormOptions {
    fn default() -> Self {
        AddRmsNormOptions { eps: None, dropout: 0.0 }
    }
}

/// Adds a branch to a residual stream, and normalises the sum: what stands between two blocks of a
/// transformer.
///
/// ```text
/// h = drop(x) + residual
/// y = rms_norm(h)
/// ```
///
/// * `input`: x, the branch, `[*, normalized_shape]`, of kind `Float`, `Double`, `Half` or
///   `BFloat16`, on the CPU or CUDA
/// * `residual`: the stream, of the input's shape, and of its kind or, with an input of a half kind,
///   `Float`
/// * `normalized_shape`: the trailing sizes of `input`, one or several
/// * `weight`: w, `[normalized_shape]`; `None` for ones
/// * `options`: ε, and the probability of dropout
///
/// Returns (h, y), contiguous, both of the input's shape; h has the kind of `residual` and y that
/// of `input`. h is rounded to its kind before it is normalised, as
/// [`rms_norm`](super::rms_norm()) of the stored sum would be, and y is rounded once. The weight
/// has the input's kind or, with an input of a half kind, `Float`. On CUDA it is rounded to the
/// kind of `residual`. Strides and sizes are arbitrary, and tensors may be empty. Autocast
/// changes nothing, because y already has the kind in which the next product reads it. There are
/// first and second derivatives with respect to each tensor. As those of libtorch's addition, the
/// gradients of `input` and `residual` may be one tensor and, if only h has one, that incoming
/// gradient itself.
///
/// On CUDA the operator works on libtorch's current stream and never waits for the GPU. If rows begin
/// at multiples of 16 bytes and have up to 8192 values (`Double` 4096), the forward pass reads x and
/// residual once and writes h and y once, and the backward pass reads h and both gradients once and
/// writes one gradient once (two with dropout or two kinds). Other rows, and those of which a block of
/// an older GPU cannot hold two in shared memory, are added by libtorch and normalised by
/// [`rms_norm`](super::rms_norm())'s kernels. The kernel draws dropout's random numbers from libtorch's
/// generator, so that a captured graph draws new ones in each replay; the probability is rounded to a
/// multiple of 2⁻¹⁶. It draws other numbers than libtorch's `dropout`, which other rows and the CPU use.
///
/// Equivalent to:
/// ```
/// # use tch::{Kind, Device, Tensor};
/// # use tch_extension::ops::{AddRmsNormOptions, add_rms_norm, rms_norm};
/// # let options = (Kind::Double, Device::Cpu);
/// # let (x, residual) = (Tensor::randn([5, 6], options), Tensor::randn([5, 6], options));
/// # let w = Tensor::randn([6], options);
/// let sum = x.dropout(0.0, true) + &residual;
/// let output = rms_norm(&sum, &[6], Some(&w), Some(1e-5));
///
/// let options = AddRmsNormOptions { eps: Some(1e-5), ..Default::default() };
/// let (h, y) = add_rms_norm(&x, &residual, &[6], Some(&w), &options);
/// assert!(h == sum && y.allclose(&output, 1e-12, 1e-12, false));
/// ```
///
/// Source: Zhang and Sennrich, Root Mean Square Layer Normalization,
/// <https://arxiv.org/abs/1910.07467>.
///
/// # Panics
/// If [`f_add_rms_norm`] returns an error.
pub fn add_rms_norm(
    input: &Tensor,
    residual: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    options: &AddRmsNormOptions,
) -> (Tensor, Tensor) {
    super::unwrap(f_add_rms_norm(input, residual, normalized_shape, weight, options))
}

/// [`add_rms_norm`], with an error instead of a panic.
///
/// # Errors
/// If an argument has another kind, device, shape or value than stated (the error names the argument),
/// or if libtorch or CUDA fails.
pub fn f_add_rms_norm(
    input: &Tensor,
    residual: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    options: &AddRmsNormOptions,
) -> Result<(Tensor, Tensor)> {
    let AddRmsNormOptions { eps, dropout } = *options;
    let norm = AddRmsNorm { normalized_shape: normalized_shape.to_vec(), eps, dropout };
    let AddRmsNormOut { sum, output } = call(norm, &AddRmsNormIn { input, residual, weight })?;
    Ok((sum, output))
}

/// [`add_rms_norm`] in plain tch operations, without checks of its own.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn add_rms_norm_reference(
    input: &Tensor,
    residual: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    options: &AddRmsNormOptions,
) -> Result<(Tensor, Tensor)> {
    let AddRmsNormOptions { eps, dropout } = *options;
    let sum = input.f_dropout(dropout, true)?.f_add(residual)?;
    let output = rms_norm_reference(&sum, normalized_shape, weight, eps)?;
    Ok((sum, output.f_to_kind(input.f_kind()?)?))
}

crate::signature! {
    /// `sum = dropout(input) + residual` and `rms_norm(sum)`; returns both. Else as `add_layer_norm`.
    pub AddRmsNorm: AddRmsNormIn -> AddRmsNormOut = "add_rms_norm"(
        input, residual, normalized_shape: Vec<i64>, weight?, eps: Option<f64> = None, dropout: f64 = 0.0
    ) -> (sum, output)
}

crate::slots! {
    /// The inverse of each row's root mean square, and what dropout leaves.
    pub struct KeptAddRmsNorm { rstd?, dropped? }
}

impl AddRmsNorm {
    fn norm<'a>(&'a self, branch: &'a Meta<i64>, stream: &'a Meta<i64>, way: Way) -> AddNorm<'a> {
        AddNorm {
            kernels: &kernels::KERNELS,
            formula: |sum, shape, weight, _, eps| rms_norm_reference(sum, shape, weight, Some(eps)),
            normalized_shape: &self.normalized_shape,
            eps: self.eps.unwrap_or(default_eps(stream.kind())),
            dropout: self.dropout,
            way,
            branch,
            stream,
        }
    }
}

impl Operator for AddRmsNorm {
    type Kept = KeptAddRmsNorm;
    type Plan = Way;

    const SECOND: Second = Second::Itself;
    const READS_OUTPUTS: u64 = 0b1;
    const IS_SEEDED: bool = true;

    fn composed(&self, of: &Args<'_, Self>, is_traced: bool) -> Result<Option<Outputs<Self>>> {
        let dropped = dropped_outside(Self::NAME, of.input, self.dropout, is_traced)?;
        let Some(input) = &dropped else { return Ok(None) };
        let others = AddRmsNorm { dropout: 0.0, ..self.clone() };
        dispatched(&others, &AddRmsNormIn { input, ..of.clone() }).map(Some)
    }

    fn cast(&self, of: &Args<'_, Self>) -> Result<Option<Vec<Option<Tensor>>>> {
        cast(AddRmsNormIn::tensors(of).as_ref())
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
        let AddRmsNormIn { input, residual, weight } = of;
        let parameters = [weight.as_ref(), None];
        let (shape, dropout) = (&self.normalized_shape, self.dropout);
        let rows = add_rule(Self::NAME, [input, residual], parameters, shape, dropout)?;
        let is_kept = needs.input || needs.residual || needs.weight;
        let moment = || is_kept.then(|| moment(input, &rows));
        Ok(Made {
            outputs: AddRmsNormOut { sum: residual.clone(), output: input.clone() },
            kept: KeptAddRmsNorm { rstd: moment(), dropped: None },
        })
    }

    /// h stands for what was added.
    fn reads(&self, _: &Needs<Self>) -> Needs<Self> {
        AddRmsNormIn { input: false, residual: false, weight: true }
    }

    /// h depends on no parameter.
    fn constant_outputs(&self, needs: &Needs<Self>) -> u64 {
        u64::from(!needs.input && !needs.residual)
    }

    fn shared_gradients(&self, of: &Args<'_, Self>) -> &'static [(usize, usize)] {
        gradients_of_sum(of.input, of.residual, self.dropout)
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        let AddRmsNormIn { input, residual, weight } = call.of;
        let Made { outputs, kept } = call.check()?;
        let norm = self.norm(&outputs.output, &outputs.sum, call.plan);
        let addends = Addends { input, residual, weight, bias: None };
        let moments = Moments { mean: None, rstd: kept.rstd };
        let found = norm.forward(&addends, moments)?;
        let Moments { rstd, .. } = found.moments;
        Ok(Made {
            outputs: AddRmsNormOut { sum: found.sum, output: found.output },
            kept: KeptAddRmsNorm { rstd, dropped: found.dropped },
        })
    }

    /// The gradients of h alone go through dropout only.
    fn reads_for(&self, grads: &AddRmsNormOut<Each<bool>>, _: &Needs<Self>, _: &Way) -> [u64; 3] {
        if grads.output { [u64::MAX; 3] } else { [0, 0, 0b10] }
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        let (metas, needs, kept) = (again.metas()?, &again.needs, &again.kept);
        let read = Read {
            sum: again.outputs.sum.as_ref(),
            weight: again.of.weight.as_ref(),
            moments: Moments { mean: None, rstd: kept.rstd.as_ref() },
            dropped: kept.dropped.as_ref(),
        };
        let wanted = [
            needs.input.then_some(&metas.input),
            needs.residual.then_some(&metas.residual),
            metas.weight.as_ref().filter(|_| needs.weight),
            None,
        ];
        let norm = self.norm(&metas.input, &metas.residual, again.plan);
        let grads = [grads.sum.as_ref(), grads.output.as_ref()];
        let [input, residual, weight, _] =
            norm.backward(grads, &read, wanted, again.is_recorded)?;
        Ok(AddRmsNormIn { input, residual, weight })
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        let AddRmsNormIn { input, residual, weight } = *of;
        let options = AddRmsNormOptions { eps: self.eps, dropout: self.dropout };
        let shape = &self.normalized_shape;
        let (sum, output) = add_rms_norm_reference(input, residual, shape, weight, &options)?;
        Ok(AddRmsNormOut { sum, output })
    }
}
