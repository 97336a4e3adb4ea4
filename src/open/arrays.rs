//! Arrays of the caller. What a kernel relies on is checked here and in `call`.

use super::abi::{DlDataType, DlDevice, DlTensor, Refusal};
use super::arguments::{Argument, Result, dtype_name, kind_of, names};
use crate::ops::kinds::Kind;
use std::ffi::c_void;
use std::fmt::Display;

/// An array whose memory, as far as anybody can tell, holds its elements.
#[derive(Clone, Copy)]
pub struct Array<'a> {
    pub(super) argument: Argument<'a>,
    pub address: *mut c_void,
    pub shape: &'a [i64],
    strides: Option<&'a [i64]>,
    dtype: DlDataType,
    pub(super) device: DlDevice,
    /// The bytes from its first element to the end of the last one.
    pub(super) bytes: usize,
}

/// More dimensions than any library has.
const MOST_DIMENSIONS: i32 = 64;

impl<'a> Array<'a> {
    pub(super) fn new(argument: Argument<'a>, tensor: &'a DlTensor) -> Result<Self> {
        let refuse = |expected: &str, got: &dyn Display| {
            argument.refuse("ValueError", expected, got, "copy it")
        };
        let &DlTensor { data, device, ndim, dtype, shape, strides, byte_offset } = tensor;
        let has_shape = (0..=MOST_DIMENSIONS).contains(&ndim) && (ndim == 0 || !shape.is_null());
        if !has_shape {
            return Err(refuse("at most 64 dimensions and their sizes", &format!("{ndim}")));
        }
        // SAFETY: an array has so many sizes and, unless they are null, strides.
        let sizes = |at: *const i64| unsafe { std::slice::from_raw_parts(at, ndim as usize) };
        let shape = if ndim == 0 { &[] } else { sizes(shape) };
        let strides = (ndim > 0 && !strides.is_null()).then(|| sizes(strides));
        if let Some(&size) = shape.iter().find(|size| **size < 0) {
            return Err(refuse("sizes of at least 0", &size));
        }
        let all = Array { argument, address: data, shape, strides, dtype, device, bytes: 0 };
        let is_backward = |(size, stride): (&i64, &i64)| *size > 1 && *stride < 0;
        if strides.is_some_and(|strides| shape.iter().zip(strides).any(is_backward)) {
            return Err(refuse("strides of at least 0, as a copy has", &format!("{strides:?}")));
        }
        let too_large = || refuse("an array that fits into memory", &format!("{shape:?}"));
        let bytes = all.extent().ok_or_else(too_large)?;
        if bytes > 0 && data.is_null() {
            return Err(refuse("memory for the elements", &"a null pointer"));
        }
        let offset = usize::try_from(byte_offset).map_err(|_| too_large())?;
        let first = data.addr().checked_add(offset).ok_or_else(too_large)?;
        first.checked_add(bytes).ok_or_else(too_large)?;
        let element = usize::from(dtype.bits.div_ceil(8)).max(1);
        if bytes > 0 && matches!(element, 2 | 4 | 8) && first % element != 0 {
            let expected = format!("an address that is a multiple of {element} bytes");
            return Err(refuse(&expected, &format!("{first:#x}")));
        }
        Ok(Array { address: data.wrapping_byte_add(offset), bytes, ..all })
    }

    /// The bytes that it takes, with gaps; `None` if they cannot be.
    fn extent(&self) -> Option<usize> {
        let element = i64::from(self.dtype.bits).checked_mul(self.dtype.lanes.into())?;
        let element = element.checked_add(7)? / 8;
        if self.shape.contains(&0) {
            return Some(0);
        }
        let mut elements: i64 = 1;
        for size in self.shape {
            elements = elements.checked_mul(*size)?;
        }
        let mut last = elements - 1;
        if let Some(strides) = self.strides {
            last = 0;
            for (size, stride) in self.shape.iter().zip(strides) {
                let stride = if *size > 1 { *stride } else { 0 };
                last = (size - 1).checked_mul(stride)?.checked_add(last)?;
            }
        }
        elements.checked_mul(element)?;
        let bytes = last.checked_add(1)?.checked_mul(element)?;
        isize::try_from(bytes).ok().map(isize::cast_unsigned)
    }

    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    fn is_contiguous(&self) -> bool {
        let Some(strides) = self.strides.filter(|_| !self.is_empty()) else { return true };
        let mut expected = 1;
        for (size, stride) in self.shape.iter().zip(strides).rev() {
            if *size > 1 && *stride != expected {
                return false;
            }
            expected *= size;
        }
        true
    }

