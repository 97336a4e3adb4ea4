// For blocks of a cluster that share a row: which columns each block has, stores to another block's
// shared memory, and sums over all blocks.
#pragma once

#include "../hopper/cluster.h"
#include "../hopper/cluster_launch.h"
#include "row_team.h"

namespace tch_extension::norm {
namespace {

constexpr int kMostInCluster = 8;

// A block's columns of a row. Its last vector may have fewer columns.
struct Columns {
  int vectors, columns;
  int64_t column;  // the block's first column
};

__device__ __forceinline__ Columns columns_of_block(int64_t columns, int lanes, int cluster) {
  const int64_t all = (columns + lanes - 1) / lanes;
  const int64_t each = (all + cluster - 1) / cluster;
  const int64_t first = (blockIdx.x % cluster) * each;
  const int64_t left = all - first;
  Columns mine;
  mine.vectors = static_cast<int>(left < 0 ? 0 : left < each ? left : each);
  mine.column = first * lanes;
  const int64_t columns_left = columns - mine.column;
  const int64_t most = int64_t{mine.vectors} * lanes;
  mine.columns = static_cast<int>(columns_left < most ? columns_left < 0 ? 0 : columns_left : most);
  return mine;
}

__device__ __forceinline__ void arrive_at_cluster_barrier() { hopper::cluster_arrive(); }

__device__ __forceinline__ void wait_at_cluster_barrier() { hopper::cluster_wait(); }

__device__ __forceinline__ void cluster_barrier() {
  arrive_at_cluster_barrier();
  wait_at_cluster_barrier();
}

// Stores `value` at the same place in the shared memory of another block of the cluster.
template <typename C>
__device__ __forceinline__ void store_in_block(Pair<C>* place, int block, Pair<C> value) {
#if __CUDA_ARCH__ >= 900
  *hopper::in_block(place, block) = value;
#endif
}

// team_sum over all blocks of the cluster, whose threads must all call this. `buffer` has 2 ·
// kMostInCluster · kMostThreads / kWarp pairs.
template <typename C>
__device__ __forceinline__ Pair<C> cluster_sum(Pair<C> sum, int cluster, int rank, Pair<C>* buffer,
                                               int& phase) {
  sum = warp_sum(sum, kWarp);
  const int warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  Pair<C>* sums = buffer + phase * (kMostInCluster * kMostThreads / kWarp);
  phase = 1 - phase;
  if (lane < cluster) store_in_block(sums + rank * warps + warp, lane, sum);
  cluster_barrier();
  Pair<C> total = {C(0), C(0)};
  for (int index = lane; index < cluster * warps; index += kWarp) {
    total.first += sums[index].first;
    total.second += sums[index].second;
  }
  return warp_sum(total, kWarp);
}

enum class Team { kWithinWarp, kBlock, kBlockWithRest, kCluster };

// The number of pairs in the buffer that a block with such a team needs for the sums.
template <Team kTeam>
constexpr int kPairsOfSums =
    2 * kMostThreads / kWarp * (kTeam == Team::kCluster ? kMostInCluster : 1);

// Sums over all threads that share a row.
template <Team kTeam, typename C>
__device__ __forceinline__ Pair<C> sum_of_team(Pair<C> sum, const NormPlan& plan, int team,
                                               Pair<C>* buffer, int& phase) {
  if constexpr (kTeam == Team::kCluster) {
    return cluster_sum(sum, plan.cluster, blockIdx.x % plan.cluster, buffer, phase);
  } else {
    return team_sum < kTeam == Team::kWithinWarp > (sum, team, buffer, phase);
  }
}

// The configuration of a launch of `clusters` clusters, or of as many blocks if a cluster is one
// block.
struct ClusterLaunch : hopper::ClusterLaunch {
  ClusterLaunch(const NormPlan& plan, int bytes, int64_t clusters, cudaStream_t stream)
      : hopper::ClusterLaunch(plan.threads, bytes, plan.cluster, clusters, stream) {
    if (plan.cluster == 1) config.numAttrs = 0;
  }
};

}  // namespace
}  // namespace tch_extension::norm
