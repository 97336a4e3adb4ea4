//! The error type of this crate.

use tch::TchError;

/// The result type of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an operator refused its arguments or failed. Each message is one line, except that a failed
/// gradcheck adds its numbers. It names the operator, the argument, what was expected, what was
/// passed, and how to fix it.
///
/// `Debug` prints the same text, so that `unwrap` shows a readable message.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is not acceptable. Nothing was computed or changed.
    #[error("{op}: {argument}: expected {expected}, got {got}{}", way_out(.hint))]
    Argument {
        /// The operator's name.
        op: String,
        /// The argument's name.
        argument: String,
        /// What the operator accepts.
        expected: String,
        /// What was passed.
        got: String,
        /// How to fix it; may be empty.
        hint: String,
    },

    /// libtorch reported an error.
    #[error("{0}")]
    Torch(String),

    /// The autograd bridge was misused, or a backward pass failed.
    #[error("{0}")]
    Autograd(String),

    /// A CUDA kernel could not be launched.
    #[error("CUDA kernel {kernel}: {message}")]
    Launch {
        /// The kernel's name.
        kernel: String,
        /// CUDA's error message.
        message: String,
    },

    /// CUDA is needed but not available, or CUDA reported an error.
    #[error("{op}: {reason}")]
    Cuda {
        /// The function that was called.
        op: String,
        /// What is missing or went wrong, and, if known, how to fix it.
        reason: String,
    },

    /// Ranks could not be brought together, or an operation of several ranks failed: a rank ended,
    /// came too late, or called something else.
    #[error("{op}: {reason}")]
    Distributed {
        /// The function that was called.
        op: String,
        /// Which rank reports it, what went wrong, and, if known, how to fix it.
        reason: String,
    },

    /// Sources could not be compiled or loaded at run time. The message quotes the compiler and may
    /// have several lines.
    #[error("jit: {name}: {message}")]
    Jit {
        /// The extension's name.
        name: String,
        /// The message of the compiler, the linker or the dynamic loader, with the file.
        message: String,
    },

    /// Anything else, such as an error of a user's own operator.
    #[error(transparent)]
    Other(#[from] Box<dyn std::error::Error + Send + Sync>),
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// Makes an error with this text.
    pub fn msg(text: impl Into<String>) -> Self {
        Error::Other(text.into().into())
    }

    /// Makes an [`Error::Argument`].
    pub fn argument(
        op: &str,
        argument: &str,
        expected: impl Into<String>,
        got: impl Into<String>,
        hint: impl Into<String>,
    ) -> Self {
        Error::Argument {
            op: op.to_string(),
            argument: argument.to_string(),
            expected: expected.into(),
            got: got.into(),
            hint: hint.into(),
        }
    }
}

impl From<TchError> for Error {
    fn from(error: TchError) -> Self {
        match error {
            // libtorch appends a C++ backtrace; the lines before it say what happened.
            TchError::Torch(text) => Error::Torch(without_backtrace(&text)),
            other => Error::Torch(other.to_string()),
        }
    }
}

fn way_out(hint: &str) -> String {
    if hint.is_empty() { String::new() } else { format!("; {hint}") }
}

fn without_backtrace(text: &str) -> String {
    text.lines()
        .take_while(|line| {
            !line.starts_with("Exception raised from") && !line.starts_with("frame #")
        })
        .collect::<Vec<_>>()
        .join("\n")
        .trim_end()
        .to_string()
}

/// The message of a panic.
pub(crate) fn panic_text(payload: &(dyn std::any::Any + Send)) -> &str {
    payload
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| payload.downcast_ref::<&str>().copied())
        .unwrap_or("with a value that is not text")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_with_the_way_out() {
        let error =
            Error::argument("linear", "weight", "kind Float", "kind Int", "cast it with to_kind");
        assert_eq!(
            error.to_string(),
            "linear: weight: expected kind Float, got kind Int; cast it with to_kind"
        );
        let error = Error::argument("linear", "weight", "2 dimensions", "3", "");
        assert_eq!(error.to_string(), "linear: weight: expected 2 dimensions, got 3");
    }

    /// Programs print an error with its causes, as anyhow's `{error:#}` does.
    #[test]
    fn a_text_is_not_its_own_cause() {
        use std::error::Error as _;
        assert!(Error::msg("a text").source().is_none());
        let outer: Box<dyn std::error::Error + Send + Sync> = Error::msg("a text").into();
        let outer = Error::from(outer);
        assert!(outer.to_string() == "a text" && outer.source().is_none());
    }

    #[test]
    fn libtorch_errors_lose_their_backtrace() {
        let error =
            tch::Tensor::from_slice(&[1.0]).f_reshape([2, 2]).map_err(Error::from).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("shape '[2, 2]' is invalid"), "{text}");
        assert!(!text.contains("frame #") && !text.contains('\n'), "{text}");
    }

    /// docs/autograd.md describes this. If this test fails, tch has changed: remove the text there.
    #[test]
    fn fallible_functions_of_tch_that_take_a_number_panic() {
        type Call = fn(&mut tch::Tensor) -> std::result::Result<tch::Tensor, TchError>;
        // None of these functions may write to a leaf.
        let mut leaf = tch::Tensor::from_slice(&[1.0]).set_requires_grad(true);
        let calls: [Call; 3] =
            [|x| x.f_add_scalar_(1.0), |x| x.f_mul_scalar_(2.0), |x| x.f_fill_(3.0)];
        for call in calls {
            let outcome =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| call(&mut leaf).is_err()));
            let payload = outcome.expect_err("a panic");
            assert!(panic_text(&*payload).contains("a leaf Variable that requires grad"));
        }
        let error = leaf.f_add_(&tch::Tensor::from(1.0)).map_err(Error::from).unwrap_err();
        assert!(error.to_string().contains("a leaf Variable that requires grad"), "{error}");
    }
}
