//! Safe typed views of CPU tensors, for kernels in plain Rust.
//!
//! [`view()`] reads a tensor's elements in place and [`view_mut`] writes them, with any strides:
//!
//! ```
//! use tch::{Device, Kind, Tensor};
//! use tch_extension::autograd::{Context, Function, Inputs, Saver, Tensors, apply};
//! use tch_extension::testing::gradcheck;
//! use tch_extension::view::{view, view_mut};
//! use tch_extension::{Result, check};
//!
//! /// The sum of the squares of each row.
//! struct RowSquares;
//!
//! impl Function for RowSquares {
//!     const NAME: &'static str = "row_squares";
//!
//!     fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
//!         let x = inputs.get(0)?;
//!         check!(Self::NAME, x).defined()?.kind_in(&[Kind::Double])?.dim(2, "[B, F]")?;
//!         saver.save(x);
//!         let mut sums = Tensor::zeros([x.size()[0]], (Kind::Double, Device::Cpu));
//!         let (x, mut out) = (view::<f64, 2>(x)?, view_mut::<f64, 1>(&mut sums)?);
//!         for (index, row) in x.rows().enumerate() {
//!             out.set([index], row.iter().map(|value| value * value).sum());
//!         }
//!         drop(out);
//!         Ok(sums.into())
//!     }
//!
//!     fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
//!         Ok((ctx.saved(0)? * grads.get(0)?.unsqueeze(1) * 2.0).into())
//!     }
//! }
//!
//! let x = Tensor::randn([3, 4], (Kind::Double, Device::Cpu)).transpose(0, 1).set_requires_grad(true);
//! gradcheck(|inputs| apply(RowSquares, &[Some(&inputs[0])]), &[&x], &Default::default())?;
//! # Ok::<(), tch_extension::Error>(())
//! ```
//!
//! [`View::iter`] and [`View::to_vec`] pass the values to other crates, and
//! [`ViewMut::copy_from_slice`] takes them back:
//!
//! ```
//! use tch_extension::{tch::Tensor, view::{view, view_mut}};
//!
//! let mut tensor = Tensor::from_slice(&[3_i64, 1, 2]);
//! let mut values = view::<i64, 1>(&tensor)?.to_vec();
//! values.sort();
//! view_mut::<i64, 1>(&mut tensor)?.copy_from_slice(&values);
//! assert_eq!(tensor, Tensor::from_slice(&[1_i64, 2, 3]));
//! # Ok::<(), tch_extension::Error>(())
//! ```
//!
//! # Aliasing
//! A tch tensor is a handle. While a view lives, another handle of the same memory may be used for
//! writing, and Rust's borrow checker cannot see that. Therefore:
//! * A view copies values in and out. It never returns a reference to the memory or a slice of it,
//!   and the next read simply sees a change that was made through another handle. This is why there
//!   is no indexing with `[]`.
//! * A view keeps its memory allocated, even if the tensor's other handles release it (`resize_`,
//!   `set_data`); then only the view can still see it. A lazy clone that is made while a
//!   [`ViewMut`] lives also sees what is written later.
//! * While a [`ViewMut`] lives, no other view can be made of bytes between its first and its last
//!   byte, in any thread: that is an error. Disjoint parts of one tensor can be written at the same
//!   time.
//! * An operation of `distributed` in flight counts as a view, for writing if it writes, from its
//!   start until it has ended or its `Work` was waited for.
//! * A view stays in its thread. Another thread that has its own handle can still write with tch
//!   while this thread reads. That is a data race, as between any two functions of tch, and you
//!   must prevent it.
//!
//! ```compile_fail,E0277
//! use tch_extension::{tch::Tensor, view::view};
//!
//! let tensor = Tensor::from_slice(&[1_f32]);
//! let view = view::<f32, 1>(&tensor).unwrap();
//! std::thread::scope(|scope| scope.spawn(move || view.at([0])).join().unwrap());
//! ```
//!
//! # Autograd
//! The results of computations on a view are plain data outside the graph. To give them a gradient,
//! use [`Function`](crate::autograd::Function), whose forward pass runs with grad mode off. A
//! tensor that requires grad can be written only while grad mode is off, because its graph would
//! not know of the change. Making a [`ViewMut`] counts as an in-place operation, and so does
//! dropping it: if a tensor that was saved for a backward pass is changed through the view, that
//! backward pass is an error. If the tensor was saved while the [`ViewMut`] lived, the error occurs
//! only after the drop, so drop the view before the backward pass.

use crate::check::Check;
use crate::ffi::autograd::tch_extension_grad_mode;
use crate::ffi::tensor::{Refusal, Strided, is_contiguous};
use crate::overlap::overlaps;
use crate::{Error, Result, kind_of};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use tch::Tensor;
use tch::kind::Element;

