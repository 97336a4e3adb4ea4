//! Bindings to `csrc/tensor`.

use super::take_message;
use super::value::{kind_number, kind_of_number};
use crate::{Error, Result};
use std::ffi::{c_char, c_int, c_void};
use std::marker::PhantomData;
use std::mem::{size_of, transmute_copy};
use std::rc::Rc;
use tch::kind::Element;
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

/// The C++ side of a view.
#[repr(C)]
#[doc(alias = "tch_extension::Pin")]
struct CPin {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    fn tch_extension_describe(tensor: *const C_tensor) -> *mut c_char;
    fn tch_extension_is_in_memory(tensor: *const C_tensor) -> bool;
    fn tch_extension_is_plain(tensor: *const C_tensor) -> bool;
    fn tch_extension_array(
        tensor: *const C_tensor,
        kind: i32,
        device: i32,
        sizes: *const i64,
        len: usize,
        data: *mut *mut c_void,
    ) -> bool;
    fn tch_extension_is_strided(tensor: *const C_tensor) -> bool;
    fn tch_extension_scalar_type(tensor: *const C_tensor) -> i32;
    fn tch_extension_has_shape(tensor: *const C_tensor, sizes: *const i64, len: usize) -> bool;
    fn tch_extension_is_contiguous(tensor: *const C_tensor) -> bool;
    fn tch_extension_same_device(one: *const C_tensor, other: *const C_tensor) -> bool;
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
    fn tch_extension_pin_flat(
        tensor: *const C_tensor,
        writer: bool,
        len: *mut usize,
        data: *mut *mut c_void,
        pin: *mut *mut CPin,
        refused: *mut c_int,
    ) -> *mut c_char;
    fn tch_extension_unpin(pin: *mut CPin);
    fn tch_extension_touch(tensor: *const C_tensor);
    fn tch_extension_is_at(
        tensor: *const C_tensor,
        data: *const c_void,
        sizes: *const i64,
        strides: *const i64,
        dim: usize,
    ) -> bool;
    fn tch_extension_bump_version(tensor: *const C_tensor) -> *mut c_char;
    #[cfg(test)]
    safe fn tch_extension_pinned() -> usize;
}

/// What an internal error says of a tensor that a kernel cannot take. `Debug` would ask libtorch, and
/// so torch.func, or panic.
pub(crate) fn describe(tensor: &Tensor) -> String {
    // SAFETY: the pointer is borrowed from a live tensor, and the text is ours.
    take_message(unsafe { tch_extension_describe(tensor.as_ptr()) }).unwrap_or_default()
}

/// Whether the tensor's memory holds its values in row-major order, without gaps.
pub(crate) fn is_plain(tensor: &Tensor) -> bool {
    // SAFETY: the pointer is borrowed from a live tensor.
    unsafe { tch_extension_is_plain(tensor.as_ptr()) }
}

/// How large an array has to be.
#[derive(Clone, Copy)]
pub(crate) enum Extent<'a> {
    Sizes(&'a [i64]),
    /// So many elements, in any shape.
    Elements(usize),
}

/// The address of the tensor's first element, for a kernel, if the tensor is plain, of this kind and
/// device, and as large.
pub(crate) fn array(
    tensor: &Tensor,
    (kind, device): (Kind, Device),
    extent: Extent<'_>,
) -> Option<*mut c_void> {
    let device = match device {
        Device::Cpu => -1,
        Device::Cuda(index) => i32::try_from(index).ok()?,
        _ => return None,
    };
    let (sizes, len) = match extent {
        Extent::Sizes(sizes) => (sizes.as_ptr(), sizes.len()),
        Extent::Elements(len) => (std::ptr::null(), len),
    };
    let (tensor, mut data) = (tensor.as_ptr(), std::ptr::null_mut());
    // SAFETY: the pointer is borrowed from a live tensor, there are `len` sizes unless they are null,
    // and C++ writes `data`.
    let fits =
        unsafe { tch_extension_array(tensor, kind_number(kind), device, sizes, len, &mut data) };
    fits.then_some(data)
}

/// Whether the tensor's memory holds its values, in any strides.
pub(crate) fn is_in_memory(tensor: &Tensor) -> bool {
    // SAFETY: the pointer is borrowed from a live tensor.
    unsafe { tch_extension_is_in_memory(tensor.as_ptr()) }
}

/// Whether the tensor is dense.
pub(crate) fn is_strided(tensor: &Tensor) -> bool {
    // SAFETY: the pointer is borrowed from a live tensor.
    unsafe { tch_extension_is_strided(tensor.as_ptr()) }
}

