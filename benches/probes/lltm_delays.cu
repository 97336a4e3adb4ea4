// Whether the LLTM kernels of clusters compute the same bits whoever comes late: each warp sleeps for a
// random time before its waits, 1000 runs of each kernel, or as many as the argument says. From the root of
// the repository:
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -std=c++17 -O3 --expt-relaxed-constexpr -I csrc
//     -I csrc/include -o lltm_delays benches/probes/lltm_delays.cu && ./lltm_delays
//
// Every wait gives up after a while, so that a mistake ends instead of hanging.
#include "lltm_delays.h"

namespace tch_extension {
namespace {

__device__ void late_wait_for_arrival(uint32_t barrier, uint32_t parity) {
  sleep_sometimes(barrier, 4);
  __syncwarp();
  while (!has_arrived(barrier, parity)) {
    if (is_too_late()) return;
  }
}

__device__ void late_barrier_of_tile(const Place& place) {
  sleep_sometimes(1, 4);
  __syncwarp();
  barrier_of_tile(place);
  sleep_sometimes(2, 4);
  __syncwarp();
}

}  // namespace
}  // namespace tch_extension

#define wait_for_arrival late_wait_for_arrival
#define barrier_of_tile late_barrier_of_tile
#include "lltm/persistent_backward.cu"
#include "lltm/persistent_forward.cu"

namespace {

void launch(const LltmPersistentForward& forward) {
  check(tch_extension_lltm_persistent_forward_cuda(&forward, nullptr));
}

void launch(const LltmPersistentBackward& backward) {
  check(tch_extension_lltm_persistent_backward_cuda(&backward, nullptr));
}

template <typename T>
void expect_of_clusters(int runs, int rows, int hidden, int cluster, int groups, bool tf32) {
  LltmPersistentForward forward{};
  LltmPersistentBackward backward{};
  forward.cluster = backward.cluster = cluster;
  forward.tf32 = backward.tf32 = tf32;
  forward.groups = groups;
  char how[80];
  std::snprintf(how, sizeof how, "clusters of %d, %d groups%s", cluster, groups, tf32 ? ", tf32" : "");
  expect_the_same_bits<T, T>(rows, hidden, runs, forward, backward, how,
                             [](const auto& params) { launch(params); });
}

}  // namespace

int main(int count, char** arguments) {
  const int runs = runs_of(count, arguments);
  expect_of_clusters<__nv_bfloat16>(runs, 17, 128, 8, 1, false);
  expect_of_clusters<__half>(runs, 250, 100, 8, 1, false);
  expect_of_clusters<__nv_bfloat16>(runs, 24, 256, 8, 1, false);
  expect_of_clusters<__nv_bfloat16>(runs, 24, 512, 16, 1, false);
  expect_of_clusters<__nv_bfloat16>(runs, 130, 512, 8, 1, false);
  expect_of_clusters<__nv_bfloat16>(runs, 24, 768, 16, 1, false);
  expect_of_clusters<float>(runs, 17, 128, 8, 1, true);
  expect_of_clusters<float>(runs, 24, 256, 8, 1, true);
  expect_of_clusters<float>(runs, 24, 512, 16, 1, true);
  expect_of_clusters<float>(runs, 40, 512, 16, 2, true);
  expect_of_clusters<float>(runs, 17, 128, 8, 1, false);
  expect_of_clusters<double>(runs, 17, 128, 8, 1, false);
  return 0;
}
