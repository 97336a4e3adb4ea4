//! The kernels of `csrc/add_rms_norm`.

use crate::kernels::raw_kernels;
use crate::ops::norm::kernels::add::{AddBackward, AddForward, AddKernels};
use crate::ops::rms_norm;

raw_kernels! {
    "add_rms_norm";
    fn forward(AddForward) =
        tch_extension_add_rms_norm_forward_cpu, tch_extension_add_rms_norm_forward_cuda;
    fn backward(AddBackward) =
        tch_extension_add_rms_norm_backward_cpu, tch_extension_add_rms_norm_backward_cuda;
}

pub(crate) const KERNELS: AddKernels = AddKernels { forward, backward, norm: rms_norm::KERNELS };
