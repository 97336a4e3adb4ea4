//! The kernels of `csrc/add_layer_norm`.

use crate::kernels::raw_kernels;
use crate::ops::layer_norm;
use crate::ops::norm::kernels::add::{AddBackward, AddForward, AddKernels};

raw_kernels! {
    "add_layer_norm";
    fn forward(AddForward) =
        tch_extension_add_layer_norm_forward_cpu, tch_extension_add_layer_norm_forward_cuda;
    fn backward(AddBackward) =
        tch_extension_add_layer_norm_backward_cpu, tch_extension_add_layer_norm_backward_cuda;
}

pub(super) const KERNELS: AddKernels = AddKernels { forward, backward, norm: layer_norm::KERNELS };
