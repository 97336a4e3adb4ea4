//! Calls of the kernels of `csrc/optim`, and what they need to know about tensors.

pub(super) mod half;
mod spans;

pub(super) use spans::{Spans, Update};

use super::optimizer::KINDS;
use crate::ffi::tensor::touch;
use crate::ffi::{kind_code, take_message};
use crate::{Error, Result};
use std::ffi::{c_char, c_void};
use std::ops::Range;
use std::ptr::{null, null_mut};
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

/// How parameters are updated.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    AdamW,
    /// AdamW with AMSGrad.
    AmsGrad,
    Sgd,
    /// The momentum of Muon: a span's weights, which are 0, become the direction of its step.
    Muon,
}

impl Rule {
    pub fn is_adam(self) -> bool {
        matches!(self, Rule::AdamW | Rule::AmsGrad)
    }
}

/// The numbers of a group of parameters, in memory of the device, so that a captured graph reads
/// their current values.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Hyper {
    pub lr: f64,
    pub weight_decay: f64,
    /// AdamW's β₁, SGD's and Muon's momentum.
    pub first: f64,
    /// AdamW's β₂, SGD's dampening.
    pub second: f64,
    /// AdamW's ε.
    pub epsilon: f64,
    /// SGD and Muon: 1 for Nesterov's momentum, or else 0.
    pub nesterov: f64,
    /// 1 if gradients are followed upward, or else 0.
    pub maximize: f64,
}

/// The number of values in a [`Hyper`].
pub(super) const HYPERS: i64 = 7;

/// What a step multiplies the values of a span with. The first kernel of a step computes it from
/// the group's numbers, the number of steps and the gradients' norm.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Coefficients {
    /// Not 0: nothing is updated.
    skip: f64,
    /// Gradients are multiplied by this, and then by `clip`. Negative if they are followed upward.
    inverse_scale: f64,
    clip: f64,
    /// AdamW: lr / (1 - β₁ᵗ). SGD: lr. Muon: -1.
    rate: f64,
    /// AdamW: 1 - lr · weight decay. SGD: the weight decay. Muon: 0.
    decay: f64,
    /// AdamW: β₁. SGD: the momentum; 0 if there is no buffer. Muon: the momentum.
    first: f64,
    /// AdamW: β₂. SGD: what the gradient is multiplied by before it is added to the buffer. Muon: 1.
    second: f64,
    /// AdamW: 1 / √(1 - β₂ᵗ). SGD and Muon: 1 for Nesterov's momentum, or else 0.
    root: f64,
    /// AdamW: ε.
    epsilon: f64,
}

/// The number of values in [`Coefficients`].
const COEFFICIENTS: i64 = 9;

/// Values that are updated alike: a parameter, or a part of one. All arrays have `len` values in
/// the same order.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Span {
    /// What is updated: the parameter, or its master weights.
    weight: *mut c_void,
    /// Gets the updated weights, rounded to a half kind: the parameter of master weights. May be
    /// null.
    rounded: *mut c_void,
    gradient: *mut c_void,
    /// AdamW's mean of gradients; SGD's buffer, which may be null; Muon's buffer.
    first: *mut c_void,
    /// AdamW's mean of squared gradients; null for SGD.
    second: *mut c_void,
    /// AMSGrad's largest `second` so far; null for others.
    largest: *mut c_void,
    /// The number of steps so far. SGD counts the updates of its buffer.
    step: *mut i64,
    hyper: *const Hyper,
    len: i64,
    /// The number of chunks of the spans before this one.
    begin: i64,
    /// libtorch's numbers of the kinds. They are small, so that more spans fit into a launch.
    kind: i16,
    rounded_kind: i16,
    gradient_kind: i16,
    /// The kind in which values of `kind` are computed or, for a half kind, that kind.
    moment_kind: i16,
}

/// One step over spans whose tensors are on one device.
#[repr(C)]
pub(super) struct Step {
    /// `[count]`, in memory of the host.
    spans: *const Span,
    count: i64,
    /// The number of values that a block, or an item of the CPU's work, takes at a time: a multiple
    /// of 1024.
    chunk: i64,
    /// The number of chunks of all spans.
    chunks: i64,
    rule: Rule,
    /// Whether the gradients are scaled by `grad_scale`; `found_inf` is then written instead of
    /// read.
    is_scaled: i32,
    /// Whether `scan` also does the work of `prepare`.
    prepares: i32,
    reserved: i32,
    /// `[1]`; null if gradients are not scaled.
    grad_scale: *const f32,
    /// `[1]`: not 0 if a gradient is infinite or NaN; may be null.
    found_inf: *mut f32,
    /// `[1]`: the norm to which gradients are clipped; null if they are not.
    max_norm: *const f64,
    /// `[1]`: gets the norm of the gradients; may be null.
    norm: *mut f64,
    /// `[2]`: the sum of the squares of the gradients, and the number of chunks with one that is
    /// infinite or NaN. Null if nobody asks for them.
    totals: *mut f64,
    /// `[chunks + 1, 2]`: the same per chunk. The last launch of several may have no chunk, and its
    /// only block then writes after all others.
    partials: *mut f64,
    /// `[1]`: a counter, 0 between kernels.
    ticket: *mut u32,
    /// `[count]`
    coefficients: *mut Coefficients,
}

