//! The kinds and devices of plans, from tch's.

use super::kinds::{Device, Kind};
use crate::{Error, Result};

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
}

/// The kind in which values of this kind are computed, as [`kinds::compute_kind`](super::kinds::compute_kind)
/// says.
pub(crate) fn compute_kind(kind: tch::Kind) -> tch::Kind {
    if kind == tch::Kind::Double { tch::Kind::Double } else { tch::Kind::Float }
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
