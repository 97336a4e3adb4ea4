//! The kernels of `csrc/rms_norm`.

use crate::kernels::raw_kernels;
#[cfg(tch_extension_cuda)]
use crate::ops::norm::Plan;
use crate::ops::norm::kernels::{Backward, Forward, Kernels};

raw_kernels! {
    "rms_norm";
    fn forward(Forward) =
        tch_extension_rms_norm_forward_cpu, tch_extension_rms_norm_forward_cuda;
    fn backward(Backward) =
        tch_extension_rms_norm_backward_cpu, tch_extension_rms_norm_backward_cuda;
    fn finish(Backward) =
        tch_extension_rms_norm_finish_cpu, tch_extension_rms_norm_finish_cuda;
}

#[cfg(tch_extension_cuda)]
unsafe extern "C" {
    fn tch_extension_rms_norm_clusters_cuda(plan: *const Plan, kind: i32) -> i64;
}

pub(crate) const KERNELS: Kernels = Kernels {
    op: "rms_norm",
    is_centred: false,
    forward,
    backward,
    finish,
    #[cfg(tch_extension_cuda)]
    clusters: tch_extension_rms_norm_clusters_cuda,
};
