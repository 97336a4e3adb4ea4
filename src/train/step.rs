//! The captured step.

use super::graphs::{Captured, Graphs, key_of};
use super::parameters::Parameters;
use super::work::{Part, Work, revision_of};
use super::{StepOptions, StepOutput, StepStats};
use crate::amp::GradScaler;
use crate::cuda::{Graph, Stream, StreamGuard, is_capturing, record_stream};
use crate::ffi::amp::clear_autocast_cache;
use crate::ffi::gradients as ffi;
use crate::optim::Optimizer;
use crate::{Error, Result, check};
use std::fmt;
use tch::{Device, Tensor};

const NEW: &str = "train::Step::new";
const STEP: &str = "train::Step::step";

/// A training step: the forward pass of a closure, the backward pass, and the optimizer. On a GPU it
/// is captured as a CUDA graph and replayed. See the [module](crate::train) for what that means.
pub struct Step<O, F> {
    // The graphs are dropped first: they wait for work that uses the optimizer's tensors.
    graphs: Graphs,
    work: Work<O, F>,
    options: StepOptions,
    /// The stream of the warm-up and of captures, made by the first call that needs it.
    stream: Option<Stream>,
    /// How many batches of the current step are done.
    position: usize,
    /// The optimizer may have other parameters than before, or do other work.
    is_touched: bool,
    /// The optimizer's, as of the graphs.
    revision: u64,
    /// With accumulation, a call without a graph made gradients that there were none of before.
    has_new_sums: bool,
    /// The last call did not end well.
    has_failed: bool,
    stats: StepStats,
}

