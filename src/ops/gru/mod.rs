//! Whole sequences of torch.nn's GRU.

mod costs;
mod kernels;

pub(super) use costs::{COSTS, CUDNN};

use super::costs::Place;
use super::recurrent::kernels::cpu::CpuCell;
use super::recurrent::kernels::cuda::CudaCell;
use super::recurrent::layer::{self, Cell, Cudnn, State};
use super::recurrent::plan::Costs;
use super::recurrent::{RnnOptions, RnnWeights};
use crate::operator::{
    Again, Args, Call, Dim, Gradients, Incoming, Made, Meta, Metas, Needs, Operator, Outputs, call,
};
use crate::{Error, Result};
use tch::Tensor;

/// One layer of a GRU in one direction, as torch.nn.GRU has it. Returns h of each step, and h after
/// the last step.
///
/// ```text
/// [r | z] = σ(x[t] W_irzᵀ + b_irz + h[t-1] W_hrzᵀ + b_hrz)
/// n = tanh(x[t] W_inᵀ + b_in + r (h[t-1] W_hnᵀ + b_hn))
/// h[t] = (1 - z) n + z h[t-1]
/// ```
///
/// * `input`: x, `[T, B, F]`
/// * `h`: h before the first step, `[B, H]`
/// * `weights`: W_ih `[3H, F]`, W_hh `[3H, H]`, b_ih and b_hh `[3H]` or absent; the rows are for r,
///   z and n
/// * `options`: the lengths of the sequences, if they differ
///
/// Returns (h of all steps `[T, B, H]`, h after the last step `[B, H]`). Both are contiguous and
/// have memory of their own. The tensors are of one kind, `Float`, `Double`, `Half` or `BFloat16`,
/// on one device. Strides and sizes are arbitrary; tensors may be empty, and there may be no steps
/// at all. There are first and second derivatives of each output with respect to each tensor.
/// Gradients of weights and biases may be parts of one piece of memory, as libtorch's are.
///
/// Under autocast on CUDA, all tensors are cast to autocast's kind, which the outputs have, too. On the
/// CPU only what is multiplied is rounded to it, and the outputs have the kind of h, as in libtorch.
///
/// On the CPU the weights are packed once, and libtorch's threads work together through the whole
/// sequence; one step, and up to four rows in all steps, are products and a kernel for each step. The
/// half kinds are computed as `Float` from end to end and rounded once.
///
/// On CUDA, libtorch's own layer is cuDNN's. A layer whose F and H are up to 64 (32 in `Double`) is one
/// kernel of this crate forward and two backward, where that is faster; above 32 columns (16) the
/// products for the weights' gradients follow. On compute capability 9.0 a direction of other layers is
/// one kernel of this crate where that is faster: in the half kinds and in tf32, for H up to 2048 that
/// is a multiple of 8, and for any H up to 768; in other `Float` and in `Double` for H up to 128.
/// Elsewhere, and unless that is clearly faster, it is cuDNN's layer. Which it is depends on the sizes,
/// the kind and the GPU, and on whether the parameters follow one another in one piece of memory, from
/// which cuDNN takes them without a copy
/// ([`flatten_parameters`](crate::nn::Gru::flatten_parameters)).
///
/// Unless [`set_rnn_allow_tf32`](crate::cuda::set_rnn_allow_tf32) forbids it, `Float` is multiplied in
/// tf32 where libtorch's own layer surely does so, too, and is as exact as that layer elsewhere. With
/// T·B of at least 64, and F and H that are multiples of 4, these are the products for the gradients of
/// the weights; from F = 128 and H = 64 on those with the input and for its gradient; and with B over 1
/// those for each step: in the backward pass above H = 128, and in the forward pass above H = 192 if H is
/// over 320 or B over 16. The kernels for all steps then multiply fp16 values that are scaled by powers
/// of two and are as exact as tf32 (in few steps, `Float` itself). In other products over all steps, and
/// in a product for each step, [`set_matmul_allow_tf32`](crate::cuda::set_matmul_allow_tf32) decides,
/// which is off by default.
/// In the half kinds, our kernels for all steps keep h in `Float` from step to step, and round what
/// they multiply, but for small layers.
///
/// With a graph other kernels may compute the output than without one, because the plan counts both
/// passes: the last bits may differ.
///
/// Memory grows linearly with T. The backward keeps `4·T·B·H` numbers in addition to inputs and
/// outputs, or what cuDNN asks for.
///
/// Equivalent to:
/// ```
/// # use tch::{Kind, Device, Tensor};
/// # use tch_extension::ops::{RnnWeights, gru};
/// # let options = (Kind::Double, Device::Cpu);
/// # let (x, w_ih, w_hh) = (Tensor::randn([6, 2, 4], options), Tensor::randn([9, 4], options), Tensor::randn([9, 3], options));
/// # let (b_ih, b_hh) = (Tensor::randn([9], options), Tensor::randn([9], options));
/// # let h0 = Tensor::randn([2, 3], options);
/// let parameters = [&w_ih, &w_hh, &b_ih, &b_hh];
/// let (output, h) = x.gru(&h0.unsqueeze(0), &parameters, true, 1, 0.0, true, false, false);
///
/// let weights = RnnWeights { w_ih: &w_ih, w_hh: &w_hh, b_ih: Some(&b_ih), b_hh: Some(&b_hh) };
/// let fused = gru(&x, &h0, &weights, &Default::default());
/// assert!(fused.0.allclose(&output, 1e-12, 1e-12, false));
/// assert!(fused.1.allclose(&h.squeeze_dim(0), 1e-12, 1e-12, false));
/// ```
///
/// # Sequences of different lengths
/// With [`lengths`](RnnOptions::lengths) this is what torch.nn.GRU computes of a `PackedSequence`. The input of the
/// steps that are padding is never used, even if it is NaN; their output and its gradient are zero; and the
/// state stays what it was after the last step of the sequence. Where lengths differ, the call cannot be
/// captured in a CUDA graph, because it copies the lengths to the GPU.
///
/// ```
/// # use tch::{Kind, Device, Tensor};
/// # use tch_extension::ops::{RnnOptions, RnnWeights, gru};
/// # let options = (Kind::Double, Device::Cpu);
/// # let (x, w_ih, w_hh) = (Tensor::randn([6, 2, 4], options), Tensor::randn([9, 4], options), Tensor::randn([9, 3], options));
/// # let h0 = Tensor::randn([2, 3], options);
/// # let weights = RnnWeights { w_ih: &w_ih, w_hh: &w_hh, b_ih: None, b_hh: None };
/// let lengths = [6, 2];
/// let (output, h) = gru(&x, &h0, &weights, &RnnOptions { lengths: Some(&lengths) });
///
/// for (b, length) in (0..).zip(lengths) {
///     let x = x.narrow(0, 0, length).narrow(1, b, 1);
///     let alone = gru(&x, &h0.narrow(0, b, 1), &weights, &Default::default());
///     assert!(alone.0.allclose(&output.narrow(0, 0, length).narrow(1, b, 1), 1e-12, 1e-12, false));
///     assert!(alone.1.allclose(&h.narrow(0, b, 1), 1e-12, 1e-12, false));
/// }
/// assert_eq!(output.narrow(0, 2, 4).select(1, 1).abs().max().double_value(&[]), 0.0);
/// ```
///
/// Source: <https://pytorch.org/docs/stable/generated/torch.nn.GRU.html>.
///
/// # Panics
/// If [`f_gru`] returns an error.
pub fn gru(
    input: &Tensor,
    h: &Tensor,
    weights: &RnnWeights<'_>,
    options: &RnnOptions<'_>,
) -> (Tensor, Tensor) {
    super::unwrap(f_gru(input, h, weights, options))
}

