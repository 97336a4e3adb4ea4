//! Bindings to `csrc/testing`.

use super::take_message;
use crate::{Error, Result};
use std::ffi::{c_char, c_void};
use std::marker::PhantomData;
use tch::Tensor;
use torch_sys::C_tensor;

unsafe extern "C" {
    safe fn tch_extension_canary_begin() -> *mut c_char;
    safe fn tch_extension_canary_end() -> usize;
    safe fn tch_extension_canary_overwritten() -> usize;
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
    // SAFETY: the pointer is borrowed from a live tensor, and C++ writes `result` on success.
    match take_message(unsafe { tch_extension_cpp_identity(x.as_ptr(), &mut result) }) {
        Some(message) => Err(Error::Torch(message)),
        // SAFETY: on success, `result` is a handle that we own.
        None => Ok(unsafe { Tensor::from_ptr(result) }),
    }
}

/// While it lives, this thread's CPU allocations have canaries on either side.
pub(crate) struct Canaries {
    /// The watch belongs to the thread, so this must stay in it.
    _not_send: PhantomData<*mut ()>,
}

impl Canaries {
    /// Starts watching. Only one can exist in a thread at a time.
    pub(crate) fn new() -> Result<Self> {
        let message = take_message(tch_extension_canary_begin());
        message
            .map_or(Ok(Canaries { _not_send: PhantomData }), |message| Err(Error::Torch(message)))
    }

    /// How many of this thread's allocations have had canaries overwritten so far.
    pub(crate) fn overwritten() -> usize {
        tch_extension_canary_overwritten()
    }

    /// Stops watching, and returns how many allocations had canaries overwritten.
    #[cfg(test)]
    pub(crate) fn end(self) -> usize {
        // `drop` calls this a second time, which has no effect.
        tch_extension_canary_end()
    }
}

impl Drop for Canaries {
    fn drop(&mut self) {
        tch_extension_canary_end();
    }
}

/// Records what a profiler sees of this thread, while it lives.
pub(crate) struct Recording {
    handle: u64,
    /// The recording belongs to the thread, so this must stay in it.
    _not_send: PhantomData<*mut ()>,
}

impl Recording {
    /// Starts recording. Only one can exist in a thread at a time.
    pub(crate) fn new() -> Result<Self> {
        let mut handle = 0;
        // SAFETY: C++ writes `handle` on success.
        let message = take_message(unsafe { tch_extension_record_begin(&mut handle) });
        message.map_or(Ok(Recording { handle, _not_send: PhantomData }), |message| {
            Err(Error::Torch(message))
        })
    }

    /// Stops recording. Returns names and sequence numbers in order, and the number of events that
    /// have not ended.
    pub(crate) fn end(self) -> (Vec<(String, i64)>, i64) {
        let mut events = Vec::new();
        let context = std::ptr::from_mut(&mut events).cast();
        // SAFETY: `take_event` is called only during this call, with `events` as its context.
        let open = unsafe { tch_extension_record_end(self.handle, context, take_event) };
        std::mem::forget(self);
        (events, open)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        unsafe extern "C" fn ignore(_: *mut c_void, _: *const c_char, _: usize, _: i64) {}
        // SAFETY: `ignore` accepts any arguments.
        unsafe { tch_extension_record_end(self.handle, std::ptr::null_mut(), ignore) };
    }
}

/// # Safety
/// `context` must be the list in [`Recording::end`], and `name` must point to `len` bytes.
unsafe extern "C" fn take_event(
    context: *mut c_void,
    name: *const c_char,
    len: usize,
    sequence_nr: i64,
) {
    // SAFETY: the caller guarantees both pointers (see `# Safety`).
    let (events, name) = unsafe {
        (
            &mut *context.cast::<Vec<(String, i64)>>(),
            std::slice::from_raw_parts(name.cast::<u8>(), len),
        )
    };
    events.push((String::from_utf8_lossy(name).into_owned(), sequence_nr));
}

#[cfg(test)]
#[repr(C)]
#[doc(alias = "tch_extension::TouchedOnCpu")]
struct CTouched {
    _opaque: [u8; 0],
}

