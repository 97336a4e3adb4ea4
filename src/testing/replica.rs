//! Private copies of tensors that can be changed freely.

use super::compare::{components, is_complex, parts};
use crate::Result;
use tch::{Kind, Tensor};

/// A copy of a tensor that a kernel cannot distinguish from the original. It has the same sizes,
/// strides and storage offset, so also the same alignment, and it is a leaf that requires grad if
/// the original requires grad.
pub(super) struct Replica {
    pub tensor: Tensor,
    /// The memory of `tensor` from the beginning of its storage, as one dimension.
    storage: Tensor,
    offset: i64,
}

impl Replica {
    pub fn of(original: &Tensor) -> Result<Replica> {
        Self::with_margin(original, 0)
    }

    /// Makes a replica with `margin` more elements on either side that do not belong to the tensor;
    /// see [`no_value`]. If the margin is a multiple of 64, the alignment stays the same.
    pub fn with_margin(original: &Tensor, margin: i64) -> Result<Replica> {
        let data = original.f_detach()?;
        let (size, stride, offset) = (data.size(), data.stride(), storage_offset(&data)?);
        let len = extent(&size, &stride, offset);
        let source = data.f_as_strided([len], [1], 0)?;
        let storage = no_value(&[len + 2 * margin], &data)?;
        storage.f_narrow(0, margin, len)?.f_copy_(&source)?;
        let offset = offset + margin;
        // Detached, because writes to `storage` would otherwise count as writes to a leaf that
        // requires grad.
        let tensor = storage.f_as_strided(size, stride, offset)?.f_detach()?;
        let tensor = tensor.f_set_requires_grad(original.requires_grad())?;
        Ok(Replica { tensor, storage, offset })
    }

    /// Copies all its memory, including the memory between and around the elements.
    pub fn memory(&self) -> Result<Tensor> {
        let mut copy = self.storage.f_empty_like()?;
        copy.f_copy_(&self.storage)?;
        Ok(copy)
    }

    /// Overwrites all its memory with another copy of it, without autograd noticing.
    pub fn overwrite(&self, memory: &Tensor) -> Result<()> {
        self.storage.shallow_clone().f_copy_(memory)?;
        Ok(())
    }

    pub fn elements(&self) -> Result<Elements> {
        let kind = self.tensor.f_kind()?;
        let storage = match is_complex(kind) {
            true => self.storage.f_view_as_real()?.f_reshape([-1])?,
            false => self.storage.shallow_clone(),
        };
        let parts = parts(kind) as i64;
        let positions = positions(&self.tensor.size(), &self.tensor.stride(), self.offset);
        let positions = positions
            .iter()
            .flat_map(|position| (0..parts).map(move |part| position * parts + part));
        Ok(Elements { storage, positions: positions.collect(), values: components(&self.tensor)? })
    }
}

/// The elements of a [`Replica`] in row-major order, which can be changed one at a time without
/// autograd noticing. A complex element counts as two: its real part and its imaginary part.
pub(super) struct Elements {
    storage: Tensor,
    positions: Vec<i64>,
    values: Vec<f64>,
}

impl Elements {
    pub fn len(&self) -> usize {
        self.values.len()
    }

    pub fn value(&self, element: usize) -> f64 {
        self.values[element]
    }

    pub fn set(&self, element: usize, value: f64) -> Result<()> {
        let _ = self.storage.f_narrow(0, self.positions[element], 1)?.f_fill_(value)?;
        Ok(())
    }

    pub fn restore(&self, element: usize) -> Result<()> {
        self.set(element, self.values[element])
    }

    pub fn set_all(&self, values: &[f64]) -> Result<()> {
        let device = self.storage.device();
        let values =
            Tensor::f_from_slice(values)?.f_to_kind(self.storage.f_kind()?)?.f_to_device(device)?;
        let positions = Tensor::f_from_slice(&self.positions)?.f_to_device(device)?;
        let _ = self.storage.shallow_clone().f_index_copy_(0, &positions, &values)?;
        Ok(())
    }

    pub fn restore_all(&self) -> Result<()> {
        self.set_all(&self.values)
    }

    /// Whether two elements share memory, as in an expanded tensor.
    pub fn overlap(&self) -> bool {
        let mut sorted = self.positions.clone();
        sorted.sort_unstable();
        sorted.windows(2).any(|pair| pair[0] == pair[1])
    }
}

/// A tensor filled with a value that no element has: NaN, or the largest value of the kind.
pub(super) fn no_value(size: &[i64], like: &Tensor) -> Result<Tensor> {
    let kind = like.f_kind()?;
    let device = like.device();
    Ok(match kind {
        Kind::Bool => Tensor::f_ones(size, (kind, device))?,
        Kind::Uint8 => Tensor::f_full(size, i64::from(u8::MAX), (kind, device))?,
        Kind::Int8 => Tensor::f_full(size, i64::from(i8::MAX), (kind, device))?,
        Kind::Int16 => Tensor::f_full(size, i64::from(i16::MAX), (kind, device))?,
        Kind::Int => Tensor::f_full(size, i64::from(i32::MAX), (kind, device))?,
        Kind::Int64 => Tensor::f_full(size, i64::MAX, (kind, device))?,
        _ => Tensor::f_full(size, f64::NAN, (kind, device))?,
    })
}

