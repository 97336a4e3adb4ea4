// LLTM on the CPU: one step, and all steps by a team of threads.
#include "../recurrent/step/cpu.h"

#include "../recurrent/cpu/launch.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

static void lltm_step_forward(const recurrent::step::ForwardParams& params, int64_t begin,
                              int64_t end) {
  recurrent::for_kind_of_sums(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    recurrent::step::for_each_vector<T>(params, begin, end, recurrent::step::step_forward<T>);
  });
}

static void lltm_step_backward(const recurrent::step::BackwardParams& params, int64_t begin,
                               int64_t end) {
  recurrent::for_kind_of_sums(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    recurrent::step::for_each_vector<T>(params, begin, end, recurrent::step::step_backward<T>);
  });
}

static void lltm_packed_forward(const recurrent::cpu::ForwardParams& params, int64_t begin,
                                int64_t end) {
  recurrent::for_kind_of_sums(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    recurrent::cpu::run(recurrent::cpu::Forward<T>{params}, {params.team, begin, end}, 0, 1,
                        params.steps);
  });
}

static void lltm_packed_backward(const recurrent::cpu::BackwardParams& params, int64_t begin,
                                 int64_t end) {
  const int64_t steps = params.steps + (params.needs_grad_h0 ? 1 : 0);
  recurrent::for_kind_of_sums(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    recurrent::cpu::run(recurrent::cpu::Backward<T>{params}, {params.team, begin, end},
                        params.steps - 1, -1, steps);
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension

TCH_EXTENSION_CPU_KERNEL(tch_extension_lltm_step_forward, lltm_step_forward,
                         tch_extension::recurrent::step::ForwardParams,
                         tch_extension::recurrent::step::rows,
                         tch_extension::recurrent::step::rows_of_a_thread)
TCH_EXTENSION_CPU_KERNEL(tch_extension_lltm_step_backward, lltm_step_backward,
                         tch_extension::recurrent::step::BackwardParams,
                         tch_extension::recurrent::step::rows,
                         tch_extension::recurrent::step::rows_of_a_thread)
TCH_EXTENSION_CPU_KERNEL(tch_extension_lltm_packed_forward, lltm_packed_forward,
                         tch_extension::recurrent::cpu::ForwardParams,
                         tch_extension::recurrent::cpu::places, tch_extension::recurrent::cpu::one)
TCH_EXTENSION_CPU_KERNEL(tch_extension_lltm_packed_backward, lltm_packed_backward,
                         tch_extension::recurrent::cpu::BackwardParams,
                         tch_extension::recurrent::cpu::places, tch_extension::recurrent::cpu::one)
