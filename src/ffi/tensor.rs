//! `csrc/tensor`.

use super::take_message;
use crate::{Error, Result};
use std::ffi::{c_char, c_int, c_void};
use std::mem::{MaybeUninit, size_of, transmute_copy};
use std::rc::Rc;
use tch::kind::Element;
use tch::{Kind, Tensor};
use torch_sys::C_tensor;

/// What C++ keeps of a view while it lives.
#[repr(C)]
struct CPin {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    fn tch_extension_is_in_memory(tensor: *const C_tensor) -> bool;
    fn tch_extension_is_plain(tensor: *const C_tensor) -> bool;
    fn tch_extension_is_strided(tensor: *const C_tensor) -> bool;
    fn tch_extension_plain(tensor: *const C_tensor, result: *mut *mut C_tensor) -> *mut c_char;
    fn tch_extension_pin(
        tensor: *const C_tensor,
        writer: bool,
        sizes: *mut i64,
        strides: *mut i64,
        dim: usize,
        data: *mut *mut c_void,
        pin: *mut *mut CPin,
        refused: *mut c_int,
    ) -> *mut c_char;
    fn tch_extension_unpin(pin: *mut CPin);
    fn tch_extension_bump_version(tensor: *const C_tensor) -> *mut c_char;
    #[cfg(test)]
    safe fn tch_extension_pinned() -> usize;
}

/// Whether a kernel may read the tensor's memory row by row.
pub(crate) fn is_plain(tensor: &Tensor) -> bool {
    // SAFETY: borrowed from a live tensor.
    unsafe { tch_extension_is_plain(tensor.as_ptr()) }
}

/// Whether a kernel that knows the strides may read the tensor's memory.
pub(crate) fn is_in_memory(tensor: &Tensor) -> bool {
    // SAFETY: borrowed from a live tensor.
    unsafe { tch_extension_is_in_memory(tensor.as_ptr()) }
}

/// Whether the tensor is dense.
pub(crate) fn is_strided(tensor: &Tensor) -> bool {
    // SAFETY: borrowed from a live tensor.
    unsafe { tch_extension_is_strided(tensor.as_ptr()) }
}

/// The tensor itself if a kernel may read its memory row by row, otherwise a copy of which that is
/// true. More than `contiguous`: that keeps a pending negation, and zeros that have no memory.
pub(crate) fn plain(tensor: &Tensor) -> Result<Tensor> {
    let mut result = std::ptr::null_mut();
    // SAFETY: borrowed from a live tensor; on success the handle becomes ours.
    match take_message(unsafe { tch_extension_plain(tensor.as_ptr(), &mut result) }) {
        Some(message) => Err(Error::Torch(message)),
        // SAFETY: a handle that C++ allocated for us.
        None => Ok(unsafe { Tensor::from_ptr(result) }),
    }
}

/// Tells autograd that the tensor's values change.
pub(crate) fn bump_version(tensor: &mut Tensor) -> Result<()> {
    // SAFETY: borrowed from a live tensor.
    match take_message(unsafe { tch_extension_bump_version(tensor.as_ptr()) }) {
        Some(message) => Err(Error::Torch(message)),
        None => Ok(()),
    }
}

/// Why a tensor cannot be viewed; the numbers are C++'s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Refusal {
    Device = 1,
    LazyValues,
    NoMemory,
    LazyClone,
    ViewedForWriting,
    Viewed,
}

impl Refusal {
    fn from_code(code: c_int) -> Option<Refusal> {
        use Refusal::*;
        [Device, LazyValues, NoMemory, LazyClone, ViewedForWriting, Viewed]
            .into_iter()
            .find(|&refusal| refusal as c_int == code)
    }
}

/// Memory that stays allocated while this lives, whatever happens to the tensor.
struct Pin(*mut CPin);

impl Drop for Pin {
    fn drop(&mut self) {
        // SAFETY: C++ made it for us, and nothing uses it afterwards.
        unsafe { tch_extension_unpin(self.0) }
    }
}