#[cfg(test)]
unsafe extern "C" {
    safe fn tch_extension_touched_here(is_captured: bool);
    fn tch_extension_touched_begin(result: *mut *mut CTouched) -> *mut c_char;
    fn tch_extension_touched_end(touched: *mut CTouched) -> *mut c_char;
    fn tch_extension_touched_free(touched: *mut CTouched);
    fn tch_extension_touched_has(touched: *const CTouched, tensor: *const C_tensor) -> bool;
    fn tch_extension_touched_is_intact(touched: *const CTouched) -> bool;
    fn tch_extension_touched_is_left(touched: *mut CTouched) -> bool;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply, grad};
    use crate::strided::Strided;
    use std::sync::Mutex;
    use tch::{Device, Kind, Tensor};

    /// What a graph would keep if it had been captured on the CPU.
    struct Touched(*mut CTouched);

    static RECORDINGS: Mutex<()> = Mutex::new(());

    impl Touched {
        fn of(body: impl FnOnce()) -> Touched {
            let _alone = RECORDINGS.lock().unwrap();
            let mut touched = std::ptr::null_mut();
            // SAFETY: C++ writes the handle on success.
            assert_eq!(take_message(unsafe { tch_extension_touched_begin(&mut touched) }), None);
            tch_extension_touched_here(true);
            body();
            tch_extension_touched_here(false);
            // SAFETY: the recording is alive.
            assert_eq!(take_message(unsafe { tch_extension_touched_end(touched) }), None);
            Touched(touched)
        }

        fn has(&self, tensor: &Tensor) -> bool {
            // SAFETY: the recording and the tensor are alive.
            unsafe { tch_extension_touched_has(self.0, tensor.as_ptr()) }
        }

        fn is_intact(&self) -> bool {
            // SAFETY: the recording is alive.
            unsafe { tch_extension_touched_is_intact(self.0) }
        }

        fn is_left(&self) -> bool {
            // SAFETY: the recording is alive.
            unsafe { tch_extension_touched_is_left(self.0) }
        }
    }

    impl Drop for Touched {
        fn drop(&mut self) {
            // SAFETY: we own the recording, which has ended.
            unsafe { tch_extension_touched_free(self.0) }
        }
    }

    /// Ones, made without an operation that gets the input.
    struct Ones;

    impl Function for Ones {
        const NAME: &'static str = "ones";

        fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> crate::Result<Tensors> {
            saver.save(inputs.get(0)?);
            Ok(Tensor::f_ones(inputs.get(0)?.size(), (Kind::Float, Device::Cpu))?.into())
        }

        fn backward(&self, ctx: &Context<'_>, _: &Tensors) -> crate::Result<Tensors> {
            // Asks for the tensor, and calls no operation with it.
            Ok(Tensor::ones(ctx.saved(0)?.size(), (Kind::Float, Device::Cpu)).into())
        }
    }

    fn floats() -> Tensor {
        Tensor::ones([3], (Kind::Float, Device::Cpu))
    }

    #[test]
    fn what_operations_and_kernels_use_is_kept() {
        let (x, y, listed, strided) = (floats(), floats(), floats(), floats());
        let (given, saved) = (floats().set_requires_grad(true), floats().set_requires_grad(true));
        let output = apply(Ones, &[Some(&saved)]).unwrap();
        let (out_grad, elsewhere, untouched) = (floats(), floats(), floats());
        let touched = Touched::of(|| {
            let _ = x.shallow_clone().f_add_(&y).unwrap();
            let _ = Tensor::cat(&[&listed, &x], 0);
            Strided::<1>::new(&strided).unwrap();
            apply(Ones, &[Some(&given)]).unwrap();
            grad(
                &[output.get(0).unwrap()],
                &[&saved],
                &crate::autograd::GradOptions {
                    grad_outputs: &[Some(&out_grad)],
                    ..Default::default()
                },
            )
            .unwrap();
            // Another thread may launch work on the stream that is captured.
            let other = elsewhere.shallow_clone();
            let thread = std::thread::spawn(move || {
                tch_extension_touched_here(true);
                drop(other.neg());
            });
            thread.join().unwrap();
        });
        let used = [&x, &y, &listed, &strided, &given, &saved, &out_grad, &elsewhere];
        for (place, tensor) in used.into_iter().enumerate() {
            assert!(touched.has(tensor), "tensor {place}");
        }
        assert!(!touched.has(&untouched));
        let _ = untouched.neg();
        assert!(!touched.has(&untouched), "the recording has ended");
    }

    #[test]
    fn memory_that_was_exchanged_or_left_is_known() {
        let (x, mut other) = (floats(), floats());
        let touched = Touched::of(|| drop(x.neg()));
        assert!(touched.is_intact() && !touched.is_left());
        // The memory is kept, but the tensor has other memory now.
        other.set_data(&x);
        drop(x);
        assert!(touched.is_intact() && !touched.is_left());
        other.set_data(&floats());
        assert!(touched.is_intact() && touched.is_left());

        let x = floats();
        let touched = Touched::of(|| drop(x.neg()));
        let _ = x.shallow_clone().resize_([1 << 20]);
        assert!(!touched.is_intact() && !touched.is_left());
        // A second graph that keeps it is nobody who could still use the tensor.
        let mut x = floats();
        let [first, second] = [(); 2].map(|()| Touched::of(|| drop(x.neg())));
        assert!(!first.is_left() && !second.is_left());
        x.set_data(&floats());
        assert!(first.is_left() && second.is_left());
        let third = Touched::of(|| drop(x.neg()));
        drop(second);
        assert!(first.is_left() && !third.is_left());
        drop(x);
        assert!(third.is_left());
        // Nobody else had this one at the end.
        let x = floats();
        assert!(!Touched::of(move || drop(x.neg())).is_left());
    }

    fn bytes() -> Tensor {
        Tensor::zeros([100], (Kind::Uint8, Device::Cpu))
    }

    fn write(tensor: &Tensor, offset: isize) {
        // SAFETY: the address is within the 64 bytes of canaries on either side.
        unsafe { tensor.data_ptr().cast::<u8>().offset(offset).write(1) };
    }

    #[test]
    fn a_byte_next_to_an_allocation_is_counted() {
        for (offsets, broken) in [(&[0, 99][..], 0), (&[100], 1), (&[-1], 1), (&[163, -64], 1)] {
            for freed in [false, true] {
                let canaries = Canaries::new().unwrap();
                let (tensor, other) = (bytes(), bytes());
                offsets.iter().for_each(|&offset| write(&tensor, offset));
                assert_eq!(tensor.data_ptr() as usize % 64, other.data_ptr() as usize % 64);
                let kept = (!freed).then_some(tensor);
                assert_eq!(Canaries::overwritten(), broken, "{offsets:?}");
                assert_eq!(canaries.end(), broken, "{offsets:?}");
                drop(kept);
            }
        }
    }

    #[test]
    fn a_watch_is_one_thread_s_and_ends() {
        let canaries = Canaries::new().unwrap();
        // These are freed by another thread, and after the watch.
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
