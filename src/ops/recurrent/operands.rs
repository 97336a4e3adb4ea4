//! Tensors as kernels read them.

use crate::Result;
use crate::ffi::facts::empty_of;
use crate::ffi::tensor::in_vectors;
use tch::{Device, Kind, Tensor};

/// The kind in which kernels compute tensors of this kind: on the CPU there are none for the half
/// kinds.
pub(in crate::ops) fn worked_in(kind: Kind, device: Device) -> Kind {
    match (device, kind) {
        (Device::Cpu, Kind::Half | Kind::BFloat16) => Kind::Float,
        (_, kind) => kind,
    }
}

/// The tensor in the kind and layout that kernels read; on CUDA they read 16 bytes at a time.
pub(in crate::ops) fn worked(tensor: &Tensor) -> Result<Tensor> {
    worked_as(worked_in(tensor.f_kind()?, tensor.device()), tensor)
}

/// The same, in this kind.
pub(in crate::ops) fn worked_as(kind: Kind, tensor: &Tensor) -> Result<Tensor> {
    in_vectors(&tensor.f_to_kind(kind)?)
}

/// A copy with memory of its own.
pub(in crate::ops) fn copied(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_to_dtype(tensor.f_kind()?, false, true)?)
}

/// A copy that is row-major in whatever layout the tensor is.
pub(in crate::ops) fn row_major_copy(tensor: &Tensor, kind: Kind) -> Result<Tensor> {
    let mut copy = empty_of(&tensor.size(), (kind, tensor.device()))?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}