/// [`gru`], with an error instead of a panic.
///
/// # Errors
/// If an argument has another kind, device or shape than stated (the error names the argument); if there
/// is not one length for each sequence, from 1 to T; or if libtorch or CUDA fails.
pub fn f_gru(
    input: &Tensor,
    h: &Tensor,
    weights: &RnnWeights<'_>,
    options: &RnnOptions<'_>,
) -> Result<(Tensor, Tensor)> {
    let RnnWeights { w_ih, w_hh, b_ih, b_hh } = *weights;
    let of = GruIn { input, h, w_ih, w_hh, b_ih, b_hh };
    let lengths = options.lengths.map(<[i64]>::to_vec);
    let GruOut { output, h } = call(Gru { lengths }, &of)?;
    Ok((output, h))
}

/// [`gru`] in plain tch operations, without checks of its own.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn gru_reference(
    input: &Tensor,
    h: &Tensor,
    weights: &RnnWeights<'_>,
    options: &RnnOptions<'_>,
) -> Result<(Tensor, Tensor)> {
    let state = (h.shallow_clone(), None);
    let (output, (last, _)) = layer::reference::<Gru>(input, options.lengths, weights, state)?;
    Ok((output, last))
}

crate::signature! {
    /// One layer of torch.nn.GRU in one direction; returns (h of all steps `[T, B, H]`, h).
    ///
    /// input `[T, B, F]`, h `[B, H]`, w_ih `[3H, F]`, w_hh `[3H, H]`, b_ih and b_hh `[3H]`. With lengths, as
    /// for `lstm`.
    pub Gru: GruIn -> GruOut = "gru"(
        input, h, w_ih, w_hh, b_ih?, b_hh?, lengths: Option<Vec<i64>> = None
    ) -> (output, h)
}

layer::operator!(Gru: GruIn -> GruOut,);

impl Cell for Gru {
    const OP: &'static str = "gru";
    const GATES: i64 = 3;
    const PARAMETERS: [&'static str; 3] = ["[3H, F]", "[3H, H]", "[3H]"];
    const STATE_IS_H: bool = true;
    const SEPARATE: i64 = 1;
    // There is no state but h.
    const KEEPS_STATE: &'static [(i64, f64)] = &[];
    const CPU: CpuCell = kernels::CPU;
    const CUDA: Option<CudaCell> = kernels::CUDA;
    const COSTS: &'static Place<Costs> = &COSTS;
    const CUDNN: &'static Place<Cudnn> = &CUDNN;

    fn step(input_gates: &Tensor, hidden_gates: &Tensor, (h, _): &State) -> Result<State> {
        let of_input = input_gates.f_chunk(Self::GATES, 1)?;
        let of_hidden = hidden_gates.f_chunk(Self::GATES, 1)?;
        let ([ir, iz, inn], [hr, hz, hn]) = (&of_input[..], &of_hidden[..]) else {
            return Err(Error::msg("gru: the weights do not have 3H rows"));
        };
        let r = ir.f_add(hr)?.f_sigmoid()?;
        let z = iz.f_add(hz)?.f_sigmoid()?;
        let n = inn.f_add(&r.f_mul(hn)?)?.f_tanh()?;
        Ok((n.f_add(&z.f_mul(&h.f_sub(&n)?)?)?, None))
    }
}
