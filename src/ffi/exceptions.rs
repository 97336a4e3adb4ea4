//! Bindings to `csrc/autograd/exceptions.cpp`: the exceptions behind Rust's errors, while libtorch
//! calls Rust.

use super::take_message;
use crate::Result;
use crate::error::panic_text;
use std::any::Any;
use std::ffi::c_char;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tch::TchError;

unsafe extern "C" {
    fn tch_extension_exception_known_as(
        before: *const c_char,
        before_len: usize,
        now: *const c_char,
        now_len: usize,
    );
    safe fn tch_extension_newest_exception(index: usize) -> *mut c_char;
    fn tch_extension_named(
        name: *const c_char,
        name_len: usize,
        text: *const c_char,
        text_len: usize,
    ) -> *mut c_char;
}

/// Tells C++ that an error with the text `now` stands for the exception with the text `before`, too.
/// For a text that this crate makes of another; a text that the user makes is an error of its own.
pub(crate) fn known_as(before: &str, now: &str) {
    // SAFETY: C++ copies both texts.
    unsafe {
        tch_extension_exception_known_as(
            before.as_ptr().cast(),
            before.len(),
            now.as_ptr().cast(),
            now.len(),
        );
    }
}

/// `name: text`. A name with which the text begins is not repeated, even if one of the two has a
/// namespace. The result stands for the same exception as the text.
pub(crate) fn named(name: &str, text: &str) -> String {
    // SAFETY: C++ reads both texts, and we own the result.
    let named = take_message(unsafe {
        tch_extension_named(name.as_ptr().cast(), name.len(), text.as_ptr().cast(), text.len())
    })
    .unwrap_or_default();
    known_as(text, &named);
    named
}

/// Runs `run`, which libtorch called for, and returns the text of its error or panic, if it fails.
/// `what` is what panicked. C++ passes the text to `RustCall::fail`.
pub(crate) fn failure(what: &str, run: impl FnOnce() -> Result<()>) -> Option<String> {
    // Unwinding through C++ would abort the process. The text of the error is made inside
    // `catch_unwind`, too, because an error's `Display` and a panic's payload are the user's code.
    let outcome = catch_unwind(AssertUnwindSafe(|| match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(panic) => {
            let text = text_of_panic(what, panic_text(panic.as_ref()));
            discard(panic);
            Some(text)
        }
    }));
    outcome.unwrap_or_else(|panic| {
        discard(panic);
        Some(format!("{what} failed, and formatting its error panicked"))
    })
}

/// The operators of tch, such as `*`, panic with the `Debug` text of an error. If an exception was the
/// reason, this returns the exception's text.
fn text_of_panic(what: &str, panic: &str) -> String {
    let texts = (0..).map_while(|index| take_message(tch_extension_newest_exception(index)));
    for text in texts {
        let of_tch = format!(": {:?}", TchError::Torch(text.clone()));
        if panic.ends_with(&of_tch) || panic.ends_with(&format!(": {text}")) {
            return text;
        }
    }
    format!("{what} panicked: {panic}")
}

/// Drops a panic's payload. Its own `Drop` may panic again.
pub(crate) fn discard(payload: Box<dyn Any + Send>) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(move || drop(payload))) {
        std::mem::forget(again);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stands_once() {
        for (name, text, expected) in [
            ("muladd", "a is odd", "muladd: a is odd"),
            ("muladd", "muladd: a is odd", "muladd: a is odd"),
            ("my::muladd", "muladd: a: expected 1", "my::muladd: a: expected 1"),
            ("muladd", "my::muladd: muladd: a is odd", "my::muladd: a is odd"),
            ("my::muladd", "my::muladd: my::muladd: ", "my::muladd: "),
            ("muladd", "muladd_backward: a is odd", "muladd: muladd_backward: a is odd"),
            ("muladd", "muladd", "muladd: muladd"),
            ("muladd", "", "muladd: "),
        ] {
            assert_eq!(named(name, text), expected);
        }
    }

    #[test]
    fn a_failure_is_a_text() {
        assert_eq!(failure("it", || Ok(())), None);
        assert_eq!(failure("it", || Err(crate::Error::msg("no"))).as_deref(), Some("no"));
        assert_eq!(failure("it", || panic!("no")).as_deref(), Some("it panicked: no"));
    }
}
