//! The back ends of libtorch's attention.

use super::functional::{AttentionOptions, OP, Prepared};
use crate::ffi::sdp_backends::{SdpBackends, SdpEnabled, SdpOrder};
use crate::{Error, Result};
use std::sync::{Mutex, Once, PoisonError};
use tch::Tensor;

/// A way in which libtorch computes
/// [`scaled_dot_product_attention`](super::scaled_dot_product_attention):
/// torch.nn.attention.SDPBackend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SdpaBackend {
    /// Matrix products and a softmax, for all arguments. It keeps the matrix of weights, `[.., L,
    /// S]`, and has second derivatives.
    Math,
    /// FlashAttention 2 on CUDA, in half kinds and without a mask; libtorch's own kernel on the
    /// CPU.
    FlashAttention,
    /// Memory-efficient attention (CUTLASS), on CUDA.
    EfficientAttention,
    /// cuDNN's kernels, on CUDA, in half kinds.
    CudnnAttention,
}

impl SdpaBackend {
    const ALL: [SdpaBackend; 4] = [
        SdpaBackend::Math,
        SdpaBackend::FlashAttention,
        SdpaBackend::EfficientAttention,
        SdpaBackend::CudnnAttention,
    ];

    /// The number in `at::SDPBackend`.
    pub(super) fn number(self) -> usize {
        match self {
            SdpaBackend::Math => 0,
            SdpaBackend::FlashAttention => 1,
            SdpaBackend::EfficientAttention => 2,
            SdpaBackend::CudnnAttention => 3,
        }
    }

    /// Whether it computes without the matrix of weights.
    pub fn is_fused(self) -> bool {
        self != SdpaBackend::Math
    }
}

/// The back ends that are enabled now, first the one that libtorch tries first.
///
/// On GPUs on which libtorch prefers cuDNN, it changes the initial order when the process calls
/// attention on CUDA for the first time.
///
/// # Errors
/// An error of libtorch.
pub fn enabled_sdpa_backends() -> Result<Vec<SdpaBackend>> {
    let now = SdpBackends::get()?;
    let known = |number: &i64| SdpaBackend::ALL.into_iter().find(|b| b.number() as i64 == *number);
    let enabled = |backend: &SdpaBackend| now.enabled[backend.number()];
    Ok(now.order.iter().filter_map(known).filter(enabled).collect())
}

/// Runs `body` with only these back ends enabled: torch.nn.attention.sdpa_kernel. Afterwards, also
/// after a panic, the same are enabled as before.
///
/// The settings belong to the process and not to the thread, as in torch: a region changes what
/// other threads compute meanwhile. If regions of two threads overlap, the newest of those that are
/// open decides, and after the last one the settings are those from before the first.
///
/// The backward pass uses the back end of its forward pass, wherever it runs. But
/// [`checkpoint`](crate::autograd::checkpoint()) computes the forward pass again during the backward
/// pass, and chooses anew: run such a backward pass within the region, too.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_extension::nn::{AttentionOptions, SdpaBackend, f_sdpa_backend, sdpa_kernel};
///
/// let x = Tensor::randn([2, 4, 5, 8], (Kind::Float, Device::Cpu));
/// let options = AttentionOptions::default();
/// assert_eq!(f_sdpa_backend(&x, &x, &x, &options)?, SdpaBackend::FlashAttention);
/// let inside = sdpa_kernel(&[SdpaBackend::Math], || f_sdpa_backend(&x, &x, &x, &options))??;
/// assert_eq!(inside, SdpaBackend::Math);
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// When `backends` is empty, and an error of libtorch.
pub fn sdpa_kernel<T>(backends: &[SdpaBackend], body: impl FnOnce() -> T) -> Result<T> {
    within("sdpa_kernel", backends, false, body)
}

/// [`sdpa_kernel`], and libtorch tries the back ends in the order of the slice: `sdpa_kernel(…,
/// set_priority=True)` in Python. The order matters on CUDA only.
///
/// ```
/// use tch_extension::nn::{SdpaBackend, enabled_sdpa_backends, sdpa_kernel_by_priority};
///
/// let order = [SdpaBackend::Math, SdpaBackend::CudnnAttention];
/// assert_eq!(sdpa_kernel_by_priority(&order, enabled_sdpa_backends)??, order);
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// As for [`sdpa_kernel`].
pub fn sdpa_kernel_by_priority<T>(backends: &[SdpaBackend], body: impl FnOnce() -> T) -> Result<T> {
    settle_the_initial_order();
    within("sdpa_kernel_by_priority", backends, true, body)
}

fn within<T>(
    op: &str,
    backends: &[SdpaBackend],
    by_priority: bool,
    body: impl FnOnce() -> T,
) -> Result<T> {
    if backends.is_empty() {
        return Err(Error::argument(op, "backends", "one back end or more", "none", ""));
    }
    let _region = OpenRegion::new(backends, by_priority)?;
    Ok(body())
}

/// The settings that a region found, which it restores. Later regions have greater ids.
struct Region {
    id: u64,
    enabled: SdpEnabled,
    /// Only if the region changed it. libtorch may set its own order meanwhile, which must stay.
    order: Option<SdpOrder>,
}

/// The regions of all threads that are open, oldest first.
static REGIONS: Mutex<Vec<Region>> = Mutex::new(Vec::new());

/// Ends its region when it is dropped, also by a panic.
struct OpenRegion(u64);

