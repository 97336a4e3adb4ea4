//! Rules that an operator must follow besides giving the right numbers.

mod forward;
mod gradients;
mod run;
mod surroundings;

use crate::autograd::Tensors;
use crate::check::Check;
use crate::error::panic_text;
use crate::ffi::autograd::tch_extension_set_grad_mode;
use crate::ffi::testing::Canaries;
use crate::{Error, Result};
use run::Case;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, OnceLock, PoisonError};
use surroundings::Kept;
use tch::{Device, Tensor};

const OP: &str = "conformance";

/// What [`conformance`] must know about an operator. The default suits an operator that only
/// computes new tensors.
#[derive(Clone, Copy, Debug)]
pub struct ConformanceOptions<'a> {
    /// The inputs that it changes in place (`Saver::mark_dirty`).
    pub changed_inputs: &'a [usize],
    /// The outputs that may share memory with an input, as (output, input). Any output may share
    /// memory with `changed_inputs`.
    pub aliases: &'a [(usize, usize)],
    /// How close two computations of the same numbers must be, `(rtol, atol)`. The default is
    /// [`tolerance`](super::tolerance) for the kind of each output and gradient. Long sums whose
    /// terms cancel need more, if they are added in another order for another layout.
    pub tolerance: Option<(f64, f64)>,
    /// Whether the same inputs must give the same bits.
    pub deterministic: bool,
    /// Whether the operator can be captured in a CUDA graph.
    pub cuda_graph: bool,
}

impl Default for ConformanceOptions<'_> {
    fn default() -> Self {
        ConformanceOptions {
            changed_inputs: &[],
            aliases: &[],
            tolerance: None,
            deterministic: true,
            cuda_graph: true,
        }
    }
}