/// The tensor's kind; `None` if it is undefined or tch does not know the kind.
pub(crate) fn kind(tensor: &Tensor) -> Option<Kind> {
    // SAFETY: the pointer is borrowed from a live tensor.
    kind_of_number(i64::from(unsafe { tch_extension_scalar_type(tensor.as_ptr()) }))
}

/// Whether the tensor is defined and has this shape.
pub(crate) fn has_shape(tensor: &Tensor, shape: &[i64]) -> bool {
    // SAFETY: the pointer is borrowed from a live tensor, and the shape has this length.
    unsafe { tch_extension_has_shape(tensor.as_ptr(), shape.as_ptr(), shape.len()) }
}

/// Whether the tensor is defined and contiguous.
pub(crate) fn is_contiguous(tensor: &Tensor) -> bool {
    // SAFETY: the pointer is borrowed from a live tensor.
    unsafe { tch_extension_is_contiguous(tensor.as_ptr()) }
}

/// Whether both tensors are defined, and on the same device.
pub(crate) fn same_device(one: &Tensor, other: &Tensor) -> bool {
    // SAFETY: both pointers are borrowed from live tensors.
    unsafe { tch_extension_same_device(one.as_ptr(), other.as_ptr()) }
}

/// Returns the tensor itself if its memory holds its values in row-major order, and otherwise a
/// copy for which this is true. It does more than `contiguous`, which keeps a pending negation, and
/// zeros that have no memory.
pub(crate) fn plain(tensor: &Tensor) -> Result<Tensor> {
    let mut result = std::ptr::null_mut();
    // SAFETY: the pointer is borrowed from a live tensor. On success we own the handle.
    match take_message(unsafe { tch_extension_plain(tensor.as_ptr(), &mut result) }) {
        Some(message) => Err(Error::Torch(message)),
        // SAFETY: it is a handle that C++ allocated for us.
        None => Ok(unsafe { Tensor::from_ptr(result) }),
    }
}

/// Whether 16-byte loads can read the tensor's memory from its first element on; the CPU's can from
/// anywhere.
pub(crate) fn is_in_vectors(tensor: &Tensor) -> bool {
    const BYTES: usize = 16;
    !tensor.device().is_cuda()
        || !is_in_memory(tensor)
        || tensor.data_ptr().addr().is_multiple_of(BYTES)
}

/// The tensor, of a floating kind, for kernels that load 16 bytes at a time: plain, and on CUDA at a
/// multiple of 16 bytes.
pub(crate) fn in_vectors(tensor: &Tensor) -> Result<Tensor> {
    let tensor = plain(tensor)?;
    if is_in_vectors(&tensor) { Ok(tensor) } else { copy_in_vectors(&tensor) }
}

/// A copy of a tensor of a floating kind that [`is_in_vectors`]; autograd differentiates it.
pub(crate) fn copy_in_vectors(tensor: &Tensor) -> Result<Tensor> {
    // This product is exact. A copy would be CUDA's, which moves single bytes from an odd address.
    Ok(tensor.f_mul_scalar(1.0)?)
}

/// A tensor on the CPU with these values. tch's `f_from_slice` fills the memory of a tensor that an
/// operation makes, which has none of its own within transforms of torch.func.
pub(crate) fn from_slice(values: &[i64]) -> Result<Tensor> {
    let (len, kind, device) = (values.len() as i64, Kind::Int64, Device::Cpu);
    // SAFETY: the memory has so many values of this kind, and outlives the tensor, which is dropped
    // here. Nobody writes to it.
    let borrowed =
        unsafe { Tensor::f_from_blob(values.as_ptr().cast(), &[len], &[1], kind, device) }?;
    let mut copy = borrowed.f_empty_like()?;
    copy.f_copy_(&borrowed)?;
    Ok(copy)
}

/// Calls `body` with a tensor on the CPU that has these values, of an element's bytes each. Nothing is
/// copied unless they are at an odd address. The body must not keep the tensor, nor write to it.
pub(crate) fn with_values<R>(
    values: &[u8],
    size: &[i64],
    kind: Kind,
    body: impl FnOnce(&Tensor) -> Result<R>,
) -> Result<R> {
    let element = kind.elt_size_in_bytes();
    let is_borrowed = values.as_ptr().addr().is_multiple_of(element)
        && size.iter().product::<i64>() as usize * element == values.len();
    if !is_borrowed {
        return body(&Tensor::f_from_data_size(values, size, kind)?);
    }
    let mut stride = vec![1; size.len()];
    for place in (1..size.len()).rev() {
        stride[place - 1] = stride[place] * size[place].max(1);
    }
    // SAFETY: the memory has so many elements of this kind, at a multiple of their size, and outlives
    // the tensor, which is dropped here. Nobody writes to it.
    let borrowed =
        unsafe { Tensor::f_from_blob(values.as_ptr(), size, &stride, kind, Device::Cpu) }?;
    body(&borrowed)
}

