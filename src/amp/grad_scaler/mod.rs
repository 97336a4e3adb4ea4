//! Scaling of losses and gradients: `torch.amp.GradScaler`.

mod gradients;
mod optimizer;
mod options;

pub use optimizer::{Optimizer, ScaledGradients};
pub use options::{GradScalerOptions, GradScalerState};

use crate::ffi::amp as ffi;
use crate::ffi::amp::identity;
use crate::{Error, Result, check};
use gradients::{Group, groups_of_gradients, moved};
use options::{check_factors, check_scale, out_of_range};
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use tch::{Device, Kind, Tensor};

/// Scales losses, so that gradients of kind `Half` do not vanish, and skips the steps for which the
/// scale was too large. It is `torch.amp.GradScaler` with the same steps and the same numbers.
///
/// In each iteration, [`scale`](Self::scale) the loss, run the backward pass, [`step`](Self::step)
/// each optimizer, and [`update`](Self::update) once. To inspect or clip gradients, call
/// [`unscale`](Self::unscale) before the step. If a gradient is infinite or NaN, `step` skips its
/// optimizer and `update` lowers the scale. After `growth_interval` updates without such a
/// gradient, the scale grows.
///
/// The weights, and so the gradients, must be of kind `Float` or `Double` or, on the CPU,
/// `BFloat16`. They may be on several devices, even those of one optimizer. Absent gradients are
/// skipped. For sparse gradients (COO), the stored values are checked.
///
/// Only `step` of optimizers other than this crate's, [`scale_factor`](Self::scale_factor),
/// [`growth_tracker`](Self::growth_tracker) and [`state`](Self::state) wait for the GPU. The other
/// functions wait only if they have to copy a number from a GPU to the CPU, which is needed when the
/// first tensor that was scaled is not on the device of the gradients.
///
/// ```
/// use tch::nn::{self, OptimizerConfig};
/// use tch::{Device, Kind, Tensor};
/// use tch_extension::amp::GradScaler;
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let w = vs.root().ones("w", &[1]);
/// let mut optimizer = nn::Sgd::default().build(&vs, 1.0)?;
/// let mut scaler = GradScaler::new(Default::default())?;
/// let mut train = |loss: Tensor| -> tch_extension::Result<bool> {
///     optimizer.zero_grad();
///     scaler.scale(&loss)?.backward();
///     let stepped = scaler.step(&mut optimizer)?;
///     scaler.update()?;
///     Ok(stepped)
/// };
/// assert!(train((&w * 0.5).sum(Kind::Float))?);
/// assert_eq!(w.double_value(&[0]), 0.5);
/// assert!(!train((&w * f64::INFINITY).sum(Kind::Float))?, "skipped");
/// assert_eq!((w.double_value(&[0]), scaler.scale_factor()?), (0.5, 32768.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// There are three differences from torch. Misuse that torch would answer with wrong results is an
/// error, for example a parameter that got its gradient and joined its optimizer after `unscale`.
/// `step` returns whether it stepped. Options and states that are out of range are refused.
#[derive(Debug)]
pub struct GradScaler {
    enabled: bool,
    /// `scale` and `growth_tracker` are the initial values.
    state: GradScalerState,
    /// `None` until the first tensor is scaled.
    current: Option<Current>,
    /// The optimizers whose gradients were unscaled since the last update.
    optimizers: Vec<Unscaled>,
}

/// The current values, on the device of the first tensor that was scaled.
#[derive(Debug)]
struct Current {
    /// Kind Float, 0-dimensional.
    scale: Tensor,
    /// Kind Int, 0-dimensional.
    growth_tracker: Tensor,
}

/// An optimizer whose gradients were unscaled.
#[derive(Debug)]
struct Unscaled {
    identities: HashSet<usize>,
    /// Kept alive, so that no other tensor gets the same identity.
    _parameters: Vec<Tensor>,
    /// One tensor for each device that has gradients; it is not 0 if one of them was infinite or
    /// NaN.
    found_inf: Vec<Tensor>,
    stepped: bool,
}