/// The storage offset in elements. tch does not expose libtorch's own `storage_offset`.
fn storage_offset(tensor: &Tensor) -> Result<i64> {
    if tensor.numel() == 0 {
        return Ok(0);
    }
    let begin = tensor.f_as_strided([1], [1], 0)?;
    let bytes = tensor.data_ptr() as usize - begin.data_ptr() as usize;
    Ok((bytes / tensor.f_kind()?.elt_size_in_bytes()) as i64)
}

/// The number of elements from the beginning of the storage to the tensor's last element.
fn extent(size: &[i64], stride: &[i64], offset: i64) -> i64 {
    if size.contains(&0) {
        return 0;
    }
    offset + 1 + size.iter().zip(stride).map(|(size, stride)| (size - 1) * stride).sum::<i64>()
}

/// The positions of the elements in the storage, in row-major order.
fn positions(size: &[i64], stride: &[i64], offset: i64) -> Vec<i64> {
    size.iter().zip(stride).fold(vec![offset], |outer, (&size, &stride)| {
        outer.iter().flat_map(|&start| (0..size).map(move |index| start + index * stride)).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    fn matrix() -> Tensor {
        Tensor::arange(24, (Kind::Double, Device::Cpu)).reshape([4, 6])
    }

    #[test]
    fn looks_like_the_original() {
        let base = matrix();
        let views = [
            base.shallow_clone(),
            base.transpose(0, 1),
            base.narrow(1, 1, 3),
            base.slice(1, 1, 6, 2).transpose(0, 1),
            base.select(0, 3).select(0, 5),
            base.narrow(0, 4, 0),
            base.narrow(0, 1, 1).expand([3, 6], false),
            base.to_kind(Kind::Int).narrow(0, 1, 2),
        ];
        for view in views {
            let replica = Replica::of(&view).unwrap();
            assert_eq!(replica.tensor, view);
            assert_eq!(replica.tensor.stride(), view.stride());
            assert_eq!(storage_offset(&replica.tensor).unwrap(), storage_offset(&view).unwrap());
            assert!(replica.tensor.is_leaf() && !replica.tensor.requires_grad());
            assert!(view.numel() == 0 || replica.tensor.data_ptr() != view.data_ptr());
        }
    }

    #[test]
    fn margins_are_no_part_of_it() {
        let original = matrix().transpose(0, 1);
        let replica = Replica::with_margin(&original, 64).unwrap();
        assert_eq!((&replica.tensor, replica.tensor.stride()), (&original, original.stride()));
        let memory = replica.memory().unwrap();
        assert_eq!(memory.numel(), 64 + 24 + 64);
        assert_eq!(memory.isnan().sum(Kind::Int64).int64_value(&[]), 128);
        assert_eq!(memory.narrow(0, 64, 24), matrix().reshape([24]));
        assert!(
            Replica::with_margin(&matrix().narrow(0, 4, 0), 64).unwrap().memory().unwrap().numel()
                >= 128
        );
        let integers =
            Replica::with_margin(&matrix().to_kind(Kind::Int64), 1).unwrap().memory().unwrap();
        assert_eq!(integers.int64_value(&[25]), i64::MAX);
    }

    #[test]
    fn elements_are_the_tensors_own() {
        let original = matrix().slice(1, 1, 6, 2).transpose(0, 1).set_requires_grad(true);
        let replica = Replica::of(&original).unwrap();
        assert!(replica.tensor.requires_grad() && replica.tensor.is_leaf());
        let elements = replica.elements().unwrap();
        assert_eq!(elements.len(), 12);
        elements.set(5, -1.0).unwrap();
        assert_eq!(replica.tensor.double_value(&[1, 1]), -1.0);
        assert_eq!(original.double_value(&[1, 1]), 9.0);
        elements.restore(5).unwrap();
        assert_eq!(replica.tensor, original);
    }

    #[test]
    fn elements_of_complex_tensors_are_their_parts() {
        let complex = matrix().reshape([4, 3, 2]).view_as_complex().transpose(0, 1).narrow(0, 1, 2);
        let replica = Replica::of(&complex).unwrap();
        assert_eq!(
            (replica.tensor.stride(), replica.tensor.kind()),
            (complex.stride(), Kind::ComplexDouble)
        );
        let elements = replica.elements().unwrap();
        assert_eq!((elements.len(), elements.value(0), elements.value(3)), (16, 2.0, 9.0));
        elements.set(3, -1.0).unwrap();
        assert_eq!(components(&replica.tensor).unwrap()[..4], [2.0, 3.0, 8.0, -1.0]);
        elements.restore(3).unwrap();
        assert_eq!(components(&replica.tensor).unwrap(), components(&complex).unwrap());
        // The elements of a conjugate are conjugated, although its memory is not.
        let conjugate = Replica::of(&complex.conj()).unwrap();
        assert_eq!(conjugate.elements().unwrap().value(3), -9.0);
    }

    #[test]
    fn overlap_is_exact() {
        let overlap = |tensor: &Tensor| Replica::of(tensor).unwrap().elements().unwrap().overlap();
        assert!(overlap(&matrix().narrow(1, 0, 1).expand([4, 3], false)));
        assert!(overlap(&matrix().as_strided([3, 3], [1, 1], 0)));
        assert!(!overlap(&matrix().as_strided([3, 2], [2, 3], 0)));
        assert!(!overlap(&matrix().narrow(0, 0, 1).expand([1, 6], false)));
    }
}
