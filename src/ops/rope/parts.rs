//! The gradients as a plain function, below autograd.

use super::{Rope, RopeOptions};
use crate::Result;
use tch::Tensor;

/// The gradients of q and k, of the incoming ones that are there: the inverse rotation.
///
/// # Errors
/// If libtorch or CUDA fails.
pub fn rope_backward(
    grads: [Option<&Tensor>; 2],
    cos: &Tensor,
    sin: &Tensor,
    options: &RopeOptions,
) -> Result<[Option<Tensor>; 2]> {
    let options = RopeOptions { in_place: false, ..*options };
    Rope { is_inverse: true, ..Rope::new(&options) }.rotated(grads, [cos, sin])
}