impl GradScaler {
    /// Makes a scaler with the initial scale.
    ///
    /// # Errors
    /// When an option is out of its range, unless `enabled` is false.
    pub fn new(options: GradScalerOptions) -> Result<GradScaler> {
        let state = GradScalerState {
            scale: options.init_scale,
            growth_factor: options.growth_factor,
            backoff_factor: options.backoff_factor,
            growth_interval: options.growth_interval,
            growth_tracker: 0,
        };
        if options.enabled {
            let op = "GradScaler::new";
            check_scale(op, "init_scale", options.init_scale)?;
            check_factors(op, &state)?;
        }
        Ok(GradScaler { enabled: options.enabled, state, current: None, optimizers: Vec::new() })
    }

    /// Whether the scaler is enabled. If it is not, it does nothing.
    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Returns the loss times the scale; call `backward` on the result. The loss may have any shape
    /// and any floating-point kind, on the CPU or on CUDA. As in PyTorch, the result has the loss's
    /// kind, so that values of kind `Half` easily become infinite; but a single number without
    /// dimensions, as `mean` returns it, becomes `Float` if it is of a half kind.
    ///
    /// # Errors
    /// When the tensor is undefined or sparse, or an error of libtorch.
    pub fn scale(&mut self, loss: &Tensor) -> Result<Tensor> {
        if !self.enabled {
            return Ok(loss.shallow_clone());
        }
        check!("GradScaler::scale", loss).defined()?;
        let current = match &mut self.current {
            Some(current) => current,
            none => none.insert(Current::new(&self.state, loss.device())?),
        };
        Ok(loss.f_mul(&moved(&current.scale, loss.device())?)?)
    }

