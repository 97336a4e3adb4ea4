//! Tensors as plain structs of a pointer, sizes and strides, for your own kernels in C++ and CUDA.
//!
//! [`Strided`] and [`StridedMut`] have the layout of the structs with the same names in
//! `tch_extension/accessor.h`. Put them in the parameter struct of an `extern "C"` function, which
//! gets its accessors from them:
//!
//! ```no_run
//! use tch_extension::strided::{Strided, StridedMut};
//! use tch_extension::tch::Tensor;
//! use tch_extension::{Result, check};
//!
//! // struct ScaleParams { tch_extension::Strided<2> x; tch_extension::StridedMut<2> y; };
//! #[repr(C)]
//! struct ScaleParams<'a> {
//!     x: Strided<'a, 2>,
//!     y: StridedMut<'a, 2>,
//! }
//!
//! unsafe extern "C" {
//!     fn my_crate_scale_cpu(params: *const ScaleParams<'_>);
//! }
//!
//! fn scale(x: &Tensor) -> Result<Tensor> {
//!     check!("scale", x).defined()?.dim(2, "[B, F]")?;
//!     let mut y = x.empty_like();
//!     let params = ScaleParams { x: Strided::new(x)?, y: StridedMut::new(&mut y)? };
//!     // SAFETY: the kernel reads and writes within the sizes; both are on the CPU.
//!     unsafe { my_crate_scale_cpu(&params) };
//!     Ok(y)
//! }
//! # fn main() {}
//! ```
//!
//! The structs hold an address and keep nothing alive except the borrow. Use them for one call
//! only. Another handle of the tensor may release its memory meanwhile (`resize_`, `set_data`): the
//! functions of [`kernels!`](crate::kernels!) refuse such a struct, and a call of your own must see
//! to it. The address belongs to the tensor's device, and a kernel for another device must
//! not use it: [`check!`](crate::check!) and a `match` on the device make sure of that.

use crate::check::Check;
use crate::ffi::autograd::tch_extension_grad_mode;
use crate::ffi::tensor::{Handle, address, bump_version, is_in_memory, plain};
use crate::overlap::overlaps;
use crate::{Error, Result};
use std::ffi::c_void;
use std::marker::PhantomData;
use tch::{Device, Kind, Tensor};

/// A dense tensor of `N` dimensions that a kernel reads with strides.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a, const N: usize> {
    data: *const c_void,
    sizes: [i64; N],
    strides: [i64; N],
    kind: i32,
    device: i32,
    tensor: Handle<'a>,
}

/// A dense tensor of `N` dimensions that a kernel writes with strides.
#[repr(C)]
#[derive(Debug)]
pub struct StridedMut<'a, const N: usize> {
    data: *mut c_void,
    sizes: [i64; N],
    strides: [i64; N],
    kind: i32,
    device: i32,
    tensor: Handle<'a>,
    writes: PhantomData<&'a mut Tensor>,
}

impl<'a, const N: usize> Strided<'a, N> {
    /// Describes a tensor on any device.
    ///
    /// ```
    /// use tch_extension::strided::Strided;
    /// use tch_extension::tch::{Device, Kind, Tensor};
    ///
    /// let x = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu)).transpose(0, 1);
    /// let x = Strided::<2>::new(&x)?;
    /// assert_eq!((x.sizes(), x.strides()), ([3, 2], [1, 3]));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the tensor is undefined or sparse, or has another number of dimensions; when its kind
    /// is neither numeric nor bool; and when the memory does not hold the values themselves (a
    /// pending negation or conjugation, zeros without memory).
    pub fn new(tensor: &'a Tensor) -> Result<Self> {
        let Parts { sizes, strides, kind, device } = parts("Strided::new", tensor)?;
        let data = address(tensor);
        Ok(Strided { data, sizes, strides, kind, device, tensor: Handle::of(tensor) })
    }

    /// Whether the tensor is still where it was.
    pub(crate) fn is_current(&self) -> bool {
        self.tensor.is_at(self.data, &self.sizes, &self.strides)
    }

    /// The tensor's device.
    pub fn device(&self) -> Device {
        device_of(self.device)
    }

    /// The size of each dimension.
    pub fn sizes(&self) -> [i64; N] {
        self.sizes
    }

    /// The distance in memory between neighbours along each dimension, in elements.
    pub fn strides(&self) -> [i64; N] {
        self.strides
    }
}

