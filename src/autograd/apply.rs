//! Running an operator and attaching it to the graph; how the engine then reaches its backward.

use super::function::{Context, Function, Saved, Saver};
use super::pointers::Pointers;
use super::saved_hooks;
use super::tensors::{Inputs, Tensors};
use crate::error::panic_text;
use crate::ffi::autograd as ffi;
use crate::ffi::take_message;
use crate::{Error, Result};
use std::any::Any;
use std::backtrace::Backtrace;
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use tch::Tensor;
use torch_sys::C_tensor;

/// Runs an operator and, if grad mode is on and an input requires grad, makes it part of the graph.
/// A missing input is `None`.
///
/// Without a graph the outputs are constants, also where the forward returned an input or switched
/// grad mode on for itself. An input that is returned comes back as an alias, unless it was changed
/// in place. Grad mode is afterwards what it was before.
///
/// # Errors
/// The forward's own, or a misuse of [`Saver`].
#[track_caller]
pub fn apply<F: Function>(mut function: F, inputs: &[Option<&Tensor>]) -> Result<Tensors> {
    let operator = Operator { name: F::NAME, double_backward: F::DOUBLE_BACKWARD };
    operator.run(inputs, |saver, inputs| {
        let outputs = function.forward(saver, inputs)?;
        Ok((outputs, OfFunction(function)))
    })
}

/// [`apply`] for an operator of a few lines: two closures in place of a [`Function`]. The backward
/// is not differentiable itself; a second derivative through it is an error.
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
/// As [`apply`].
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
    let operator = Operator { name, double_backward: false };
    operator.run(inputs, |saver, inputs| Ok((forward(saver, inputs)?, OfClosure(backward))))
}

/// What a node runs.
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

/// What is known of an operator before its forward.
struct Operator {
    name: &'static str,
    double_backward: bool,
}

impl Operator {
    // Compiled in the crate of the operator; the small functions that it calls are `#[inline]`, to
    // be inlined there, too.
    #[track_caller]
    fn run<B: Backward>(
        &self,
        inputs: &[Option<&Tensor>],
        forward: impl FnOnce(&mut Saver<'_>, Inputs<'_>) -> Result<(Tensors, B)>,
    ) -> Result<Tensors> {
        let pointers = Pointers::new(inputs.iter().copied());
        let guard = ForwardGuard::new(self.name, pointers.as_slice());
        let mode = guard.0;
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

    /// Hands a forward that has run over to libtorch's graph.
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
        };
        let state = Box::into_raw(Box::new(State { backward, inputs_len: inputs.len() }));
        let mut wrapped = vec![std::ptr::null_mut(); outputs.len()];
        // SAFETY: every pointer in `params` is valid for its length during the call; the indices
        // were checked; `state` is what VTable::<B> expects, and C++ takes it in any case;
        // `wrapped` has a place for each output.
        let message = unsafe {
            ffi::tch_extension_apply(
                &params,
                state.cast(),
                VTable::<B>::VALUE,
                wrapped.as_mut_ptr(),
            )
        };
        if let Some(message) = take_message(message) {
            return Err(Error::Autograd(format!("{}: {message}", self.name)));
        }
        // SAFETY: on success each entry is null or a handle for us to own.
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
    fn no_such_index(&self, call: &str, index: usize, of: &str, len: usize) -> Error {
        Error::Autograd(format!("{}: {call}({index}), but there are {len} {of}", self.name))
    }
}

pub(super) fn requires_grad(tensor: &Tensor) -> bool {
    // SAFETY: borrowed from a live tensor.
    unsafe { ffi::tch_extension_requires_grad(tensor.as_ptr()) }
}

/// Whether outputs of a forward that needs no graph can be handed over as they are.
#[inline]
fn are_constants(inputs: &[*const C_tensor], outputs: &[*const C_tensor]) -> bool {
    // SAFETY: each is null or borrowed from a live tensor.
    unsafe {
        ffi::tch_extension_are_constants(
            inputs.as_ptr(),
            inputs.len(),
            outputs.as_ptr(),
            outputs.len(),
        )
    }
}