const ARGUMENT: &str = "tensor";

/// Makes a view of the elements of a dense CPU tensor with the kind of `T` and `N` dimensions. `T`
/// may be any of tch's element types: `f32`, `f64`, the half crate's `f16` and `bf16`, integers,
/// `bool`.
///
/// ```
/// use tch_extension::{tch::Tensor, view::view};
///
/// let tensor = Tensor::from_slice(&[1_f32, 2.0, 3.0, 4.0]).reshape([2, 2]).transpose(0, 1);
/// let view = view::<f32, 2>(&tensor)?;
/// assert_eq!((view.shape(), view.strides()), ([2, 2], [1, 2]));
/// assert_eq!((view.at([0, 1]), view.get([0, 2])), (3.0, None));
/// assert_eq!(view.iter().collect::<Vec<_>>(), [1.0, 3.0, 2.0, 4.0]);
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// A view cannot outlive its tensor:
/// ```compile_fail,E0505
/// use tch_extension::{tch::Tensor, view::view};
///
/// let tensor = Tensor::from_slice(&[1_f32]);
/// let view = view::<f32, 1>(&tensor).unwrap();
/// drop(tensor);
/// view.at([0]);
/// ```
///
/// # Errors
/// When the tensor is undefined or sparse, or has another kind, number of dimensions or device;
/// when the memory does not hold the values themselves (a pending negation or conjugation, zeros
/// without memory, a lazy clone); while a [`ViewMut`] of the same memory lives; and while an operation
/// of `distributed` that writes it is in flight.
pub fn view<T: Element + Copy, const N: usize>(tensor: &Tensor) -> Result<View<'_, T, N>> {
    let inner = pinned("view", tensor, false)?;
    Ok(View { inner, tensor: PhantomData })
}

/// Makes a view of the elements of a contiguous CPU tensor of any number of dimensions, in a row: the
/// view of an element-wise kernel. [`contiguous`](crate::strided::contiguous) makes a tensor so.
///
/// ```
/// use tch_extension::{tch::Tensor, view::{view_flat, view_flat_mut}};
///
/// let x = Tensor::from_slice(&[1_f32, 2.0, 3.0, 4.0]).reshape([2, 2]);
/// let mut y = x.empty_like();
/// let mut squares = view_flat_mut::<f32>(&mut y)?;
/// for (at, value) in view_flat::<f32>(&x)?.iter().enumerate() {
///     squares.set([at], value * value);
/// }
/// drop(squares);
/// assert_eq!(y, &x * &x);
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// As for [`view()`], whatever the number of dimensions; also when the tensor is not contiguous.
pub fn view_flat<T: Element + Copy>(tensor: &Tensor) -> Result<View<'_, T, 1>> {
    let inner = pinned_flat("view_flat", tensor, false)?;
    Ok(View { inner, tensor: PhantomData })
}

/// Like [`view_flat`], for writing.
///
/// # Errors
/// As for [`view_mut`]; also when the tensor is not contiguous.
pub fn view_flat_mut<T: Element + Copy>(tensor: &mut Tensor) -> Result<ViewMut<'_, T, 1>> {
    const OP: &str = "view_flat_mut";
    check_writable(OP, tensor)?;
    let inner = pinned_flat(OP, tensor, true)?;
    Ok(ViewMut { view: View { inner, tensor: PhantomData } })
}

/// Like [`view()`], for writing.
///
/// ```
/// use tch_extension::{tch::Tensor, view::view_mut};
///
/// let mut tensor = Tensor::from_slice(&[1_f32, 2.0, 3.0]);
/// let mut view = view_mut::<f32, 1>(&mut tensor)?;
/// view.apply(|value| value * 10.0);
/// view.set([0], 7.0);
/// drop(view);
/// assert_eq!(tensor, Tensor::from_slice(&[7_f32, 20.0, 30.0]));
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// While the view lives, the tensor itself cannot be used:
/// ```compile_fail,E0502
/// use tch_extension::{tch::Tensor, view::view_mut};
///
/// let mut tensor = Tensor::from_slice(&[1_f32]);
/// let mut view = view_mut::<f32, 1>(&mut tensor).unwrap();
/// tensor.print();
/// view.set([0], 2.0);
/// ```
///
/// # Errors
/// As for [`view()`]; also while any view of the same memory lives, or an operation that reads it is in
/// flight, when elements overlap in memory (an expanded tensor), and when the tensor requires grad
/// while grad mode is on.
pub fn view_mut<T: Element + Copy, const N: usize>(
    tensor: &mut Tensor,
) -> Result<ViewMut<'_, T, N>> {
    const OP: &str = "view_mut";
    let check = check_writable(OP, tensor)?;
    // Check the tensor before the view is made, so that a refusal does not bump the version
    // counter.
    if !is_contiguous(tensor) && overlaps(&tensor.size(), &tensor.stride()) {
        let got = format!("strides {:?} for shape {:?}", tensor.stride(), tensor.size());
        return Err(check.refuse(
            "elements that do not overlap in memory",
            got,
            "call contiguous()",
        ));
    }
    let inner = pinned(OP, tensor, true)?;
    Ok(ViewMut { view: View { inner, tensor: PhantomData } })
}

