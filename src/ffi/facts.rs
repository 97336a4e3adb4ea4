//! Bindings to `csrc/tensor/facts.cpp`: one call answers what the checks and launches of an
//! operator need to know about all its tensors, and one makes all its outputs. In tch, each such
//! question is a call and a check for an error, and often an allocation.

use super::pointers::Pointers;
use super::take_message;
use super::value::{kind_number, kind_of_number};
use crate::{Error, Result};
use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

const MOST_DIMS: usize = 4;

/// What checks and launches need to know about one tensor. The address is valid as long as the
/// tensor is borrowed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[doc(alias = "tch_extension::TensorFacts")]
pub(crate) struct Facts {
    data: *const c_void,
    sizes: [i64; MOST_DIMS],
    strides: [i64; MOST_DIMS],
    dim: i32,
    kind: i32,
    device: i32,
    is_in_memory: bool,
    requires_grad: bool,
}

#[repr(C)]
#[derive(Clone, Copy)]
#[doc(alias = "tch_extension::TensorSize")]
struct Size {
    sizes: [i64; MOST_DIMS],
    dim: i32,
}

// SAFETY: it only describes a tensor; whoever reads from the address must hold the tensor.
unsafe impl Send for Facts {}
// SAFETY: as for `Send`.
unsafe impl Sync for Facts {}

unsafe extern "C" {
    fn tch_extension_facts(
        tensors: *const *const C_tensor,
        len: usize,
        facts: *mut Facts,
    ) -> *mut c_char;
    fn tch_extension_empty(
        sizes: *const Size,
        len: usize,
        kind: i32,
        device: i32,
        tensors: *mut *mut C_tensor,
        data: *mut *mut c_void,
    ) -> *mut c_char;
}

/// The facts of each tensor. For an absent tensor, and for one that is undefined, sparse or nested,
/// they say only that there is none.
pub(crate) fn facts<const N: usize>(tensors: [Option<&Tensor>; N]) -> Result<[Facts; N]> {
    let pointers = tensors.map(|tensor| tensor.map_or(null(), Tensor::as_ptr));
    let mut facts = [Facts::NONE; N];
    // SAFETY: the pointers are null or borrowed from live tensors, and both arrays have N entries.
    match take_message(unsafe { tch_extension_facts(pointers.as_ptr(), N, facts.as_mut_ptr()) }) {
        Some(message) => Err(Error::Torch(message)),
        None => Ok(facts),
    }
}

/// Writes the facts of each tensor in a list. There is room for as many.
pub(crate) fn facts_into(tensors: &[Option<&Tensor>], facts: &mut [Facts]) -> Result<()> {
    let pointers = Pointers::new(tensors.iter().copied());
    let pointers = pointers.as_slice();
    assert_eq!(pointers.len(), facts.len(), "as many facts as tensors");
    // SAFETY: the pointers are null or borrowed from live tensors, and both arrays have as many
    // entries.
    let message =
        unsafe { tch_extension_facts(pointers.as_ptr(), pointers.len(), facts.as_mut_ptr()) };
    take_message(message).map_or(Ok(()), |message| Err(Error::Torch(message)))
}

impl Facts {
    pub const NONE: Facts = Facts {
        data: null(),
        sizes: [0; MOST_DIMS],
        strides: [0; MOST_DIMS],
        dim: -1,
        kind: 0,
        device: CPU,
        is_in_memory: false,
        requires_grad: false,
    };

    /// For a sequence of a single step, `[1, rows, columns]`: the facts of that step. For any other
    /// tensor, its own facts.
    pub fn of_one_step(self) -> Facts {
        let Some([1, rows, columns]) = self.sizes() else { return self };
        let strides = [self.strides[1], self.strides[2], 0, 0];
        Facts { sizes: [rows, columns, 0, 0], strides, dim: 2, ..self }
    }

    /// The first element's address; null if there are no elements.
    pub fn data(&self) -> *const c_void {
        self.data
    }

    /// libtorch's number of the kind.
    pub fn kind_code(&self) -> i32 {
        self.kind
    }

    /// The kind, if there are kernels for it.
    pub fn kind(&self) -> Option<Kind> {
        match self.kind {
            _ if self.dim < 0 => None,
            5 => Some(Kind::Half),
            6 => Some(Kind::Float),
            7 => Some(Kind::Double),
            15 => Some(Kind::BFloat16),
            _ => None,
        }
    }

    /// The kind, if tch knows it.
    pub fn known_kind(&self) -> Option<Kind> {
        kind_of_number(i64::from(self.kind)).filter(|_| self.dim >= 0)
    }

