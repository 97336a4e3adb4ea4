//! Runs an operator and attaches it to the graph, and holds the entry through which the engine
//! calls its backward pass.

use super::context::Context;
use super::function::Function;
use super::saved_hooks;
use super::saver::{Saved, Saver};
use super::tensors::{Inputs, Tensors};
use crate::ffi::autograd as ffi;
use crate::ffi::exceptions::{self, discard};
use crate::ffi::pointers::Pointers;
use crate::ffi::take_message;
use crate::{Error, Result};
use std::backtrace::Backtrace;
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use tch::Tensor;
use torch_sys::C_tensor;

/// Runs an operator and, if grad mode is on and an input requires grad, makes it part of the graph.
/// An absent input is `None`.
///
/// Without a graph the outputs are constants, even if the forward pass returned an input or
/// switched grad mode on. An input that is returned comes back as an alias, unless it was changed
/// in place. A view of an input stays one, as a view that libtorch makes under `no_grad`: if the input
/// requires grad, it does, too, has no gradient, and cannot be changed in place with grad mode on.
/// Afterwards grad mode is what it was before.
///
/// # Errors
/// The forward pass's own error, a misuse of [`Saver`], or an input with a gradient of forward-mode AD
/// (a dual tensor), for which an operator with its own backward pass is not defined.
#[track_caller]
pub fn apply<F: Function>(mut function: F, inputs: &[Option<&Tensor>]) -> Result<Tensors> {
    let operator = Operator {
        name: F::NAME,
        double_backward: F::DOUBLE_BACKWARD,
        without_autocast: F::WITHOUT_AUTOCAST,
    };
    operator.run(inputs, |saver, inputs| {
        let outputs = function.forward(saver, inputs)?;
        Ok((outputs, OfFunction(function)))
    })
}

/// Like [`apply`], for an operator of a few lines: two closures take the place of a [`Function`].
/// The backward pass is not itself differentiable; a second derivative through it is an error.
///
/// ```
/// use tch::{Kind, Tensor};
/// use tch_extension::autograd::apply_with;
///
/// let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
/// let y = apply_with(
///     "square",
///     &[Some(&x)],
///     |saver, inputs| {
///         let x = inputs.get(0)?;
///         saver.save(x);
///         Ok((x * x).into())
///     },
///     |ctx, grads| Ok((grads.get(0)? * ctx.saved(0)? * 2.0).into()),
/// )?
/// .single()?;
/// y.sum(Kind::Double).backward();
/// assert_eq!(x.grad(), Tensor::from_slice(&[6.0]));
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// As for [`apply`].
#[track_caller]
pub fn apply_with<Forward, Back>(
    name: &'static str,
    inputs: &[Option<&Tensor>],
    forward: Forward,
    backward: Back,
) -> Result<Tensors>
where
    Forward: FnOnce(&mut Saver<'_>, Inputs<'_>) -> Result<Tensors>,
    Back: Fn(&Context<'_>, &Tensors) -> Result<Tensors> + Send + Sync + 'static,
{
    apply_registered(name, false, inputs, forward, backward)
}

/// [`apply_with`] for an operator that libtorch knows.
#[track_caller]
pub(crate) fn apply_registered<Forward, Back>(
    name: &'static str,
    double_backward: bool,
    inputs: &[Option<&Tensor>],
    forward: Forward,
    backward: Back,
) -> Result<Tensors>
where
    Forward: FnOnce(&mut Saver<'_>, Inputs<'_>) -> Result<Tensors>,
    Back: Fn(&Context<'_>, &Tensors) -> Result<Tensors> + Send + Sync + 'static,
{
    let operator = Operator { name, double_backward, without_autocast: false };
    operator.run(inputs, |saver, inputs| Ok((forward(saver, inputs)?, OfClosure(backward))))
}

/// The backward pass that a graph node runs.
trait Backward: Send + Sync + 'static {
    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors>;
}

struct OfFunction<F>(F);

impl<F: Function> Backward for OfFunction<F> {
    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        self.0.backward(ctx, grads)
    }
}

