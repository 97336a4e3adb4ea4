//! The rotation and its gradient as a plain function, below autograd.

use super::{OP, Rope, RopeOptions, check_arguments};
use crate::{Error, Result};
use tch::Tensor;

/// The rotations of those of q and k that are there, or the inverse ones, which are the gradients.
///
/// # Errors
/// As for [`f_rope`](crate::ops::f_rope).
pub fn rope_rotate(
    tensors: [Option<&Tensor>; 2],
    tables: [&Tensor; 2],
    options: &RopeOptions,
    is_inverse: bool,
) -> Result<[Option<Tensor>; 2]> {
    let [q, k] = tensors;
    let (Some(first), Some(second)) = (q.or(k), k.or(q)) else {
        let expected = "one of them to be there";
        return Err(Error::argument(OP, "q and k", expected, "neither", ""));
    };
    let options = RopeOptions { in_place: false, ..*options };
    check_arguments([first, second], tables, &options)?;
    Rope { is_inverse, ..Rope::new(&options) }.rotated(tensors, tables)
}