/// Checks that autograd would not miss a change.
fn check_writable<'a>(op: &'a str, tensor: &'a Tensor) -> Result<Check<'a>> {
    let check = Check::new(op, ARGUMENT, tensor).defined()?;
    if tensor.requires_grad() && tch_extension_grad_mode() {
        let hint =
            "its graph would not know of the change: write under no_grad, or to a detached copy";
        return Err(check.refuse(
            "a tensor without gradient, or grad mode off",
            "one that requires grad",
            hint,
        ));
    }
    Ok(check)
}

fn pinned<T: Element + Copy, const N: usize>(
    op: &str,
    tensor: &Tensor,
    writer: bool,
) -> Result<Strided<T, N>> {
    let kind = kind_of::<T>();
    let check = Check::new(op, ARGUMENT, tensor).defined()?.kind_in(&[kind])?;
    if tensor.dim() != N {
        let names = std::array::from_fn::<_, N, _>(|dim| format!("d{dim}")).join(", ");
        check.dim(N, &format!("[{names}]"))?;
    }
    Strided::new(tensor, kind, writer)?.map_err(|refusal| refused(check, refusal))
}

fn pinned_flat<T: Element + Copy>(
    op: &str,
    tensor: &Tensor,
    writer: bool,
) -> Result<Strided<T, 1>> {
    let kind = kind_of::<T>();
    let check = Check::new(op, ARGUMENT, tensor).defined()?.kind_in(&[kind])?;
    if !is_contiguous(tensor) {
        let got = format!("strides {:?} for shape {:?}", tensor.stride(), tensor.size());
        return Err(check.refuse("a contiguous tensor", got, "call strided::contiguous"));
    }
    Strided::flat(tensor, kind, writer)?.map_err(|refusal| refused(check, refusal))
}

fn refused(check: Check<'_>, refusal: Refusal) -> Error {
    let (expected, got, hint) = match refusal {
        Refusal::Device => {
            ("a CPU tensor", "one on another device", "move it with to_device(Device::Cpu)")
        }
        Refusal::LazyValues => (
            "values as they are in memory",
            "a pending negation or conjugation",
            "call resolve_neg() or resolve_conj()",
        ),
        Refusal::NoMemory => {
            ("a tensor with memory", "zeros without", "make them with Tensor::zeros")
        }
        Refusal::LazyClone => {
            ("a tensor with memory of its own", "a lazy clone or its original", "call copy()")
        }
        Refusal::ViewedForWriting => (
            "memory that nobody else writes to",
            "some with a live ViewMut",
            "drop the ViewMut first",
        ),
        Refusal::Viewed => {
            ("memory without another view", "some with a live View", "drop the View first")
        }
        Refusal::InFlight => (
            "memory that no operation in flight uses",
            "some of an operation of distributed",
            "wait for its Work first",
        ),
    };
    check.refuse(expected, got, hint)
}

/// The elements of a tensor, for reading; made by [`view()`].
pub struct View<'a, T, const N: usize> {
    inner: Strided<T, N>,
    tensor: PhantomData<&'a Tensor>,
}

impl<T: Element + Copy, const N: usize> View<'_, T, N> {
    /// The size of each dimension.
    pub fn shape(&self) -> [usize; N] {
        self.inner.shape()
    }

    /// The distance in memory between neighbours along each dimension, in elements. It is zero
    /// along an expanded dimension.
    pub fn strides(&self) -> [isize; N] {
        self.inner.strides()
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.inner.len()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element at this index, or `None` if the index is out of range.
    #[inline]
    pub fn get(&self, index: [usize; N]) -> Option<T> {
        self.inner.read(index)
    }

    /// The element at this index.
    ///
    /// # Panics
    /// When the index is out of range.
    #[inline]
    #[track_caller]
    pub fn at(&self, index: [usize; N]) -> T {
        self.get(index).unwrap_or_else(|| out_of_bounds(&index, &self.shape()))
    }

    /// The elements in row-major order (the last index changes fastest).
    pub fn iter(&self) -> impl ExactSizeIterator<Item = T> + '_ {
        self.inner.elements()
    }

    /// The indices of all elements, in row-major order.
    pub fn indices(&self) -> Indices<N> {
        Indices { shape: self.shape(), next: [0; N], left: self.len() }
    }

    /// A copy of the elements, in row-major order.
    pub fn to_vec(&self) -> Vec<T> {
        self.inner.copy_out().unwrap_or_else(|| self.iter().collect())
    }
}

