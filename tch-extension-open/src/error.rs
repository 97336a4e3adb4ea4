//! The error of this crate, with those variants of tch-extension's that the shared files make.

pub(crate) type Result<T> = std::result::Result<T, Error>;

#[derive(Debug)]
pub(crate) enum Error {
    Launch { kernel: String, message: String },
    Cuda { op: String, reason: String },
    Other(String),
}

impl Error {
    pub(crate) fn msg(text: impl Into<String>) -> Self {
        Error::Other(text.into())
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Launch { kernel, message } => write!(f, "CUDA kernel {kernel}: {message}"),
            Error::Cuda { op, reason } => write!(f, "{op}: {reason}"),
            Error::Other(text) => f.write_str(text),
        }
    }
}
