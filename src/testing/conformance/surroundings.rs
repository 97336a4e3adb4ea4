//! Properties that show when an operator is called under other conditions: threads, streams, CUDA
//! graphs.

use super::run::{Case, Outcome, tensors_of};
use crate::cuda::{Graph, Stream, StreamGuard, synchronize};
use crate::ffi::amp::AutocastSetting;
use crate::ffi::autograd::{tch_extension_grad_mode as grad_mode, tch_extension_set_grad_mode};
use crate::ffi::testing::Canaries;
use crate::testing::compare::is_complex;
use crate::testing::replica::Replica;
use crate::{Error, Result};
use std::borrow::Borrow;
use tch::{Device, Kind, Tensor};

pub(super) fn state(case: &Case<'_>) -> Result<()> {
    for enabled in [true, false] {
        let _guard = (!enabled).then(tch::no_grad_guard);
        let leaves = tensors_of(&case.copies()?);
        let before = Kept::of(&leaves)?;
        case.runner.call_as_it_is(&leaves)?;
        before.0.unchanged("the forward")?;
    }
    let before = Kept::of(case.inputs)?;
    case.runner.run_as_it_is(&tensors_of(&case.copies()?), &case.fresh_vectors())?;
    before.0.unchanged("the backward")
}

struct Surroundings {
    grad_mode: bool,
    /// The settings for the CPU and for CUDA.
    autocast: [AutocastSetting; 2],
    /// The current stream of the inputs' CUDA device, if there is one.
    stream: Option<Stream>,
}

/// Restores whatever an operator changed in its caller's settings when dropped. Without it, such an
/// operator would seem to violate every other property, too.
pub(super) struct Kept(Surroundings);

impl Kept {
    pub fn of<T: Borrow<Tensor>>(inputs: &[T]) -> Result<Self> {
        Ok(Kept(Surroundings::of(cuda_device(inputs))?))
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        tch_extension_set_grad_mode(self.0.grad_mode);
        // None of this can fail, because it restores earlier settings.
        set_autocast(&self.0.autocast);
        let stream = self
            .0
            .stream
            .filter(|stream| Stream::current(stream.device()).is_ok_and(|now| now != *stream));
        // Do this only if the stream changed: a guard also makes the stream's device current, which
        // is not always the device that was current.
        if let Some(Ok(guard)) = stream.as_ref().map(StreamGuard::new) {
            std::mem::forget(guard);
        }
    }
}

fn set_autocast(settings: &[AutocastSetting; 2]) {
    for (cuda, setting) in [false, true].into_iter().zip(settings) {
        let _ = setting.set(cuda);
    }
}

impl Surroundings {
    fn of(device: Option<Device>) -> Result<Self> {
        Ok(Surroundings {
            grad_mode: grad_mode(),
            autocast: [AutocastSetting::get(false)?, AutocastSetting::get(true)?],
            stream: device.map(Stream::current).transpose()?,
        })
    }

    /// Checks that the current settings are still these.
    fn unchanged(&self, by: &str) -> Result<()> {
        let now = Surroundings::of(self.stream.as_ref().map(Stream::device))?;
        let changed = if self.grad_mode != now.grad_mode {
            "grad mode"
        } else if self.autocast.map(|setting| setting.kind())
            != now.autocast.map(|setting| setting.kind())
        {
            "autocast"
        } else if self.stream != now.stream {
            "the current CUDA stream"
        } else {
            return Ok(());
        };
        Err(Error::msg(format!("{by} changed {changed} for the caller; use a guard")))
    }
}

fn cuda_device<T: Borrow<Tensor>>(inputs: &[T]) -> Option<Device> {
    inputs
        .iter()
        .map(|input| input.borrow().device())
        .find(|device| matches!(device, Device::Cuda(_)))
}

pub(super) fn threads(case: &Case<'_>) -> Result<()> {
    const THREADS: usize = 2;
    const ROUNDS: usize = 4;
    let runner = case.runner;
    let round = || -> Result<(Vec<Tensor>, Vec<Option<Tensor>>)> {
        Ok((tensors_of(&case.copies()?), case.fresh_vectors()))
    };
    let work = (0..THREADS).map(|_| (0..ROUNDS).map(|_| round()).collect::<Result<Vec<_>>>());
    let work = work.collect::<Result<Vec<_>>>()?;
    if let Some(device) = cuda_device(case.inputs) {
        // The copies were made on this thread's stream, and the new threads may use other streams.
        synchronize(device)?;
    }
    let autocast = Surroundings::of(None)?.autocast;
    let run = |rounds: Vec<(Vec<Tensor>, Vec<Option<Tensor>>)>| {
        // New threads get the settings of the calling thread.
        set_autocast(&autocast);
        let _canaries = Canaries::new()?;
        rounds
            .iter()
            .map(|(leaves, vectors)| runner.run(leaves, vectors))
            .collect::<Result<Vec<_>>>()
    };
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = work.into_iter().map(|rounds| scope.spawn(|| run(rounds))).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    if let Some(device) = cuda_device(case.inputs) {
        synchronize(device)?;
    }
    for outcome in outcomes {
        let outcome = outcome.unwrap_or_else(|panic| Err(super::panicked(panic.as_ref())));
        let outcome = outcome.map_err(|error| Error::msg(format!("in a new thread: {error}")))?;
        outcome.iter().try_for_each(|outcome| case.agrees("in a new thread", outcome))?;
    }
    Ok(())
}