/// The elements of a tensor, for reading and writing; made by [`view_mut`].
pub struct ViewMut<'a, T, const N: usize> {
    view: View<'a, T, N>,
}

impl<'a, T, const N: usize> Deref for ViewMut<'a, T, N> {
    type Target = View<'a, T, N>;

    fn deref(&self) -> &Self::Target {
        &self.view
    }
}

impl<T: Element + Copy, const N: usize> ViewMut<'_, T, N> {
    /// Writes the element at this index.
    ///
    /// # Panics
    /// When the index is out of range.
    #[inline]
    #[track_caller]
    pub fn set(&mut self, index: [usize; N], value: T) {
        if !self.view.inner.write(index, value) {
            out_of_bounds(&index, &self.shape())
        }
    }

    /// Writes the same value to all elements.
    pub fn fill(&mut self, value: T) {
        self.apply(|_| value);
    }

    /// Replaces each element by the result of a function, in row-major order.
    pub fn apply(&mut self, mut function: impl FnMut(T) -> T) {
        for index in self.indices() {
            let value = function(self.at(index));
            self.set(index, value);
        }
    }

    /// Writes all elements, in row-major order.
    ///
    /// # Panics
    /// When the number of values is not the number of elements.
    #[track_caller]
    pub fn copy_from_slice(&mut self, values: &[T]) {
        assert_eq!(values.len(), self.len(), "as many values as the view has elements");
        for (index, &value) in self.indices().zip(values) {
            self.set(index, value);
        }
    }
}

/// Stable Rust has no `N - 1` for a const parameter, so each number of dimensions has its own
/// methods.
macro_rules! rows {
    ($($n:literal => $m:literal),+) => {$(
        impl<T: Element + Copy> View<'_, T, $n> {
            /// The sub-view at this index of the first dimension.
            ///
            /// # Panics
            /// When the index is out of range.
            #[track_caller]
            pub fn row(&self, row: usize) -> View<'_, T, $m> {
                let inner = self.inner.row(row).unwrap_or_else(|| out_of_bounds(&[row], &self.shape()[..1]));
                View { inner, tensor: PhantomData }
            }

            /// The sub-views along the first dimension.
            pub fn rows(&self) -> impl ExactSizeIterator<Item = View<'_, T, $m>> {
                (0..self.shape()[0]).map(|row| self.row(row))
            }
        }

        impl<T: Element + Copy> ViewMut<'_, T, $n> {
            /// The sub-view at this index of the first dimension, for writing.
            ///
            /// # Panics
            /// When the index is out of range.
            #[track_caller]
            pub fn row_mut(&mut self, row: usize) -> ViewMut<'_, T, $m> {
                ViewMut { view: self.view.row(row) }
            }
        }
    )+};
}

rows!(1 => 0, 2 => 1, 3 => 2, 4 => 3, 5 => 4);

/// The indices within a shape, in row-major order; made by [`View::indices`].
#[derive(Clone, Debug)]
pub struct Indices<const N: usize> {
    shape: [usize; N],
    next: [usize; N],
    left: usize,
}

impl<const N: usize> Iterator for Indices<N> {
    type Item = [usize; N];

    fn next(&mut self) -> Option<[usize; N]> {
        self.left = self.left.checked_sub(1)?;
        let index = self.next;
        for dim in (0..N).rev() {
            self.next[dim] += 1;
            if self.next[dim] < self.shape[dim] {
                break;
            }
            self.next[dim] = 0;
        }
        Some(index)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl<const N: usize> ExactSizeIterator for Indices<N> {}

impl<T: Element + Copy + fmt::Debug, const N: usize> fmt::Debug for View<'_, T, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shape, strides) = (self.shape(), self.strides());
        f.debug_struct("View")
            .field("shape", &shape)
            .field("strides", &strides)
            .finish_non_exhaustive()
    }
}

impl<T: Element + Copy + fmt::Debug, const N: usize> fmt::Debug for ViewMut<'_, T, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.view.fmt(f)
    }
}

#[track_caller]
fn out_of_bounds(index: &[usize], shape: &[usize]) -> ! {
    panic!("index {index:?} is out of bounds of shape {shape:?}")
}
