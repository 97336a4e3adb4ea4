//! Checks of an operator's arguments. The error messages name the operator, the argument, what was
//! expected, what was passed, and how to fix it.
//!
//! ```
//! use tch::{Device, Kind, Tensor};
//! use tch_extension::{Result, check};
//!
//! fn scale(input: &Tensor, factor: &Tensor) -> Result<Tensor> {
//!     let kinds = [Kind::Float, Kind::Double];
//!     let input_arg = check!("scale", input).defined()?.kind_in(&kinds)?.dim(2, "[B, F]")?;
//!     let (b, f) = (input.size()[0], input.size()[1]);
//!     check!("scale", factor).defined()?.like(&input_arg)?.shape("[B, F]", &[b, f])?;
//!     Ok(input * factor)
//! }
//!
//! let input = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
//! let factor = Tensor::zeros([3], (Kind::Float, Device::Cpu));
//! let error = scale(&input, &factor).unwrap_err().to_string();
//! assert_eq!(error, "scale: factor: expected shape [B, F] = [2, 3], got [3]");
//! ```

use crate::ffi::tensor as facts;
use crate::{Error, Result};
use tch::{Device, Kind, Tensor};

/// Begins the checks of one argument: `check!("op", variable)`, or `check!("op", "name",
/// expression)`.
///
/// The variable's name is the argument's name in messages. See [`mod@crate::check`].
#[macro_export]
macro_rules! check {
    ($op:expr, $argument:ident) => {
        $crate::check::Check::new($op, stringify!($argument), &$argument)
    };
    ($op:expr, $name:expr, $argument:expr) => {
        $crate::check::Check::new($op, $name, &$argument)
    };
}

/// One argument that is being checked; made by [`check!`](crate::check!).
#[derive(Clone, Copy)]
pub struct Check<'a> {
    op: &'a str,
    argument: &'a str,
    tensor: &'a Tensor,
}

impl<'a> Check<'a> {
    /// Begins the checks of argument `argument` of operator `op`.
    pub fn new(op: &'a str, argument: &'a str, tensor: &'a Tensor) -> Self {
        Check { op, argument, tensor }
    }

    /// Checks that the tensor is defined and ordinary: dense, on a device with memory. Call it
    /// first, because the other checks cannot examine an undefined tensor.
    ///
    /// # Errors
    /// When the tensor is undefined, sparse or otherwise special.
    pub fn defined(self) -> Result<Self> {
        if facts::is_strided(self.tensor) {
            return Ok(self);
        }
        if !self.tensor.defined() {
            return Err(self.undefined());
        }
        Err(self.refuse("a dense tensor", "another layout", "convert it with to_dense"))
    }

    /// Checks that the tensor has one of these kinds.
    ///
    /// # Errors
    /// When it has another kind.
    pub fn kind_in(self, kinds: &[Kind]) -> Result<Self> {
        let kind = self.kind()?;
        if kinds.contains(&kind) {
            return Ok(self);
        }
        let names: Vec<_> = kinds.iter().map(|kind| format!("{kind:?}")).collect();
        let hint = format!(
            "cast it with to_kind(Kind::{})",
            names.first().map_or("Float", String::as_str)
        );
        Err(self.refuse(format!("kind {}", names.join(" or ")), format!("{kind:?}"), hint))
    }

    /// Checks that the tensor is on a device for which this build has kernels.
    ///
    /// # Errors
    /// For a CUDA tensor if the build has no CUDA kernels, and for any device other than the CPU
    /// and CUDA.
    pub fn supported_device(self) -> Result<Self> {
        match self.tensor.device() {
            Device::Cpu => Ok(self),
            Device::Cuda(_) if crate::cuda::is_compiled() => Ok(self),
            device @ Device::Cuda(_) => Err(no_cuda_kernels(self.op, self.argument, device)),
            device => Err(self.refuse(
                "a CPU or CUDA tensor",
                format!("{device:?}"),
                "move it with to_device",
            )),
        }
    }

    /// Checks that the tensor has the kind and the device of another argument.
    ///
    /// # Errors
    /// When either differs.
    pub fn like(self, other: &Check<'_>) -> Result<Self> {
        let kind = other.kind()?;
        self.same_device_as(other)?.kind_as(kind, other.argument)
    }