/// Tells a capture that is under way that a kernel gets the address of the tensor's memory, which a
/// graph must keep. The inputs of operations and of our functions, and the tensors that they saved,
/// need no such call.
pub(crate) fn touch(tensor: &Tensor) {
    // SAFETY: the pointer is borrowed from a live tensor.
    unsafe { tch_extension_touch(tensor.as_ptr()) }
}

/// The address of the tensor's first element, for a kernel.
pub(crate) fn address(tensor: &Tensor) -> *mut c_void {
    touch(tensor);
    tensor.data_ptr()
}

/// A borrowed tensor, in a struct that is shared with C++.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handle<'a>(*const c_void, PhantomData<&'a Tensor>);

impl<'a> Handle<'a> {
    pub fn of(tensor: &'a Tensor) -> Self {
        Handle(tensor.as_ptr().cast(), PhantomData)
    }

    /// Whether the tensor has these sizes and strides, and its first element this address.
    pub fn is_at<const N: usize>(
        &self,
        data: *const c_void,
        sizes: &[i64; N],
        strides: &[i64; N],
    ) -> bool {
        // SAFETY: the tensor is borrowed, and both arrays have N entries.
        unsafe { tch_extension_is_at(self.0.cast(), data, sizes.as_ptr(), strides.as_ptr(), N) }
    }
}

/// Tells autograd that the tensor's values change.
pub(crate) fn bump_version(tensor: &mut Tensor) -> Result<()> {
    // SAFETY: the pointer is borrowed from a live tensor.
    match take_message(unsafe { tch_extension_bump_version(tensor.as_ptr()) }) {
        Some(message) => Err(Error::Torch(message)),
        None => Ok(()),
    }
}

/// Why a tensor cannot be viewed. C++ uses the same numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Refusal {
    Device = 1,
    LazyValues,
    NoMemory,
    LazyClone,
    ViewedForWriting,
    Viewed,
    InFlight,
}

impl Refusal {
    fn from_code(code: c_int) -> Option<Refusal> {
        use Refusal::*;
        [Device, LazyValues, NoMemory, LazyClone, ViewedForWriting, Viewed, InFlight]
            .into_iter()
            .find(|&refusal| refusal as c_int == code)
    }
}

/// Memory that stays allocated while this lives, whatever happens to the tensor.
struct Pin(*mut CPin);

impl Drop for Pin {
    fn drop(&mut self) {
        // SAFETY: C++ made the pin for us, and nobody uses it afterwards.
        unsafe { tch_extension_unpin(self.0) }
    }
}

/// The elements of a CPU tensor. Values are copied in and out, and a reference to an element never
/// exists, because other handles of the memory may be used for writing while this lives. Neither
/// `Send` nor `Sync`.
pub(crate) struct Strided<T, const N: usize> {
    /// The address of element `[0; N]`. Every index within `shape` leads to memory that `pin` keeps
    /// allocated.
    data: *mut T,
    shape: [usize; N],
    strides: [isize; N],
    pin: Rc<Pin>,
}

/// What C++ writes when it pins a tensor's memory.
struct Pinned {
    data: *mut c_void,
    pin: *mut CPin,
    code: c_int,
}

impl Pinned {
    fn none() -> Pinned {
        Pinned { data: std::ptr::null_mut(), pin: std::ptr::null_mut(), code: 0 }
    }

    /// The address of the first element, and the pin, which C++ made for us.
    fn finish<T>(
        self,
        message: *mut c_char,
    ) -> Result<std::result::Result<(*mut T, Rc<Pin>), Refusal>> {
        if let Some(message) = take_message(message) {
            return Err(Error::Torch(message));
        }
        Ok(match Refusal::from_code(self.code) {
            Some(refusal) => Err(refusal),
            None => Ok((self.data.cast(), Rc::new(Pin(self.pin)))),
        })
    }
}

/// Refuses a tensor whose memory does not have the kind, or values of type `T`.
fn check_elements<T>(tensor: &Tensor, kind: Kind) -> Result<()> {
    if self::kind(tensor) == Some(kind) && kind.elt_size_in_bytes() == size_of::<T>() {
        return Ok(());
    }
    Err(Error::msg(format!("internal error: a view of {kind:?} made of {}", describe(tensor))))
}

