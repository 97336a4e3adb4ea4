//! Quick refusals of libtorch's.

use std::ffi::{c_char, c_int, c_void};

unsafe extern "C" {
    fn calloc(count: usize, size: usize) -> *mut c_void;
}

/// Takes the C library's place: libtorch names every function on the stack in every error that tch
/// turns into text, and finds each name among hundreds of thousands, which takes longer than the
/// rest of most tests. The errors keep their lines, one for each frame, so that it still shows
/// where one of ours would have them.
///
/// # Safety
/// As glibc's: `count` addresses, of which none is read here.
#[unsafe(no_mangle)]
unsafe extern "C" fn backtrace_symbols(
    _addresses: *const *mut c_void,
    count: c_int,
) -> *mut *mut c_char {
    const NAME: &[u8] = b"(not looked up in tests)\0";
    let count = usize::try_from(count).unwrap_or(0);
    let pointers = count * size_of::<*mut c_char>();
    // SAFETY: one block, which the caller frees: the pointers, and behind them the name that all of
    // them point to.
    unsafe {
        let block = calloc(1, pointers + NAME.len()).cast::<*mut c_char>();
        if !block.is_null() {
            let name = block.add(count).cast::<c_char>();
            std::ptr::copy_nonoverlapping(NAME.as_ptr().cast(), name, NAME.len());
            std::slice::from_raw_parts_mut(block, count).fill(name);
        }
        block
    }
}