struct OfClosure<B>(B);

impl<B> Backward for OfClosure<B>
where
    B: Fn(&Context<'_>, &Tensors) -> Result<Tensors> + Send + Sync + 'static,
{
    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        (self.0)(ctx, grads)
    }
}

/// What is known about an operator before its forward pass runs.
struct Operator {
    name: &'static str,
    double_backward: bool,
    without_autocast: bool,
}

impl Operator {
    // This function is generic, so it is compiled in the crate that defines the operator. The small
    // functions that it calls are `#[inline]`, so that they can be inlined there, too.
    #[track_caller]
    fn run<B: Backward>(
        &self,
        inputs: &[Option<&Tensor>],
        forward: impl FnOnce(&mut Saver<'_>, Inputs<'_>) -> Result<(Tensors, B)>,
    ) -> Result<Tensors> {
        let pointers = Pointers::new(inputs.iter().copied());
        let guard = ForwardGuard::new(self.name, pointers.as_slice(), self.without_autocast);
        let mode = guard.0;
        if mode.has_forward_gradient {
            return Err(self.no_forward_mode());
        }
        let mut saver = Saver::new(self.name, inputs, pointers.as_slice(), mode.needs_graph);
        let (outputs, backward) = forward(&mut saver, Inputs::new(inputs))?;
        drop(guard);
        self.check_indices("mark_dirty", "inputs", &saver.dirty, inputs.len())?;
        self.check_indices(
            "mark_non_differentiable",
            "outputs",
            &saver.non_differentiable,
            outputs.len(),
        )?;
        let output_pointers = Pointers::new(outputs.iter().map(Option::as_ref));
        let output_pointers = output_pointers.as_slice();
        if !mode.needs_graph
            && saver.dirty.is_empty()
            && are_constants(saver.pointers, output_pointers)
        {
            return Ok(outputs);
        }
        let place = Location::caller();
        let trace = (mode.needs_graph && mode.anomaly_mode)
            .then(|| format!("{place}\n{}", Backtrace::force_capture()));
        self.attach(backward, output_pointers, &saver, trace.as_deref())
    }

    /// Attaches a graph node to the outputs of a forward pass that has run.
    fn attach<B: Backward>(
        &self,
        backward: B,
        outputs: &[*const C_tensor],
        saver: &Saver<'_>,
        trace: Option<&str>,
    ) -> Result<Tensors> {
        let inputs = saver.inputs;
        let saved = Pointers::new(saver.saved.iter().map(|saved| match saved {
            Saved::Absent => None,
            Saved::Input(index) => inputs[*index],
            Saved::Other(tensor) => Some(tensor),
        }));
        let saved = saved.as_slice();
        let hooks = saved_hooks::in_force();
        let params = ffi::ApplyParams {
            name: self.name.as_ptr().cast(),
            name_len: self.name.len(),
            inputs: saver.pointers.as_ptr(),
            inputs_len: saver.pointers.len(),
            outputs: outputs.as_ptr(),
            outputs_len: outputs.len(),
            saved: saved.as_ptr(),
            saved_len: saved.len(),
            dirty: saver.dirty.as_ptr(),
            dirty_len: saver.dirty.len(),
            non_differentiable: saver.non_differentiable.as_ptr(),
            non_differentiable_len: saver.non_differentiable.len(),
            trace: trace.map_or(std::ptr::null(), |text| text.as_ptr().cast()),
            trace_len: trace.map_or(0, str::len),
            saved_hooks: hooks.as_ref().map_or(std::ptr::null(), saved_hooks::pointer),
            saved_hooks_vtable: saved_hooks::VTABLE,
            needs_graph: saver.needs_graph,
            materialize_grads: saver.materialize_grads,
            double_backward: self.double_backward,
            without_autocast: self.without_autocast,
        };
        let state = Box::into_raw(Box::new(State { backward, inputs_len: inputs.len() }));
        let mut wrapped = vec![std::ptr::null_mut(); outputs.len()];
        // SAFETY: every pointer in `params` is valid for its length during the call, and the
        // indices were checked. `state` has the type that VTable::<B> expects, and C++ takes
        // ownership of it even on failure. `wrapped` has room for one pointer per output.
        let message = unsafe {
            ffi::tch_extension_apply(
                &params,
                state.cast(),
                VTable::<B>::VALUE,
                wrapped.as_mut_ptr(),
            )
        };
        if let Some(message) = take_message(message) {
            return Err(Error::Autograd(exceptions::named(self.name, &message)));
        }
        // SAFETY: on success each entry is null or a handle that we now own.
        Ok(wrapped.into_iter().map(|tensor| unsafe { owned(tensor) }).collect::<Vec<_>>().into())
    }