impl<T: Element + Copy> Strided<T, 1> {
    /// Pins the memory of a contiguous tensor of any number of dimensions, as if it had one.
    pub fn flat(
        tensor: &Tensor,
        kind: Kind,
        writer: bool,
    ) -> Result<std::result::Result<Self, Refusal>> {
        check_elements::<T>(tensor, kind)?;
        let (mut pinned, mut len) = (Pinned::none(), 0);
        // SAFETY: the pointer is borrowed from a live tensor, and C++ checks that it is contiguous. On
        // success without a refusal, we own the pin.
        let message = unsafe {
            tch_extension_pin_flat(
                tensor.as_ptr(),
                writer,
                &mut len,
                &mut pinned.data,
                &mut pinned.pin,
                &mut pinned.code,
            )
        };
        let pinned = pinned.finish::<T>(message)?;
        Ok(pinned.map(|(data, pin)| Strided { data, shape: [len], strides: [1], pin }))
    }
}

impl<T: Element + Copy, const N: usize> Strided<T, N> {
    /// Pins the memory of a tensor with `N` dimensions and kind `kind`. The memory of that kind
    /// must hold values of type `T`.
    pub fn new(
        tensor: &Tensor,
        kind: Kind,
        writer: bool,
    ) -> Result<std::result::Result<Self, Refusal>> {
        check_elements::<T>(tensor, kind)?;
        if tensor.dim() != N {
            return Err(Error::msg(format!(
                "internal error: a view [{N}] made of {}",
                describe(tensor)
            )));
        }
        let (mut pinned, mut sizes, mut strides) = (Pinned::none(), [0_i64; N], [0_i64; N]);
        // SAFETY: the pointer is borrowed from a live tensor. Both arrays have `N` entries, and C++
        // compares this with the tensor's number of dimensions. On success without a refusal, we own
        // the pin.
        let message = unsafe {
            tch_extension_pin(
                tensor.as_ptr(),
                writer,
                sizes.as_mut_ptr(),
                strides.as_mut_ptr(),
                N,
                &mut pinned.data,
                &mut pinned.pin,
                &mut pinned.code,
            )
        };
        let pinned = pinned.finish::<T>(message)?;
        let shape = sizes.map(|size| size as usize);
        let strides = strides.map(|stride| stride as isize);
        Ok(pinned.map(|(data, pin)| Strided { data, shape, strides, pin }))
    }

    pub fn shape(&self) -> [usize; N] {
        self.shape
    }

    pub fn strides(&self) -> [isize; N] {
        self.strides
    }

    /// The offset of an element from the first one; `None` if the index is out of range.
    #[inline]
    fn offset(&self, index: [usize; N]) -> Option<isize> {
        let mut offset = 0;
        // Zipped iterators over the three arrays took about 120 instructions an element in the profile dev
        // (docs/lab/python.md).
        for (dim, &index) in index.iter().enumerate() {
            if index >= self.shape[dim] {
                return None;
            }
            offset += index as isize * self.strides[dim];
        }
        Some(offset)
    }

    /// The number of elements. Of a tensor without elements, the product of the other sizes may
    /// overflow.
    pub fn len(&self) -> usize {
        if self.shape.contains(&0) { 0 } else { self.shape.iter().product() }
    }

    /// The elements in row-major order.
    pub fn elements(&self) -> Elements<'_, T, N> {
        Elements { strided: self, next: [0; N], offset: 0, left: self.len() }
    }

    #[inline]
    pub fn read(&self, index: [usize; N]) -> Option<T> {
        let offset = self.offset(index)?;
        // SAFETY: the address is within the memory that the pin keeps, `T` has the elements' size,
        // and `load` requires no alignment.
        Some(unsafe { load(self.data.wrapping_offset(offset)) })
    }

    /// Writes an element, and returns whether it exists. Only for a view that was made for writing:
    /// autograd would not see the change otherwise.
    #[inline]
    pub fn write(&mut self, index: [usize; N], value: T) -> bool {
        let Some(offset) = self.offset(index) else { return false };
        // SAFETY: the address is within the memory that the pin keeps, and `T` has the elements'
        // size.
        unsafe { self.data.wrapping_offset(offset).write_unaligned(value) };
        true
    }

    /// Whether the elements are row-major without gaps.
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

    /// Copies the elements, if they are contiguous.
    pub fn copy_out(&self) -> Option<Vec<T>> {
        let len = self.len();
        // Not every byte is a valid bool.
        if len == 0 || T::KIND == Kind::Bool || !self.is_contiguous() {
            return None;
        }
        let mut values = Vec::<T>::with_capacity(len);
        // SAFETY: `len` elements starting at `data` are in memory that the pin keeps, and the new
        // memory has room for them. Bytes require no alignment. Any bits are a valid `T`, because
        // it is an Element other than bool.
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

    /// The part with index `row` along the first dimension.
    pub fn row<const M: usize>(&self, row: usize) -> Option<Strided<T, M>> {
        if N != M + 1 || row >= self.shape[0] {
            return None;
        }
        let shape = std::array::from_fn(|dim| self.shape[dim + 1]);
        let strides = std::array::from_fn(|dim| self.strides[dim + 1]);
        // It uses wrapping arithmetic, because the address is null if there are no elements.
        let data = self.data.wrapping_offset(row as isize * self.strides[0]);
        Some(Strided { data, shape, strides, pin: Rc::clone(&self.pin) })
    }
}

