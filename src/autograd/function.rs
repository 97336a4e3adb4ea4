//! `torch.autograd.Function` for Rust.

use super::tensors::{Inputs, Tensors};
use crate::error::panic_text;
use crate::ffi::autograd as ffi;
use crate::ffi::take_message;
use crate::{Error, Result};
use std::any::Any;
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use tch::Tensor;
use torch_sys::C_tensor;

/// An operator with a backward of its own: what `torch.autograd.Function` is in Python.
///
/// The value itself is the operator's state: sizes, numbers, whatever is no tensor. `forward` may fill it
/// in; then it moves into the graph, where `backward` reads it, perhaps more than once and from another
/// thread. Tensors belong into [`Saver::save`], which lets the engine free them, checks that nobody changed
/// them and makes no cycles. A bare tensor in the state does not compile, because a `Tensor` is not `Sync`. (One
/// in a `Mutex` would; an input or output in there makes a cycle, and the graph is never freed.)
///
/// ```compile_fail
/// struct Hidden { input: tch::Tensor }
/// # use tch_extension::{Result, autograd::*};
/// impl Function for Hidden {
/// #   const NAME: &'static str = "hidden";
/// #   fn forward(&mut self, _: &mut Saver<'_>, _: Inputs<'_>) -> Result<Tensors> { Ok(().into()) }
/// #   fn backward(&self, _: &Context<'_>, _: &Tensors) -> Result<Tensors> { Ok(().into()) }
/// }
/// ```
///
/// # Example
/// ```
/// use tch::{Kind, Tensor};
/// use tch_extension::{Result, autograd::*};
///
/// struct Square;
///
/// impl Function for Square {
///     const NAME: &'static str = "square";
///
///     fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
///         let x = inputs.get(0)?;
///         saver.save(x);
///         Ok((x * x).into())
///     }
///
///     fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
///         Ok((grads.get(0)? * ctx.saved(0)? * 2.0).into())
///     }
/// }
///
/// let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
/// let y = apply(Square, &[Some(&x)])?.single()?;
/// y.sum(Kind::Double).backward();
/// assert_eq!(x.grad().double_value(&[0]), 6.0);
/// # Ok::<(), tch_extension::Error>(())
/// ```
pub trait Function: Send + Sync + Sized + 'static {
    /// The operator's name, in error messages and in the graph (`NAMEBackward`).
    const NAME: &'static str;

    /// Whether `backward` is itself made of differentiable operations on its gradients and on saved inputs
    /// and outputs. If so, it runs with grad mode on when a graph of the gradients is asked for
    /// (`create_graph`). If not, a second derivative through this operator is an error, never a wrong
    /// number.
    const DOUBLE_BACKWARD: bool = false;

    /// Computes the outputs, with grad mode off.
    ///
    /// # Errors
    /// Reach the caller of [`apply`] as they are.
    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors>;

    /// Computes a gradient for each input from one for each output. Entries for inputs that need none
    /// ([`Context::needs_input_grad`]) may be absent.
    ///
    /// An error, a panic or a gradient of the wrong shape becomes an error of whoever called backward,
    /// naming this operator.
    ///
    /// # Errors
    /// Whatever goes wrong.
    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors>;
}

/// A tensor that is kept for the backward.
enum Saved {
    Absent,
    /// It is borrowed until after the node has its own handle.
    Input(usize),
    Other(Tensor),
}

/// What a forward tells the graph.
pub struct Saver<'a> {
    inputs: &'a [Option<&'a Tensor>],
    pointers: &'a [*const C_tensor],
    needs_graph: bool,
    saved: Vec<Saved>,
    dirty: Vec<usize>,
    non_differentiable: Vec<usize>,
    materialize_grads: bool,
}

