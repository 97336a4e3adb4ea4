//! Kinds and sizes without values, as an operator's rule sees its tensors.

use crate::check::{cast_one, no_cuda_kernels};
use crate::ffi::facts::{Facts, empty_of};
use crate::library::SymInt;
use crate::{Error, Result};
use std::fmt::Debug;
use std::ops::{Add, Deref, DerefMut, Div, Mul, Sub};
use tch::{Device, Kind, Tensor};

/// A size: a number, or a [`SymInt`] while a program is traced for any size.
pub trait Dim:
    Clone
    + Debug
    + From<i64>
    + PartialEq
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + 'static
{
    /// Whether tensors may have no memory, and no device of their own.
    #[doc(hidden)]
    const IS_TRACED: bool;

    /// The number, if it is known.
    fn number(&self) -> Option<i64>;

    /// Whether the two are known to be different. Symbols are not compared: what is traced would
    /// then hold for one size only.
    fn differs(&self, other: &Self) -> bool {
        self.number().zip(other.number()).is_some_and(|(a, b)| a != b)
    }

    /// The product of sizes, 1 for none; `None` if it is known to exceed 64 bits, which it may without
    /// elements.
    fn product(sizes: &[Self]) -> Option<Self> {
        let times = |product: Self, size: &Self| match (product.number(), size.number()) {
            (Some(product), Some(size)) => product.checked_mul(size).map(Self::from),
            _ => Some(product * size.clone()),
        };
        sizes.iter().try_fold(Self::from(1), times)
    }

    /// The tensor's sizes.
    #[doc(hidden)]
    fn sizes(tensor: &Tensor) -> Vec<Self>;
}

impl Dim for i64 {
    const IS_TRACED: bool = false;

    fn number(&self) -> Option<i64> {
        Some(*self)
    }

    fn sizes(tensor: &Tensor) -> Vec<i64> {
        tensor.size()
    }
}

impl Dim for SymInt {
    const IS_TRACED: bool = true;

    fn number(&self) -> Option<i64> {
        SymInt::number(self)
    }

    fn sizes(tensor: &Tensor) -> Vec<SymInt> {
        crate::library::sizes(tensor)
    }
}

/// What an operator's [`rule`](super::Operator::rule) knows of an argument, and what it says of an
/// output: kind and sizes. Errors of its checks name the operator and the argument.
#[derive(Clone, Debug)]
pub struct Meta<D> {
    op: &'static str,
    argument: &'static str,
    kind: Kind,
    device: Device,
    sizes: Sizes<D>,
}

/// Sizes, of which up to `FEW` need no allocation.
#[derive(Clone)]
struct Sizes<D> {
    few: [D; FEW],
    many: Vec<D>,
    len: usize,
}

const FEW: usize = 4;

impl<D: Dim> Sizes<D> {
    fn new(sizes: &[D]) -> Self {
        let few = std::array::from_fn(|dim| sizes.get(dim).cloned().unwrap_or(D::from(0)));
        let many = if sizes.len() > FEW { sizes.to_vec() } else { Vec::new() };
        Sizes { few, many, len: sizes.len() }
    }
}

impl<D> Deref for Sizes<D> {
    type Target = [D];

    fn deref(&self) -> &[D] {
        if self.len > FEW { &self.many } else { &self.few[..self.len] }
    }
}

impl<D> DerefMut for Sizes<D> {
    fn deref_mut(&mut self) -> &mut [D] {
        if self.len > FEW { &mut self.many } else { &mut self.few[..self.len] }
    }
}

impl<D: Debug> Debug for Sizes<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        (**self).fmt(f)
    }
}

impl<D: Dim> Meta<D> {
    pub(super) fn of(op: &'static str, argument: &'static str, tensor: &Tensor) -> Result<Self> {
        let unknown = |error: tch::TchError| {
            Error::argument(op, argument, "a known kind", error.to_string(), "")
        };
        let (kind, device) = (tensor.f_kind().map_err(unknown)?, tensor.device());
        Ok(Meta { op, argument, kind, device, sizes: Sizes::new(&D::sizes(tensor)) })
    }

    /// The kind.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The device. While a program is traced, it may be any.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The sizes.
    pub fn sizes(&self) -> &[D] {
        &self.sizes
    }

    /// Checks that the argument has one of these kinds.
    ///
    /// # Errors
    /// When it has another kind.
    pub fn kind_in(&self, kinds: &[Kind]) -> Result<&Self> {
        if kinds.contains(&self.kind) {
            return Ok(self);
        }
        let names: Vec<_> = kinds.iter().map(|kind| format!("{kind:?}")).collect();
        let first = names.first().map_or("Float", String::as_str);
        let hint = format!("cast it with to_kind(Kind::{first})");
        let expected = format!("kind {}", names.join(" or "));
        Err(self.refuse(expected, format!("{:?}", self.kind), hint))
    }

