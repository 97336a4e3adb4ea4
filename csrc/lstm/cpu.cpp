// An LSTM on the CPU: a single step, and all steps computed by a team of threads.
#include "../recurrent/step/cpu.h"

#include "../recurrent/cells/lstm_cpu.h"
#include "../recurrent/cpu/launch.h"
#include "params.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

static void lstm_step_forward(const recurrent::step::ForwardParams& params, int64_t begin,
                              int64_t end) {
  recurrent::step::run_forward<recurrent::LstmOnCpu>(params, begin, end);
}

static void lstm_step_backward(const recurrent::step::BackwardParams& params, int64_t begin,
                               int64_t end) {
  recurrent::step::run_backward<recurrent::LstmOnCpu>(params, begin, end);
}

static void lstm_packed_forward(const recurrent::cpu::ForwardParams& params, int64_t begin,
                                int64_t end) {
  recurrent::cpu::run_forward<recurrent::LstmOnCpu>(params, begin, end);
}

static void lstm_packed_backward(const recurrent::cpu::BackwardParams& params, int64_t begin,
                                 int64_t end) {
  recurrent::cpu::run_backward<recurrent::LstmOnCpu>(params, begin, end);
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension

TCH_EXTENSION_CPU_KERNEL(tch_extension_lstm_step_forward, lstm_step_forward,
                         tch_extension::recurrent::step::ForwardParams,
                         tch_extension::recurrent::step::rows,
                         tch_extension::recurrent::step::rows_of_a_thread)
TCH_EXTENSION_CPU_KERNEL(tch_extension_lstm_step_backward, lstm_step_backward,
                         tch_extension::recurrent::step::BackwardParams,
                         tch_extension::recurrent::step::rows,
                         tch_extension::recurrent::step::rows_of_a_thread)
TCH_EXTENSION_CPU_KERNEL(tch_extension_lstm_packed_forward, lstm_packed_forward,
                         tch_extension::recurrent::cpu::ForwardParams,
                         tch_extension::recurrent::cpu::places, tch_extension::recurrent::cpu::one)
TCH_EXTENSION_CPU_KERNEL(tch_extension_lstm_packed_backward, lstm_packed_backward,
                         tch_extension::recurrent::cpu::BackwardParams,
                         tch_extension::recurrent::cpu::places, tch_extension::recurrent::cpu::one)
