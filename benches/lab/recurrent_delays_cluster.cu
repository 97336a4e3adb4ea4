// Checks that the LLTM kernels that use clusters compute the same bits, whichever warp is late:
// each warp sleeps for a random time before its waits. Each kernel runs 1000 times, or as often as
// the argument says. From the root of the repository:
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -std=c++17 -O3 --expt-relaxed-constexpr -I csrc
//     -I csrc/include -o recurrent_delays_cluster benches/lab/recurrent_delays_cluster.cu &&
//     ./recurrent_delays_cluster
//
// Every wait gives up after 100 seconds, so that a mistake ends the program instead of hanging it.
// The program then reports "a wait gave up" or, if a block sends to a block that has given up,
// "unspecified launch failure". compute-sanitizer's racecheck takes a minute for each size, and
// several minutes if other programs use the GPU. This checks a single size with few steps, and its
// waits give up after 600 seconds:
//
//   compute-sanitizer --tool racecheck ./recurrent_delays_cluster 1 4
//     "f32, products in f32, (4, 60, 256)" 600
#include "recurrent_delays.h"

namespace tch_extension {

namespace hopper {
namespace {

__device__ void late_mbarrier_wait(uint32_t barrier, uint32_t parity) {
  sleep_sometimes(barrier, 4);
  __syncwarp();
  while (!mbarrier_try_wait(barrier, parity)) {
    if (is_too_late()) return;
  }
}

}  // namespace
}  // namespace hopper

namespace recurrent::cluster {
namespace {

__device__ void late_barrier_of_tile(const Place& place, int parts) {
  sleep_sometimes(1, 4);
  __syncwarp();
  barrier_of_tile(place, parts);
  sleep_sometimes(2, 4);
  __syncwarp();
}

}  // namespace
}  // namespace recurrent::cluster
}  // namespace tch_extension

#define mbarrier_wait late_mbarrier_wait
#define barrier_of_tile late_barrier_of_tile
#include "lltm/cluster_backward.cu"
#include "lltm/cluster_forward.cu"

namespace {

void launch(const tch_extension::recurrent::cluster::ForwardParams& forward) {
  check(tch_extension_lltm_persistent_forward_cuda(&forward, nullptr));
}

void launch(const tch_extension::recurrent::cluster::BackwardParams& backward) {
  const bool is_plain =
      backward.product_kind == kTchExtensionFloat || backward.product_kind == kTchExtensionDouble;
  // For plain products of this size, there is no backward kernel.
  if (is_plain && backward.hidden > 128) return;
  check(tch_extension_lltm_persistent_backward_cuda(&backward, nullptr));
}

template <typename S, typename T>
void expect_of_clusters(int runs, int rows, int hidden, int cluster, bool is_scaled = false) {
  tch_extension::recurrent::cluster::ForwardParams forward{};
  tch_extension::recurrent::cluster::BackwardParams backward{};
  forward.cluster = backward.cluster = cluster;
  const Array<float> scales(3 * hidden, 9, 1e-3f), h0_scales(rows, 10, 1.0f);
  if (is_scaled) {
    forward.scales = backward.scales = scales.data;
    forward.h0_scales = h0_scales.data;
  }
  char how[80];
  std::snprintf(how, sizeof how, "clusters of %d%s", cluster, is_scaled ? ", scaled" : "");
  expect_the_same_bits<S, T>(rows, hidden, runs, forward, backward, how,
                             [](const auto& params) { launch(params); });
}

}  // namespace

int main(int count, char** arguments) {
  const int runs = runs_of(count, arguments);
  using Bf16 = __nv_bfloat16;
  expect_of_clusters<Bf16, Bf16>(runs, 17, 128, 8);
  expect_of_clusters<__half, __half>(runs, 250, 100, 8);
  expect_of_clusters<Bf16, Bf16>(runs, 24, 256, 8);
  expect_of_clusters<Bf16, Bf16>(runs, 24, 512, 16);
  expect_of_clusters<Bf16, Bf16>(runs, 130, 512, 8);
  expect_of_clusters<Bf16, Bf16>(runs, 24, 768, 16);
  expect_of_clusters<float, __half>(runs, 17, 128, 8, true);
  expect_of_clusters<float, __half>(runs, 24, 256, 8, true);
  expect_of_clusters<float, __half>(runs, 24, 512, 16, true);
  expect_of_clusters<float, __half>(runs, 130, 512, 8, true);
  expect_of_clusters<float, __half>(runs, 24, 768, 16, true);
  expect_of_clusters<float, float>(runs, 17, 128, 8);
  expect_of_clusters<double, double>(runs, 17, 128, 8);
  expect_of_clusters<float, float>(runs, 60, 256, 16);
  expect_of_clusters<double, double>(runs, 17, 200, 16);
  return 0;
}