/// The elements of a [`Strided`] in row-major order.
pub(crate) struct Elements<'a, T, const N: usize> {
    strided: &'a Strided<T, N>,
    /// The next element's index and, while some are left, its offset.
    next: [usize; N],
    offset: isize,
    left: usize,
}

impl<T: Element + Copy, const N: usize> Iterator for Elements<'_, T, N> {
    type Item = T;

    #[inline]
    fn next(&mut self) -> Option<T> {
        self.left = self.left.checked_sub(1)?;
        let Strided { data, shape, strides, .. } = self.strided;
        // SAFETY: as in `Strided::read`; the index is within the shape, because some were left.
        let value = unsafe { load(data.wrapping_offset(self.offset)) };
        for dim in (0..N).rev() {
            self.next[dim] += 1;
            if self.next[dim] < shape[dim] {
                self.offset += strides[dim];
                break;
            }
            // Go back by as many strides as were added. One more could overflow, because a dimension of
            // size 1 may have any stride.
            self.next[dim] = 0;
            self.offset -= strides[dim] * (shape[dim] - 1) as isize;
        }
        Some(value)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl<T: Element + Copy, const N: usize> ExactSizeIterator for Elements<'_, T, N> {}

/// Reads the value at an address. Memory of kind Bool may hold any byte, and every byte except zero
/// counts as true.
///
/// # Safety
/// There must be `size_of::<T>()` readable bytes at the address, and `T` must be the type of
/// [`Element::KIND`].
#[inline]
unsafe fn load<T: Element + Copy>(address: *const T) -> T {
    if T::KIND == Kind::Bool && size_of::<T>() == 1 {
        // SAFETY: the caller guarantees one readable byte (see `# Safety`).
        let byte = u8::from(unsafe { address.cast::<u8>().read() } != 0);
        // SAFETY: libtorch itself writes zero and one for this kind.
        return unsafe { transmute_copy(&byte) };
    }
    // SAFETY: the caller guarantees the bytes (see `# Safety`). Any bits are a valid `T`, because it
    // is an Element other than bool.
    unsafe { address.read_unaligned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_stays_pinned() {
        // No other unit test makes views, so this test knows the count.
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
        // Also pin memory that libtorch does not free, and memory that moves to another storage
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
    fn questions_have_tchs_answers() {
        let x = Tensor::zeros([2, 3], (Kind::BFloat16, Device::Cpu));
        assert_eq!(kind(&x), Some(Kind::BFloat16));
        assert!(has_shape(&x, &[2, 3]) && !has_shape(&x, &[3, 2]) && !has_shape(&x, &[2]));
        assert!(is_contiguous(&x) && !is_contiguous(&x.transpose(0, 1)));
        assert!(same_device(&x, &x.transpose(0, 1)));
        let none = Tensor::new();
        assert_eq!(kind(&none), None);
        assert!(!has_shape(&none, &[0]) && !is_contiguous(&none) && !same_device(&x, &none));
        for device in crate::testing::devices().into_iter().filter(|device| device.is_cuda()) {
            assert!(!same_device(&x, &x.to_device(device)));
        }
    }

    #[test]
    fn a_slice_becomes_a_tensor_of_its_own() {
        for values in [vec![], vec![7], (0..1000).collect::<Vec<i64>>()] {
            let tensor = from_slice(&values).unwrap();
            assert_ne!(tensor.data_ptr().cast_const(), values.as_ptr().cast());
            assert_eq!(Vec::<i64>::try_from(tensor).unwrap(), values);
        }
    }

    #[test]
    fn a_view_of_the_wrong_type_is_refused_here_too() {
        let tensor = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
        assert!(Strided::<f32, 1>::new(&tensor, Kind::Float, false).is_err());
        assert!(Strided::<f64, 2>::new(&tensor, Kind::Float, false).is_err());
        assert!(Strided::<f64, 2>::new(&tensor, Kind::Double, false).is_err());
    }
}