    /// Calls [`scale`](Self::scale) for several losses, in order.
    ///
    /// ```
    /// # use tch::Tensor;
    /// # let mut scaler = tch_extension::amp::GradScaler::new(Default::default())?;
    /// let scaled = scaler.scale_all(&[&Tensor::from(1.0_f32), &Tensor::from(2.0_f32)])?;
    /// assert_eq!(scaled[1].double_value(&[]), 131072.0);
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`scale`](Self::scale).
    pub fn scale_all(&mut self, losses: &[&Tensor]) -> Result<Vec<Tensor>> {
        losses.iter().map(|loss| self.scale(loss)).collect()
    }

    /// Divides the gradients of the optimizer's parameters by the scale, in place, and records
    /// whether one was infinite or NaN. Call it before code that needs the real gradients, such as
    /// clipping; otherwise [`step`](Self::step) does it. Call it at most once per optimizer and
    /// update, when all gradients of the optimizer are complete.
    ///
    /// ```
    /// # use tch::{Kind, nn::{OptimizerConfig, Sgd, VarStore}};
    /// # use tch_extension::amp::GradScaler;
    /// # let vs = VarStore::new(tch::Device::Cpu);
    /// # let w = vs.root().ones("w", &[1]);
    /// # let mut optimizer = Sgd::default().build(&vs, 0.5)?;
    /// # let mut scaler = GradScaler::new(Default::default())?;
    /// scaler.scale(&(&w * 10.0).sum(Kind::Float))?.backward();
    /// scaler.unscale(&optimizer)?;
    /// assert_eq!(w.grad().double_value(&[0]), 10.0);
    /// optimizer.clip_grad_value(1.0);
    /// scaler.step(&mut optimizer)?;
    /// assert_eq!(w.double_value(&[0]), 0.5);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When nothing was scaled before; when `unscale` or `step` was already called for this
    /// optimizer since the last update; for a gradient of kind `Half` (its weights should be
    /// `Float`, which autocast casts as needed), of another unsuitable kind, or of a sparse layout
    /// other than COO; or an error of libtorch.
    pub fn unscale(&mut self, optimizer: &impl Optimizer) -> Result<()> {
        if !self.enabled {
            return Ok(());
        }
        let op = "GradScaler::unscale";
        self.current(op)?;
        let parameters = optimizer.parameters();
        if let Some(index) = self.find(op, &parameters)? {
            let call = if self.optimizers[index].stepped { "step" } else { "unscale" };
            return Err(too_late(op, call));
        }
        self.unscale_parameters(op, parameters).map(|_| ())
    }

    /// Steps the optimizer unless one of its gradients was infinite or NaN, and returns whether it
    /// stepped. It first unscales the gradients if [`unscale`](Self::unscale) did not. Call it once
    /// per optimizer and update. It waits for the GPU, because it needs to know whether the
    /// gradients are finite.
    ///
    /// With an optimizer of this crate (see [`Optimizer::step_on_device`]) it does not wait: the GPU
    /// itself skips the step. The result is then true, unless all gradients are on the CPU. Such an
    /// optimizer leaves the gradients scaled if `unscale` was not called, and takes gradients of
    /// half kinds, too.
    ///
    /// # Errors
    /// As for [`unscale`](Self::unscale); when no parameter has a gradient; or an error of the
    /// optimizer.
    pub fn step(&mut self, optimizer: &mut impl Optimizer) -> Result<bool> {
        if !self.enabled {
            return optimizer.step().map(|()| true);
        }
        let op = "GradScaler::step";
        self.current(op)?;
        let parameters = optimizer.parameters();
        let index = match self.find(op, &parameters)? {
            Some(index) if self.optimizers[index].stepped => return Err(too_late(op, "step")),
            Some(index) => index,
            None => {
                let scale = self.current(op)?.scale.shallow_clone();
                let scaled = ScaledGradients::Scaled(&scale);
                if let Some(found_inf) = optimizer.step_on_device(scaled).transpose()? {
                    return self.stepped_on_device(op, parameters, found_inf);
                }
                self.unscale_parameters(op, parameters)?
            }
        };
        let unscaled = &mut self.optimizers[index];
        if unscaled.found_inf.is_empty() {
            return Err(no_gradient(op));
        }
        let gradients = ScaledGradients::Unscaled(&unscaled.found_inf);
        if optimizer.step_on_device(gradients).transpose()?.is_some() {
            unscaled.stepped = true;
            return finite_as_far_as_known(&unscaled.found_inf);
        }
        let mut finite = true;
        for found_inf in &unscaled.found_inf {
            finite &= found_inf.f_double_value(&[])? == 0.0;
        }
        if finite {
            optimizer.step()?;
        }
        unscaled.stepped = true;
        Ok(finite)
    }

    /// Remembers what an optimizer found that unscaled its gradients itself.
    fn stepped_on_device(
        &mut self,
        op: &str,
        parameters: Vec<Tensor>,
        found_inf: Vec<Tensor>,
    ) -> Result<bool> {
        if found_inf.is_empty() {
            return Err(no_gradient(op));
        }
        let finite = finite_as_far_as_known(&found_inf)?;
        self.optimizers.push(Unscaled {
            identities: parameters.iter().map(ffi::identity).collect(),
            _parameters: parameters,
            found_inf,
            stepped: true,
        });
        Ok(finite)
    }

    /// Ends an iteration. It lowers the scale if a gradient of any optimizer was infinite or NaN,
    /// and raises it if this was the last of `growth_interval` updates in a row without such a
    /// gradient. It does not wait for the GPU.
    ///
    /// # Errors
    /// When nothing was scaled before, or no gradient was unscaled since the last update.
    pub fn update(&mut self) -> Result<()> {
        if !self.enabled {
            return Ok(());
        }
        let op = "GradScaler::update";
        let device = self.current(op)?.scale.device();
        let mut found = self.optimizers.iter().flat_map(|unscaled| &unscaled.found_inf);
        let Some(first) = found.next() else {
            return Err(Error::msg(format!(
                "{op}: no gradient was unscaled since the last update; step first"
            )));
        };
        let mut found_inf = moved(first, device)?;
        for other in found {
            found_inf = found_inf.f_add(&moved(other, device)?)?;
        }
        let GradScalerState { growth_factor, backoff_factor, growth_interval, .. } = self.state;
        let current = self.current(op)?;
        let _ = current.scale.shallow_clone().f_internal_amp_update_scale_(
            &current.growth_tracker,
            &found_inf,
            growth_factor,
            backoff_factor,
            growth_interval,
        )?;
        self.optimizers.clear();
        Ok(())
    }

    /// Ends an iteration and sets the scale to a value of your choice. The count of updates towards
    /// the next growth continues.
    ///
    /// # Errors
    /// When the scale is not positive and finite as `f32`, or nothing was scaled before.
    pub fn update_to(&mut self, scale: f64) -> Result<()> {
        if !self.enabled {
            return Ok(());
        }
        let op = "GradScaler::update_to";
        check_scale(op, "scale", scale)?;
        let _ = self.current(op)?.scale.shallow_clone().f_fill_(scale)?;
        self.optimizers.clear();
        Ok(())
    }

    /// The current scale, or 1 if the scaler is not enabled. Waits for the GPU.
    ///
    /// # Errors
    /// An error of CUDA.
    pub fn scale_factor(&self) -> Result<f64> {
        match &self.current {
            _ if !self.enabled => Ok(1.0),
            Some(current) => Ok(current.scale.f_double_value(&[])?),
            None => Ok(self.state.scale),
        }
    }

    /// The number of updates since the scale last changed, or 0 if the scaler is not enabled. Waits
    /// for the GPU.
    ///
    /// # Errors
    /// An error of CUDA.
    pub fn growth_tracker(&self) -> Result<i64> {
        match &self.current {
            _ if !self.enabled => Ok(0),
            Some(current) => Ok(current.growth_tracker.f_int64_value(&[])?),
            None => Ok(self.state.growth_tracker),
        }
    }

    /// The state to save, best after an update, or `None` if the scaler is not enabled. Waits for
    /// the GPU.
    ///
    /// ```
    /// # use tch_extension::amp::GradScaler;
    /// let scaler = GradScaler::new(Default::default())?;
    /// let saved = scaler.state()?.expect("it is enabled");
    ///
    /// let mut resumed = GradScaler::new(Default::default())?;
    /// resumed.load_state(&saved)?;
    /// assert_eq!(resumed.state()?, Some(saved));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// An error of CUDA.
    pub fn state(&self) -> Result<Option<GradScalerState>> {
        if !self.enabled {
            return Ok(None);
        }
        let (scale, growth_tracker) = (self.scale_factor()?, self.growth_tracker()?);
        Ok(Some(GradScalerState { scale, growth_tracker, ..self.state }))
    }

    /// Continues from a saved state. Does nothing if the scaler is not enabled.
    ///
    /// # Errors
    /// When a number is out of its range. The scaler is then unchanged.
    pub fn load_state(&mut self, state: &GradScalerState) -> Result<()> {
        if !self.enabled {
            return Ok(());
        }
        let op = "GradScaler::load_state";
        check_factors(op, state)?;
        // The scale may have fallen to 0 in the saved run.
        if state.scale != 0.0 {
            check_scale(op, "scale", state.scale)?;
        }
        if !(0..=i64::from(i32::MAX)).contains(&state.growth_tracker) {
            return Err(out_of_range(op, "growth_tracker", "a count", state.growth_tracker));
        }
        if let Some(current) = &self.current {
            // In place, because a CUDA graph may read them.
            let _ = current.scale.shallow_clone().f_fill_(state.scale)?;
            let _ = current.growth_tracker.shallow_clone().f_fill_(state.growth_tracker)?;
        }
        self.state = *state;
        Ok(())
    }

    /// Changes with all that a CUDA graph keeps of a scaler: the memory of the scale, and the numbers
    /// that `update` takes from the CPU.
    #[cfg_attr(not(feature = "train"), allow(dead_code))]
    pub(crate) fn revision(&self) -> u64 {
        let GradScalerState { growth_factor, backoff_factor, growth_interval, .. } = self.state;
        let memory = self.current.as_ref().map(|current| identity(&current.scale));
        let factors = [growth_factor, backoff_factor].map(f64::to_bits);
        let mut hasher = DefaultHasher::new();
        (self.enabled, memory, factors, growth_interval).hash(&mut hasher);
        hasher.finish()
    }

    /// Forgets what was unscaled since the last update, after an iteration that failed.
    #[cfg_attr(not(feature = "train"), allow(dead_code))]
    pub(crate) fn forget_unscaled(&mut self) {
        self.optimizers.clear();
    }

    fn current(&self, op: &str) -> Result<&Current> {
        self.current.as_ref().ok_or_else(|| {
            Error::msg(format!(
                "{op}: nothing was scaled yet; run the backward of what GradScaler::scale returns"
            ))
        })
    }

    /// The index of the optimizer with these parameters among those whose gradients were unscaled.
    fn find(&self, op: &str, parameters: &[Tensor]) -> Result<Option<usize>> {
        let identities: Vec<usize> = parameters.iter().map(ffi::identity).collect();
        let known =
            |unscaled: &Unscaled| identities.iter().any(|id| unscaled.identities.contains(id));
        let Some(index) = self.optimizers.iter().position(known) else { return Ok(None) };
        let unscaled = &self.optimizers[index].identities;
        for (place, (parameter, id)) in parameters.iter().zip(&identities).enumerate() {
            if !unscaled.contains(id) && parameter.f_grad()?.defined() {
                let expected = "the parameters of which the gradients were unscaled";
                let got = format!(
                    "parameter {place}, whose gradient was not, together with parameters whose gradients were"
                );
                let hint = "give an optimizer all its parameters before unscale, and each to one optimizer only";
                return Err(Error::argument(op, "optimizer", expected, got, hint));
            }
        }
        Ok(Some(index))
    }

    /// Unscales the gradients, and returns the index of the new entry in `self.optimizers`.
    fn unscale_parameters(&mut self, op: &str, mut parameters: Vec<Tensor>) -> Result<usize> {
        let _no_grad = tch::no_grad_guard();
        let mut identities = HashSet::new();
        parameters.retain(|parameter| identities.insert(ffi::identity(parameter)));
        let scale = &self.current(op)?.scale;
        let groups = groups_of_gradients(op, &parameters)?;
        // Computed in Double, as torch does, so that the result is the same to the last bit on
        // every device.
        let inverse = scale.f_to_kind(Kind::Double)?.f_reciprocal()?.f_to_kind(Kind::Float)?;
        let mut devices: Vec<(Device, Tensor, Tensor)> = Vec::new();
        for Group { device, gradients, .. } in &groups {
            let place = match devices.iter().position(|known| known.0 == *device) {
                Some(place) => place,
                None => {
                    let found_inf = Tensor::f_zeros(NO_DIM, (Kind::Float, *device))?;
                    devices.push((*device, found_inf, moved(&inverse, *device)?));
                    devices.len() - 1
                }
            };
            let (_, found_inf, inverse) = &mut devices[place];
            ffi::unscale(gradients, found_inf, inverse)?;
        }
        self.optimizers.push(Unscaled {
            identities,
            _parameters: parameters,
            found_inf: devices.into_iter().map(|(_, found_inf, _)| found_inf).collect(),
            stepped: false,
        });
        Ok(self.optimizers.len() - 1)
    }
}