impl Saver<'_> {
    /// Keeps a tensor for the backward, under the next slot number: 0, 1, ….
    ///
    /// Inputs and outputs keep their place in the graph. Anything else is an intermediate: plain data, which
    /// a backward that runs with grad mode on may not read (see [`Context::create_graph`]).
    pub fn save(&mut self, tensor: &Tensor) {
        self.save_optional(Some(tensor));
    }

    /// [`Saver::save`] for a tensor that may be absent; takes a slot in any case.
    pub fn save_optional(&mut self, tensor: Option<&Tensor>) {
        // Without a graph there is no backward to read it.
        if !self.needs_graph {
            return;
        }
        if self.saved.capacity() == 0 {
            // Inputs, outputs and an intermediate: mostly the only allocation.
            self.saved.reserve(self.inputs.len() + 3);
        }
        let input_of = |tensor: &Tensor| self.pointers.iter().position(|&input| input == tensor.as_ptr());
        self.saved.push(match tensor {
            None => Saved::Absent,
            Some(tensor) => {
                input_of(tensor).map_or_else(|| Saved::Other(tensor.shallow_clone()), Saved::Input)
            }
        });
    }

    /// Whether there will be a backward at all: grad mode is on and some input requires grad.
    pub fn needs_graph(&self) -> bool {
        self.needs_graph
    }

    /// Whether input `index` requires grad, and there will be a backward.
    pub fn needs_input_grad(&self, index: usize) -> bool {
        self.needs_graph && self.inputs.get(index).copied().flatten().is_some_and(Tensor::requires_grad)
    }

    /// Declares that the forward changed input `index` in place; it must be among the outputs. A view that is
    /// changed in place has to be the first input present: libtorch's graph knows no other way.
    pub fn mark_dirty(&mut self, index: usize) {
        self.dirty.push(index);
    }

    /// Declares that output `index` has no derivative. Outputs of integer kinds never have one.
    pub fn mark_non_differentiable(&mut self, index: usize) {
        self.non_differentiable.push(index);
    }

    /// Whether the backward gets zeros (the default) or nothing for an output that no gradient reached.
    pub fn set_materialize_grads(&mut self, materialize: bool) {
        self.materialize_grads = materialize;
    }
}

/// What a backward can ask the graph.
pub struct Context<'a> {
    node: &'a ffi::FunctionNode,
    inputs_len: usize,
}

impl Context<'_> {
    /// The saved tensor of this slot.
    ///
    /// # Errors
    /// When it was absent, when it was changed in place since, when the graph was freed by an earlier
    /// backward, or when an intermediate is read with grad mode on.
    pub fn saved(&self, slot: usize) -> Result<Tensor> {
        self.saved_optional(slot)?
            .ok_or_else(|| Error::Autograd(format!("saved tensor {slot} was absent in the forward")))
    }

    /// [`Context::saved`] for a slot that may have been absent.
    ///
    /// # Errors
    /// As [`Context::saved`].
    pub fn saved_optional(&self, slot: usize) -> Result<Option<Tensor>> {
        let mut tensor = std::ptr::null_mut();
        // SAFETY: the node is alive while its backward runs; on success the handle becomes ours.
        let message = unsafe { ffi::tch_extension_saved(self.node, slot, &mut tensor) };
        match take_message(message) {
            Some(message) => Err(Error::Autograd(message)),
            // SAFETY: null or a handle that C++ allocated for us.
            None => Ok(unsafe { owned(tensor) }),
        }
    }

    /// Whether this backward has to compute the gradient of input `index`: it requires grad, and the caller
    /// of backward did not leave it out.
    pub fn needs_input_grad(&self, index: usize) -> bool {
        // SAFETY: the node is alive while its backward runs.
        unsafe { ffi::tch_extension_needs_input_grad(self.node, index) }
    }

    /// How many inputs the forward had, absent ones included.
    pub fn inputs_len(&self) -> usize {
        self.inputs_len
    }

    /// Whether the caller wants to differentiate these gradients again (`create_graph`) and this operator
    /// allows it ([`Function::DOUBLE_BACKWARD`]): what is computed now becomes part of the graph.
    pub fn create_graph(&self) -> bool {
        ffi::tch_extension_grad_mode()
    }
}

/// Runs an operator and, if grad mode is on and an input requires grad, makes it part of the graph.
/// A missing input is `None`.
///
/// # Errors
/// The forward's own, or a misuse of [`Saver`].
pub fn apply<F: Function>(mut function: F, inputs: &[Option<&Tensor>]) -> Result<Tensors> {
    let pointers = Pointers::new(inputs.iter().copied());
    let forward = ForwardGuard::new(pointers.as_slice());
    let needs_graph = forward.0.needs_graph;
    let mut saver = Saver {
        inputs,
        pointers: pointers.as_slice(),
        needs_graph,
        saved: Vec::new(),
        dirty: Vec::new(),
        non_differentiable: Vec::new(),
        materialize_grads: true,
    };
    let outputs = function.forward(&mut saver, Inputs::new(inputs))?;
    drop(forward);
    check_indices::<F>("mark_dirty", "inputs", &saver.dirty, inputs.len())?;
    check_indices::<F>("mark_non_differentiable", "outputs", &saver.non_differentiable, outputs.len())?;
    if !needs_graph && saver.dirty.is_empty() {
        return Ok(outputs.without_undefined());
    }
    attach(function, &outputs, &saver)
}

/// Handles that are borrowed for a call of C++; null where there is none. Few of them need no allocation.
struct Pointers {
    few: [*const C_tensor; Pointers::FEW],
    many: Vec<*const C_tensor>,
    len: usize,
}

impl Pointers {
    const FEW: usize = 8;

