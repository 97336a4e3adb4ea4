//! A whole training step as one CUDA graph.
//!
//! A step of a small model has hundreds of kernels that take the CPU longer to launch than the GPU
//! to run. [`Step`] captures them once, for each shape of a batch: the forward pass in a closure,
//! the backward pass, clipping and the optimizer. Afterwards a step is one launch, and the CPU is
//! free. On the CPU, and with [`StepOptions::capture`] set to false, the same code just runs, with
//! the same results.
//!
//! ```
//! use tch::nn::{self, Module};
//! use tch::{Device, Kind, Reduction, Tensor};
//! use tch_extension::optim::{AdamW, OptimizerConfig};
//! use tch_extension::train::{Step, StepOptions};
//!
//! let vs = nn::VarStore::new(Device::cuda_if_available());
//! let model = nn::linear(vs.root(), 4, 1, Default::default());
//! let mut optimizer = AdamW::default().build(&vs, 0.1)?;
//! optimizer.set_clip_norm(Some(1.0))?;
//! let mut step = Step::new(StepOptions::default(), optimizer, |batch: &[Tensor]| {
//!     Ok(model.forward(&batch[0]).f_mse_loss(&batch[1], Reduction::Mean)?)
//! })?;
//!
//! let mut losses = Vec::new();
//! for round in 0..40 {
//!     let x = Tensor::randn([32, 4], (Kind::Float, Device::Cpu));
//!     let y = x.sum_dim_intlist(1, true, Kind::Float);
//!     step.optimizer_mut().set_lr(0.1 / (1.0 + 0.1 * f64::from(round)))?;
//!     losses.push(step.step(&[&x, &y])?); // waits for nothing
//! }
//! let loss = |round: usize| losses[round].double_value(&[]); // waits for the GPU
//! assert!(loss(39) < loss(0));
//! # Ok::<(), tch_extension::Error>(())
//! ```
//!
//! An optimizer of your own says by [`capturable`](crate::optim::Optimizer::capturable) that a graph
//! may repeat it. tch's may not: they compute on the CPU what changes from step to step.
//!
//! # What happens
//!
//! The first [`warm_up`](StepOptions::warm_up) calls for the shapes, strides and kinds of a batch run
//! without a graph, on the stream that is captured later. They are ordinary steps, so that N calls are N
//! steps in every mode. The next call captures, which takes about as long as a few steps, and
//! replays. All later calls copy the batch to where the graph reads it, replay, and copy the loss,
//! on the current stream. The graphs of all shapes share a memory pool for what they need meanwhile.
//!
//! # What the closure may do
//!
//! - The rules of [`cuda::Graph`](crate::cuda::Graph) hold: no waiting for the GPU, no shapes that
//!   depend on values. An operation that cannot be captured gives an error with its name, even if
//!   it panics, as `double_value` does. That call changed no parameter, and the next begins a
//!   step. Call [`Step::set_capture`] with false to go on without graphs.
//! - What the closure does on the CPU happens in the warm-up and the capture only. This includes
//!   branches, counters and hooks of tensors; [`Step::recapture`] does it all anew. Numbers that
//!   change from step to step belong into tensors: those of the batch, or others on the GPU that are
//!   changed in place between steps.
//! - All that it reads is kept for the graphs. If a tensor that is none of the optimizer's, such as a
//!   frozen weight, gets other memory (`set_data`, `resize_`), the next call drops the graphs and warms
//!   up. It cannot notice this while another tensor, such as a detached one, still has the former
//!   memory, which the graphs then go on to read: call [`Step::recapture`].
//! - It must not change the batch, and must not keep tensors that have a graph of autograd from one
//!   call to the next. During a capture, no other such tensor that depends on the parameters may be
//!   alive: its graph would draw another stream into the capture.
//! - [`Autocast`](crate::amp::Autocast) belongs into the closure, as a guard that ends in it.
//!   Each call begins and ends with an empty cache of casts. For kind `Half`, give the step a
//!   scaler: [`Step::with_scaler`].
//!
//! # Gradients
//!
//! The step owns the gradients of its parameters. After a call they are those of the batches of this
//! step so far, at the same addresses for each graph; what was written to them by hand before a step
//! is discarded. With one batch per step, they are absent before the backward pass, which then
//! writes instead of adding. Each graph then has gradients of its own, which take memory for each
//! shape, and after a replay `grad` is that of the graph which ran. With
//! [`accumulate`](StepOptions::accumulate), all graphs add to the same tensors, and a parameter that
//! once had a gradient has zeros in later steps that do not use it.
//!
//! [`Step::after_backward`] is the place for collectives and for changes of gradients.
//!
//! # Random numbers
//!
//! Dropout draws from libtorch's generator of the GPU, whose state a replay reads and advances just
//! as the same operations do without a graph. A captured run and one without graphs draw the same
//! numbers after the same `tch::manual_seed`, step by step, and a new seed between two steps takes
//! effect. With several ranks, seed by step and rank: ranks with one seed drop the same places. Steps
//! that draw random numbers in several threads at the same time must use one stream.
//!
//! # A state that is carried on
//!
//! Return it from the closure next to the loss, detached from history, and pass it with the next
//! batch. To reset it, pass another tensor.
//!
//! ```
//! # use tch::nn::{self, OptimizerConfig};
//! # use tch::{Device, Kind, Tensor};
//! # use tch_extension::train::{Step, StepOptions};
//! # let vs = nn::VarStore::new(Device::Cpu);
//! # let w = vs.root().randn("w", &[3, 3], 0.0, 0.5);
//! # let optimizer = nn::Sgd::default().build(&vs, 0.1)?;
//! # let options = StepOptions { capture: false, ..Default::default() };
//! let mut step = Step::new(options, optimizer, |batch: &[Tensor]| {
//!     let state = (&batch[0] + batch[1].matmul(&w)).tanh();
//!     Ok(((&state - 0.5).square().mean(Kind::Float), vec![state.detach()]))
//! })?;
//! let mut state = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
//! for _ in 0..4 {
//!     let x = Tensor::randn([2, 3], (Kind::Float, Device::Cpu));
//!     let mut output = step.step_with_extra(&[&x, &state])?;
//!     state = output.extra.remove(0);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Several at once
//!
//! Steps may exist next to one another and move to other threads. While one captures, no other
//! thread may draw random numbers on a GPU or replay a graph. Calls of one
//! step on different streams wait for one another on the GPU. Steps that draw random numbers share
//! the generator's state, so use one stream for them, or let one wait for the other. Dropping a step
//! waits for its work.
//!
//! In Python this is `torch.cuda.graph` around the whole step, or
//! `torch.cuda.make_graphed_callables`; see PyTorch's notes on whole-network capture.

mod graphs;
mod options;
mod parameters;
mod step;
mod work;

pub use options::{StepOptions, StepOutput, StepStats};
pub use step::Step;