    #[inline]
    fn check_indices(&self, call: &str, of: &str, indices: &[usize], len: usize) -> Result<()> {
        match indices.iter().find(|&&index| index >= len) {
            Some(&index) => Err(self.no_such_index(call, index, of, len)),
            None => Ok(()),
        }
    }

    #[cold]
    fn no_forward_mode(&self) -> Error {
        Error::Autograd(format!(
            "{}: forward-mode AD is not defined for it; an input is a dual tensor: use reverse mode (backward, \
             grad), or write the operator as operations of tch",
            self.name
        ))
    }

    #[cold]
    fn no_such_index(&self, call: &str, index: usize, of: &str, len: usize) -> Error {
        Error::Autograd(format!("{}: {call}({index}), but there are {len} {of}", self.name))
    }
}

pub(super) fn requires_grad(tensor: &Tensor) -> bool {
    // SAFETY: the pointer is borrowed from a live tensor.
    unsafe { ffi::tch_extension_requires_grad(tensor.as_ptr()) }
}

/// Whether the outputs of a forward pass without a graph can be returned unchanged.
#[inline]
fn are_constants(inputs: &[*const C_tensor], outputs: &[*const C_tensor]) -> bool {
    // SAFETY: each pointer is null or borrowed from a live tensor.
    unsafe {
        ffi::tch_extension_are_constants(
            inputs.as_ptr(),
            inputs.len(),
            outputs.as_ptr(),
            outputs.len(),
        )
    }
}

/// Keeps grad mode off until dropped, and autocast if it is asked to. tch's own guard of grad mode is
/// ten times slower, because it checks for an error after each call.
struct ForwardGuard(ffi::ForwardMode);

impl ForwardGuard {
    #[inline]
    fn new(name: &'static str, inputs: &[*const C_tensor], without_autocast: bool) -> Self {
        // SAFETY: the name is static; each input is null or borrowed from a live tensor.
        ForwardGuard(unsafe {
            ffi::tch_extension_begin_forward(
                name.as_ptr().cast(),
                name.len(),
                inputs.as_ptr(),
                inputs.len(),
                without_autocast,
            )
        })
    }
}

impl Drop for ForwardGuard {
    // This also runs when a forward pass panics.
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the mode comes from `begin_forward`, and only this call ends it.
        unsafe { ffi::tch_extension_end_forward(&self.0) };
    }
}

/// What the graph node owns.
struct State<B> {
    backward: B,
    inputs_len: usize,
}

/// The two functions through which C++ calls and drops a `B`.
struct VTable<B>(std::marker::PhantomData<B>);

impl<B: Backward> VTable<B> {
    // This is a reference to a constant, because C++ keeps the pointer for as long as the node
    // lives.
    const VALUE: &'static ffi::FunctionVTable =
        &ffi::FunctionVTable { backward: backward::<B>, drop: drop_state::<B> };
}

