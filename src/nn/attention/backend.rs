//! The back ends of libtorch's attention.

use super::functional::{AttentionOptions, OP, Prepared};
use crate::ffi::sdp_backends::SdpBackends;
use crate::{Error, Result};
use std::sync::Once;
use tch::{Device, Kind, Tensor};

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
    fn number(self) -> usize {
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
/// after a panic, the settings are what they were before.
///
/// The settings belong to the process and not to the thread, as in torch: a region changes what
/// other threads compute meanwhile, and regions of two threads must not overlap. The backward pass
/// uses the back end of its forward pass, wherever it runs.
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
    within("sdpa_kernel", backends, |_| Ok(()), body)
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
    let reorder = |settings: &mut SdpBackends| -> Result<()> {
        // `sort_by_key` is stable, so back ends that are not in the slice keep their order.
        settings.order.sort_by_key(|&number| {
            let place = backends.iter().position(|backend| backend.number() as i64 == number);
            place.unwrap_or(backends.len())
        });
        Ok(())
    };
    settle_the_initial_order();
    within("sdpa_kernel_by_priority", backends, reorder, body)
}

fn within<T>(
    op: &str,
    backends: &[SdpaBackend],
    adapt: impl FnOnce(&mut SdpBackends) -> Result<()>,
    body: impl FnOnce() -> T,
) -> Result<T> {
    if backends.is_empty() {
        return Err(Error::argument(op, "backends", "one back end or more", "none", ""));
    }
    let before = SdpBackends::get()?;
    let mut settings = before;
    for (number, enabled) in settings.enabled.iter_mut().enumerate() {
        *enabled = backends.iter().any(|backend| backend.number() == number);
    }
    adapt(&mut settings)?;
    let _restore = Restore(before);
    settings.set()?;
    Ok(body())
}

struct Restore(SdpBackends);

impl Drop for Restore {
    fn drop(&mut self) {
        // libtorch cannot fail here, because it only gets back its own settings.
        let _ = self.0.set();
    }
}

/// libtorch overwrites the order of the back ends when it chooses one on CUDA for the first time.
/// So it has to do that before the order is changed.
fn settle_the_initial_order() {
    static SETTLED: Once = Once::new();
    SETTLED.call_once(|| {
        if tch::Cuda::is_available() {
            // Nothing is lost if this fails: attention itself will fail, too.
            let _ = Tensor::f_empty([1, 1, 8, 8], (Kind::Half, Device::Cuda(0))).and_then(|x| {
                Tensor::f_internal_fused_sdp_choice(
                    &x,
                    &x,
                    &x,
                    None::<&Tensor>,
                    0.0,
                    false,
                    None,
                    false,
                )
            });
        }
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
