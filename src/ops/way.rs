//! How a test or a benchmark forces one of an operator's ways.

use std::cell::Cell;
use std::thread::LocalKey;

/// The ways of one operator: kernels, or sequences of kernels, that compute the same result. The
/// operator's plan chooses one of them, unless [`force`] did. The default value leaves the choice
/// to the plan.
#[doc(hidden)]
pub trait Way: Copy + Default + 'static {
    /// The way that is forced in this thread.
    #[doc(hidden)]
    fn forced() -> &'static LocalKey<Cell<Self>>;
}

/// Runs `body`. In it, this thread's calls of the operator use the given way where it exists for
/// their arguments. The backward passes of these calls use it as well, whichever thread runs them
/// and when.
#[doc(hidden)]
pub fn force<W: Way, T>(way: W, body: impl FnOnce() -> T) -> T {
    struct Restore<W: Way>(W);
    impl<W: Way> Drop for Restore<W> {
        fn drop(&mut self) {
            W::forced().set(self.0);
        }
    }
    let _restore = Restore(W::forced().replace(way));
    body()
}

/// The way that is forced in this thread.
pub(super) fn forced<W: Way>() -> W {
    W::forced().get()
}

/// Declares that an enum lists the ways of an operator.
macro_rules! ways {
    ($way:ty) => {
        impl $crate::ops::way::Way for $way {
            fn forced() -> &'static std::thread::LocalKey<std::cell::Cell<Self>> {
                thread_local! {
                    static FORCED: std::cell::Cell<$way> = const { std::cell::Cell::new(<$way>::Automatic) };
                }
                &FORCED
            }
        }
    };
}
pub(super) use ways;

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    enum Example {
        #[default]
        Automatic,
        First,
        Second,
    }
    ways!(Example);

    #[test]
    fn a_way_is_forced_within_the_body_only_and_in_this_thread_only() {
        let inner = force(Example::First, || {
            let other = std::thread::spawn(forced::<Example>).join().expect("a value");
            (forced::<Example>(), force(Example::Second, forced::<Example>), other)
        });
        assert_eq!(inner, (Example::First, Example::Second, Example::Automatic));
        let panicked = std::panic::catch_unwind(|| force(Example::First, || panic!("in the body")));
        assert!(panicked.is_err());
        assert_eq!(forced::<Example>(), Example::Automatic);
    }
}
