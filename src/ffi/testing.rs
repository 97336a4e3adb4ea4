//! `csrc/testing`.

use super::take_message;
use crate::{Error, Result};
use std::ffi::{c_char, c_void};
use std::marker::PhantomData;
use tch::Tensor;
use torch_sys::C_tensor;

unsafe extern "C" {
    safe fn tch_extension_canary_begin() -> *mut c_char;
    safe fn tch_extension_canary_end() -> usize;
    fn tch_extension_record_begin(handle: *mut u64) -> *mut c_char;
    fn tch_extension_record_end(
        handle: u64,
        context: *mut c_void,
        take: unsafe extern "C" fn(*mut c_void, *const c_char, usize, i64),
    ) -> i64;
    fn tch_extension_cpp_identity(x: *const C_tensor, result: *mut *mut C_tensor) -> *mut c_char;
}

/// An operator that does nothing, written with C++'s `torch::autograd::Function`.
pub(crate) fn cpp_identity(x: &Tensor) -> Result<Tensor> {
    let mut result = std::ptr::null_mut();
    // SAFETY: borrowed from a live tensor; `result` is written on success.
    match take_message(unsafe { tch_extension_cpp_identity(x.as_ptr(), &mut result) }) {
        Some(message) => Err(Error::Torch(message)),
        // SAFETY: a handle for us to own.
        None => Ok(unsafe { Tensor::from_ptr(result) }),
    }
}

/// While it lives, what this thread allocates on the CPU has canaries on either side.
pub(crate) struct Canaries {
    /// The watch is the thread's.
    _not_send: PhantomData<*mut ()>,
}

impl Canaries {
    /// Begins; one at a time in a thread.
    pub(crate) fn new() -> Result<Self> {
        let message = take_message(tch_extension_canary_begin());
        message
            .map_or(Ok(Canaries { _not_send: PhantomData }), |message| Err(Error::Torch(message)))
    }

    /// How many allocations had something written beside them.
    pub(crate) fn end(self) -> usize {
        // What `drop` ends is over then.
        tch_extension_canary_end()
    }
}

impl Drop for Canaries {
    fn drop(&mut self) {
        tch_extension_canary_end();
    }
}

/// What a profiler sees of this thread while it lives.
pub(crate) struct Recording {
    handle: u64,
    /// The watch is the thread's.
    _not_send: PhantomData<*mut ()>,
}

impl Recording {
    /// Begins; one at a time in a thread.
    pub(crate) fn new() -> Result<Self> {
        let mut handle = 0;
        // SAFETY: `handle` is written on success.
        let message = take_message(unsafe { tch_extension_record_begin(&mut handle) });
        message.map_or(Ok(Recording { handle, _not_send: PhantomData }), |message| {
            Err(Error::Torch(message))
        })
    }

    /// Names and sequence numbers, in order; and how many have not ended.
    pub(crate) fn end(self) -> (Vec<(String, i64)>, i64) {
        let mut events = Vec::new();
        let context = std::ptr::from_mut(&mut events).cast();
        // SAFETY: `take_event` is called during the call only, with `events` as its context.
        let open = unsafe { tch_extension_record_end(self.handle, context, take_event) };
        std::mem::forget(self);
        (events, open)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        unsafe extern "C" fn ignore(_: *mut c_void, _: *const c_char, _: usize, _: i64) {}
        // SAFETY: `ignore` takes anything.
        unsafe { tch_extension_record_end(self.handle, std::ptr::null_mut(), ignore) };
    }
}

/// # Safety
/// `context` must be the list of [`Recording::end`], and `name` hold `len` bytes.
unsafe extern "C" fn take_event(
    context: *mut c_void,
    name: *const c_char,
    len: usize,
    sequence_nr: i64,
) {
    // SAFETY: as the caller promises.
    let (events, name) = unsafe {
        (
            &mut *context.cast::<Vec<(String, i64)>>(),
            std::slice::from_raw_parts(name.cast::<u8>(), len),
        )
    };
    events.push((String::from_utf8_lossy(name).into_owned(), sequence_nr));
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind, Tensor};

    fn bytes() -> Tensor {
        Tensor::zeros([100], (Kind::Uint8, Device::Cpu))
    }

    fn write(tensor: &Tensor, offset: isize) {
        // SAFETY: within the 64 bytes of canaries on either side.
        unsafe { tensor.data_ptr().cast::<u8>().offset(offset).write(1) };
    }

    #[test]
    fn a_byte_beside_an_allocation_is_counted() {
        for (offsets, broken) in [(&[0, 99][..], 0), (&[100], 1), (&[-1], 1), (&[163, -64], 1)] {
            for freed in [false, true] {
                let canaries = Canaries::new().unwrap();
                let (tensor, other) = (bytes(), bytes());
                offsets.iter().for_each(|&offset| write(&tensor, offset));
                assert_eq!(tensor.data_ptr() as usize % 64, other.data_ptr() as usize % 64);
                let kept = (!freed).then_some(tensor);
                assert_eq!(canaries.end(), broken, "{offsets:?}");
                drop(kept);
            }
        }
    }

    #[test]
    fn a_watch_is_one_thread_s_and_ends() {
        let canaries = Canaries::new().unwrap();
        // Freed elsewhere, and afterwards.
        let (first, second) = (bytes(), bytes());
        write(&first, 100);
        std::thread::spawn(move || drop(first)).join().unwrap();
        assert_eq!(canaries.end(), 1);
        drop(second);
        drop(Canaries::new().unwrap());
        assert_eq!(Canaries::new().unwrap().end(), 0, "a new one knows nothing of the last");
        assert!(bytes().resize_([1 << 20]).size() == [1 << 20]);
    }
}