    /// Checks that the tensor is on the device of another argument.
    ///
    /// # Errors
    /// When it differs.
    pub fn same_device_as(self, other: &Check<'_>) -> Result<Self> {
        if facts::same_device(self.tensor, other.tensor) {
            return Ok(self);
        }
        let device = other.tensor.device();
        Err(self.refuse(
            format!("device {device:?}, as {}", other.argument),
            format!("{:?}", self.tensor.device()),
            format!("move it with to_device(Device::{device:?})"),
        ))
    }

    /// Checks that the tensor has this kind. `whose` names what else has it: another argument, or
    /// the promoted kind of several arguments.
    ///
    /// # Errors
    /// When it has another kind.
    pub fn kind_as(self, kind: Kind, whose: &str) -> Result<Self> {
        let found = self.kind()?;
        if found == kind {
            return Ok(self);
        }
        let hint = cast_one(found, kind, whose);
        Err(self.refuse(format!("kind {kind:?}, as {whose}"), format!("{found:?}"), hint))
    }

    /// Checks the number of dimensions. `names` shows them in the message, such as `[B, F]`.
    ///
    /// # Errors
    /// When the tensor has another number of dimensions.
    pub fn dim(self, dim: usize, names: &str) -> Result<Self> {
        if self.tensor.dim() == dim {
            return Ok(self);
        }
        let plural = if dim == 1 { "dimension" } else { "dimensions" };
        Err(self.refuse(
            format!("{dim} {plural} {names}"),
            format!("shape {:?}", self.tensor.size()),
            "",
        ))
    }

    /// Checks the shape. `names` says what the sizes mean, such as `[B, H]`.
    ///
    /// # Errors
    /// When the tensor has another shape.
    pub fn shape(self, names: &str, shape: &[i64]) -> Result<Self> {
        if facts::has_shape(self.tensor, shape) {
            return Ok(self);
        }
        Err(self.refuse(
            format!("shape {names} = {shape:?}"),
            format!("{:?}", self.tensor.size()),
            "",
        ))
    }

    /// The tensor that is being checked.
    pub fn tensor(&self) -> &'a Tensor {
        self.tensor
    }

    /// The argument's kind.
    fn kind(&self) -> Result<Kind> {
        if let Some(kind) = facts::kind(self.tensor) {
            return Ok(kind);
        }
        if !self.tensor.defined() {
            return Err(self.undefined());
        }
        // tch panics on kinds that it does not know, such as quantised kinds of newer libtorch
        // versions.
        self.tensor.f_kind().map_err(|error| self.refuse("a known kind", error.to_string(), ""))
    }

    fn undefined(&self) -> Error {
        self.refuse(
            "a tensor",
            "an undefined one",
            "was Tensor::new() passed, or a missing gradient?",
        )
    }

    /// Makes an error about this argument.
    pub fn refuse(
        &self,
        expected: impl Into<String>,
        got: impl Into<String>,
        hint: impl Into<String>,
    ) -> Error {
        Error::argument(self.op, self.argument, expected, got, hint)
    }
}

pub(crate) fn no_cuda_kernels(op: &str, argument: &str, device: Device) -> Error {
    let expected = "a CPU tensor, because this build has no CUDA kernels";
    let hint = "build with a libtorch that has CUDA and an nvcc (cargo xtask doctor says what is missing), or move it \
                with to_device(Device::Cpu)";
    Error::argument(op, argument, expected, format!("{device:?}"), hint)
}

/// What to do where an argument is of kind `found`, and `whose` is of kind `kind`: which of the two is
/// wrong, only the caller knows.
pub(crate) fn cast_one(found: Kind, kind: Kind, whose: &str) -> String {
    let is_float = matches!(found, Kind::Double | Kind::Float | Kind::Half | Kind::BFloat16);
    let other = match is_float {
        true => format!(", or {whose} with to_kind(Kind::{found:?})"),
        false => String::new(),
    };
    format!("cast it with to_kind(Kind::{kind:?}){other}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_dimension_is_singular() {
        let x = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
        let error = check!("op", x).dim(1, "[F]").map(|_| ()).unwrap_err().to_string();
        assert_eq!(error, "op: x: expected 1 dimension [F], got shape [2, 3]");
    }

    #[test]
    fn an_undefined_tensor_is_called_so_whatever_is_asked_of_it() {
        let x = Tensor::new();
        for asked in [check!("op", x).defined(), check!("op", x).kind_in(&[Kind::Float])] {
            let error = asked.map(|_| ()).unwrap_err().to_string();
            assert!(error.starts_with("op: x: expected a tensor, got an undefined one"), "{error}");
        }
    }
}