    fn new<'a>(tensors: impl ExactSizeIterator<Item = Option<&'a Tensor>>) -> Self {
        let tensors = tensors.map(|tensor| tensor.map_or(std::ptr::null(), Tensor::as_ptr));
        let (mut few, len) = ([std::ptr::null(); Self::FEW], tensors.len());
        if len > Self::FEW {
            return Pointers { few, many: tensors.collect(), len };
        }
        few.iter_mut().zip(tensors).for_each(|(place, pointer)| *place = pointer);
        Pointers { few, many: Vec::new(), len }
    }

    fn as_slice(&self) -> &[*const C_tensor] {
        if self.len > Self::FEW { &self.many } else { &self.few[..self.len] }
    }
}

pub(super) fn requires_grad(tensor: &Tensor) -> bool {
    // SAFETY: borrowed from a live tensor.
    unsafe { ffi::tch_extension_requires_grad(tensor.as_ptr()) }
}

/// Grad mode off until dropped. tch's own guard does the same at ten times the cost: it looks for an error after
/// each call.
struct ForwardGuard(ffi::ForwardMode);

impl ForwardGuard {
    fn new(inputs: &[*const C_tensor]) -> Self {
        // SAFETY: each is null or borrowed from a live tensor.
        ForwardGuard(unsafe { ffi::tch_extension_begin_forward(inputs.as_ptr(), inputs.len()) })
    }
}

impl Drop for ForwardGuard {
    // Also when a forward panics.
    fn drop(&mut self) {
        if self.0.grad_mode_before {
            ffi::tch_extension_set_grad_mode(true);
        }
    }
}

/// Hands a forward that has run over to libtorch's graph.
fn attach<F: Function>(function: F, outputs: &Tensors, saver: &Saver<'_>) -> Result<Tensors> {
    let inputs = saver.inputs;
    let output_pointers = Pointers::new(outputs.iter().map(Option::as_ref));
    let saved_pointers = Pointers::new(saver.saved.iter().map(|saved| match saved {
        Saved::Absent => None,
        Saved::Input(index) => inputs[*index],
        Saved::Other(tensor) => Some(tensor),
    }));
    let (input_pointers, output_pointers, saved_pointers) =
        (saver.pointers, output_pointers.as_slice(), saved_pointers.as_slice());
    let params = ffi::ApplyParams {
        name: F::NAME.as_ptr().cast(),
        name_len: F::NAME.len(),
        inputs: input_pointers.as_ptr(),
        inputs_len: input_pointers.len(),
        outputs: output_pointers.as_ptr(),
        outputs_len: output_pointers.len(),
        saved: saved_pointers.as_ptr(),
        saved_len: saved_pointers.len(),
        dirty: saver.dirty.as_ptr(),
        dirty_len: saver.dirty.len(),
        non_differentiable: saver.non_differentiable.as_ptr(),
        non_differentiable_len: saver.non_differentiable.len(),
        materialize_grads: saver.materialize_grads,
        double_backward: F::DOUBLE_BACKWARD,
    };
    let state = Box::into_raw(Box::new(State { function, inputs_len: inputs.len() }));
    let mut wrapped = vec![std::ptr::null_mut(); output_pointers.len()];
    // SAFETY: every pointer in `params` is valid for its length during the call; the indices were checked;
    // `state` is what VTable::<F> expects, and C++ takes it in any case; `wrapped` has a place for each output.
    let message =
        unsafe { ffi::tch_extension_apply(&params, state.cast(), VTable::<F>::VALUE, wrapped.as_mut_ptr()) };
    if let Some(message) = take_message(message) {
        return Err(Error::Autograd(format!("{}: {message}", F::NAME)));
    }
    // SAFETY: on success each entry is null or a handle for us to own.
    Ok(wrapped.into_iter().map(|tensor| unsafe { owned(tensor) }).collect::<Vec<_>>().into())
}

fn check_indices<F: Function>(call: &str, of: &str, indices: &[usize], len: usize) -> Result<()> {
    match indices.iter().find(|&&index| index >= len) {
        Some(index) => {
            Err(Error::Autograd(format!("{}: {call}({index}), but there are {len} {of}", F::NAME)))
        }
        None => Ok(()),
    }
}

/// What lives in the graph node.
struct State<F> {
    function: F,
    inputs_len: usize,
}

/// The two entries through which C++ reaches an `F`.
struct VTable<F>(std::marker::PhantomData<F>);

impl<F: Function> VTable<F> {
    // A reference to a constant: C++ keeps it for as long as the node lives.
    const VALUE: &'static ffi::FunctionVTable =
        &ffi::FunctionVTable { backward: backward::<F>, drop: drop_state::<F> };
}

