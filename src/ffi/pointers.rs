//! Tensors as raw pointers for a call into C++.

use tch::Tensor;
use torch_sys::C_tensor;

/// Tensor handles that are borrowed for a call into C++; an absent tensor is null. Up to `FEW`
/// pointers need no heap allocation.
pub(crate) struct Pointers {
    few: [*const C_tensor; Pointers::FEW],
    many: Vec<*const C_tensor>,
    len: usize,
}

impl Pointers {
    const FEW: usize = 8;

    pub fn new<'a>(tensors: impl ExactSizeIterator<Item = Option<&'a Tensor>>) -> Self {
        let tensors = tensors.map(|tensor| tensor.map_or(std::ptr::null(), Tensor::as_ptr));
        let (mut few, len) = ([std::ptr::null(); Self::FEW], tensors.len());
        if len > Self::FEW {
            return Pointers { few, many: tensors.collect(), len };
        }
        few.iter_mut().zip(tensors).for_each(|(place, pointer)| *place = pointer);
        Pointers { few, many: Vec::new(), len }
    }

    #[inline]
    pub fn as_slice(&self) -> &[*const C_tensor] {
        if self.len > Self::FEW { &self.many } else { &self.few[..self.len] }
    }
}

pub(crate) fn borrowed_pointers<'a>(
    tensors: impl Iterator<Item = Option<&'a Tensor>>,
) -> Vec<*const C_tensor> {
    tensors.map(|tensor| tensor.map_or(std::ptr::null(), Tensor::as_ptr)).collect()
}