impl OpenRegion {
    fn new(backends: &[SdpaBackend], by_priority: bool) -> Result<Self> {
        let mut regions = REGIONS.lock().unwrap_or_else(PoisonError::into_inner);
        let SdpBackends { order: found_order, enabled: found } = SdpBackends::get()?;
        let place = |number: i64| backends.iter().position(|b| b.number() as i64 == number);
        let mut enabled = found;
        for (number, enabled) in enabled.iter_mut().enumerate() {
            *enabled = place(number as i64).is_some();
        }
        SdpBackends::enable(&enabled)?;
        let id = regions.last().map_or(0, |newest| newest.id + 1);
        regions.push(Region { id, enabled: found, order: by_priority.then_some(found_order) });
        let region = OpenRegion(id);
        // The lock is free before `region` may be dropped.
        let ordered = by_priority.then(|| {
            let mut order = found_order;
            // The sort is stable, so back ends that are not in the slice keep their order.
            order.sort_by_key(|&number| place(number).unwrap_or(backends.len()));
            SdpBackends::set_order(&order)
        });
        drop(regions);
        ordered.transpose().map(|_| region)
    }
}

impl Drop for OpenRegion {
    fn drop(&mut self) {
        let mut regions = REGIONS.lock().unwrap_or_else(PoisonError::into_inner);
        let (enabled, order) = end(&mut regions, self.0);
        // libtorch cannot fail here, because it only gets back its own settings.
        let _ = enabled.map(|enabled| SdpBackends::enable(&enabled));
        let _ = order.map(|order| SdpBackends::set_order(&order));
    }
}

/// Takes a region off the list, and returns what to restore. What a newer region has changed, that
/// region will restore.
fn end(regions: &mut Vec<Region>, id: u64) -> (Option<SdpEnabled>, Option<SdpOrder>) {
    let Some(index) = regions.iter().position(|region| region.id == id) else {
        return (None, None);
    };
    let Region { enabled, order, .. } = regions.remove(index);
    let newer = &mut regions[index..];
    let heir = newer.iter_mut().find_map(|newer| newer.order.as_mut());
    let order = match (order, heir) {
        (Some(order), Some(heir)) => {
            *heir = order;
            None
        }
        (order, _) => order,
    };
    match newer.first_mut() {
        Some(heir) => {
            heir.enabled = enabled;
            (None, order)
        }
        None => (Some(enabled), order),
    }
}

/// libtorch overwrites the order of the back ends when it chooses one on CUDA for the first time.
/// So it has to do that before the order is changed.
fn settle_the_initial_order() {
    static SETTLED: Once = Once::new();
    SETTLED.call_once(|| {
        // Nothing is lost if this fails: attention itself will fail, too.
        let _ = SdpBackends::settle();
    });
}

/// Which back end [`scaled_dot_product_attention`](super::scaled_dot_product_attention) takes for
/// these arguments now. It computes nothing. What is taken also depends on whether gradients will
/// be needed.
///
/// # Errors
/// As for [`f_scaled_dot_product_attention`](super::f_scaled_dot_product_attention).
pub fn f_sdpa_backend(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    options: &AttentionOptions<'_>,
) -> Result<SdpaBackend> {
    let prepared = Prepared::new(query, key, value, options)?;
    let Some(number) = prepared.choice()? else { return Ok(SdpaBackend::Math) };
    let known = SdpaBackend::ALL.into_iter().find(|backend| backend.number() as i64 == number);
    known.ok_or_else(|| Error::msg(format!("{OP}: libtorch chose its back end {number}")))
}

/// libtorch's error, in our words if no back end can be taken.
pub(super) fn refusal(error: tch::TchError) -> Error {
    let error = Error::from(error);
    let text = error.to_string();
    if !text.contains("No available kernel") && !text.contains("No viable backend") {
        return error;
    }
    let enabled = enabled_sdpa_backends().unwrap_or_default();
    Error::msg(format!(
        "{OP}: expected an enabled back end that takes these arguments, got {enabled:?}; SdpaBackend::Math takes all"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On CUDA libtorch sets its order when it first chooses a back end, perhaps within a region.
    #[test]
    fn an_order_that_libtorch_sets_within_a_region_stays() {
        // On a GPU, the region by priority would do it, after `before` was read.
        settle_the_initial_order();
        let now = || SdpBackends::get().expect("settings");
        let before = now();
        let mut other = before.order;
        other.reverse();
        let set = || SdpBackends::set_order(&other).expect("an order");
        sdpa_kernel(&[SdpaBackend::Math], set).expect("a region");
        assert_eq!(now(), SdpBackends { order: other, ..before });
        SdpBackends::set_order(&before.order).expect("the order before");
        sdpa_kernel_by_priority(&[SdpaBackend::Math], set).expect("a region");
        assert_eq!(now(), before);
    }

    #[test]
    fn what_a_region_found_goes_to_the_next_newer_one() {
        let region = |id, first, order: Option<i64>| Region {
            id,
            enabled: [first, true, true, true, true],
            order: order.map(|first| [first, 1, 2, 3, 4]),
        };
        let mut regions =
            vec![region(3, true, Some(7)), region(4, false, None), region(5, true, Some(8))];
        assert_eq!(end(&mut regions, 3), (None, None));
        assert!(regions[0].enabled[0] && regions[0].order.is_none());
        assert_eq!(regions[1].order, Some([7, 1, 2, 3, 4]));
        let enabled = [true; 5];
        assert_eq!(end(&mut regions, 5), (Some(enabled), Some([7, 1, 2, 3, 4])));
        assert_eq!(end(&mut regions, 4), (Some(enabled), None));
        assert_eq!(end(&mut regions, 4), (None, None));
    }
}