/// A change of gradients in place.
#[repr(C)]
pub(super) struct Rewrite {
    spans: *const Span,
    count: i64,
    chunk: i64,
    chunks: i64,
    /// The first of [`Step::totals`]; null if gradients are limited one by one.
    squares: *const f64,
    /// The largest norm of all, or the largest absolute value of each.
    max: f64,
}

/// Numbers that are written to memory of a device without waiting for it.
#[repr(C)]
pub(super) struct Store {
    to: *mut f64,
    count: i64,
    /// `[count]`
    values: [f64; 7],
}

/// Whether a tensor can be updated, and what is in the way. C++ makes the values.
#[allow(dead_code)]
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Readiness {
    Ready,
    /// A parameter without a gradient.
    Absent,
    /// A gradient whose values are in another order than the parameter's, or not in memory.
    OtherLayout,
    NotStrided,
    NotDense,
    Inference,
    OtherSize,
}

/// A tensor as the kernels see it. The address is valid as long as the tensor is borrowed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Fact {
    pub data: *mut c_void,
    pub len: i64,
    /// libtorch's number of the kind.
    pub kind: i32,
    /// The index of a CUDA device, -1 for the CPU, -2 for any other device.
    pub device: i32,
    pub readiness: Readiness,
    /// Tells orders of a parameter's elements in memory apart; 0 for a contiguous one.
    pub layout: i32,
}

impl Fact {
    const NONE: Fact = Fact {
        data: null_mut(),
        len: 0,
        kind: -1,
        device: -2,
        readiness: Readiness::Absent,
        layout: 0,
    };

    pub fn device(&self) -> Option<Device> {
        match self.device {
            -1 => Some(Device::Cpu),
            index => usize::try_from(index).ok().map(Device::Cuda),
        }
    }

    pub fn is_of(&self, kind: Kind) -> bool {
        kind_code(kind).is_ok_and(|code| code == self.kind)
    }
}

crate::kernels::raw_kernels! {
    "optim";
    fn scan_raw(Step) = tch_extension_optim_scan_cpu, tch_extension_optim_scan_cuda;
    fn prepare_raw(Step) = tch_extension_optim_prepare_cpu, tch_extension_optim_prepare_cuda;
    fn update_raw(Step) = tch_extension_optim_update_cpu, tch_extension_optim_update_cuda;
    fn rewrite_raw(Rewrite) = tch_extension_optim_rewrite_cpu, tch_extension_optim_rewrite_cuda;
    fn store_raw(Store) = tch_extension_optim_store_cpu, tch_extension_optim_store_cuda;
}

unsafe extern "C" {
    // csrc/optim/tensors.cpp
    fn tch_extension_optim_facts(
        parameters: *const *const C_tensor,
        gradients: *const *const C_tensor,
        count: usize,
        facts: *mut Fact,
    ) -> *mut c_char;
    fn tch_extension_optim_forget_gradients(
        parameters: *const *const C_tensor,
        count: usize,
    ) -> *mut c_char;
    fn tch_extension_optim_bump_versions(
        tensors: *const *const C_tensor,
        count: usize,
    ) -> *mut c_char;
}

fn check(message: *mut c_char) -> Result<()> {
    take_message(message).map_or(Ok(()), |text| Err(Error::Torch(text)))
}

/// A parameter and its gradient as the kernels see them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    pub parameter: Fact,
    pub gradient: Fact,
}

/// What is known about the parameters, and about their gradients: those that autograd has
/// accumulated, or those that are given.
pub(super) fn facts(
    parameters: &[&Tensor],
    gradients: Option<&[Option<&Tensor>]>,
) -> Result<Vec<Facts>> {
    let pointers: Vec<*const C_tensor> = parameters.iter().map(|tensor| tensor.as_ptr()).collect();
    let given: Option<Vec<*const C_tensor>> = gradients.map(|gradients| {
        let pointer = |tensor: &Tensor| tensor.as_ptr();
        gradients.iter().map(|gradient| gradient.map_or(null(), pointer)).collect()
    });
    if given.as_ref().is_some_and(|given| given.len() != pointers.len()) {
        return Err(Error::msg("internal error: another number of gradients than of parameters"));
    }
    let mut facts = vec![Fact::NONE; 2 * pointers.len()];
    // SAFETY: all pointers are null or borrowed from live tensors. Both arrays of pointers have as
    // many entries as there are parameters, and `facts` has twice as many.
    check(unsafe {
        tch_extension_optim_facts(
            pointers.as_ptr(),
            given.as_ref().map_or(null(), Vec::as_ptr),
            pointers.len(),
            facts.as_mut_ptr(),
        )
    })?;
    let pair = |pair: &[Fact]| match pair {
        &[parameter, gradient] => Some(Facts { parameter, gradient }),
        _ => None,
    };
    Ok(facts.chunks_exact(2).filter_map(pair).collect())
}

