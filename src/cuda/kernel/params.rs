//! The parameters of a launch.

use crate::ffi::cuda_types::LaunchFacts;
use std::ffi::c_void;
use std::marker::PhantomData;

/// A type that a kernel takes by value: a number, an address, an array, or a `repr(C)` struct of
/// these, for which you implement it.
///
/// ```
/// #[derive(Clone, Copy)]
/// #[repr(C)]
/// struct Size { rows: i64, scale: f32 }
/// // SAFETY: it is repr(C), and its fields are such types.
/// unsafe impl tch_extension::cuda::Parameter for Size {}
/// ```
///
/// A reference is not one of them: a kernel could not read this program's memory.
///
/// # Safety
/// The type has the size and layout of the type in the kernel, and its values mean something on a
/// GPU.
pub unsafe trait Parameter: Copy {}

macro_rules! plain {
    ($($number:ty),+) => {
        // SAFETY: numbers have the same representation in C.
        $(unsafe impl Parameter for $number {})+
    };
}
plain!(i8, i16, i32, i64, isize, u8, u16, u32, u64, usize, f32, f64, bool);

// SAFETY: an address has the same representation in C. Whoever launches the kernel guarantees that
// it is one of the device.
unsafe impl<T> Parameter for *const T {}
// SAFETY: as for `*const T`.
unsafe impl<T> Parameter for *mut T {}
// SAFETY: an array has the representation of C's array in a struct, which is how a kernel takes it.
unsafe impl<T: Parameter, const N: usize> Parameter for [T; N] {}

/// A parameter of a launch: the value that [`params!`](crate::cuda::params) refers to.
#[derive(Clone, Copy, Debug)]
pub struct Param<'a> {
    address: *const c_void,
    size: usize,
    value: PhantomData<&'a ()>,
}

impl<'a> Param<'a> {
    /// A parameter with this value.
    pub fn of<T: Parameter>(value: &'a T) -> Param<'a> {
        Param {
            address: std::ptr::from_ref(value).cast(),
            size: size_of::<T>(),
            value: PhantomData,
        }
    }

    pub(super) fn address(&self) -> *const c_void {
        self.address
    }
}

/// The parameters of a kernel: `params![x.data_ptr(), y.data_ptr(), 0.5f32, n]`. Each has exactly
/// the type that the kernel takes, so a number needs its suffix: `2` alone is an `i32`.
/// [`Parameter`](crate::cuda::Parameter) lists the types. The macro makes a `&[Param]` of
/// temporary values, so write it inside the call of [`launch`](crate::cuda::Kernel::launch).
#[doc(hidden)]
#[macro_export]
macro_rules! __params {
    ($($value:expr),* $(,)?) => {
        &[$($crate::cuda::Param::of(&$value)),*] as &[$crate::cuda::Param<'_>]
    };
}

/// Checks number and sizes.
pub(super) fn check(params: &[Param<'_>], facts: &LaunchFacts) -> Result<(), String> {
    let expected = facts.params.unwrap_or(params.len());
    if params.len() != expected {
        return Err(format!("expected {expected} parameters, got {}", params.len()));
    }
    let mut pairs = params.iter().zip(&facts.sizes).enumerate();
    match pairs.find(|(_, (param, size))| param.size != **size) {
        None => Ok(()),
        Some((index, (param, size))) => Err(format!(
            "parameter {index} (of 0 to {}): expected {size} bytes, got {}",
            expected - 1,
            param.size
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_sizes(params: &[Param<'_>], sizes: &[usize]) -> Result<(), String> {
        let facts = LaunchFacts {
            capability: 90,
            max_threads: 1024,
            static_shared: 0,
            max_shared: 0,
            params: Some(sizes.len()),
            sizes: sizes.to_vec(),
        };
        check(params, &facts)
    }

    #[test]
    fn number_and_sizes_are_checked() {
        let memory = std::ptr::null_mut::<c_void>();
        let params = crate::cuda::params![memory, 1i64, 0.5f32, [1u8; 3], true];
        assert_eq!(check_sizes(params, &[8, 8, 4, 3, 1]), Ok(()));
        assert_eq!(check_sizes(crate::cuda::params![], &[]), Ok(()));
        let text = check_sizes(params, &[8, 8, 4, 3]).expect_err("one too many");
        assert_eq!(text, "expected 4 parameters, got 5");
        let text = check_sizes(params, &[8, 8, 8, 3, 1]).expect_err("another size");
        assert_eq!(text, "parameter 2 (of 0 to 4): expected 8 bytes, got 4");
    }

    #[test]
    fn a_parameter_refers_to_its_value() {
        let value = 0x1234_5678u32;
        let param = Param::of(&value);
        // SAFETY: it is the address of `value`, which is alive.
        assert_eq!(unsafe { *param.address().cast::<u32>() }, value);
    }
}