/// The elements of a tensor on the CPU. Values are copied in and out, and no reference to one
/// exists at any time: other handles of the memory may be written through while this lives. Neither
/// `Send` nor `Sync`.
pub(crate) struct Strided<T, const N: usize> {
    /// Where element `[0; N]` is. Whatever index is below `shape` leads to memory that `pin` keeps.
    data: *mut T,
    shape: [usize; N],
    strides: [isize; N],
    pin: Rc<Pin>,
}

impl<T: Element + Copy, const N: usize> Strided<T, N> {
    /// Pins the memory of a tensor of `N` dimensions and kind `kind`, which has to be what lies in
    /// memory for a `T`.
    pub fn new(
        tensor: &Tensor,
        kind: Kind,
        writer: bool,
    ) -> Result<std::result::Result<Self, Refusal>> {
        if tensor.f_kind()? != kind
            || kind.elt_size_in_bytes() != size_of::<T>()
            || tensor.dim() != N
        {
            return Err(Error::msg(format!(
                "internal error: a view of {kind:?} [{N}] made of {tensor:?}"
            )));
        }
        let (mut sizes, mut strides) = ([0; N], [0; N]);
        let (mut data, mut pin, mut code) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
        // SAFETY: borrowed from a live tensor; `N` numbers fit in each array, and C++ compares `N`
        // with the tensor's own; on success without refusal the pin becomes ours.
        let message = unsafe {
            tch_extension_pin(
                tensor.as_ptr(),
                writer,
                sizes.as_mut_ptr(),
                strides.as_mut_ptr(),
                N,
                &mut data,
                &mut pin,
                &mut code,
            )
        };
        if let Some(message) = take_message(message) {
            return Err(Error::Torch(message));
        }
        if let Some(refusal) = Refusal::from_code(code) {
            return Ok(Err(refusal));
        }
        let shape = sizes.map(|size: i64| size as usize);
        let strides = strides.map(|stride: i64| stride as isize);
        Ok(Ok(Strided { data: data.cast(), shape, strides, pin: Rc::new(Pin(pin)) }))
    }

    pub fn shape(&self) -> [usize; N] {
        self.shape
    }

    pub fn strides(&self) -> [isize; N] {
        self.strides
    }

    /// How far from the first element one is; `None` when there is none there.
    fn offset(&self, index: [usize; N]) -> Option<isize> {
        let mut offset = 0;
        for ((index, size), stride) in index.into_iter().zip(self.shape).zip(self.strides) {
            if index >= size {
                return None;
            }
            offset += index as isize * stride;
        }
        Some(offset)
    }

    pub fn read(&self, index: [usize; N]) -> Option<T> {
        let offset = self.offset(index)?;
        // SAFETY: within the memory that the pin keeps, of `T`'s size, and `load` asks for no
        // alignment.
        Some(unsafe { load(self.data.wrapping_offset(offset)) })
    }

    /// Whether there is such an element. Through a view that was not made for writing it would be a
    /// change that autograd cannot see.
    pub fn write(&mut self, index: [usize; N], value: T) -> bool {
        let Some(offset) = self.offset(index) else { return false };
        // SAFETY: within the memory that the pin keeps, and of `T`'s size.
        unsafe { self.data.wrapping_offset(offset).write_unaligned(value) };
        true
    }

