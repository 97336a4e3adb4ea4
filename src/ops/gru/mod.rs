//! Whole sequences of torch.nn's GRU.

mod costs;
mod kernels;

use super::recurrent::RnnWeights;
use super::recurrent::kernels::cpu::CpuCell;
use super::recurrent::kernels::cuda::CudaCell;
use super::recurrent::layer::{self, Cell, Costs, State};
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
/// * `weights`: W_ih `[3H, F]`, W_hh `[3H, H]`, b_ih and b_hh `[3H]` or absent; the rows are for r,
///   z and n
/// * `h`: h before the first step, `[B, H]`
///
/// Returns (h of all steps `[T, B, H]`, h after the last step `[B, H]`). Both are contiguous and
/// have memory of their own. The tensors are of one kind, `Float`, `Double`, `Half` or `BFloat16`,
/// on one device. Strides and sizes are arbitrary; tensors may be empty, and there may be no steps
/// at all. There are first and second derivatives of each output with respect to each tensor.
///
/// Under autocast, all tensors are cast to autocast's kind, which the outputs have, too.
///
/// On the CPU the weights are packed once, and libtorch's threads work together through the whole
/// sequence. The half kinds are computed as `Float` from end to end and rounded once.
///
/// On CUDA, libtorch's own layer is cuDNN's. On compute capability 9.0 all steps of a direction are
/// one kernel of this crate where that is faster: in the half kinds for H up to 2048 that is a
/// multiple of 8, and for any H up to 768; in `Float` and `Double` for H up to 128. Elsewhere it
/// is cuDNN's kernels, or a product and a kernel for each step. cuDNN's products of `Float` are in
/// tf32 unless [`set_rnn_allow_tf32`](crate::cuda::set_rnn_allow_tf32) forbids it. Our kernels for
/// all steps never round to tf32; the products around them follow
/// [`set_matmul_allow_tf32`](crate::cuda::set_matmul_allow_tf32). In the half kinds, our kernels for
/// all steps keep h in `Float` from step to step, and round what they multiply.
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
/// let fused = gru(&x, &weights, &h0);
/// assert!(fused.0.allclose(&output, 1e-12, 1e-12, false));
/// assert!(fused.1.allclose(&h.squeeze_dim(0), 1e-12, 1e-12, false));
/// ```
///
/// Source: <https://pytorch.org/docs/stable/generated/torch.nn.GRU.html>.
///
/// # Panics
/// If [`f_gru`] returns an error.
pub fn gru(input: &Tensor, weights: &RnnWeights<'_>, h: &Tensor) -> (Tensor, Tensor) {
    super::unwrap(f_gru(input, weights, h))
}

/// [`gru`], with an error instead of a panic.
///
/// # Errors
/// If an argument has another kind, device or shape than stated (the error names the argument), or
/// if libtorch or CUDA fails.
pub fn f_gru(input: &Tensor, weights: &RnnWeights<'_>, h: &Tensor) -> Result<(Tensor, Tensor)> {
    let (output, (last, _)) = layer::f_layer::<Gru>(input, weights, h, None)?;
    Ok((output, last))
}

/// [`gru`] in plain tch operations, without checks of its own.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn gru_reference(
    input: &Tensor,
    weights: &RnnWeights<'_>,
    h: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let (output, (last, _)) = layer::reference::<Gru>(input, weights, (h.shallow_clone(), None))?;
    Ok((output, last))
}

struct Gru;

impl Cell for Gru {
    const OP: &'static str = "gru";
    const GATES: i64 = 3;
    const ROWS: &'static str = "3H";
    const STATE_IS_H: bool = true;
    const SEPARATE: i64 = 1;
    const CPU: CpuCell = kernels::CPU;
    const CUDA: Option<CudaCell> = kernels::CUDA;
    const COSTS: &'static Costs = &costs::COSTS;

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
