//! Bindings to `csrc/library/sym_int.cpp`.

use super::{take_message, text};
use crate::{Error, Result};
use std::ffi::c_char;
use tch::{Kind, Tensor};
use torch_sys::C_tensor;

/// The C++ side of an int that is not known.
#[repr(C)]
#[doc(alias = "c10::SymNodeImpl")]
pub(super) struct Node {
    _opaque: [u8; 0],
}

/// An int that may not be known yet: libtorch's `SymInt`.
///
/// While `torch.compile` or `torch.export` trace a program, sizes are symbols, so that what they
/// make works for all sizes. Sums, differences, products and quotients of symbols are symbols. A
/// comparison, and [`guard`](SymInt::guard), look at the size that is traced, and what is made then
/// works only where the answer is the same.
#[repr(C)]
#[doc(alias = "tch_extension::RawSymInt")]
pub struct SymInt {
    number: i64,
    /// Null if the number is known. Otherwise we own a reference.
    node: *mut Node,
}

// SAFETY: libtorch counts references atomically, and a node of Python's takes the interpreter's lock.
// A tensor, which can be sent as well, holds the same nodes.
unsafe impl Send for SymInt {}
// SAFETY: as for `Send`.
unsafe impl Sync for SymInt {}

unsafe extern "C" {
    fn tch_extension_retain_sym_int(node: *mut Node);
    fn tch_extension_release_sym_int(node: *mut Node);
    fn tch_extension_combine_sym_ints(
        operation: c_char,
        a: *const SymInt,
        b: *const SymInt,
        result: *mut SymInt,
    ) -> *mut c_char;
    fn tch_extension_compare_sym_ints(
        equal: bool,
        a: *const SymInt,
        b: *const SymInt,
        result: *mut bool,
    ) -> *mut c_char;
    fn tch_extension_guard_sym_int(node: *mut Node, result: *mut i64) -> *mut c_char;
    fn tch_extension_sym_int_text(node: *mut Node, text: *mut *mut c_char) -> *mut c_char;
    fn tch_extension_sym_dim(tensor: *const C_tensor, dim: *mut usize) -> *mut c_char;
    fn tch_extension_sym_sizes(
        tensor: *const C_tensor,
        sizes: *mut SymInt,
        dim: usize,
    ) -> *mut c_char;
    fn tch_extension_new_empty(
        like: *const C_tensor,
        sizes: *const SymInt,
        len: usize,
        kind: i32,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
}

fn checked(message: *mut c_char) -> Result<()> {
    take_message(message).map_or(Ok(()), |message| Err(Error::Torch(message)))
}

impl SymInt {
    pub(crate) fn known(number: i64) -> Self {
        SymInt { number, node: std::ptr::null_mut() }
    }

    /// # Safety
    /// The node must be alive.
    pub(super) unsafe fn borrowed(node: *mut Node) -> Self {
        // SAFETY: the caller guarantees that the node is alive (see `# Safety`).
        unsafe { tch_extension_retain_sym_int(node) };
        SymInt { number: 0, node }
    }

    /// The number, if it is known without looking at what is traced.
    pub fn number(&self) -> Option<i64> {
        self.node.is_null().then_some(self.number)
    }

    /// The node; null if the number is known.
    pub(super) fn node(&self) -> *mut Node {
        self.node
    }

    /// The number. If it is symbolic, it is that of what is traced, and what is made from the trace
    /// works for this number only.
    ///
    /// # Errors
    /// When the number depends on the values of a tensor, or belongs to no trace.
    pub fn guard(&self) -> Result<i64> {
        let mut number = self.number;
        if !self.node.is_null() {
            // SAFETY: we hold a reference of the node.
            checked(unsafe { tch_extension_guard_sym_int(self.node, &mut number) })?;
        }
        Ok(number)
    }

    /// `operation` is one of `+ - * / %`, `<` for the minimum and `>` for the maximum.
    pub(crate) fn combine(&self, operation: u8, other: &SymInt) -> Result<SymInt> {
        let mut result = SymInt::known(0);
        // SAFETY: both are alive, and C++ writes a number and a reference that we then own.
        let message = unsafe {
            tch_extension_combine_sym_ints(operation as c_char, self, other, &mut result)
        };
        checked(message).map(|()| result)
    }

    fn compare(&self, equal: bool, other: &SymInt) -> Result<bool> {
        let mut result = false;
        // SAFETY: both are alive.
        checked(unsafe { tch_extension_compare_sym_ints(equal, self, other, &mut result) })?;
        Ok(result)
    }

    pub(crate) fn equals(&self, other: &SymInt) -> Result<bool> {
        self.compare(true, other)
    }

    pub(crate) fn is_less(&self, other: &SymInt) -> Result<bool> {
        self.compare(false, other)
    }

    pub(crate) fn text(&self) -> Result<String> {
        match self.number() {
            Some(number) => Ok(number.to_string()),
            // SAFETY: we hold a reference of the node. We own the text.
            None => text(|text| unsafe { tch_extension_sym_int_text(self.node, text) }),
        }
    }
}

impl Clone for SymInt {
    fn clone(&self) -> Self {
        if !self.node.is_null() {
            // SAFETY: we hold a reference of the node.
            unsafe { tch_extension_retain_sym_int(self.node) };
        }
        SymInt { number: self.number, node: self.node }
    }
}

impl Drop for SymInt {
    fn drop(&mut self) {
        if !self.node.is_null() {
            // SAFETY: we own the reference, and nobody uses it afterwards.
            unsafe { tch_extension_release_sym_int(self.node) };
        }
    }
}

/// The tensor's sizes.
pub(crate) fn sizes(tensor: &Tensor) -> Result<Vec<SymInt>> {
    let mut dim = 0;
    // SAFETY: the pointer is borrowed from a live tensor.
    checked(unsafe { tch_extension_sym_dim(tensor.as_ptr(), &mut dim) })?;
    let mut sizes = vec![SymInt::known(0); dim];
    // SAFETY: as above, and `sizes` has `dim` entries, which own nothing yet.
    checked(unsafe { tch_extension_sym_sizes(tensor.as_ptr(), sizes.as_mut_ptr(), dim) })?;
    Ok(sizes)
}

/// A tensor of these sizes on the device of `like`.
pub(crate) fn new_empty(like: &Tensor, sizes: &[SymInt], kind: Option<Kind>) -> Result<Tensor> {
    let kind = kind.map_or(-1, super::value::kind_number);
    let mut result = std::ptr::null_mut();
    // SAFETY: the pointers are valid for the call; C++ copies the sizes.
    checked(unsafe {
        tch_extension_new_empty(like.as_ptr(), sizes.as_ptr(), sizes.len(), kind, &mut result)
    })?;
    // SAFETY: it is a handle that C++ allocated for us.
    Ok(unsafe { Tensor::from_ptr(result) })
}
