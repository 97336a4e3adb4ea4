//! How cuTile's kernels take tensors: an address, then sizes and strides as `i32`, and for an output
//! also the sizes of a tile and the strides.

use tch::Tensor;
use tch_extension::cuda::Param;
use tch_extension::{Error, Result};

/// A contiguous tensor of rank `N` as parameters.
pub(crate) struct Tile<const N: usize> {
    address: *mut std::ffi::c_void,
    sizes: [i32; N],
    strides: [i32; N],
    tile: [i32; N],
}

impl<const N: usize> Tile<N> {
    /// Of a contiguous tensor, which is cut into tiles of this size.
    pub(crate) fn new(op: &str, tensor: &Tensor, tile: [i32; N]) -> Result<Tile<N>> {
        let too_large = || Error::msg(format!("{op}: a size or stride of {tensor:?} exceeds i32"));
        let small = |values: Vec<i64>| {
            let values: Option<Vec<i32>> =
                values.into_iter().map(|value| i32::try_from(value).ok()).collect();
            values.and_then(|values| <[i32; N]>::try_from(values).ok()).ok_or_else(too_large)
        };
        debug_assert!(tensor.is_contiguous());
        // Not the tensor's own strides, which may be any where a size is 1.
        let mut next = 1;
        let mut strides = tensor.size();
        for stride in strides.iter_mut().rev() {
            (*stride, next) = (next, next * *stride);
        }
        let (sizes, strides) = (small(tensor.size())?, small(strides)?);
        Ok(Tile { address: tensor.data_ptr(), sizes, strides, tile })
    }

    /// The parameters of an input.
    pub(crate) fn input(&self) -> Vec<Param<'_>> {
        let numbers = self.sizes.iter().chain(&self.strides).map(Param::of);
        std::iter::once(Param::of(&self.address)).chain(numbers).collect()
    }

    /// The parameters of an output.
    pub(crate) fn output(&self) -> Vec<Param<'_>> {
        let numbers = self.tile.iter().chain(&self.strides).map(Param::of);
        self.input().into_iter().chain(numbers).collect()
    }

    /// The number of tiles in each dimension.
    pub(crate) fn tiles(&self) -> [u32; N] {
        std::array::from_fn(|dim| {
            self.sizes[dim].unsigned_abs().div_ceil(self.tile[dim].unsigned_abs())
        })
    }
}

/// Whether the kernels that were compiled for aligned tensors may take these contiguous ones: their
/// addresses and their rows are multiples of 16 bytes.
pub(crate) fn are_aligned(tensors: &[&Tensor]) -> bool {
    tensors.iter().all(|tensor| {
        let row = tensor.size().last().map_or(0, |&size| size.unsigned_abs() as usize);
        tensor.data_ptr().addr() % 16 == 0 && row * tensor.kind().elt_size_in_bytes() % 16 == 0
    })
}
