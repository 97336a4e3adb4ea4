//! What an operator has to keep to beside giving the right numbers.

mod forward;
mod gradients;
mod run;
mod surroundings;

use crate::autograd::Tensors;
use crate::check::Check;
use crate::error::panic_text;
use crate::ffi::autograd::tch_extension_set_grad_mode;
use crate::{Error, Result};
use run::Case;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use surroundings::Kept;
use tch::{Device, Tensor};

const OP: &str = "conformance";

/// What [`conformance`] has to know of an operator; the default suits one that computes new
/// tensors.
#[derive(Clone, Copy, Debug)]
pub struct ConformanceOptions<'a> {
    /// The inputs that it changes in place (`Saver::mark_dirty`).
    pub changed_inputs: &'a [usize],
    /// The outputs that may share memory with an input, as (output, input). Outputs may share that
    /// of `changed_inputs` anyway.
    pub aliases: &'a [(usize, usize)],
    /// How close two ways to the same numbers have to be, `(rtol, atol)`. By default
    /// [`tolerance`](super::tolerance) of each output's and gradient's kind. Long sums whose terms
    /// cancel need more, if another layout has them added in another order.
    pub tolerance: Option<(f64, f64)>,
    /// Whether the same inputs have to give the same bits.
    pub deterministic: bool,
    /// Whether it can be captured in a CUDA graph.
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

/// In the order in which they are described below.
const PROPERTIES: [(&str, Property); 13] = [
    ("inputs unchanged", forward::inputs_unchanged),
    ("no aliasing", forward::no_aliasing),
    ("memory", forward::memory),
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

/// Checks what a training loop takes for granted of an operator, and
/// [`gradcheck`](super::gradcheck()) does not see. What `torch.library.opcheck` is in Python, and
/// more, for any [`Function`](crate::autograd::Function) and whatever is built of some.
///
/// In order:
/// 1. *inputs unchanged*: neither inputs nor the memory around them are written to, by forward
///    (with a graph and without) or backward, unless declared in
///    [`changed_inputs`](ConformanceOptions::changed_inputs); and then libtorch is told;
/// 2. *no aliasing*: no output shares memory with an input or another output, unless declared; nor
///    does an output or a gradient share any with that of another call;
/// 3. *memory*: on the CPU, nothing is written beside outputs, gradients and whatever else is
///    allocated on the way (on CUDA, compute-sanitizer sees that);
/// 4. *determinism*: two runs give the same bits;
/// 5. *no_grad*: with grad mode off, or inputs that require no grad, the outputs are the same, and
///    without a graph;
/// 6. *layouts*: transposed, strided, misaligned and expanded inputs give what contiguous ones
///    give;
/// 7. *needs_input_grad*: whatever the set of inputs that require grad, they get the gradients that
///    they get when all do;
/// 8. *incoming gradients*: transposed, strided, misaligned and expanded ones give what contiguous
///    ones give, and absent ones what zeros give;
/// 9. *create_graph*: three steps, each fed with the one before, whose inputs depend on one
///    another, have the same gradients with and without `create_graph`, and right second
///    derivatives; or an error (kinds `Double` and, but for the second derivatives, `Float`);
/// 10. *state*: grad mode, autocast and the current CUDA stream are afterwards what they were;
/// 11. *threads*: new threads, two at once, get the same outputs and gradients;
/// 12. *stream*: on CUDA, all work is done on the current stream, that of the backward, too;
/// 13. *CUDA graph*: on CUDA, forward and backward can be captured, and a replay computes with what
///     the inputs hold then.
///
/// An operator that draws random numbers gives other ones each time: have it take them, or a mask,
/// as an input. Complex and sparse tensors are not supported. A race shows in *threads* only when
/// the two threads meet, which inputs of a few elements make unlikely.
///
/// On CUDA, calls of it take turns; other threads must not wait for the whole device meanwhile, or
/// the capture fails. All this takes a hundred calls and more, so inputs are best small. It is done
/// with grad mode on, and with the caller's autocast settings, in new threads, too. `operator` gets
/// copies of `inputs` with their strides and alignment; the originals are never touched. Those that
/// require grad are what is differentiated by, as for `gradcheck`, so that one closure serves both;
/// unlike there, they may be of any floating kind. A closure that captures a tensor does not
/// compile, because other threads call it, too: make it an input.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_extension::ops::f_lltm_cell;
/// use tch_extension::testing::conformance;
///
/// let leaf = |size: [i64; 2]| Tensor::randn(size, (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let (x, w, h, c) = (leaf([2, 4]), leaf([9, 7]), leaf([2, 3]), leaf([2, 3]));
/// let cell = |inputs: &[Tensor]| {
///     let [x, w, h, c] = inputs else { unreachable!("four inputs") };
///     f_lltm_cell(x, w, None, (h, c)).map(|(h, c)| [h, c])
/// };
/// conformance(cell, &[&x, &w, &h, &c], &Default::default())?;
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// One line for each property that does not hold. Also what `operator` reports when it is called
/// with the inputs as they are, or with what it panics then; and when an input is undefined.
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
    // A capture in one thread does not survive that another waits for the device.
    let on_cuda = inputs.iter().any(|input| input.device() != Device::Cpu);
    let _alone = on_cuda.then(|| ON_CUDA.lock().unwrap_or_else(PoisonError::into_inner));
    let operator = |inputs: &[Tensor]| operator(inputs).map(Into::into);
    let _kept = Kept::of(inputs)?;
    tch_extension_set_grad_mode(true);
    let case = caught(|| Case::new(&operator, inputs, options))?;
    let failures: Vec<String> = PROPERTIES
        .iter()
        .filter_map(|(name, property)| Some((name, caught(|| property(&case)).err()?.to_string())))
        // CUDA's errors go on with advice that fits none of this.
        .map(|(name, text)| format!("{OP}: {name}: {}", text.lines().next().unwrap_or_default()))
        .collect();
    if failures.is_empty() { Ok(()) } else { Err(Error::msg(failures.join("\n"))) }
}

static ON_CUDA: Mutex<()> = Mutex::new(());

/// An operator may panic where an input is not what it expects; other properties are still worth
/// looking at.
fn caught<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(panicked(panic.as_ref())))
}

fn panicked(payload: &(dyn Any + Send)) -> Error {
    // tch's panics quote libtorch's whole backtrace.
    let text = panic_text(payload).split("\\nException raised").next().unwrap_or_default();
    Error::msg(format!("it panicked: {}", text.lines().next().unwrap_or_default()))
}