    /// Checks that the argument is on a device for which this build has kernels.
    ///
    /// # Errors
    /// For a CUDA tensor if the build has no CUDA kernels, and for any device other than the CPU and
    /// CUDA.
    pub fn supported_device(&self) -> Result<&Self> {
        match self.device {
            Device::Cpu => Ok(self),
            _ if D::IS_TRACED => Ok(self),
            Device::Cuda(_) if crate::cuda::is_compiled() => Ok(self),
            device @ Device::Cuda(_) => Err(no_cuda_kernels(self.op, self.argument, device)),
            device => Err(self.refuse(
                "a CPU or CUDA tensor",
                format!("{device:?}"),
                "move it with to_device",
            )),
        }
    }

    /// Checks that the argument has the kind and the device of another one.
    ///
    /// # Errors
    /// When either differs.
    pub fn like(&self, other: &Meta<D>) -> Result<&Self> {
        self.same_device_as(other)?.kind_as(other.kind, other.argument)
    }

    /// Checks that the argument is on the device of another one.
    ///
    /// # Errors
    /// When it is not.
    pub fn same_device_as(&self, other: &Meta<D>) -> Result<&Self> {
        if self.device == other.device {
            return Ok(self);
        }
        let device = other.device;
        Err(self.refuse(
            format!("device {device:?}, as {}", other.argument),
            format!("{:?}", self.device),
            format!("move it with to_device(Device::{device:?})"),
        ))
    }

    /// Checks that the argument has this kind, which `whose` has.
    ///
    /// # Errors
    /// When it has another kind.
    pub fn kind_as(&self, kind: Kind, whose: &str) -> Result<&Self> {
        if self.kind == kind {
            return Ok(self);
        }
        let hint = cast_one(self.kind, kind, whose);
        Err(self.refuse(format!("kind {kind:?}, as {whose}"), format!("{:?}", self.kind), hint))
    }

    /// Checks the number of dimensions. `names` says what they are, such as `[B, F]`.
    ///
    /// # Errors
    /// When it is another number.
    pub fn dim(&self, dim: usize, names: &str) -> Result<&Self> {
        if self.sizes.len() == dim {
            return Ok(self);
        }
        let plural = if dim == 1 { "dimension" } else { "dimensions" };
        let got = format!("shape {:?}", self.sizes);
        Err(self.refuse(format!("{dim} {plural} {names}"), got, ""))
    }

    /// Checks the shape, as far as sizes are known. `names` says what they are, such as `[B, H]`.
    ///
    /// # Errors
    /// When it is another shape.
    pub fn shape(&self, names: &str, shape: &[D]) -> Result<&Self> {
        let differ = |(a, b): (&D, &D)| a.differs(b);
        if self.sizes.len() == shape.len() && !self.sizes.iter().zip(shape).any(differ) {
            return Ok(self);
        }
        let expected = format!("shape {names} = {shape:?}");
        Err(self.refuse(expected, format!("{:?}", self.sizes), ""))
    }

    /// An error about this argument.
    pub fn refuse(
        &self,
        expected: impl Into<String>,
        got: impl Into<String>,
        hint: impl Into<String>,
    ) -> Error {
        Error::argument(self.op, self.argument, expected, got, hint)
    }

    /// A new contiguous tensor of other sizes, and of this kind and device.
    #[must_use]
    pub fn sized(&self, sizes: impl AsRef<[D]>) -> Meta<D> {
        Meta { sizes: Sizes::new(sizes.as_ref()), ..self.clone() }
    }

    /// A new contiguous tensor with another last size.
    #[must_use]
    pub fn with_last(mut self, size: D) -> Meta<D> {
        if let Some(last) = self.sizes.last_mut() {
            *last = size;
        }
        self
    }

    /// A new tensor of another kind.
    #[must_use]
    pub fn of_kind(&self, kind: Kind) -> Meta<D> {
        Meta { kind, ..self.clone() }
    }
}

impl Meta<i64> {
    /// `None` if the facts do not say everything.
    pub(super) fn from_facts(
        op: &'static str,
        argument: &'static str,
        facts: &Facts,
    ) -> Option<Self> {
        let (kind, device) = (facts.known_kind()?, facts.device()?);
        Some(Meta { op, argument, kind, device, sizes: Sizes::new(facts.all_sizes()?) })
    }

    /// Makes the tensor, without values.
    pub(crate) fn allocate(&self) -> Result<Tensor> {
        empty_of(&self.sizes, (self.kind, self.device))
    }
}

impl Meta<SymInt> {
    /// Makes the tensor that stands for it while a program is traced.
    pub(super) fn fake(&self, like: &Tensor) -> Result<Tensor> {
        crate::library::empty(&self.sizes, self.kind, like)
    }
}