    /// The device, if this build has kernels for it.
    pub fn device(&self) -> Option<Device> {
        match self.device {
            _ if self.dim < 0 => None,
            CPU => Some(Device::Cpu),
            index => {
                usize::try_from(index).ok().filter(|_| cfg!(tch_extension_cuda)).map(Device::Cuda)
            }
        }
    }

    /// The sizes, if there are not too many of them.
    pub fn all_sizes(&self) -> Option<&[i64]> {
        self.sizes.get(..usize::try_from(self.dim).ok()?)
    }

    /// Whether this is a tensor with the other's kind and device.
    pub fn is_like(&self, other: &Facts) -> bool {
        self.dim >= 0 && self.kind == other.kind && self.device == other.device
    }

    /// The sizes, if the tensor has `N` dimensions.
    pub fn sizes<const N: usize>(&self) -> Option<[i64; N]> {
        let sizes = self.sizes.get(..N)?.try_into().ok()?;
        usize::try_from(self.dim).is_ok_and(|dim| dim == N).then_some(sizes)
    }

    /// The stride of a matrix' rows, in elements, if the elements of each row are contiguous.
    pub fn row_stride(&self) -> Option<i64> {
        let [_, columns] = self.sizes()?;
        (self.is_in_memory && (columns <= 1 || self.strides[1] == 1)).then_some(self.strides[0])
    }

    /// Whether the tensor is one contiguous row: a vector, or a matrix with one row.
    pub fn is_row(&self) -> bool {
        let last = usize::try_from(self.dim).unwrap_or(0).wrapping_sub(1);
        let is_row = last == 0 || (last == 1 && self.sizes[0] == 1);
        is_row && self.is_in_memory && (self.sizes[last] <= 1 || self.strides[last] == 1)
    }

    /// Whether a matrix is row-major without gaps.
    pub fn is_plain_matrix(&self) -> bool {
        let rows = self.sizes[0];
        self.row_stride().is_some_and(|stride| rows <= 1 || stride == self.sizes[1])
    }
}

/// Stands for the CPU where a CUDA device would have its index.
const CPU: i32 = -1;

/// A tensor that is not yet initialised, and its address.
#[derive(Debug)]
pub(crate) struct Fresh {
    pub tensor: Tensor,
    pub data: *mut c_void,
}

/// Makes new contiguous tensors of these sizes, with the kind and device of `like`, for kernels
/// that write every element.
pub(crate) fn empty<const N: usize>(
    sizes: [Option<&[i64]>; N],
    like: &Facts,
) -> Result<[Option<Fresh>; N]> {
    let mut asked = [Size { sizes: [0; MOST_DIMS], dim: -1 }; N];
    for (asked, sizes) in asked.iter_mut().zip(sizes) {
        let Some(sizes) = sizes else { continue };
        let places = asked.sizes.get_mut(..sizes.len());
        places
            .ok_or_else(|| Error::msg("internal error: too many dimensions"))?
            .copy_from_slice(sizes);
        asked.dim = sizes.len() as i32;
    }
    let (mut tensors, mut data) = ([null_mut(); N], [null_mut(); N]);
    // SAFETY: all three arrays have N entries, and the kind and device come from a tensor.
    let message = unsafe {
        tch_extension_empty(
            asked.as_ptr(),
            N,
            like.kind,
            like.device,
            tensors.as_mut_ptr(),
            data.as_mut_ptr(),
        )
    };
    if let Some(message) = take_message(message) {
        return Err(Error::Torch(message));
    }
    let mut data = data.into_iter();
    Ok(tensors.map(|raw| {
        let data = data.next().unwrap_or(null_mut());
        // SAFETY: the pointer is null or a handle that C++ allocated for us.
        (!raw.is_null()).then(|| Fresh { tensor: unsafe { Tensor::from_ptr(raw) }, data })
    }))
}

/// `Tensor::f_empty` without a call of the dispatcher, for up to four dimensions.
///
/// # Errors
/// When a size is negative, memory is exhausted, or this build has no such device.
pub(crate) fn empty_of(sizes: &[i64], (kind, device): (Kind, Device)) -> Result<Tensor> {
    let index = match device {
        Device::Cpu => Some(CPU),
        Device::Cuda(index) if cfg!(tch_extension_cuda) => i32::try_from(index).ok(),
        _ => None,
    };
    let Some(index) = index.filter(|_| sizes.len() <= MOST_DIMS) else {
        return Ok(Tensor::f_empty(sizes, (kind, device))?);
    };
    let like = Facts { kind: kind_number(kind), device: index, dim: 0, ..Facts::NONE };
    let [made] = empty([Some(sizes)], &like)?;
    made.map(|made| made.tensor).ok_or_else(|| Error::msg("internal error: no tensor was made"))
}