impl<'a, const N: usize> StridedMut<'a, N> {
    /// Describes a tensor on any device. Autograd counts the tensor as changed from this moment.
    ///
    /// # Errors
    /// As for [`Strided::new`]; also when elements overlap in memory (an expanded tensor), and when
    /// the tensor requires grad while grad mode is on.
    pub fn new(tensor: &'a mut Tensor) -> Result<Self> {
        const OP: &str = "StridedMut::new";
        let Parts { sizes, strides, kind, device } = parts(OP, tensor)?;
        let check = Check::new(OP, "tensor", tensor);
        if tensor.requires_grad() && tch_extension_grad_mode() {
            let expected = "a tensor without gradient, or grad mode off";
            let hint = "its graph would not know of the change: write under no_grad, or to a detached copy";
            return Err(check.refuse(expected, "one that requires grad", hint));
        }
        if overlaps(&sizes, &strides) {
            let got = format!("strides {strides:?} for shape {sizes:?}");
            return Err(check.refuse(
                "elements that do not overlap in memory",
                got,
                "call contiguous()",
            ));
        }
        bump_version(tensor)?;
        let data = address(tensor);
        let tensor = Handle::of(tensor);
        Ok(StridedMut { data, sizes, strides, kind, device, tensor, writes: PhantomData })
    }

    /// Whether the tensor is still where it was.
    pub(crate) fn is_current(&self) -> bool {
        self.tensor.is_at(self.data, &self.sizes, &self.strides)
    }

    /// The tensor's device.
    pub fn device(&self) -> Device {
        device_of(self.device)
    }

    /// The size of each dimension.
    pub fn sizes(&self) -> [i64; N] {
        self.sizes
    }

    /// The distance in memory between neighbours along each dimension, in elements.
    pub fn strides(&self) -> [i64; N] {
        self.strides
    }
}

/// Returns the tensor itself if its values are in memory in row-major order without gaps, and
/// otherwise a copy that is. Use it for a kernel that does not handle strides. It does more than
/// [`Tensor::contiguous`], which keeps a pending negation or conjugation, and zeros that have no
/// memory.
///
/// ```
/// use tch_extension::strided::contiguous;
/// use tch_extension::tch::Tensor;
///
/// let x = Tensor::from_slice(&[1.0, 2.0]).internal_neg_view();
/// assert_eq!(contiguous(&x)?, Tensor::from_slice(&[-1.0, -2.0]));
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// When the tensor is undefined or sparse.
pub fn contiguous(tensor: &Tensor) -> Result<Tensor> {
    Check::new("contiguous", "tensor", tensor).defined()?;
    plain(tensor)
}

struct Parts<const N: usize> {
    sizes: [i64; N],
    strides: [i64; N],
    kind: i32,
    device: i32,
}

/// The CPU, in place of a CUDA device's index.
const CPU: i32 = -1;

fn device_of(index: i32) -> Device {
    usize::try_from(index).map_or(Device::Cpu, Device::Cuda)
}

fn parts<const N: usize>(op: &str, tensor: &Tensor) -> Result<Parts<N>> {
    let names = std::array::from_fn::<_, N, _>(|dim| format!("d{dim}")).join(", ");
    let check = Check::new(op, "tensor", tensor).defined()?.dim(N, &format!("[{names}]"))?;
    let kind = tensor.f_kind()?;
    let Some(kind) = kind_number(kind) else {
        return Err(check.refuse(
            "a kind of numbers or bool",
            format!("{kind:?}"),
            "cast with to_kind",
        ));
    };
    if !is_in_memory(tensor) {
        let hint = "make it so with strided::contiguous";
        return Err(check.refuse("a dense tensor with its values in memory", "another", hint));
    }
    let array = |numbers: Vec<i64>| {
        numbers
            .try_into()
            .map_err(|_| Error::msg("internal error: the tensor's dimensions changed"))
    };
    let device = match tensor.device() {
        Device::Cpu => Some(CPU),
        Device::Cuda(index) => i32::try_from(index).ok(),
        _ => None,
    };
    let Some(device) = device else {
        let got = format!("{:?}", tensor.device());
        return Err(check.refuse("a tensor on the CPU or a CUDA device", got, "move it there"));
    };
    Ok(Parts { sizes: array(tensor.size())?, strides: array(tensor.stride())?, kind, device })
}

/// libtorch's number of a kind, which tch does not expose.
fn kind_number(kind: Kind) -> Option<i32> {
    Some(match kind {
        Kind::Uint8 => 0,
        Kind::Int8 => 1,
        Kind::Int16 => 2,
        Kind::Int => 3,
        Kind::Int64 => 4,
        Kind::Half => 5,
        Kind::Float => 6,
        Kind::Double => 7,
        Kind::ComplexHalf => 8,
        Kind::ComplexFloat => 9,
        Kind::ComplexDouble => 10,
        Kind::Bool => 11,
        Kind::BFloat16 => 15,
        _ => return None,
    })
}
