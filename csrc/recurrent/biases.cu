// Adds the two biases of a layer in the kind of the sums: one launch in place of up to five.

#include "params.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::recurrent {
namespace {

template <typename T>
__global__ void __launch_bounds__(kThreads)
    biases_kernel(const __grid_constant__ RecurrentBiases params) {
  using G = Compute<T>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= params.rows) return;
  auto value_of = [row](const void* bias) {
    return bias == nullptr ? G{} : static_cast<G>(static_cast<const T*>(bias)[row]);
  };
  const int64_t of_separate = row - (params.rows - params.separate_rows);
  G sum = value_of(params.b_ih);
  if (of_separate >= 0) {
    static_cast<G*>(params.separate)[of_separate] = value_of(params.b_hh);
  } else {
    sum += value_of(params.b_hh);
  }
  static_cast<G*>(params.sums)[row] = sum;
}

}  // namespace
}  // namespace tch_extension::recurrent

extern "C" tch_extension::LaunchStatus tch_extension_recurrent_biases_cuda(
    const RecurrentBiases* params, cudaStream_t stream) {
  using namespace tch_extension;
  using namespace recurrent;
  const int64_t blocks = ceil_div(params->rows, int64_t{kThreads});
  if (blocks > INT32_MAX)
    return {"recurrent_biases", "internal error: more rows than a grid has threads"};
  for_kind(params->kind, [&](auto type) {
    using T = typename decltype(type)::type;
    biases_kernel<T><<<static_cast<unsigned int>(blocks), kThreads, 0, stream>>>(*params);
  });
  return launch_status("recurrent_biases");
}
