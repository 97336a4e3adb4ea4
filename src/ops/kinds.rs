//! The kinds and devices that plans know. They are not tch's, so that plans can serve programs without it.

/// A kind with kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Half,
    BFloat16,
    Float,
    Double,
}

impl Kind {
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

/// The kind in which kernels compute values of this kind.
pub(crate) fn compute_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// Where kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    Cpu,
    Cuda(usize),
    /// No kernel runs there.
    Other,
}

impl Device {
    pub fn is_cuda(self) -> bool {
        matches!(self, Device::Cuda(_))
    }
}