/// Makes the gradients of these parameters undefined.
pub(super) fn forget_gradients<'a>(parameters: impl Iterator<Item = &'a Tensor>) -> Result<()> {
    let pointers: Vec<*const C_tensor> = parameters.map(|tensor| tensor.as_ptr()).collect();
    // SAFETY: all pointers are borrowed from live tensors.
    check(unsafe { tch_extension_optim_forget_gradients(pointers.as_ptr(), pointers.len()) })
}

/// Tells autograd that the values of these tensors have changed.
pub(super) fn bump_versions<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> Result<()> {
    let pointers: Vec<*const C_tensor> = tensors.map(|tensor| tensor.as_ptr()).collect();
    // SAFETY: all pointers are borrowed from live tensors.
    check(unsafe { tch_extension_optim_bump_versions(pointers.as_ptr(), pointers.len()) })
}

/// A tensor that an optimizer owns and nobody else can reach, and its address.
#[derive(Debug)]
pub(super) struct Owned {
    tensor: Tensor,
    data: *mut c_void,
}

// SAFETY: the address belongs to the tensor, which may be sent to another thread.
unsafe impl Send for Owned {}

impl Owned {
    /// Takes a tensor of which no other handle exists, or none that is used for anything but
    /// reading and writing values.
    pub fn new(tensor: Tensor) -> Self {
        let data = tensor.data_ptr();
        Owned { tensor, data }
    }

    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// The address, for a kernel.
    pub fn address(&self) -> *mut c_void {
        touch(&self.tensor);
        self.data
    }
}

/// What a step is told besides its spans. All tensors are on the spans' device.
pub(super) struct Call<'a> {
    pub rule: Rule,
    pub spans: &'a Spans,
    /// `[]`, `Float`: the gradients are scaled by it.
    pub grad_scale: Option<&'a Tensor>,
    /// `[]`, `Float`: written if gradients are scaled, and read otherwise.
    pub found_inf: Option<&'a Tensor>,
    /// `[1]`, `Double`
    pub max_norm: Option<&'a Owned>,
    /// `[1]`, `Double`
    pub norm: Option<&'a Owned>,
    /// `[1]`, `Int`
    pub ticket: &'a Owned,
}

/// Memory of one step.
pub(super) struct Scratch {
    /// `[2]`, `Double`: see [`Step::totals`].
    pub totals: Tensor,
    partials: Tensor,
    coefficients: Tensor,
}

impl Scratch {
    pub fn new(spans: &Spans, device: Device) -> Result<Scratch> {
        let of = |len: i64| Tensor::f_empty([len], (Kind::Double, device));
        Ok(Scratch {
            totals: of(2)?,
            partials: of(2 * (spans.chunks + 1))?,
            coefficients: of(COEFFICIENTS * spans.len())?,
        })
    }

    /// For other spans of the same step, with its totals.
    pub fn with_totals_of(&self, spans: &Spans, device: Device) -> Result<Scratch> {
        Ok(Scratch { totals: self.totals.shallow_clone(), ..Scratch::new(spans, device)? })
    }
}

fn scalar(tensor: Option<&Tensor>, device: Device) -> Result<*mut f32> {
    let Some(tensor) = tensor else { return Ok(null_mut()) };
    crate::ffi::checked("scalar", tensor, &[], (Kind::Float, device)).map(|data| data.cast())
}

