//! Whole sequences of torch.nn's LSTM.

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

/// One layer of an LSTM in one direction, as torch.nn.LSTM has it. Returns h of each step, and the
/// state after the last step.
///
/// ```text
/// [i | f | g | o] = x[t] W_ihᵀ + b_ih + h[t-1] W_hhᵀ + b_hh
/// c[t] = σ(f) c[t-1] + σ(i) tanh(g)
/// h[t] = σ(o) tanh(c[t])
/// ```
///
/// * `input`: x, `[T, B, F]`
/// * `state`: (h, c) before the first step, each `[B, H]`
/// * `weights`: W_ih `[4H, F]`, W_hh `[4H, H]`, b_ih and b_hh `[4H]` or absent
/// * `options`: the lengths of the sequences, if they differ
///
/// Returns (h of all steps `[T, B, H]`, (h, c) after the last step, each `[B, H]`). All three are
/// contiguous and have memory of their own. The tensors are of one kind, `Float`, `Double`, `Half`
/// or `BFloat16`, on one device. Strides and sizes are arbitrary; tensors may be empty, and there
/// may be no steps at all. There are first and second derivatives of each output with respect to
/// each tensor. Gradients of weights and biases may be parts of one piece of memory, as libtorch's are.
///
/// Under autocast, all tensors are cast to autocast's kind, which the outputs have, too.
///
/// On the CPU the weights are packed once, and libtorch's threads work together through the whole
/// sequence; one step, and up to four rows in all steps, are products and a kernel for each step. In
/// `Float` oneDNN's layer, which is libtorch's own, is called where it is faster. The half kinds are
/// computed as `Float` from end to end and rounded once.
///
/// On CUDA, libtorch's own layer is cuDNN's. A layer whose F and H are up to 64 (32 in `Double`) is one
/// kernel of this crate forward and two backward, where that is faster; above 32 columns (16) the
/// products for the weights' gradients follow. On compute capability 9.0 a direction of other layers is
/// one kernel of this crate where that is faster: in the half kinds and in tf32, for H up to 2048 that
/// is a multiple of 8, and for any H up to 512; in other `Float` and in `Double` for H up to 128.
/// Elsewhere, and unless that is clearly faster, it is cuDNN's layer. Which it is depends on the sizes,
/// the kind and the GPU, and on whether the parameters follow one another in one piece of memory, from
/// which cuDNN takes them without a copy
/// ([`flatten_parameters`](crate::nn::Lstm::flatten_parameters)).
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
/// In the half kinds, our kernels for all steps keep c in `Float` from step to step.
///
/// With a graph other kernels may compute the output than without one, because the plan counts both
/// passes: the last bits may differ.
///
/// Memory grows linearly with T. The backward keeps `5·T·B·H` numbers in addition to inputs and
/// outputs, or what cuDNN or oneDNN asks for (oneDNN `16·T·B·H`).
///
/// Equivalent to:
/// ```
/// # use tch::{Kind, Device, Tensor};
/// # use tch_extension::ops::{RnnWeights, lstm};
/// # let options = (Kind::Double, Device::Cpu);
/// # let (x, w_ih, w_hh) = (Tensor::randn([6, 2, 4], options), Tensor::randn([12, 4], options), Tensor::randn([12, 3], options));
/// # let (b_ih, b_hh) = (Tensor::randn([12], options), Tensor::randn([12], options));
/// # let (h0, c0) = (Tensor::randn([2, 3], options), Tensor::randn([2, 3], options));
/// let (h, c) = (h0.unsqueeze(0), c0.unsqueeze(0));
/// let parameters = [&w_ih, &w_hh, &b_ih, &b_hh];
/// let (output, h, c) = x.lstm(&[&h, &c], &parameters, true, 1, 0.0, true, false, false);
///
/// let weights = RnnWeights { w_ih: &w_ih, w_hh: &w_hh, b_ih: Some(&b_ih), b_hh: Some(&b_hh) };
/// let fused = lstm(&x, (&h0, &c0), &weights, &Default::default());
/// assert!(fused.0.allclose(&output, 1e-12, 1e-12, false));
/// assert!(fused.1.0.allclose(&h.squeeze_dim(0), 1e-12, 1e-12, false));
/// assert!(fused.1.1.allclose(&c.squeeze_dim(0), 1e-12, 1e-12, false));
/// ```
///
/// # Sequences of different lengths
/// With [`lengths`](RnnOptions::lengths) this is what torch.nn.LSTM computes of a `PackedSequence`. The input of
/// the steps that are padding is never used, even if it is NaN; their output and its gradient are zero;
/// and the state stays what it was after the last step of the sequence. Where lengths differ, cuDNN's kernels
/// are not used, and the call cannot be captured in a CUDA graph, because it copies the lengths to the GPU.
/// Under autocast on the CPU only what is multiplied is rounded to autocast's kind, and the outputs have the
/// kind of c, as in libtorch.
///
/// ```
/// # use tch::{Kind, Device, Tensor};
/// # use tch_extension::ops::{RnnOptions, RnnWeights, lstm};
/// # let options = (Kind::Double, Device::Cpu);
/// # let (x, w_ih, w_hh) = (Tensor::randn([6, 2, 4], options), Tensor::randn([12, 4], options), Tensor::randn([12, 3], options));
/// # let (h0, c0) = (Tensor::randn([2, 3], options), Tensor::randn([2, 3], options));
/// # let weights = RnnWeights { w_ih: &w_ih, w_hh: &w_hh, b_ih: None, b_hh: None };
/// let lengths = [6, 2];
/// let options = RnnOptions { lengths: Some(&lengths) };
/// let (output, (h, c)) = lstm(&x, (&h0, &c0), &weights, &options);
///
/// for (b, length) in (0..).zip(lengths) {
///     let x = x.narrow(0, 0, length).narrow(1, b, 1);
///     let state = (&h0.narrow(0, b, 1), &c0.narrow(0, b, 1));
///     let alone = lstm(&x, state, &weights, &Default::default());
///     assert!(alone.0.allclose(&output.narrow(0, 0, length).narrow(1, b, 1), 1e-12, 1e-12, false));
///     assert!(alone.1.0.allclose(&h.narrow(0, b, 1), 1e-12, 1e-12, false));
///     assert!(alone.1.1.allclose(&c.narrow(0, b, 1), 1e-12, 1e-12, false));
/// }
/// assert_eq!(output.narrow(0, 2, 4).select(1, 1).abs().max().double_value(&[]), 0.0);
/// ```
///
/// Source: <https://pytorch.org/docs/stable/generated/torch.nn.LSTM.html>.
///
/// # Panics
/// If [`f_lstm`] returns an error.
pub fn lstm(
    input: &Tensor,
    state: (&Tensor, &Tensor),
    weights: &RnnWeights<'_>,
    options: &RnnOptions<'_>,
) -> (Tensor, (Tensor, Tensor)) {
    super::unwrap(f_lstm(input, state, weights, options))
}