    pub fn refuse(&self, expected: impl Display, got: impl Display, way_out: &str) -> Refusal {
        self.argument.refuse("ValueError", expected, got, way_out)
    }

    pub fn contiguous(self) -> Result<Self> {
        if self.is_contiguous() {
            return Ok(self);
        }
        let got = format!("strides {:?} of a shape {:?}", self.strides.unwrap_or(&[]), self.shape);
        Err(self.refuse("a contiguous array", got, "copy it, as numpy.ascontiguousarray does"))
    }

    pub fn is_of(&self, code: u8, bits: u8) -> bool {
        self.dtype == DlDataType { code, bits, lanes: 1 }
    }

    pub fn of_shape(self, shape: &[i64]) -> Result<Self> {
        if self.shape == shape {
            return Ok(self);
        }
        Err(self.refuse(format!("shape {shape:?}"), format!("{:?}", self.shape), ""))
    }

    pub fn one_of(self, kinds: &[Kind]) -> Result<Of<'a>> {
        match kind_of(self.dtype).filter(|kind| kinds.contains(kind)) {
            Some(kind) => Ok(Of { array: self, kind }),
            None => Err(self.wrong_type(&names(kinds))),
        }
    }

    pub fn wrong_type(&self, expected: &str) -> Refusal {
        self.argument.refuse("TypeError", expected, dtype_name(self.dtype), "")
    }

    /// The strides of a row-major array, or its own.
    pub fn strides(&self) -> Vec<i64> {
        if let Some(strides) = self.strides {
            return strides.to_vec();
        }
        let mut strides = vec![1; self.shape.len()];
        for at in (1..self.shape.len()).rev() {
            strides[at - 1] = self.shape[at].max(1).saturating_mul(strides[at]);
        }
        strides
    }

    /// Its values, if it is on the CPU and contiguous.
    ///
    /// # Safety
    /// It has 64-bit integers, `len` of them.
    pub unsafe fn integers(&self, len: i64) -> impl Iterator<Item = i64> + 'a {
        let first = self.address.cast::<i64>().cast_const();
        // SAFETY: what the caller guarantees (see `# Safety`); its memory was checked.
        (0..len.max(0) as usize).map(move |at| unsafe { first.add(at).read() })
    }
}

/// An array of a kind with kernels.
#[derive(Clone, Copy)]
pub struct Of<'a> {
    pub array: Array<'a>,
    pub kind: Kind,
}

impl<'a> Of<'a> {
    /// The sizes but the last one, and the numbers of rows and columns.
    pub fn rows(&self) -> Result<(&'a [i64], [i64; 2])> {
        let shape = self.array.shape;
        let expected = "at least one dimension, and columns in the last one";
        let refuse = || self.array.refuse(expected, format!("shape {shape:?}"), "");
        let (columns, leading) =
            shape.split_last().filter(|(last, _)| **last > 0).ok_or_else(refuse)?;
        let rows = leading.iter().try_fold(1_i64, |rows, size| rows.checked_mul(*size));
        let sizes = rows.map(|rows| [rows, *columns]).filter(|sizes| can_be_planned(*sizes));
        let too_many =
            || self.array.refuse("fewer rows or columns", format!("shape {shape:?}"), "");
        Ok((leading, sizes.ok_or_else(too_many)?))
    }
}

/// Whether plans can compute with these numbers of rows and columns. Without rows, there may be more columns
/// than fit into memory.
pub fn can_be_planned([rows, columns]: [i64; 2]) -> bool {
    rows.max(1).checked_mul(columns).is_some_and(|elements| elements < i64::MAX / 64)
}

/// The addresses that kernels get for arrays that may be absent.
pub fn address(of: Option<Of<'_>>) -> *mut c_void {
    of.map_or(std::ptr::null_mut(), |of| of.array.address)
}