/// Grad mode off until dropped. tch's own guard does the same at ten times the cost: it looks for
/// an error after each call.
struct ForwardGuard(ffi::ForwardMode);

impl ForwardGuard {
    #[inline]
    fn new(name: &'static str, inputs: &[*const C_tensor]) -> Self {
        // SAFETY: the name is static; each input is null or borrowed from a live tensor.
        ForwardGuard(unsafe {
            ffi::tch_extension_begin_forward(
                name.as_ptr().cast(),
                name.len(),
                inputs.as_ptr(),
                inputs.len(),
            )
        })
    }
}

impl Drop for ForwardGuard {
    // Also when a forward panics.
    #[inline]
    fn drop(&mut self) {
        // SAFETY: from `begin_forward`, and ended once.
        unsafe { ffi::tch_extension_end_forward(&self.0) };
    }
}

/// What lives in the graph node.
struct State<B> {
    backward: B,
    inputs_len: usize,
}

/// The two entries through which C++ reaches a `B`.
struct VTable<B>(std::marker::PhantomData<B>);

impl<B: Backward> VTable<B> {
    // A reference to a constant: C++ keeps it for as long as the node lives.
    const VALUE: &'static ffi::FunctionVTable =
        &ffi::FunctionVTable { backward: backward::<B>, drop: drop_state::<B> };
}

/// # Safety
/// `state` must come from `attach::<B>`, `node` and `results` from the call's own C++ frame, and
/// `grads` must hold `grads_len` pointers, each null or to a live tensor.
unsafe extern "C" fn backward<B: Backward>(
    state: *const c_void,
    node: *const ffi::FunctionNode,
    grads: *const *mut C_tensor,
    grads_len: usize,
    results: *mut ffi::BackwardResults,
) -> c_int {
    let run = || -> Result<()> {
        // SAFETY: as the caller promises; `B: Sync` makes a shared reference fine on any thread.
        let (state, node) = unsafe { (&*state.cast::<State<B>>(), &*node) };
        let pointers = match grads_len {
            // `from_raw_parts` takes no null, which an empty C++ vector may give.
            0 => &[],
            // SAFETY: as the caller promises.
            _ => unsafe { std::slice::from_raw_parts(grads, grads_len) },
        };
        // SAFETY: null or a handle that became ours with the call.
        let ours = |&grad: &*mut C_tensor| unsafe { owned(grad) };
        let grads: Tensors = match pointers {
            [single] => ours(single).into(),
            several => several.iter().map(ours).collect::<Vec<_>>().into(),
        };
        // SAFETY: the results are the caller's, who waits for us.
        let ctx = unsafe { Context::new(node, results, state.inputs_len) };
        let gradients = state.backward.backward(&ctx, &grads)?;
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
    // Unwinding through C++ would abort the process. The text comes from inside, too: an error's
    // `Display` and a panic's payload are the user's code.
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
/// `state` must come from `attach::<B>` and not be used again.
unsafe extern "C" fn drop_state<B: Backward>(state: *mut c_void) {
    // SAFETY: as the caller promises.
    let state = unsafe { Box::from_raw(state.cast::<State<B>>()) };
    // A panic in a user's Drop has nowhere to go; the graph is coming down around it.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(move || drop(state))) {
        discard(panic);
    }
}

/// # Safety
/// `tensor` must be null or a handle that nobody else owns.
pub(super) unsafe fn owned(tensor: *mut C_tensor) -> Option<Tensor> {
    // SAFETY: as the caller promises.
    (!tensor.is_null()).then(|| unsafe { Tensor::from_ptr(tensor) })
}

/// # Safety
/// `results` must come from the C++ frame that called.
pub(super) unsafe fn give_gradient(
    results: *mut ffi::BackwardResults,
    index: usize,
    gradient: Tensor,
) {
    let mut gradient = std::mem::ManuallyDrop::new(gradient);
    // SAFETY: as the caller promises; the handle becomes C++'s.
    unsafe { ffi::tch_extension_give_gradient(results, index, gradient.as_mut_ptr()) };
}