/// Gives the inputs their values late, on a side stream. Work on any other stream does not wait for
/// the values and so gives wrong results.
pub(super) fn stream(case: &Case<'_>) -> Result<()> {
    let Some(device) = cuda_device(case.inputs) else { return Ok(()) };
    let side = Stream::new(device)?;
    let on_side = |late: bool| -> Result<Outcome> {
        let copies = case.copies()?;
        let leaves = tensors_of(&copies);
        let vectors = case.fresh_vectors();
        let memories = copies.iter().map(Replica::memory).collect::<Result<Vec<_>>>()?;
        let delay = Tensor::f_ones([4096, 4096], (Kind::Float, device))?;
        if late {
            for (copy, memory) in copies.iter().zip(&memories) {
                copy.overwrite(&memory.f_zeros_like()?)?;
            }
            for vector in vectors.iter().flatten() {
                let _ = vector.shallow_clone().f_zero_()?;
            }
        }
        synchronize(device)?;
        let _guard = StreamGuard::new(&side)?;
        if late {
            for _ in 0..8 {
                let _ = delay.f_matmul(&delay)?;
            }
            for (copy, memory) in copies.iter().zip(&memories) {
                copy.overwrite(memory)?;
            }
            for (vector, values) in vectors.iter().flatten().zip(case.vectors.iter().flatten()) {
                vector.shallow_clone().f_copy_(values)?;
            }
        }
        let outcome = case.runner.run(&leaves, &vectors)?;
        // Copy the results on this stream, before anything waits for another stream.
        let copied = |tensors: &[Option<Tensor>]| {
            tensors.iter().map(|tensor| tensor.as_ref().map(Tensor::copy)).collect::<Vec<_>>()
        };
        let outcome =
            Outcome { outputs: copied(&outcome.outputs), gradients: copied(&outcome.gradients) };
        side.synchronize()?;
        Ok(outcome)
    };
    // The first allocation for a new stream may wait for the whole device, which would hide what
    // this test looks for. So run once without delay.
    on_side(false)?;
    case.agrees("on a side stream", &on_side(true)?)
}

pub(super) fn cuda_graph(case: &Case<'_>) -> Result<()> {
    // Without libtorch's caching allocator there is no memory pool that a graph could own.
    let no_pool = std::env::var_os("PYTORCH_NO_CUDA_MEMORY_CACHING").is_some();
    let Some(device) =
        cuda_device(case.inputs).filter(|_| case.runner.options.cuda_graph && !no_pool)
    else {
        return Ok(());
    };
    for _ in 0..3 {
        case.again()?;
    }
    let copies = case.copies()?;
    let leaves = tensors_of(&copies);
    synchronize(device)?;
    let (graph, (captured, _)) = Graph::capture(device, || {
        // libtorch warns of a graph without nodes, as of an operator that has nothing to compute.
        let something = Tensor::f_zeros([1], (Kind::Float, device))?;
        Ok((case.run(&leaves)?, something))
    })
    .map_err(|error| Error::msg(format!("it cannot be captured: {error}")))?;
    for factor in [1.0, 0.5] {
        refill(case, &copies, factor)?;
        graph.replay()?;
        let fresh = case.copies()?;
        refill(case, &fresh, factor)?;
        let expected = case.run(&tensors_of(&fresh))?;
        case.runner.agree("replayed with other values", &captured, &expected)?;
    }
    Ok(())
}

/// Fills the copies with the inputs' values, multiplied by `factor` for floating-point and complex
/// kinds.
fn refill(case: &Case<'_>, copies: &[Replica], factor: f64) -> Result<()> {
    for (copy, original) in copies.iter().zip(case.copies()?) {
        let memory = original.memory()?;
        copy.overwrite(&if memory.f_is_floating_point()? || is_complex(memory.f_kind()?) {
            memory.f_mul_scalar(factor)?
        } else {
            memory
        })?;
    }
    Ok(())
}
