//! Calls of the kernels of `csrc/rope`, by addresses of arrays: heads of q and k, and the tables by which
//! they are rotated. Nothing here names tch, so that programs without it use it, too.

use crate::Result;
use crate::ops::kinds::Device;
use std::ffi::c_void;

/// The kernels count the heads of q and k in 32 bits.
pub(crate) const MOST_HEADS: i64 = 1 << 29;

/// The heads of one tensor, and where they go. Strides count elements; the values of a head are
/// adjacent.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Heads {
    /// `[B, T, heads, D]`.
    pub from: *const c_void,
    /// `[B, T, heads, D]`: other memory, or the same.
    pub to: *mut c_void,
    /// The number of heads of a token, at most 2²⁹; 0 if there is no such tensor.
    pub heads: i64,
    /// Of a sequence, a token and a head.
    pub from_strides: [i64; 3],
    pub to_strides: [i64; 3],
}

/// The rotation of the heads of two tensors by the same tables.
#[repr(C)]
pub(crate) struct Rotation {
    /// B, the number of sequences.
    pub batch: i64,
    /// T, the number of tokens of a sequence.
    pub tokens: i64,
    /// R, the number of values of a head that are rotated: an even number.
    pub rotated: i64,
    /// The number of values after them that are copied: D - R, or 0 in place.
    pub copied: i64,
    /// From a token's row of a table to that of the next one.
    pub cos_stride: i64,
    pub sin_stride: i64,
    /// Of the heads.
    pub kind: i32,
    /// Of the tables: the same, or that in which heads of a half kind are computed.
    pub table_kind: i32,
    /// Whether the pairs are (2i, 2i + 1) instead of (i, i + R / 2).
    pub is_interleaved: i32,
    /// Whether the angles are negative.
    pub is_inverse: i32,
    /// `[T, R / 2]`.
    pub cos: *const c_void,
    /// `[T, R / 2]`.
    pub sin: *const c_void,
    pub q: Heads,
    pub k: Heads,
}

crate::kernels::raw_kernels! {
    "rope";
    fn run(Rotation) = tch_extension_rope_rotate_cpu, tch_extension_rope_rotate_cuda;
}

impl Heads {
    /// No tensor.
    pub const NONE: Heads = Heads {
        from: std::ptr::null(),
        to: std::ptr::null_mut(),
        heads: 0,
        from_strides: [0; 3],
        to_strides: [0; 3],
    };
}

impl Rotation {
    /// Rotates the heads.
    ///
    /// # Safety
    /// The arrays have the sizes, strides and kinds that are stated, and are on the device. No two
    /// elements that are written share memory, and one that is read shares it only with its own result.
    pub unsafe fn run(mut self, device: Device) -> Result<()> {
        if self.tokens == 1 {
            self.take_sequences_for_tokens();
        }
        // SAFETY: what the caller guarantees (see `# Safety`). A kernel that works in place reads a value
        // before it writes it, in the same thread, and nobody else reads it.
        unsafe { run(device, &self) }
    }

    /// One token of each of many sequences, as in generation, is like one sequence of as many tokens
    /// at the same position. CUDA's blocks then have several of them.
    fn take_sequences_for_tokens(&mut self) {
        (self.batch, self.tokens) = (1, self.batch);
        (self.cos_stride, self.sin_stride) = (0, 0);
        for heads in [&mut self.q, &mut self.k] {
            heads.from_strides.swap(0, 1);
            heads.to_strides.swap(0, 1);
        }
    }
}