/// # Safety
/// `state` must come from `attach::<F>`, `node` and `results` from the call's own C++ frame, and `grads` must
/// hold `grads_len` pointers, each null or to a live tensor.
unsafe extern "C" fn backward<F: Function>(
    state: *const c_void,
    node: *const ffi::FunctionNode,
    grads: *const *mut C_tensor,
    grads_len: usize,
    results: *mut ffi::BackwardResults,
) -> c_int {
    let run = || -> Result<()> {
        // SAFETY: as the caller promises; `F: Sync` makes a shared reference fine on any thread.
        let (state, node) = unsafe { (&*state.cast::<State<F>>(), &*node) };
        let pointers = match grads_len {
            // `from_raw_parts` takes no null, which an empty C++ vector may give.
            0 => &[],
            // SAFETY: as the caller promises.
            _ => unsafe { std::slice::from_raw_parts(grads, grads_len) },
        };
        // SAFETY: null or a handle that became ours with the call.
        let owned = |grad: &*mut C_tensor| unsafe { owned(*grad) };
        let grads: Tensors = match pointers {
            [single] => owned(single).into(),
            several => several.iter().map(owned).collect::<Vec<_>>().into(),
        };
        let ctx = Context { node, inputs_len: state.inputs_len };
        let gradients = state.function.backward(&ctx, &grads)?;
        check_count(&gradients, state.inputs_len)?;
        gradients.for_each(|index, gradient| {
            // SAFETY: `results` is the caller's.
            unsafe { give_gradient(results, index, gradient) }
        });
        Ok(())
    };
    // SAFETY: as the caller promises.
    unsafe { contained("backward", results, run) }
}

/// Runs what the engine called. An error or a panic goes into `results`, and 1 is returned.
///
/// # Safety
/// `results` must come from the C++ frame that called.
pub(super) unsafe fn contained(
    what: &str,
    results: *mut ffi::BackwardResults,
    run: impl FnOnce() -> Result<()>,
) -> c_int {
    // Unwinding through C++ would abort the process. The text comes from inside, too: an error's `Display` and
    // a panic's payload are the user's code.
    let outcome = catch_unwind(AssertUnwindSafe(|| match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(panic) => {
            let text = format!("{what} panicked: {}", panic_text(panic.as_ref()));
            discard(panic);
            Some(text)
        }
    }));
    let error = match outcome {
        Ok(None) => return 0,
        Ok(Some(error)) => error,
        Err(panic) => {
            discard(panic);
            format!("{what} failed, and so did the text of its error")
        }
    };
    // SAFETY: `results` is the caller's; the text is copied.
    unsafe { ffi::tch_extension_set_backward_error(results, error.as_ptr().cast(), error.len()) };
    1
}

/// Drops a panic's payload, whose own `Drop` may panic, too.
pub(super) fn discard(payload: Box<dyn Any + Send>) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(move || drop(payload))) {
        std::mem::forget(again);
    }
}

/// Too many is fine as long as the rest is absent, as in PyTorch.
fn check_count(gradients: &Tensors, inputs_len: usize) -> Result<()> {
    let surplus = gradients.iter().skip(inputs_len).any(Option::is_some);
    if gradients.len() < inputs_len || surplus {
        return Err(Error::Autograd(format!(
            "backward returned {} gradients for {inputs_len} inputs; return one for each, absent where there is none",
            gradients.len()
        )));
    }
    Ok(())
}

/// # Safety
/// `state` must come from `attach::<F>` and not be used again.
unsafe extern "C" fn drop_state<F: Function>(state: *mut c_void) {
    // SAFETY: as the caller promises.
    let state = unsafe { Box::from_raw(state.cast::<State<F>>()) };
    // A panic in a user's Drop has nowhere to go; the graph is coming down around it.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(move || drop(state))) {
        discard(panic);
    }
}

pub(super) fn borrowed_pointers<'a>(
    tensors: impl Iterator<Item = Option<&'a Tensor>>,
) -> Vec<*const C_tensor> {
    tensors.map(|tensor| tensor.map_or(std::ptr::null(), Tensor::as_ptr)).collect()
}

/// # Safety
/// `tensor` must be null or a handle that nobody else owns.
pub(super) unsafe fn owned(tensor: *mut C_tensor) -> Option<Tensor> {
    // SAFETY: as the caller promises.
    (!tensor.is_null()).then(|| unsafe { Tensor::from_ptr(tensor) })
}

/// # Safety
/// `results` must come from the C++ frame that called.
pub(super) unsafe fn give_gradient(results: *mut ffi::BackwardResults, index: usize, gradient: Tensor) {
    let mut gradient = std::mem::ManuallyDrop::new(gradient);
    // SAFETY: as the caller promises; the handle becomes C++'s.
    unsafe { ffi::tch_extension_give_gradient(results, index, gradient.as_mut_ptr()) };
}
