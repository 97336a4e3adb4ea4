//! Bindings to `csrc/library/graph.cpp`: a call of an operator as part of a graph.

use super::define::{Call, Frame};
use super::library::{Arguments, CResults};
use super::pointers::Pointers;
use super::take_message;
use crate::{Error, Result};
use std::ffi::c_char;
use std::mem::ManuallyDrop;
use std::ptr::{NonNull, null_mut};
use tch::Tensor;
use torch_sys::C_tensor;

#[repr(C)]
#[doc(alias = "tch_extension::GraphResults")]
struct CGraphResults {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    fn tch_extension_call_below(
        frame: *const Frame,
        results: *mut *mut CGraphResults,
    ) -> *mut c_char;
    fn tch_extension_tensors(
        results: *mut CGraphResults,
        tensors: *mut *mut C_tensor,
        room: usize,
    ) -> usize;
    fn tch_extension_replace_tensors(
        results: *mut CGraphResults,
        tensors: *const *const C_tensor,
        len: usize,
    ) -> bool;
    fn tch_extension_give_results(frame: *mut Frame, results: *mut CGraphResults);
    fn tch_extension_free_graph_results(results: *mut CGraphResults);
    fn tch_extension_keep_frame(frame: *const Frame, result: *mut *mut CResults) -> *mut c_char;
}

/// The results of a call below autograd, before they are part of the graph.
pub(crate) struct GraphResults(NonNull<CGraphResults>);

impl GraphResults {
    /// The tensors among the results, in order.
    pub fn tensors(&self) -> Vec<Option<Tensor>> {
        // Most operators have few results, for which one call suffices.
        let mut few = [null_mut(); 8];
        // SAFETY: the results are alive, and there is room for so many handles.
        let len = unsafe { tch_extension_tensors(self.0.as_ptr(), few.as_mut_ptr(), few.len()) };
        if let Some(handles) = few.get(..len) {
            // SAFETY: there was room, so all handles were written, and we own them.
            return unsafe { owned(handles) };
        }
        let mut handles = vec![null_mut(); len];
        // SAFETY: the results are alive, and there is room for each handle, which we then own.
        unsafe {
            tch_extension_tensors(self.0.as_ptr(), handles.as_mut_ptr(), len);
            owned(&handles)
        }
    }

    /// Puts other tensors, of the same number, in their places.
    pub fn replace(&mut self, tensors: &[Option<Tensor>]) -> Result<()> {
        let pointers = Pointers::new(tensors.iter().map(Option::as_ref));
        let pointers = pointers.as_slice();
        // SAFETY: the results are alive, and each pointer is null or borrowed from a live tensor.
        let fits = unsafe {
            tch_extension_replace_tensors(self.0.as_ptr(), pointers.as_ptr(), pointers.len())
        };
        if fits {
            return Ok(());
        }
        Err(Error::msg("internal error: a graph has another number of results"))
    }
}

impl Drop for GraphResults {
    fn drop(&mut self) {
        // SAFETY: C++ made the results for us, and nobody uses them afterwards.
        unsafe { tch_extension_free_graph_results(self.0.as_ptr()) }
    }
}

/// # Safety
/// Each handle must be null or ours.
unsafe fn owned(handles: &[*mut C_tensor]) -> Vec<Option<Tensor>> {
    // SAFETY: the caller hands over the handles (see `# Safety`).
    let own = |&handle: &*mut C_tensor| unsafe { Tensor::from_ptr(handle) };
    handles.iter().map(|handle| (!handle.is_null()).then(|| own(handle))).collect()
}

impl Call<'_> {
    /// Calls the operator below autograd with the same arguments.
    pub(crate) fn call_below(&self) -> Result<GraphResults> {
        let (frame, mut results) = (self.frame()?, null_mut());
        // SAFETY: the frame is alive, with its arguments. We own the results.
        let message = unsafe { tch_extension_call_below(frame, &mut results) };
        match (take_message(message), NonNull::new(results)) {
            (None, Some(results)) => Ok(GraphResults(results)),
            (message, _) => Err(Error::Torch(message.unwrap_or_default())),
        }
    }

    /// Ends the call with these results.
    pub(crate) fn give_results(&mut self, results: GraphResults) {
        let results = ManuallyDrop::new(results);
        // SAFETY: the frame is alive, and C++ takes ownership.
        unsafe { tch_extension_give_results(self.emptied_frame(), results.0.as_ptr()) }
    }

    /// Keeps the arguments that are no tensors.
    pub(crate) fn keep(&self) -> Result<Arguments> {
        let (frame, mut kept) = (self.frame()?, null_mut());
        // SAFETY: the frame is alive, with its arguments. We own the result.
        let message = unsafe { tch_extension_keep_frame(frame, &mut kept) };
        match (take_message(message), NonNull::new(kept)) {
            // SAFETY: C++ made it for us.
            (None, Some(kept)) => Ok(unsafe { Arguments::new(kept) }),
            (message, _) => Err(Error::Torch(message.unwrap_or_default())),
        }
    }
}
