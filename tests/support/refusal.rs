//! Checks the message about a wrong argument.

use std::fmt::Debug;
use std::panic::UnwindSafe;
use tch_extension::Result;

/// Checks that the error begins with `place` (the operator and its argument), contains all texts
/// and has one line, and that the form without `f_` panics with the same message.
pub fn assert_refused<T: Debug, U: Debug>(
    place: &str,
    texts: &[&str],
    result: Result<T>,
    panicking: impl FnOnce() -> U + UnwindSafe,
) {
    let error = result.expect_err("bad argument").to_string();
    assert!(error.starts_with(&format!("{place}: expected ")), "{error}");
    assert!(texts.iter().all(|text| error.contains(text)), "{error}: {texts:?}");
    assert!(!error.contains('\n'), "one line: {error}");
    let panic = std::panic::catch_unwind(panicking).expect_err("the form without f_ panics");
    assert_eq!(*panic.downcast::<String>().expect("a text"), error);
}
