//! The kernels that the loops of `csrc/lltm` call. They are declared here, as all others are in Rust,
//! because C++'s declarations and the list of what kernels export are made of these.

use crate::cuda::{LaunchStatus, cudaStream_t};
use crate::ops::recurrent::kernels::cluster::{ClusterBackward, ClusterForward};
use crate::ops::recurrent::kernels::cpu::{CpuBackward, CpuForward};
use crate::ops::recurrent::kernels::grid::{GridBackward, GridForward};
use crate::ops::recurrent::kernels::step::{StepBackward, StepForward};

unsafe extern "C" {
    fn tch_extension_lltm_step_forward_cpu(params: *const StepForward);
    fn tch_extension_lltm_step_backward_cpu(params: *const StepBackward);
    fn tch_extension_lltm_packed_forward_cpu(params: *const CpuForward);
    fn tch_extension_lltm_packed_backward_cpu(params: *const CpuBackward);

    fn tch_extension_lltm_step_forward_cuda(
        params: *const StepForward,
        stream: cudaStream_t,
    ) -> LaunchStatus;
    fn tch_extension_lltm_step_backward_cuda(
        params: *const StepBackward,
        stream: cudaStream_t,
    ) -> LaunchStatus;
    fn tch_extension_lltm_cluster_forward_cuda(
        params: *const ClusterForward,
        stream: cudaStream_t,
    ) -> LaunchStatus;
    fn tch_extension_lltm_cluster_backward_cuda(
        params: *const ClusterBackward,
        stream: cudaStream_t,
    ) -> LaunchStatus;

    // `fits` becomes false if not all blocks can run at the same time; no kernel is then started.
    fn tch_extension_lltm_grid_forward_cuda(
        params: *const GridForward,
        fits: *mut bool,
        stream: cudaStream_t,
    ) -> LaunchStatus;
    fn tch_extension_lltm_grid_backward_cuda(
        params: *const GridBackward,
        fits: *mut bool,
        stream: cudaStream_t,
    ) -> LaunchStatus;
    fn tch_extension_lltm_grid_plain_forward_cuda(
        params: *const GridForward,
        fits: *mut bool,
        stream: cudaStream_t,
    ) -> LaunchStatus;
    fn tch_extension_lltm_grid_plain_backward_cuda(
        params: *const GridBackward,
        fits: *mut bool,
        stream: cudaStream_t,
    ) -> LaunchStatus;
    fn tch_extension_lltm_grid_wide_forward_cuda(
        params: *const GridForward,
        fits: *mut bool,
        stream: cudaStream_t,
    ) -> LaunchStatus;
    fn tch_extension_lltm_grid_wide_backward_cuda(
        params: *const GridBackward,
        fits: *mut bool,
        stream: cudaStream_t,
    ) -> LaunchStatus;
}
