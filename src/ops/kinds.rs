//! The kinds and devices that plans know. They are not tch's, so that plans can serve programs without it.

use crate::{Error, Result};

/// A kind with kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ops) enum Kind {
    Half,
    BFloat16,
    Float,
    Double,
}

impl Kind {
    /// # Errors
    /// When there are no kernels for the kind.
    pub fn of(kind: tch::Kind) -> Result<Kind> {
        match kind {
            tch::Kind::Half => Ok(Kind::Half),
            tch::Kind::BFloat16 => Ok(Kind::BFloat16),
            tch::Kind::Float => Ok(Kind::Float),
            tch::Kind::Double => Ok(Kind::Double),
            other => Err(Error::msg(format!("internal error: there are no kernels for {other:?}"))),
        }
    }

    /// Its number in `csrc/include/tch_extension/kind.h`, which is libtorch's.
    pub fn code(self) -> i32 {
        match self {
            Kind::Half => 5,
            Kind::Float => 6,
            Kind::Double => 7,
            Kind::BFloat16 => 15,
        }
    }

    pub fn elt_size_in_bytes(self) -> usize {
        match self {
            Kind::Half | Kind::BFloat16 => 2,
            Kind::Float => 4,
            Kind::Double => 8,
        }
    }
}

/// Where kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ops) enum Device {
    Cpu,
    Cuda(usize),
    /// No kernel runs there.
    Other,
}

impl From<tch::Device> for Device {
    fn from(device: tch::Device) -> Device {
        match device {
            tch::Device::Cpu => Device::Cpu,
            tch::Device::Cuda(index) => Device::Cuda(index),
            _ => Device::Other,
        }
    }
}

impl From<Device> for tch::Device {
    fn from(device: Device) -> tch::Device {
        match device {
            Device::Cpu => tch::Device::Cpu,
            Device::Cuda(index) => tch::Device::Cuda(index),
            // One without kernels.
            Device::Other => tch::Device::Mps,
        }
    }
}

impl Device {
    pub fn is_cuda(self) -> bool {
        matches!(self, Device::Cuda(_))
    }
}