impl Call<'_> {
    fn params(
        &self,
        device: Device,
        scratch: &Scratch,
        has_totals: bool,
        prepares: bool,
    ) -> Result<Step> {
        let Spans { spans, chunk, chunks } = self.spans;
        let data = |owned: Option<&Owned>| owned.map_or(null_mut(), Owned::address);
        Ok(Step {
            spans: spans.as_ptr(),
            count: self.spans.len(),
            chunk: *chunk,
            chunks: *chunks,
            rule: self.rule,
            is_scaled: self.grad_scale.is_some().into(),
            prepares: prepares.into(),
            reserved: 0,
            grad_scale: scalar(self.grad_scale, device)?,
            found_inf: scalar(self.found_inf, device)?,
            max_norm: data(self.max_norm).cast(),
            norm: data(self.norm).cast(),
            totals: if has_totals { scratch.totals.data_ptr().cast() } else { null_mut() },
            partials: scratch.partials.data_ptr().cast(),
            ticket: self.ticket.address().cast(),
            coefficients: scratch.coefficients.data_ptr().cast(),
        })
    }

    /// Adds up the squares of the gradients, and looks for infinite and NaN values. If `prepares`,
    /// it then does what [`Call::prepare`] does.
    pub fn scan(&self, device: Device, scratch: &Scratch, prepares: bool) -> Result<()> {
        let params = self.params(device, scratch, true, prepares)?;
        // SAFETY: the spans describe tensors that their owner still borrows, whose sizes, kinds and
        // device were looked up for this step; `scratch` was made for these spans.
        unsafe { scan_raw(device, &params) }
    }

    /// Counts the step and computes the coefficients, with the totals of a scan if there was one.
    pub fn prepare(&self, device: Device, scratch: &Scratch, has_totals: bool) -> Result<()> {
        let params = self.params(device, scratch, has_totals, false)?;
        // SAFETY: as for `scan`.
        unsafe { prepare_raw(device, &params) }
    }

    /// Updates weights and moments.
    pub fn update(&self, device: Device, scratch: &Scratch) -> Result<()> {
        let params = self.params(device, scratch, true, false)?;
        // SAFETY: as for `scan`. No two spans share memory that is written: this step compared the
        // parameters, the caller's master weights and the gradients, and all else belongs to one
        // parameter.
        unsafe { update_raw(device, &params) }
    }

    /// Updates weights and moments of some of the spans.
    pub fn update_some(
        &self,
        device: Device,
        scratch: &Scratch,
        range: Range<usize>,
    ) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let first = range.start;
        let some = self.spans.some(range)?;
        let params = self.params(device, scratch, true, false)?;
        let params = Step {
            spans: some.spans.as_ptr(),
            count: some.len(),
            chunks: some.chunks,
            coefficients: params.coefficients.wrapping_add(first),
            ..params
        };
        // SAFETY: as for `update`. `some` checked that these spans exist, and `scratch` has
        // coefficients for all spans.
        unsafe { update_raw(device, &params) }
    }
}

/// How gradients are changed in place.
#[derive(Clone, Copy)]
pub(super) enum Limit<'a> {
    /// They are scaled to a norm. The tensor has the sum of all squares, a `Double`.
    Norm(&'a Tensor, f64),
    /// Each is clamped.
    Value(f64),
}

pub(super) fn rewrite(spans: &Spans, device: Device, limit: Limit<'_>) -> Result<()> {
    let (squares, max) = match limit {
        Limit::Norm(squares, max) => {
            let like = (Kind::Double, device);
            (crate::ffi::checked("sum of squares", squares, &[], like)?, max)
        }
        Limit::Value(max) => (null_mut(), max),
    };
    let Spans { spans, chunk, chunks } = spans;
    let params = Rewrite {
        spans: spans.as_ptr(),
        count: spans.len() as i64,
        chunk: *chunk,
        chunks: *chunks,
        squares: squares.cast_const().cast(),
        max,
    };
    // SAFETY: the spans describe gradients whose owner still borrows them, and share no memory;
    // `squares` is on their device.
    unsafe { rewrite_raw(device, &params) }
}

/// Writes the numbers of a group to memory of a device, after the work that the current stream was
/// given so far.
pub(super) fn store_hyper(hyper: &Hyper, to: &Owned, device: Device) -> Result<()> {
    let Hyper { lr, weight_decay, first, second, epsilon, nesterov, maximize } = *hyper;
    store(&[lr, weight_decay, first, second, epsilon, nesterov, maximize], to, device)
}

/// Writes at most [`HYPERS`] numbers.
pub(super) fn store(numbers: &[f64], to: &Owned, device: Device) -> Result<()> {
    let like = (Kind::Double, device);
    let data = crate::ffi::checked("numbers", &to.tensor, &[numbers.len() as i64], like)?;
    let mut values = [0.0; HYPERS as usize];
    let places = values.get_mut(..numbers.len());
    places.ok_or_else(|| Error::msg("internal error: too many numbers"))?.copy_from_slice(numbers);
    let params = Store { to: data.cast(), count: numbers.len() as i64, values };
    // SAFETY: `checked` compared the tensor's kind, device and size.
    unsafe { store_raw(device, &params) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::size_of;

    #[test]
    fn the_numbers_of_values_are_those_of_the_structs() {
        assert_eq!(size_of::<Hyper>(), HYPERS as usize * 8);
        assert_eq!(size_of::<Coefficients>(), COEFFICIENTS as usize * 8);
    }
}