impl<O, F, R> Step<O, F>
where
    O: Optimizer,
    F: FnMut(&[Tensor]) -> Result<R>,
    R: Into<StepOutput>,
{
    /// Makes a step. The closure gets the tensors of a batch on the parameters' device and returns
    /// the loss, or the loss with further tensors: a [`StepOutput`].
    ///
    /// The optimizer's `step` may be of any kind if nothing is captured. Otherwise it must be
    /// [`capturable`](Optimizer::capturable).
    ///
    /// # Errors
    /// When an option is out of its range, the optimizer has no parameters, or something is to be
    /// captured and the optimizer is not capturable or has parameters on several devices.
    pub fn new(options: StepOptions, optimizer: O, closure: F) -> Result<Self> {
        options.check(NEW)?;
        let parameters = Parameters::of(NEW, &optimizer)?;
        let revision = revision_of(&optimizer, None);
        let step = Step {
            graphs: Graphs::default(),
            work: Work::new(closure, optimizer, parameters, options.accumulate),
            options,
            stream: None,
            position: 0,
            is_touched: false,
            has_new_sums: false,
            revision,
            has_failed: false,
            stats: StepStats::default(),
        };
        step.device_of_graphs(NEW).map(|_| step)
    }

    /// Lets a scaler scale the losses, unscale the gradients and skip the steps whose gradients are
    /// infinite or NaN. In a graph the optimizer must do so without waiting for the GPU, as those
    /// of `optim` do. The others give an error that names the operation which waits.
    #[must_use]
    pub fn with_scaler(mut self, scaler: GradScaler) -> Self {
        self.graphs.clear();
        self.work.scaler = Some(scaler);
        self
    }

    /// Runs `f` after the backward pass of a step's last batch, before the optimizer clips and
    /// applies the gradients, in the same graph. It gets the parameters. This is the place for
    /// collectives that average their gradients, and for changes of gradients. With a scaler, the
    /// gradients are still scaled.
    ///
    /// ```
    /// # use tch::{Device, Kind, Tensor, nn};
    /// # use tch::nn::OptimizerConfig;
    /// # use tch_extension::train::{Step, StepOptions};
    /// # let vs = nn::VarStore::new(Device::Cpu);
    /// # let w = vs.root().ones("w", &[2]);
    /// # let optimizer = nn::Sgd::default().build(&vs, 1.0)?;
    /// let options = StepOptions { capture: false, ..Default::default() };
    /// let mut step = Step::new(options, optimizer, |batch: &[Tensor]| Ok((&w * &batch[0]).sum(Kind::Float)))?
    ///     .after_backward(|parameters| {
    ///         for parameter in parameters {
    ///             let _ = parameter.f_grad()?.f_clamp_(-0.5, 0.5)?;
    ///         }
    ///         Ok(())
    ///     });
    /// step.step(&[&Tensor::from_slice(&[0.25_f32, 8.0])])?;
    /// assert_eq!(w, Tensor::from_slice(&[0.75_f32, 0.5]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn after_backward(
        mut self,
        f: impl FnMut(&[Tensor]) -> Result<()> + Send + 'static,
    ) -> Self {
        self.graphs.clear();
        self.work.after_backward = Some(Box::new(f));
        self
    }

    /// Trains on a batch and returns the loss, a 0-dimensional tensor on the device. It does not
    /// wait for the GPU; reading the loss does. The loss is a copy, which stays as it is.
    ///
    /// The tensors of the batch may be on the CPU, best in pinned memory, or on the parameters'
    /// device. They are copied on the current stream; change pinned memory only when that copy is
    /// done.
    ///
    /// # Errors
    /// When a tensor of the batch is undefined, sparse or on another device; an error of the
    /// closure, of the backward pass or of the optimizer; when the loss does not have one element,
    /// or does not require grad; when an operation cannot be captured, which the error names. After
    /// an error of a batch, nothing has changed. After any other, parameters and optimizer are as
    /// they were unless the optimizer failed, and the next call begins a step anew.
    pub fn step(&mut self, batch: &[&Tensor]) -> Result<Tensor> {
        self.step_with_extra(batch).map(|output| output.loss)
    }

    /// Like [`Step::step`], and returns copies of the closure's further tensors, too.
    ///
    /// # Errors
    /// As for [`Step::step`].
    pub fn step_with_extra(&mut self, batch: &[&Tensor]) -> Result<StepOutput> {
        let batch = self.checked(batch)?;
        self.follow_parameters()?;
        let device = self.device_of_graphs(STEP)?;
        if std::mem::replace(&mut self.has_failed, true) {
            // The closure panicked, so nobody cleaned up.
            drop(self.work.optimizer.batch_failed(Error::msg("the last step panicked")));
            self.graphs.forget_all_unused();
            self.start_anew()?;
        }
        let part = match self.position + 1 < self.options.accumulate {
            true => Part::Accumulate,
            false => Part::Step,
        };
        let begun = self.work.optimizer.begin_batch(self.position == 0, part == Part::Step);
        let output = begun.and_then(|()| match device {
            None => self.run_here(&batch, part),
            Some(device) => self.run_on(device, &batch, part),
        });
        self.work.optimizer.end_batch();
        let output = match output {
            Ok(output) => output,
            Err(error) => {
                self.has_failed = self.start_anew().is_err();
                return Err(self.work.optimizer.batch_failed(error));
            }
        };
        if part == Part::Step {
            self.stats.steps += 1;
            self.position = 0;
        } else {
            self.position += 1;
        }
        self.has_failed = false;
        Ok(output)
    }

    /// Begins to capture and replay, or ends it. Graphs that exist are kept.
    pub fn set_capture(&mut self, capture: bool) {
        self.options.capture = capture;
    }

    /// Drops all graphs, when their work is done. The next calls warm up and capture anew. Call it
    /// after a change on the CPU that a graph does not see: of a flag that the closure reads, of the
    /// precision of products, of variables that join the optimizer.
    pub fn recapture(&mut self) {
        self.graphs.clear();
        self.is_touched = true;
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &O {
        &self.work.optimizer
    }

    /// The optimizer, to set a learning rate, for example. A graph sees changes of tensors in
    /// place. If parameters were added, or the optimizer says by
    /// [`revision`](Optimizer::revision) that it now does other work, the graphs are dropped, and
    /// the next call begins a warm-up; for other parameters, it begins a step, too.
    pub fn optimizer_mut(&mut self) -> &mut O {
        self.is_touched = true;
        &mut self.work.optimizer
    }

    /// The scaler, if there is one.
    pub fn scaler(&self) -> Option<&GradScaler> {
        self.work.scaler.as_ref()
    }

    /// The scaler, to load a saved state, for example.
    pub fn scaler_mut(&mut self) -> Option<&mut GradScaler> {
        self.is_touched = true;
        self.work.scaler.as_mut()
    }

    /// What was done so far.
    pub fn stats(&self) -> StepStats {
        StepStats { graphs: self.graphs.len(), ..self.stats }
    }

    /// Drops all graphs, when their work is done, and gives the optimizer back. Gradients stay where
    /// they are.
    pub fn into_optimizer(self) -> O {
        self.work.optimizer
    }

    fn checked(&self, batch: &[&Tensor]) -> Result<Vec<Tensor>> {
        let device = self.work.parameters.first_device();
        let prepared = |(place, tensor): (usize, &&Tensor)| {
            let (name, tensor) = (format!("tensor {place} of the batch"), *tensor);
            let tensor_arg = check!(STEP, &name, tensor).defined()?;
            if ![Device::Cpu, device].contains(&tensor.device()) {
                let expected = match device {
                    Device::Cpu => "a tensor on the CPU, as the parameters".to_string(),
                    _ => format!("a tensor on {device:?}, as the parameters, or on the CPU"),
                };
                let got = format!("{:?}", tensor.device());
                return Err(tensor_arg.refuse(expected, got, "move it with to_device"));
            }
            Ok(tensor.f_detach()?)
        };
        batch.iter().enumerate().map(prepared).collect()
    }

    /// The device on which graphs are captured, if they are.
    fn device_of_graphs(&self, op: &str) -> Result<Option<Device>> {
        if !self.options.capture || !matches!(self.work.parameters.first_device(), Device::Cuda(_))
        {
            return Ok(None);
        }
        let device = self.work.parameters.device(op)?;
        if !self.work.optimizer.capturable() {
            return Err(Error::argument(
                op,
                "optimizer",
                "one that is capturable",
                "one whose numbers a graph would repeat",
                "use one of optim, implement optim::Optimizer::capturable, or set StepOptions::capture to false",
            ));
        }
        Ok(Some(device))
    }

    /// Drops the graphs if parameters were added, moved to other memory or frozen, if another tensor
    /// that they use was, or if the optimizer or the scaler does other work than before.
    fn follow_parameters(&mut self) -> Result<()> {
        if std::mem::take(&mut self.has_new_sums) || self.graphs.are_left() {
            self.graphs.clear();
        }
        let others = self.is_touched && !self.work.parameters.are_of(&self.work.optimizer);
        if others || self.work.parameters.have_changed() {
            self.graphs.clear();
            self.position = 0;
            self.work.renew_parameters(STEP)?;
        }
        let revision = self.work.revision();
        // Without graphs, this is the state that the warm-up makes.
        if revision != std::mem::replace(&mut self.revision, revision) && self.graphs.len() > 0 {
            self.graphs.clear();
        }
        self.is_touched = false;
        Ok(())
    }

    fn start_anew(&mut self) -> Result<()> {
        self.position = 0;
        self.work.give_up()
    }

    /// Runs without a graph, on the current stream.
    fn run_here(&mut self, batch: &[Tensor], part: Part) -> Result<StepOutput> {
        let device = self.work.parameters.first_device();
        let batch = moved(batch, device)?;
        if matches!(device, Device::Cuda(_)) && crate::cuda::is_compiled() {
            self.graphs.follow(&Stream::current(device)?)?;
        }
        let output = self.run_eagerly(&batch, part)?;
        copies(&output)
    }

    fn run_eagerly(&mut self, batch: &[Tensor], part: Part) -> Result<StepOutput> {
        self.work.prepare_gradients(self.position == 0)?;
        let output = self.work.run(STEP, batch, part)?;
        // Graphs know nothing of a parameter that had no gradient before.
        self.has_new_sums |= self.work.keep_gradients()?;
        // A step of tch's optimizers, and of those of `optim`, takes in new variables of its store.
        self.is_touched = true;
        self.stats.eager_calls += 1;
        self.stats.captured = false;
        Ok(output)
    }

    /// Warms up, captures or replays, as it is this shape's turn.
    fn run_on(&mut self, device: Device, batch: &[Tensor], part: Part) -> Result<StepOutput> {
        let current = Stream::current(device)?;
        if is_capturing(STEP, device)? {
            return Err(Error::msg(format!(
                "{STEP}: the current stream is being captured already; a capture cannot hold a step"
            )));
        }
        self.graphs.follow(&current)?;
        let side = match self.stream {
            Some(stream) => stream,
            None => *self.stream.insert(Stream::new(device)?),
        };
        let key = key_of(batch)?;
        let Some(index) = self.graphs.find(key, device, self.options.max_shapes)? else {
            return self.run_aside(&current, &side, &moved(batch, device)?, part);
        };
        let shape = self.graphs.shape(index);
        shape.load(batch)?;
        let is_warm = shape.way(part).warm >= self.options.warm_up;
        if !is_warm {
            let inputs: Vec<Tensor> = shape.inputs.iter().map(Tensor::shallow_clone).collect();
            let output = self.run_aside(&current, &side, &inputs, part);
            match output.is_ok() {
                true => self.graphs.shape(index).way(part).warm += 1,
                false => self.graphs.forget_unused(index),
            }
            return output;
        }
        if shape.way(part).captured.is_none() {
            let captured = self.capture(&side, index, part)?;
            self.graphs.shape(index).way(part).captured = Some(captured);
        }
        self.replay(index, part)
    }

    /// Runs without a graph on the side stream, as a warm-up for a capture there.
    fn run_aside(
        &mut self,
        current: &Stream,
        side: &Stream,
        batch: &[Tensor],
        part: Part,
    ) -> Result<StepOutput> {
        side.wait_stream(current)?;
        // Also if the closure panics.
        let _joined = Joined { current, side };
        let output = {
            let _guard = StreamGuard::new(side)?;
            self.run_eagerly(batch, part)
        };
        current.wait_stream(side)?;
        let output = output?;
        for tensor in std::iter::once(&output.loss).chain(&output.extra) {
            if tensor.device() == current.device() {
                record_stream(tensor, current)?;
            }
        }
        copies(&output)
    }

    fn capture(&mut self, side: &Stream, index: usize, part: Part) -> Result<Captured> {
        if self.options.accumulate == 1 {
            // The memory is free before the capture begins.
            self.work.parameters.remove_gradients()?;
        } else {
            self.work.prepare_gradients(false)?;
        }
        let inputs: Vec<Tensor> =
            self.graphs.shape(index).inputs.iter().map(Tensor::shallow_clone).collect();
        let (graph, (output, gradients)) =
            Graph::capture_for(STEP, side, self.graphs.any(), || {
                let output = self.work.run(STEP, &inputs, part)?;
                Ok((output, self.work.captured_gradients(STEP)?))
            })?;
        Ok(Captured { graph, output, gradients })
    }

    fn replay(&mut self, index: usize, part: Part) -> Result<StepOutput> {
        if self.options.accumulate > 1 {
            self.work.prepare_gradients(self.position == 0)?;
        }
        let Some(captured) = &self.graphs.shape(index).way(part).captured else {
            return Err(Error::msg(format!("internal error: {STEP}: there is no graph")));
        };
        captured.graph.replay()?;
        self.work.optimizer.replayed(captured.graph.device())?;
        // Casts of weights before this step, which somebody made in a region around the call.
        clear_autocast_cache()?;
        match part {
            Part::Step => self.work.parameters.set_gradients_of_step(&captured.gradients)?,
            Part::Accumulate => self.work.parameters.set_gradients(&captured.gradients)?,
        }
        self.stats.replays += 1;
        self.stats.captured = true;
        (self.stats.kernels, self.stats.other_nodes) =
            (captured.graph.kernels(), captured.graph.other_nodes());
        copies(&captured.output)
    }
}

/// When dropped, makes one stream wait for the other.
struct Joined<'a> {
    current: &'a Stream,
    side: &'a Stream,
}

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        // If CUDA has failed, the next call says so.
        let _ = self.current.wait_stream(self.side);
    }
}

/// The tensors on this device, without waiting for a GPU.
fn moved(batch: &[Tensor], device: Device) -> Result<Vec<Tensor>> {
    let moved = |tensor: &Tensor| -> Result<Tensor> {
        Ok(tensor.f_to_device_(device, tensor.f_kind()?, device != Device::Cpu, false)?)
    };
    batch.iter().map(moved).collect()
}

/// Copies on the current stream, which later calls do not overwrite.
fn copies(output: &StepOutput) -> Result<StepOutput> {
    Ok(StepOutput {
        loss: ffi::snapshot(&output.loss)?,
        extra: output.extra.iter().map(ffi::snapshot).collect::<Result<_>>()?,
    })
}

impl<O, F> fmt::Debug for Step<O, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Step")
            .field("options", &self.options)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}
