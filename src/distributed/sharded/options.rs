//! How gradients are communicated.

use super::layout::Caps;
use crate::{Error, Result};

/// What is sent in place of gradients of kind `Float`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// The gradients themselves.
    #[default]
    None,
    /// The gradients rounded to `BFloat16`: half as many bytes. Each rank divides its gradients by
    /// the number of ranks, rounds them, and gets their sum, which it converts back. The rounding
    /// costs relative errors of about 2⁻⁹.
    BFloat16,
}

/// Options of a [`ShardedOptimizer`](super::ShardedOptimizer). They must be equal on all ranks.
///
/// ```
/// use tch_extension::distributed::ShardedOptions;
///
/// let options = ShardedOptions { bucket_mb: 50.0, ..Default::default() };
/// assert_eq!(options.first_bucket_mb, 1.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShardedOptions {
    /// The largest size of a bucket, in MiB. Gradients are reduced bucket by bucket, each as soon as
    /// it is complete, while the backward pass goes on. A larger parameter has a bucket of its own.
    /// The default is 25, as in PyTorch.
    pub bucket_mb: f64,
    /// The same for the bucket that is complete first, so that communication begins early. The
    /// default is 1.
    pub first_bucket_mb: f64,
    /// Whether parameters may get no gradient in a step, on some ranks or on all. Their gradients
    /// then count as zero, so that weight decay and moments still change them. As one rank may know
    /// only in the step that a gradient is missing, all gradients are reduced in the step, without
    /// overlap. The default is false: a missing gradient is an error.
    pub allow_unused: bool,
    /// What is sent in place of gradients of kind `Float`. The default is to send the gradients
    /// themselves.
    pub compression: Compression,
}

impl Default for ShardedOptions {
    fn default() -> Self {
        ShardedOptions {
            bucket_mb: 25.0,
            first_bucket_mb: 1.0,
            allow_unused: false,
            compression: Compression::None,
        }
    }
}

impl ShardedOptions {
    pub(super) fn caps(&self, op: &str) -> Result<Caps> {
        let bytes = |name: &str, mb: f64| {
            if mb > 0.0 && mb.is_finite() {
                return Ok((mb * 1024.0 * 1024.0) as usize);
            }
            let expected = "a finite number of MiB, more than 0";
            Err(Error::argument(op, name, expected, format!("{mb}"), ""))
        };
        Ok(Caps {
            bytes: bytes("bucket_mb", self.bucket_mb)?,
            first: bytes("first_bucket_mb", self.first_bucket_mb)?,
        })
    }
}