const NO_DIM: [i64; 0] = [];

impl Current {
    fn new(state: &GradScalerState, device: Device) -> Result<Self> {
        Ok(Current {
            scale: Tensor::f_full(NO_DIM, state.scale, (Kind::Float, device))?,
            growth_tracker: Tensor::f_full(NO_DIM, state.growth_tracker, (Kind::Int, device))?,
        })
    }
}

/// Whether no gradient was infinite or NaN, as far as the CPU can tell without waiting for a GPU.
fn finite_as_far_as_known(found_inf: &[Tensor]) -> Result<bool> {
    let mut finite = true;
    for found_inf in found_inf.iter().filter(|found_inf| found_inf.device() == Device::Cpu) {
        finite &= found_inf.f_double_value(&[])? == 0.0;
    }
    Ok(finite)
}

fn no_gradient(op: &str) -> Error {
    let hint = "did the backward of the scaled loss run, and reach them?";
    Error::argument(op, "optimizer", "a parameter with a gradient", "none", hint)
}

fn too_late(op: &str, call: &str) -> Error {
    let got = format!("one after {call}");
    Error::argument(
        op,
        "optimizer",
        "an optimizer that was neither unscaled nor stepped since the last update",
        got,
        "GradScaler::update ends an iteration",
    )
}
