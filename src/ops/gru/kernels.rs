//! The kernels of `csrc/gru`.

use crate::ops::recurrent::kernels::CellShape;
#[cfg(tch_extension_cuda)]
use crate::ops::recurrent::kernels::block::BlockCell;
use crate::ops::recurrent::kernels::cpu::{CpuBackward, CpuCell, CpuForward};
use crate::ops::recurrent::kernels::cuda::CudaCell;
use crate::ops::recurrent::kernels::step::{StepBackward, StepForward};

unsafe extern "C" {
    fn tch_extension_gru_step_forward_cpu(params: *const StepForward);
    fn tch_extension_gru_step_backward_cpu(params: *const StepBackward);
    fn tch_extension_gru_packed_forward_cpu(params: *const CpuForward);
    fn tch_extension_gru_packed_backward_cpu(params: *const CpuBackward);
}

const SHAPE: CellShape = CellShape { gates: 3, saved: 4, separate: 1, state_is_h: true };

pub(super) const CPU: CpuCell = CpuCell {
    shape: SHAPE,
    step_forward: tch_extension_gru_step_forward_cpu,
    step_backward: tch_extension_gru_step_backward_cpu,
    forward: tch_extension_gru_packed_forward_cpu,
    backward: tch_extension_gru_packed_backward_cpu,
};

#[cfg(tch_extension_cuda)]
pub(super) const CUDA: Option<CudaCell> = Some(CudaCell {
    shape: SHAPE,
    step_forward: cuda::tch_extension_gru_step_forward_cuda,
    step_backward: cuda::tch_extension_gru_step_backward_cuda,
    block: Some(BlockCell {
        forward: cuda::tch_extension_gru_block_forward_cuda,
        backward: cuda::tch_extension_gru_block_backward_cuda,
    }),
    cluster_forward: cuda::tch_extension_gru_cluster_forward_cuda,
    cluster_backward: cuda::tch_extension_gru_cluster_backward_cuda,
    grid_forward: cuda::tch_extension_gru_grid_forward_cuda,
    grid_backward: cuda::tch_extension_gru_grid_backward_cuda,
    wide_grid_forward: cuda::tch_extension_gru_wide_grid_forward_cuda,
    wide_grid_backward: Some(cuda::tch_extension_gru_wide_grid_backward_cuda),
    plain_grid_forward: None,
    plain_grid_backward: None,
});
#[cfg(not(tch_extension_cuda))]
pub(super) const CUDA: Option<CudaCell> = None;

#[cfg(tch_extension_cuda)]
mod cuda {
    use crate::cuda::{LaunchStatus, cudaStream_t};
    use crate::ops::recurrent::kernels::block::{BlockBackward, BlockForward};
    use crate::ops::recurrent::kernels::cluster::{ClusterBackward, ClusterForward};
    use crate::ops::recurrent::kernels::grid::{GridBackward, GridForward};
    use crate::ops::recurrent::kernels::step::{StepBackward, StepForward};

    unsafe extern "C" {
        pub fn tch_extension_gru_step_forward_cuda(
            params: *const StepForward,
            stream: cudaStream_t,
        ) -> LaunchStatus;
        pub fn tch_extension_gru_step_backward_cuda(
            params: *const StepBackward,
            stream: cudaStream_t,
        ) -> LaunchStatus;
        pub fn tch_extension_gru_block_forward_cuda(
            params: *const BlockForward,
            stream: cudaStream_t,
        ) -> LaunchStatus;
        pub fn tch_extension_gru_block_backward_cuda(
            params: *const BlockBackward,
            stream: cudaStream_t,
        ) -> LaunchStatus;
        pub fn tch_extension_gru_cluster_forward_cuda(
            params: *const ClusterForward,
            stream: cudaStream_t,
        ) -> LaunchStatus;
        pub fn tch_extension_gru_cluster_backward_cuda(
            params: *const ClusterBackward,
            stream: cudaStream_t,
        ) -> LaunchStatus;
        pub fn tch_extension_gru_grid_forward_cuda(
            params: *const GridForward,
            fits: *mut bool,
            stream: cudaStream_t,
        ) -> LaunchStatus;
        pub fn tch_extension_gru_grid_backward_cuda(
            params: *const GridBackward,
            fits: *mut bool,
            stream: cudaStream_t,
        ) -> LaunchStatus;
        pub fn tch_extension_gru_wide_grid_forward_cuda(
            params: *const GridForward,
            fits: *mut bool,
            stream: cudaStream_t,
        ) -> LaunchStatus;
        pub fn tch_extension_gru_wide_grid_backward_cuda(
            params: *const GridBackward,
            fits: *mut bool,
            stream: cudaStream_t,
        ) -> LaunchStatus;
    }
}