type Property = fn(&Case<'_>) -> Result<()>;

/// In the order in which the documentation of [`conformance`] lists them, but for the memory, which
/// each call is watched for.
const PROPERTIES: [(&str, Property); 12] = [
    ("inputs unchanged", forward::inputs_unchanged),
    ("no aliasing", forward::no_aliasing),
    ("determinism", forward::determinism),
    ("no_grad", forward::no_grad),
    ("layouts", forward::layouts),
    ("needs_input_grad", gradients::subsets),
    ("incoming gradients", gradients::incoming),
    ("create_graph", gradients::create_graph),
    ("state", surroundings::state),
    ("threads", surroundings::threads),
    ("stream", surroundings::stream),
    ("CUDA graph", surroundings::cuda_graph),
];

/// Checks properties that a training loop relies on and that [`gradcheck`](super::gradcheck()) does
/// not see. It is what `torch.library.opcheck` is in Python, and more, for any
/// [`Function`](crate::autograd::Function) and anything that is built from several of them.
///
/// It checks, in this order:
/// 1. *inputs unchanged*: neither the forward pass (with a graph and without) nor the backward pass
///    writes to the inputs or to the memory around them, unless that is declared in
///    [`changed_inputs`](ConformanceOptions::changed_inputs). For a declared change, libtorch's
///    version counter must increase.
/// 2. *no aliasing*: no output shares memory with an input or another output, unless that is
///    declared. No output or gradient shares memory with that of another call.
/// 3. *memory*: on the CPU, nothing is written next to the inputs, the outputs, the gradients and any
///    other memory that is allocated meanwhile, in any call (on CUDA, compute-sanitizer can check
///    that). If something is, the check ends there.
/// 4. *determinism*: two runs give the same bits.
/// 5. *no_grad*: with grad mode off, or with inputs that do not require grad, the outputs are the
///    same and have no graph.
/// 6. *layouts*: transposed, strided, misaligned and expanded inputs give the same results as
///    contiguous ones.
/// 7. *needs_input_grad*: for every set of inputs that require grad, these inputs get the same
///    gradients as when all inputs require grad.
/// 8. *incoming gradients*: transposed, strided, misaligned and expanded incoming gradients give
///    the same results as contiguous ones, and absent ones give the same as zeros.
/// 9. *create_graph*: three steps, in which each step gets the outputs of the previous one and the
///    inputs depend on one another, have the same gradients with and without `create_graph`, and
///    right second derivatives or an error. (This is for the kinds `Double` and `Float`; second
///    derivatives are only checked for `Double`.)
/// 10. *state*: grad mode, autocast and the current CUDA stream are the same afterwards.
/// 11. *threads*: two new threads at once get the same outputs and gradients.
/// 12. *stream*: on CUDA, all work runs on the current stream, including that of the backward pass.
/// 13. *CUDA graph*: on CUDA, the forward and the backward pass can be captured, and a replay
///     computes with the inputs' values at that time.
///
/// An operator that draws random numbers gives different results each time: let it take the
/// numbers, or a mask, as an input. Complex inputs and outputs are checked, too, but *create_graph* is
/// skipped for complex inputs. Sparse tensors are not supported. *threads* detects a race only if the
/// two threads meet, which is unlikely for inputs with a few elements.
///
/// On CUDA, calls of `conformance` run one at a time. Other threads must not wait for the whole
/// device meanwhile, because the capture would fail. The check makes a hundred calls and more, so
/// use small inputs. It runs with grad mode on and with the caller's autocast settings, also in new
/// threads. `operator` gets copies of `inputs` with their strides and alignment; the originals are
/// never changed. As for `gradcheck`, derivatives are taken with respect to the inputs that require
/// grad, so that one closure serves both; but here they may be of any floating-point kind. A
/// closure that captures a tensor does not compile, because other threads call it, too: make the
/// tensor an input.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_extension::Result;
/// use tch_extension::testing::conformance;
///
/// let leaf = |size: [i64; 2]| Tensor::randn(size, (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let (x, w) = (leaf([2, 4]), leaf([4, 3]));
/// // This stands for your operator.
/// let product = |inputs: &[Tensor]| -> Result<[Tensor; 1]> { Ok([inputs[0].f_mm(&inputs[1])?]) };
/// conformance(product, &[&x, &w], &Default::default())?;
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// The message has one line for each property that does not hold. It is also an error when
/// `operator` reports an error or panics for the inputs as they are, and when an input is
/// undefined.
pub fn conformance<F, O>(
    operator: F,
    inputs: &[&Tensor],
    options: &ConformanceOptions<'_>,
) -> Result<()>
where
    F: Fn(&[Tensor]) -> Result<O> + Sync,
    O: Into<Tensors>,
{
    for (index, &input) in inputs.iter().enumerate() {
        Check::new(OP, &format!("inputs[{index}]"), input).defined()?;
    }
    // A capture in one thread fails if another thread waits for the device.
    let on_cuda = inputs.iter().any(|input| input.device() != Device::Cpu);
    let _alone = on_cuda.then(|| ON_CUDA.lock().unwrap_or_else(PoisonError::into_inner));
    let operator = |inputs: &[Tensor]| operator(inputs).map(Into::into);
    let _kept = Kept::of(inputs)?;
    tch_extension_set_grad_mode(true);
    let _canaries = Canaries::new()?;
    let overrun = OnceLock::new();
    let case = caught(|| Case::new(&operator, inputs, options, &overrun));
    let mut failures = Vec::new();
    if overrun.get().is_none() {
        let case = case?;
        for (name, property) in PROPERTIES {
            let result = caught(|| property(&case));
            if overrun.get().is_some() {
                break;
            }
            if let Err(error) = result {
                // The later lines of CUDA's errors are advice that does not apply here.
                let text = error.to_string();
                let text = text.lines().next().unwrap_or_default();
                failures.push(format!("{OP}: {name}: {text}"));
            }
        }
    }
    failures.extend(overrun.get().map(|text| format!("{OP}: memory: {text}")));
    if failures.is_empty() { Ok(()) } else { Err(Error::msg(failures.join("\n"))) }
}

static ON_CUDA: Mutex<()> = Mutex::new(());

/// An operator may panic for an input that it does not expect. The other properties are still worth
/// checking.
fn caught<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(panicked(panic.as_ref())))
}

fn panicked(payload: &(dyn Any + Send)) -> Error {
    // tch's panics quote libtorch's whole backtrace.
    let text = panic_text(payload).split("\\nException raised").next().unwrap_or_default();
    Error::msg(format!("it panicked: {}", text.lines().next().unwrap_or_default()))
}
