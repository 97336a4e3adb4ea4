//! `torch.autocast`.

use crate::ffi::amp::{
    AutocastSetting, autocast_cache, enter_autocast, leave_autocast, set_autocast_cache,
};
use crate::{Error, Result};
use std::cell::RefCell;
use std::marker::PhantomData;
use tch::{Device, Kind};

/// Autocast in this thread until dropped, then as before; when a panic unwinds, too. In Python it
/// is `with torch.autocast(…)`.
///
/// It holds for all devices of the given one's type. Regions nest to any depth, also those of
/// different devices. What autocast casts for an operation is libtorch's list for the type of
/// device. The weights that it cast are kept, so that a weight used twice is cast once, until the
/// thread's outermost region ends: a weight that is changed inside a region may go on with its old
/// values there. As in torch, they are kept for the process, not the thread: where regions of two
/// threads overlap, a thread may find what the other cast before the weight was changed, and the
/// end of either's outermost region lets go of all.
///
/// The backward belongs outside of the region: it runs each operation in the kind of its forward by
/// itself.
///
/// Guards are best dropped in the reverse order of their making. In any other order the youngest
/// guard still alive decides, and when the last is dropped all is as it was before the first.
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
    /// The settings are the thread's: the guard stays in it.
    _not_send: PhantomData<*mut ()>,
}

impl Autocast {
    /// Switches autocast on for `device`'s type, in kind `Half` or `BFloat16`. Whether cast weights
    /// are kept stays as it is.
    ///
    /// # Errors
    /// On another kind; when `device` is neither the CPU nor a CUDA device that is there.
    pub fn new(device: Device, kind: Kind) -> Result<Autocast> {
        enabled("Autocast::new", device, kind, None)
    }

    /// [`Autocast::new`], and cast weights are kept from now on or not (`cache_enabled` in Python).
    /// Without keeping, a weight that is changed inside the region takes effect at once.
    ///
    /// ```
    /// # use tch::{Device, Kind};
    /// # use tch_extension::amp::Autocast;
    /// let _autocast = Autocast::with_cache(Device::Cpu, Kind::BFloat16, false)?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Autocast::new`].
    pub fn with_cache(device: Device, kind: Kind, cache: bool) -> Result<Autocast> {
        enabled("Autocast::with_cache", device, kind, Some(cache))
    }

    /// Switches autocast off for `device`'s type, such as for a part of a region that needs
    /// precision. What comes into it in a half kind is best cast with `to_kind(Kind::Float)`.
    ///
    /// # Errors
    /// When `device` is neither the CPU nor a CUDA device that is there.
    pub fn disabled(device: Device) -> Result<Autocast> {
        let cuda = is_cuda("Autocast::disabled", device)?;
        enter(cuda, AutocastSetting::get(cuda)?.off(), None)
    }

    /// The kind to which autocast casts on `device` at the moment, in this thread; `None` when it
    /// is off.
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

/// What a guard found.
struct Before {
    /// The guard; ascending.
    id: u64,
    cuda: bool,
    setting: AutocastSetting,
    cache: bool,
}

thread_local! {
    /// Of the thread's living guards, oldest first.
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
        // Of a thread that is about to end nothing is left to restore.
        let Ok(Some(end)) = GUARDS.try_with(|guards| end(&mut guards.borrow_mut(), self.id)) else {
            return;
        };
        // The list is not borrowed any more: with the cast weights goes whatever hangs on their
        // graph. libtorch cannot fail here: it takes what it gave.
        let _ = leave_autocast();
        if let Some((cuda, setting)) = end.setting {
            let _ = setting.set(cuda);
        }
        if let Some(cache) = end.cache {
            set_autocast_cache(cache);
        }
    }
}

/// What to put back when a guard is gone.
struct End {
    setting: Option<(bool, AutocastSetting)>,
    cache: Option<bool>,
}

/// Takes a guard off the list. What it found is the next younger one's to put back, if there is
/// one.
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

/// Whether the device is CUDA's rather than the CPU, and there.
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
        // No younger one of its device, but one that has the cache.
        let ended = end(&mut guards, 1).unwrap();
        assert!(ended.setting.is_some_and(|(cuda, _)| cuda) && ended.cache.is_none());
        assert!(guards[0].cache && end(&mut guards, 1).is_none());
    }
}