    /// Whether the elements lie row by row, without gaps.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        for dim in (0..N).rev() {
            if self.shape[dim] != 1 && self.strides[dim] != expected {
                return false;
            }
            expected *= self.shape[dim].max(1) as isize;
        }
        true
    }

    /// The elements, if they are contiguous.
    pub fn copy_out(&self) -> Option<Vec<T>> {
        let len: usize = self.shape.iter().product();
        // A bool is not just any byte. Without elements, sizes may be beyond what can be
        // multiplied.
        if len == 0 || T::KIND == Kind::Bool || !self.is_contiguous() {
            return None;
        }
        let mut values = Vec::<T>::with_capacity(len);
        // SAFETY: `len` elements from `data` on are in memory that the pin keeps, and there is room
        // for them in new memory; bytes ask for no alignment. Any bits are a `T`, since it is an
        // Element and not bool.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.data.cast::<u8>(),
                values.as_mut_ptr().cast(),
                len * size_of::<T>(),
            );
            values.set_len(len);
        }
        Some(values)
    }

    /// Part `row` along the first dimension.
    pub fn row<const M: usize>(&self, row: usize) -> Option<Strided<T, M>> {
        if N != M + 1 || row >= self.shape[0] {
            return None;
        }
        let shape = std::array::from_fn(|dim| self.shape[dim + 1]);
        let strides = std::array::from_fn(|dim| self.strides[dim + 1]);
        // Wrapping, because without elements the address is null.
        let data = self.data.wrapping_offset(row as isize * self.strides[0]);
        Some(Strided { data, shape, strides, pin: Rc::clone(&self.pin) })
    }
}

/// The value at an address. Memory of kind Bool may hold any byte, and all but zero count as true.
///
/// # Safety
/// There are `size_of::<T>()` bytes at the address, and `T` is [`Element::KIND`]'s type.
unsafe fn load<T: Element + Copy>(address: *const T) -> T {
    if T::KIND == Kind::Bool && size_of::<T>() == 1 {
        // SAFETY: one byte, as the caller promises.
        let byte = u8::from(unsafe { address.cast::<u8>().read() } != 0);
        // SAFETY: zero and one are what libtorch itself writes for this kind.
        return unsafe { transmute_copy(&byte) };
    }
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: as many bytes as the caller promises, into as many of our own; any of them are a `T`,
    // since it is an Element and not bool.
    unsafe {
        std::ptr::copy_nonoverlapping(
            address.cast::<u8>(),
            value.as_mut_ptr().cast(),
            size_of::<T>(),
        );
        value.assume_init()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    #[test]
    fn nothing_stays_pinned() {
        // No other unit test makes views, so the count is this one's.
        let tensor = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
        let pin = |writer| Strided::<f32, 2>::new(&tensor, Kind::Float, writer).unwrap();
        let (first, second) = (pin(false).ok().unwrap(), pin(false).ok().unwrap());
        assert_eq!(pin(true).err(), Some(Refusal::Viewed));
        assert_eq!(tch_extension_pinned(), 1);
        let mut other = tensor.shallow_clone();
        let _ = other.resize_([1 << 20]);
        assert_eq!(tch_extension_pinned(), 1);
        drop((first, second));
        assert_eq!(tch_extension_pinned(), 0);
        drop(Strided::<f32, 1>::new(&other, Kind::Float, true).unwrap().ok().unwrap());
        assert_eq!(tch_extension_pinned(), 0);
        // Of memory that libtorch does not free, and of memory that moves to another storage
        // meanwhile.
        let values = [1_f32; 6];
        // SAFETY: the array outlives the tensor.
        let foreign = unsafe {
            Tensor::from_blob(values.as_ptr().cast(), &[2, 3], &[3, 1], Kind::Float, Device::Cpu)
        };
        drop(Strided::<f32, 2>::new(&foreign, Kind::Float, false).unwrap().ok().unwrap());
        assert_eq!(tch_extension_pinned(), 0);
        let moving = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
        let pinned = Strided::<f32, 2>::new(&moving, Kind::Float, false).unwrap().ok().unwrap();
        drop((moving.internal_lazy_clone(), pinned));
        assert_eq!(tch_extension_pinned(), 1);
        drop(moving);
        assert_eq!(tch_extension_pinned(), 0);
    }

    #[test]
    fn a_view_of_the_wrong_type_is_refused_here_too() {
        let tensor = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
        assert!(Strided::<f32, 1>::new(&tensor, Kind::Float, false).is_err());
        assert!(Strided::<f64, 2>::new(&tensor, Kind::Float, false).is_err());
        assert!(Strided::<f64, 2>::new(&tensor, Kind::Double, false).is_err());
    }
}