/// # Safety
/// `state` must come from `attach::<B>`. `node` and `results` must come from the C++ frame that
/// calls. `grads` must hold `grads_len` pointers, each of which is null or a handle that this
/// function takes over.
unsafe extern "C" fn backward<B: Backward>(
    state: *const c_void,
    node: *const ffi::FunctionNode,
    grads: *const *mut C_tensor,
    grads_len: usize,
    results: *mut ffi::BackwardResults,
) -> c_int {
    let run = || -> Result<()> {
        // SAFETY: the caller guarantees both pointers (see `# Safety`). `B: Sync`, so any thread
        // may use a shared reference.
        let (state, node) = unsafe { (&*state.cast::<State<B>>(), &*node) };
        let pointers = match grads_len {
            // `from_raw_parts` must not get a null pointer, which an empty C++ vector may hold.
            0 => &[],
            // SAFETY: the caller guarantees `grads_len` pointers (see `# Safety`).
            _ => unsafe { std::slice::from_raw_parts(grads, grads_len) },
        };
        // SAFETY: each pointer is null or a handle whose ownership came with the call.
        let ours = |&grad: &*mut C_tensor| unsafe { owned(grad) };
        let grads: Tensors = match pointers {
            [single] => ours(single).into(),
            several => several.iter().map(ours).collect::<Vec<_>>().into(),
        };
        // SAFETY: `results` belongs to the C++ frame that called, which waits for this function.
        let ctx = unsafe { Context::new(node, results, state.inputs_len) };
        let gradients = state.backward.backward(&ctx, &grads)?;
        check_count(&gradients, state.inputs_len)?;
        gradients.for_each(|index, gradient| {
            // SAFETY: `results` belongs to the C++ frame that called.
            unsafe { give_gradient(results, index, gradient) }
        });
        Ok(())
    };
    // SAFETY: the caller guarantees `results` (see `# Safety`).
    unsafe { contained("backward", results, run) }
}

/// Runs `run`, which the engine called for. An error or a panic is written to `results`, and the
/// function returns 1.
///
/// # Safety
/// `results` must come from the C++ frame that calls.
pub(super) unsafe fn contained(
    what: &str,
    results: *mut ffi::BackwardResults,
    run: impl FnOnce() -> Result<()>,
) -> c_int {
    let Some(error) = exceptions::failure(what, run) else { return 0 };
    // SAFETY: `results` belongs to the caller (see `# Safety`), and C++ copies the text.
    unsafe { ffi::tch_extension_set_backward_error(results, error.as_ptr().cast(), error.len()) };
    1
}

/// Accepts surplus gradients if they are absent, as PyTorch does.
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
/// `state` must come from `attach::<B>`, and nobody may use it again.
unsafe extern "C" fn drop_state<B: Backward>(state: *mut c_void) {
    // SAFETY: the caller hands over a `State<B>` that `attach` boxed (see `# Safety`).
    let state = unsafe { Box::from_raw(state.cast::<State<B>>()) };
    // A panic in a user's `Drop` cannot be reported: no caller is left while the graph is freed.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(move || drop(state))) {
        discard(panic);
    }
}

/// # Safety
/// `tensor` must be null or a handle that nobody else owns.
pub(super) unsafe fn owned(tensor: *mut C_tensor) -> Option<Tensor> {
    // SAFETY: the caller hands over the handle (see `# Safety`).
    (!tensor.is_null()).then(|| unsafe { Tensor::from_ptr(tensor) })
}

/// # Safety
/// `results` must come from the C++ frame that calls.
pub(super) unsafe fn give_gradient(
    results: *mut ffi::BackwardResults,
    index: usize,
    gradient: Tensor,
) {
    let mut gradient = std::mem::ManuallyDrop::new(gradient);
    // SAFETY: the caller guarantees `results` (see `# Safety`). C++ takes ownership of the handle.
    unsafe { ffi::tch_extension_give_gradient(results, index, gradient.as_mut_ptr()) };
}