#[cfg(test)]
unsafe extern "C" {
    /// Sizes and offsets according to the C++ compiler.
    static tch_extension_facts_layout: [usize; 12];
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    fn the_structs_agree_with_the_c_side() {
        let ours = [
            size_of::<Facts>(),
            offset_of!(Facts, data),
            offset_of!(Facts, sizes),
            offset_of!(Facts, strides),
            offset_of!(Facts, dim),
            offset_of!(Facts, kind),
            offset_of!(Facts, device),
            offset_of!(Facts, is_in_memory),
            offset_of!(Facts, requires_grad),
            size_of::<Size>(),
            offset_of!(Size, sizes),
            offset_of!(Size, dim),
        ];
        // SAFETY: it is a constant of this length in csrc/tensor/facts.cpp.
        assert_eq!(ours, unsafe { tch_extension_facts_layout });
    }

    #[test]
    fn facts_are_what_tch_says() {
        let base = Tensor::zeros([4, 6], (Kind::Double, Device::Cpu));
        let leaf = Tensor::zeros([3], (Kind::Half, Device::Cpu)).set_requires_grad(true);
        let [whole, turned, part, row, none, sparse, negated] = facts([
            Some(&base),
            Some(&base.transpose(0, 1)),
            Some(&base.narrow(1, 2, 3)),
            Some(&leaf),
            None,
            Some(&base.to_sparse_sparse_dim(2)),
            Some(&base.internal_neg_view()),
        ])
        .unwrap();
        assert_eq!(
            (whole.kind(), whole.device(), whole.data()),
            (Some(Kind::Double), Some(Device::Cpu), base.data_ptr().cast_const())
        );
        assert_eq!((whole.sizes(), whole.row_stride()), (Some([4, 6]), Some(6)));
        assert!(whole.is_plain_matrix() && !whole.requires_grad && !whole.is_row());
        assert_eq!((turned.sizes(), turned.row_stride()), (Some([6, 4]), None));
        assert_eq!(
            (part.sizes(), part.row_stride(), part.is_plain_matrix()),
            (Some([4, 3]), Some(6), false)
        );
        assert_eq!((row.sizes(), row.kind_code(), row.requires_grad), (Some([3]), 5, true));
        assert!(
            row.is_row()
                && row.sizes::<2>().is_none()
                && !row.is_like(&whole)
                && part.is_like(&whole)
        );
        let step = facts([Some(&base.narrow(1, 2, 3).unsqueeze(0))]).unwrap()[0].of_one_step();
        assert_eq!(
            (step.sizes(), step.row_stride(), step.data()),
            (Some([4, 3]), Some(6), part.data())
        );
        assert_eq!(whole.of_one_step().sizes(), Some([4, 6]));
        let steps = facts([Some(&base.view([2, 2, 6]))]).unwrap()[0].of_one_step();
        assert_eq!((steps.sizes(), steps.sizes::<2>()), (Some([2, 2, 6]), None));
        let [classes] = facts([Some(&base.to_kind(Kind::Int64))]).unwrap();
        assert_eq!((classes.kind(), classes.known_kind()), (None, Some(Kind::Int64)));
        for extraordinary in [none, sparse] {
            assert_eq!((extraordinary.known_kind(), extraordinary.device()), (None, None));
            assert!(!extraordinary.is_like(&extraordinary) && !extraordinary.is_row());
        }
        assert_eq!((negated.sizes(), negated.row_stride()), (Some([4, 6]), None));
    }

    #[test]
    fn empty_tensors_are_libtorchs() {
        for device in crate::testing::devices() {
            let like = Tensor::zeros([1], (Kind::BFloat16, device));
            let [like] = facts([Some(&like)]).unwrap();
            let [first, none, last] =
                empty([Some(&[2, 3]), None, Some(&[1, 0, 7])], &like).unwrap();
            let first = first.unwrap();
            assert_eq!(first.data, first.tensor.data_ptr());
            let (first, last) = (first.tensor, last.unwrap().tensor);
            assert_eq!(
                (first.size(), first.kind(), first.device()),
                (vec![2, 3], Kind::BFloat16, device)
            );
            assert!(first.is_contiguous() && none.is_none() && last.size() == [1, 0, 7]);
            assert!(empty([Some(&[1, -1])], &like).is_err());
            // One alone, of any number of dimensions.
            for sizes in [&[][..], &[2, 3], &[1, 0, 7], &[1, 2, 1, 2, 1, 2]] {
                let made = empty_of(sizes, (Kind::Int64, device)).unwrap();
                assert_eq!(
                    (made.size(), made.kind(), made.device()),
                    (sizes.to_vec(), Kind::Int64, device)
                );
            }
            assert!(empty_of(&[1, -1], (Kind::Float, device)).is_err());
        }
    }
}
