// A GRU on the CPU: a single step, and all steps computed by a team of threads.
//
// The latter two functions take the parameters of recurrent/cpu/params.h, whose state is h: `c0` is
// h0, `c` is `output` and c_stride is B·H. The gates are [r | z | n], as in torch.nn.GRU. With its
// parameters:
//
//   input_gates = x W_ihᵀ + b_ih + [b_hr | b_hz | 0]
//   weight = W_hh
//   separate_bias = b_hn
//
// The gradients follow from the results of the backward pass, with D = grad_gates, [D_r | D_z |
// D_hn], and N = grad_separate:
//
//   grad W_hh = Σ_t D[t]ᵀ h[t-1]
//   grad b_hh = Σ_t,b D
//   grad b_ih = Σ_t,b [D_r | D_z | N]
//   grad W_ih = Σ_t [D_r | D_z | N][t]ᵀ x[t]
//   grad x = [D_r | D_z | N] W_ih
#include "../recurrent/step/cpu.h"

#include "../recurrent/cells/gru_cpu.h"
#include "../recurrent/cpu/launch.h"
#include "params.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

static void gru_step_forward(const recurrent::step::ForwardParams& params, int64_t begin,
                             int64_t end) {
  recurrent::step::run_forward<recurrent::GruOnCpu>(params, begin, end);
}

static void gru_step_backward(const recurrent::step::BackwardParams& params, int64_t begin,
                              int64_t end) {
  recurrent::step::run_backward<recurrent::GruOnCpu>(params, begin, end);
}

static void gru_packed_forward(const recurrent::cpu::ForwardParams& params, int64_t begin,
                               int64_t end) {
  recurrent::cpu::run_forward<recurrent::GruOnCpu>(params, begin, end);
}

static void gru_packed_backward(const recurrent::cpu::BackwardParams& params, int64_t begin,
                                int64_t end) {
  recurrent::cpu::run_backward<recurrent::GruOnCpu>(params, begin, end);
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension

TCH_EXTENSION_CPU_KERNEL(tch_extension_gru_step_forward, gru_step_forward,
                         tch_extension::recurrent::step::ForwardParams,
                         tch_extension::recurrent::step::rows,
                         tch_extension::recurrent::step::rows_of_a_thread)
TCH_EXTENSION_CPU_KERNEL(tch_extension_gru_step_backward, gru_step_backward,
                         tch_extension::recurrent::step::BackwardParams,
                         tch_extension::recurrent::step::rows,
                         tch_extension::recurrent::step::rows_of_a_thread)
TCH_EXTENSION_CPU_KERNEL(tch_extension_gru_packed_forward, gru_packed_forward,
                         tch_extension::recurrent::cpu::ForwardParams,
                         tch_extension::recurrent::cpu::places, tch_extension::recurrent::cpu::one)
TCH_EXTENSION_CPU_KERNEL(tch_extension_gru_packed_backward, gru_packed_backward,
                         tch_extension::recurrent::cpu::BackwardParams,
                         tch_extension::recurrent::cpu::places, tch_extension::recurrent::cpu::one)
