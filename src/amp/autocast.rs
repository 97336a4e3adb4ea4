//! Regions in which libtorch casts automatically: `torch.autocast`.

use crate::ffi::amp::{
    AutocastSetting, autocast_cache, enter_autocast, leave_autocast, set_autocast_cache,
};
use crate::{Error, Result};
use std::cell::RefCell;
use std::marker::PhantomData;
use tch::{Device, Kind};

/// Keeps autocast on in this thread until the guard is dropped, even by a panic that unwinds. Then
/// the previous settings are restored. In Python this is `with torch.autocast(…)`.
///
/// The region holds for all devices of the same type as the given device. Regions may be nested to
/// any depth, also regions for different device types. Which operations are cast, and to which
/// kind, is decided by libtorch's lists for the device type.
///
/// libtorch caches the casts of weights, so that a weight that is used twice is cast once. The
/// cache is cleared when the thread's outermost region ends. A weight that is changed inside a
/// region may therefore continue to be used with its old values there. As in torch, the cache
/// belongs to the process and not to the thread. If regions of two threads overlap, a thread may
/// find a weight that the other thread cast before the weight was changed, and the end of either
/// thread's outermost region clears the whole cache.
///
/// Run the backward pass outside of the region: it runs each operation in the kind of its forward
/// operation by itself. The [operators](crate::ops) of this crate do so inside of a region, too; the
/// backward passes of libtorch's operations are cast there like any others.
///
/// Drop guards in the reverse order of their creation. In any other order, the newest guard that is
/// still alive decides, and when the last guard is dropped, the settings are those from before the
/// first.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_extension::amp::Autocast;
///
/// let x = Tensor::randn([2, 2], (Kind::Float, Device::Cpu));
/// let autocast = Autocast::new(Device::Cpu, Kind::BFloat16)?;
/// let y = x.matmul(&x);
/// assert_eq!(y.kind(), Kind::BFloat16);
/// {
///     let _off = Autocast::disabled(Device::Cpu)?;
///     assert_eq!(y.to_kind(Kind::Float).matmul(&x).kind(), Kind::Float);
/// }
/// drop(autocast);
/// assert_eq!(x.matmul(&x).kind(), Kind::Float);
/// # Ok::<(), tch_extension::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "autocast ends when the guard is dropped"]
pub struct Autocast {
    id: u64,
    /// The settings belong to the thread, so the guard must stay in it.
    _not_send: PhantomData<*mut ()>,
}

impl Autocast {
    /// Switches autocast on for `device`'s type, with kind `Half` or `BFloat16`. Whether casts of
    /// weights are cached stays as it is.
    ///
    /// # Errors
    /// When `kind` is another kind, or `device` is neither the CPU nor an existing CUDA device.
    pub fn new(device: Device, kind: Kind) -> Result<Autocast> {
        enabled("Autocast::new", device, kind, None)
    }

    /// Like [`Autocast::new`], but also sets whether casts of weights are cached (`cache_enabled`
    /// in Python). Without the cache, a change of a weight inside the region takes effect at once.
    ///
    /// ```
    /// # use tch::{Device, Kind};
    /// # use tch_extension::amp::Autocast;
    /// let _autocast = Autocast::with_cache(Device::Cpu, Kind::BFloat16, false)?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Autocast::new`].
    pub fn with_cache(device: Device, kind: Kind, cache: bool) -> Result<Autocast> {
        enabled("Autocast::with_cache", device, kind, Some(cache))
    }

    /// Switches autocast off for `device`'s type, for example in a part of a region that needs
    /// precision. If an input of that part has a half kind, cast it with `to_kind(Kind::Float)`.
    ///
    /// # Errors
    /// When `device` is neither the CPU nor an existing CUDA device.
    pub fn disabled(device: Device) -> Result<Autocast> {
        let cuda = is_cuda("Autocast::disabled", device)?;
        enter(cuda, AutocastSetting::get(cuda)?.off(), None)
    }

    /// The kind to which autocast now casts on `device` in this thread, or `None` if autocast is
    /// off.
    ///
    /// ```
    /// # use tch::{Device, Kind};
    /// # use tch_extension::amp::Autocast;
    /// assert_eq!(Autocast::kind(Device::Cpu), None);
    /// let _autocast = Autocast::new(Device::Cpu, Kind::BFloat16)?;
    /// assert_eq!(Autocast::kind(Device::Cpu), Some(Kind::BFloat16));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn kind(device: Device) -> Option<Kind> {
        let cuda = match device {
            Device::Cpu => false,
            Device::Cuda(_) => true,
            _ => return None,
        };
        AutocastSetting::get(cuda).ok()?.kind()
    }
}

/// The settings that a guard found when it was made.
struct Before {
    /// The guard's id. Later guards have greater ids.
    id: u64,
    cuda: bool,
    setting: AutocastSetting,
    cache: bool,
}

