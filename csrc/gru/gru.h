// The kernels of a GRU's layer, each in the file of its name, and how they are called: with their
// parameters and the stream.
#pragma once

#include "../recurrent/cpu/params.h"
#include "../recurrent/step/params.h"

extern "C" {
void tch_extension_gru_step_forward_cpu(
    const tch_extension::recurrent::step::ForwardParams*) noexcept;
void tch_extension_gru_step_backward_cpu(
    const tch_extension::recurrent::step::BackwardParams*) noexcept;
void tch_extension_gru_packed_forward_cpu(
    const tch_extension::recurrent::cpu::ForwardParams*) noexcept;
void tch_extension_gru_packed_backward_cpu(
    const tch_extension::recurrent::cpu::BackwardParams*) noexcept;
}

#if defined(TCH_EXTENSION_CUDA) || defined(__CUDACC__)
#include "../recurrent/cluster/params.h"
#include "../recurrent/grid/params.h"
#include "tch_extension/launch.h"

extern "C" {
tch_extension::LaunchStatus tch_extension_gru_step_forward_cuda(
    const tch_extension::recurrent::step::ForwardParams*, cudaStream_t);
tch_extension::LaunchStatus tch_extension_gru_step_backward_cuda(
    const tch_extension::recurrent::step::BackwardParams*, cudaStream_t);

tch_extension::LaunchStatus tch_extension_gru_cluster_forward_cuda(
    const tch_extension::recurrent::cluster::ForwardParams*, cudaStream_t);
tch_extension::LaunchStatus tch_extension_gru_cluster_backward_cuda(
    const tch_extension::recurrent::cluster::BackwardParams*, cudaStream_t);

// `fits` becomes false if not all blocks can run at the same time; no kernel is then started.
tch_extension::LaunchStatus tch_extension_gru_grid_forward_cuda(
    const tch_extension::recurrent::grid::ForwardParams*, bool* fits, cudaStream_t);
tch_extension::LaunchStatus tch_extension_gru_grid_backward_cuda(
    const tch_extension::recurrent::grid::BackwardParams*, bool* fits, cudaStream_t);
tch_extension::LaunchStatus tch_extension_gru_wide_grid_forward_cuda(
    const tch_extension::recurrent::grid::ForwardParams*, bool* fits, cudaStream_t);
tch_extension::LaunchStatus tch_extension_gru_wide_grid_backward_cuda(
    const tch_extension::recurrent::grid::BackwardParams*, bool* fits, cudaStream_t);
}
#endif