/// [`lstm`], with an error instead of a panic.
///
/// # Errors
/// If an argument has another kind, device or shape than stated (the error names the argument); if there
/// is not one length for each sequence, from 1 to T; or if libtorch or CUDA fails.
pub fn f_lstm(
    input: &Tensor,
    (h, c): (&Tensor, &Tensor),
    weights: &RnnWeights<'_>,
    options: &RnnOptions<'_>,
) -> Result<(Tensor, (Tensor, Tensor))> {
    let RnnWeights { w_ih, w_hh, b_ih, b_hh } = *weights;
    let of = LstmIn { input, h, c, w_ih, w_hh, b_ih, b_hh };
    let lengths = options.lengths.map(<[i64]>::to_vec);
    let LstmOut { output, h, c } = call(Lstm { lengths }, &of)?;
    Ok((output, (h, c)))
}

/// [`lstm`] in plain tch operations, without checks of its own.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn lstm_reference(
    input: &Tensor,
    (h, c): (&Tensor, &Tensor),
    weights: &RnnWeights<'_>,
    options: &RnnOptions<'_>,
) -> Result<(Tensor, (Tensor, Tensor))> {
    let state = (h.shallow_clone(), Some(c.shallow_clone()));
    let (output, (h, c)) = layer::reference::<Lstm>(input, options.lengths, weights, state)?;
    let c = c.ok_or_else(|| Error::msg("internal error: an LSTM without c"))?;
    Ok((output, (h, c)))
}

crate::signature! {
    /// One layer of torch.nn.LSTM in one direction; returns (h of all steps `[T, B, H]`, h, c).
    ///
    /// input `[T, B, F]`, h and c `[B, H]`, w_ih `[4H, F]`, w_hh `[4H, H]`, b_ih and b_hh `[4H]`. With lengths,
    /// sequence b has `lengths[b]` steps, from 1 to T, and padding after them: its h and c are those of its last
    /// step, and outputs after it are zero. `tch_extension.nn.LSTM` has layers and directions.
    pub Lstm: LstmIn -> LstmOut = "lstm"(
        input, h, c, w_ih, w_hh, b_ih?, b_hh?, lengths: Option<Vec<i64>> = None
    ) -> (output, h, c)
}

layer::operator!(Lstm: LstmIn -> LstmOut, c);

impl Cell for Lstm {
    const OP: &'static str = "lstm";
    const GATES: i64 = 4;
    const PARAMETERS: [&'static str; 3] = ["[4H, F]", "[4H, H]", "[4H]"];
    const STATE_IS_H: bool = false;
    const SEPARATE: i64 = 0;
    // The input gate closes, and the forget gate opens.
    const KEEPS_STATE: &'static [(i64, f64)] = &[(0, f64::NEG_INFINITY), (1, f64::INFINITY)];
    const CPU: CpuCell = kernels::CPU;
    const CUDA: Option<CudaCell> = kernels::CUDA;
    const COSTS: &'static Place<Costs> = &COSTS;
    const CUDNN: &'static Place<Cudnn> = &CUDNN;

    fn step(input_gates: &Tensor, hidden_gates: &Tensor, (_, c): &State) -> Result<State> {
        let gates = input_gates.f_add(hidden_gates)?.f_chunk(Self::GATES, 1)?;
        let ([i, f, g, o], Some(c)) = (&gates[..], c) else {
            return Err(Error::msg("lstm: the weights do not have 4H rows, or there is no c"));
        };
        let c = f.f_sigmoid()?.f_mul(c)?.f_add(&i.f_sigmoid()?.f_mul(&g.f_tanh()?)?)?;
        let h = o.f_sigmoid()?.f_mul(&c.f_tanh()?)?;
        Ok((h, Some(c)))
    }
}