thread_local! {
    /// The entries of this thread's living guards, oldest first.
    static GUARDS: RefCell<Vec<Before>> = const { RefCell::new(Vec::new()) };
}

fn enabled(op: &str, device: Device, kind: Kind, cache: Option<bool>) -> Result<Autocast> {
    let cuda = is_cuda(op, device)?;
    let setting = AutocastSetting::on(kind).ok_or_else(|| {
        Error::argument(
            op,
            "kind",
            "Half or BFloat16",
            format!("{kind:?}"),
            "Autocast::disabled switches it off",
        )
    })?;
    enter(cuda, setting, cache)
}

fn enter(cuda: bool, setting: AutocastSetting, cache: Option<bool>) -> Result<Autocast> {
    let before = AutocastSetting::get(cuda)?;
    setting.set(cuda)?;
    enter_autocast();
    let cache_before = autocast_cache();
    set_autocast_cache(cache.unwrap_or(cache_before));
    let id = GUARDS.with_borrow_mut(|guards| {
        let id = guards.last().map_or(0, |youngest| youngest.id + 1);
        guards.push(Before { id, cuda, setting: before, cache: cache_before });
        id
    });
    Ok(Autocast { id, _not_send: PhantomData })
}

impl Drop for Autocast {
    fn drop(&mut self) {
        // If the thread is about to end, nothing is left to restore.
        let Ok(Some(end)) = GUARDS.try_with(|guards| end(&mut guards.borrow_mut(), self.id)) else {
            return;
        };
        // The list is no longer borrowed here, because freeing the cached casts also frees whatever
        // their graph holds. libtorch cannot fail here, because it only gets back its own settings.
        let _ = leave_autocast();
        if let Some((cuda, setting)) = end.setting {
            let _ = setting.set(cuda);
        }
        if let Some(cache) = end.cache {
            set_autocast_cache(cache);
        }
    }
}

/// The settings to restore after a guard is gone.
struct End {
    setting: Option<(bool, AutocastSetting)>,
    cache: Option<bool>,
}

/// Takes a guard off the list. If there is a newer guard, that one inherits the settings to
/// restore.
fn end(guards: &mut Vec<Before>, id: u64) -> Option<End> {
    let index = guards.iter().position(|guard| guard.id == id)?;
    let found = guards.remove(index);
    let mut end = End { setting: Some((found.cuda, found.setting)), cache: Some(found.cache) };
    if let Some(younger) = guards[index..].iter_mut().find(|younger| younger.cuda == found.cuda) {
        younger.setting = found.setting;
        end.setting = None;
    }
    if let Some(younger) = guards.get_mut(index) {
        younger.cache = found.cache;
        end.cache = None;
    }
    Some(end)
}

/// Whether the device is an existing CUDA device; false for the CPU.
fn is_cuda(op: &str, device: Device) -> Result<bool> {
    let index = match device {
        Device::Cpu => return Ok(false),
        Device::Cuda(index) => index,
        other => {
            return Err(Error::argument(
                op,
                "device",
                "the CPU or a CUDA device",
                format!("{other:?}"),
                "",
            ));
        }
    };
    let count = usize::try_from(tch::Cuda::device_count()).unwrap_or(0);
    if index < count {
        return Ok(true);
    }
    let reason = match count {
        0 => {
            "libtorch has no CUDA here, or sees no GPU; use Device::cuda_if_available()".to_string()
        }
        _ => format!("there is no CUDA device {index}; libtorch sees {count}"),
    };
    Err(Error::Cuda { op: op.to_string(), reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(kind: Kind) -> AutocastSetting {
        AutocastSetting::on(kind).unwrap()
    }

    fn found(id: u64, cuda: bool, kind: Kind, cache: bool) -> Before {
        Before { id, cuda, setting: setting(kind), cache }
    }

    #[test]
    fn what_a_guard_found_goes_to_the_next_of_its_device() {
        let mut guards = vec![
            found(0, false, Kind::Half, true),
            found(1, true, Kind::BFloat16, false),
            found(2, false, Kind::BFloat16, false),
        ];
        let ended = end(&mut guards, 0).unwrap();
        assert!(ended.setting.is_none() && ended.cache.is_none());
        let left: Vec<_> =
            guards.iter().map(|guard| (guard.id, guard.setting.kind(), guard.cache)).collect();
        assert_eq!(left, [(1, Some(Kind::BFloat16), true), (2, Some(Kind::Half), false)]);
        // No newer guard has the same device type, but a newer guard restores the cache.
        let ended = end(&mut guards, 1).unwrap();
        assert!(ended.setting.is_some_and(|(cuda, _)| cuda) && ended.cache.is_none());
        assert!(guards[0].cache && end(&mut guards, 1).is_none());
    }
}
