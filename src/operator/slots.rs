//! Lists of tensors whose places have names: the inputs of an operator, its outputs, and what it
//! keeps for its backward pass.

use crate::{Error, Result};
use std::marker::PhantomData;
use tch::Tensor;

/// What stands in the places of a list: one type for a tensor that is always there, and one for a
/// tensor that may be absent.
pub trait Leaf {
    /// In the place of a tensor that is always there.
    type Required;
    /// In the place of a tensor that may be absent.
    type Optional;
}

/// Borrowed tensors: `&Tensor` and `Option<&Tensor>`.
#[derive(Debug)]
pub struct Borrowed<'a>(PhantomData<&'a Tensor>);

/// Tensors: `Tensor` and `Option<Tensor>`.
#[derive(Debug)]
pub struct Own;

/// Something about each tensor that is there: `T` and `Option<T>`.
#[derive(Debug)]
pub struct Described<T>(PhantomData<T>);

/// Something for each place: `T`.
#[derive(Debug)]
pub struct Each<T>(PhantomData<T>);

impl<'a> Leaf for Borrowed<'a> {
    type Required = &'a Tensor;
    type Optional = Option<&'a Tensor>;
}

impl Leaf for Own {
    type Required = Tensor;
    type Optional = Option<Tensor>;
}

impl<T> Leaf for Described<T> {
    type Required = T;
    type Optional = Option<T>;
}

impl<T> Leaf for Each<T> {
    type Required = T;
    type Optional = T;
}

/// A list of tensors with named places, made by [`slots!`](crate::slots!).
pub trait Slots: 'static {
    /// The struct with one field for each place.
    type Of<L: Leaf>;
    /// An array with one item for each place.
    type List<T>: AsRef<[T]> + AsMut<[T]> + IntoIterator<Item = T>;

    /// The names of the places.
    const NAMES: &'static [&'static str];
    /// The places that may be empty, marked `?`: one bit for each, the first one lowest.
    const OPTIONAL: u64;
    /// The places without a gradient, marked `!`.
    const CONSTANT: u64;

    /// Makes the struct. The functions are called with the index of each place, in order.
    ///
    /// # Errors
    /// Those of the functions.
    fn build<L: Leaf>(
        required: impl FnMut(usize) -> Result<L::Required>,
        optional: impl FnMut(usize) -> Result<L::Optional>,
    ) -> Result<Self::Of<L>>;

    /// Turns the struct into an array.
    fn list<L: Leaf, T>(
        of: Self::Of<L>,
        required: impl FnMut(L::Required) -> T,
        optional: impl FnMut(L::Optional) -> T,
    ) -> Self::List<T>;

    /// The struct of references to its own fields.
    fn borrow(of: &Self::Of<Own>) -> Self::Of<Borrowed<'_>>;

    /// The tensors, in order.
    fn tensors<'a>(of: &Self::Of<Borrowed<'a>>) -> Self::List<Option<&'a Tensor>>
    where
        'a: 'a;

    /// An array whose items are made from their indices.
    fn array<T>(item: impl FnMut(usize) -> T) -> Self::List<T>;

    /// Something for each place, made from its index.
    fn each<T>(item: impl FnMut(usize) -> T) -> Self::Of<Each<T>> {
        let item = std::cell::RefCell::new(item);
        let make = |index| Ok((item.borrow_mut())(index));
        match Self::build::<Each<T>>(make, make) {
            Ok(each) => each,
            Err(_) => unreachable!("neither function fails"),
        }
    }

    /// Nothing for any place.
    fn none<T>() -> Self::Of<Each<Option<T>>> {
        Self::each(|_| None)
    }

    /// What [`Slots::each`] made, as an array.
    fn items<T>(each: Self::Of<Each<T>>) -> Self::List<T> {
        Self::list::<Each<T>, T>(each, |item| item, |item| item)
    }

    /// The struct of the tensors in a list, which `op` got or made.
    ///
    /// # Errors
    /// When one is absent that must be there.
    fn borrowed<'a>(op: &str, tensors: &[Option<&'a Tensor>]) -> Result<Self::Of<Borrowed<'a>>> {
        let at = |index: usize| tensors.get(index).copied().flatten();
        Self::build::<Borrowed<'a>>(
            |index| at(index).ok_or_else(|| absent(op, Self::NAMES[index])),
            |index| Ok(at(index)),
        )
    }

    /// The struct of owned tensors. `tensor` is called once for each place.
    ///
    /// # Errors
    /// When one is absent that must be there.
    fn own(op: &str, tensor: impl FnMut(usize) -> Option<Tensor>) -> Result<Self::Of<Own>> {
        let tensor = std::cell::RefCell::new(tensor);
        Self::build::<Own>(
            |index| (tensor.borrow_mut())(index).ok_or_else(|| absent(op, Self::NAMES[index])),
            |index| Ok((tensor.borrow_mut())(index)),
        )
    }

    /// The tensors of a struct of owned ones, in order.
    fn owned(of: Self::Of<Own>) -> Self::List<Option<Tensor>> {
        Self::list::<Own, Option<Tensor>>(of, Some, |tensor| tensor)
    }

    /// The struct of descriptions.
    ///
    /// # Errors
    /// Those of the function, and when there is none in a place that is never empty.
    fn described<T>(
        op: &str,
        describe: impl FnMut(usize) -> Result<Option<T>>,
    ) -> Result<Self::Of<Described<T>>> {
        let describe = std::cell::RefCell::new(describe);
        Self::build::<Described<T>>(
            |index| (describe.borrow_mut())(index)?.ok_or_else(|| absent(op, Self::NAMES[index])),
            |index| (describe.borrow_mut())(index),
        )
    }

    /// The descriptions, in order.
    fn descriptions<T>(of: Self::Of<Described<T>>) -> Self::List<Option<T>> {
        Self::list::<Described<T>, Option<T>>(of, Some, |description| description)
    }
}

#[cold]
fn absent(op: &str, name: &str) -> Error {
    Error::argument(op, name, "a tensor", "none", "")
}

/// The list without places.
impl Slots for () {
    type Of<L: Leaf> = ();
    type List<T> = [T; 0];

    const NAMES: &'static [&'static str] = &[];
    const OPTIONAL: u64 = 0;
    const CONSTANT: u64 = 0;

    fn build<L: Leaf>(
        _: impl FnMut(usize) -> Result<L::Required>,
        _: impl FnMut(usize) -> Result<L::Optional>,
    ) -> Result<()> {
        Ok(())
    }

    fn list<L: Leaf, T>(
        (): (),
        _: impl FnMut(L::Required) -> T,
        _: impl FnMut(L::Optional) -> T,
    ) -> [T; 0] {
        []
    }

    fn borrow((): &()) {}

    fn tensors<'a>((): &()) -> [Option<&'a Tensor>; 0]
    where
        'a: 'a,
    {
        []
    }

    fn array<T>(_: impl FnMut(usize) -> T) -> [T; 0] {
        []
    }
}

/// Stands for a list whose fields are nothing yet: the parameter of a struct of [`slots!`](crate::slots!)
/// where it names the list itself.
#[derive(Clone, Copy, Debug)]
pub struct Names;

impl Leaf for Names {
    type Required = ();
    type Optional = ();
}

/// Defines a list of tensors: a struct with a field for each of them, generic over what stands there
/// ([`Leaf`]), which implements [`Slots`]. `name?` may be absent, `name!` has no gradient, and `name?!`
/// is both.
///
/// ```
/// use tch_extension::operator::{Each, Slots};
///
/// tch_extension::slots! {
///     /// What the backward pass of a norm reads.
///     pub struct Moments { mean?, rstd }
/// }
///
/// let needed: Moments<Each<bool>> = Moments { mean: false, rstd: true };
/// assert_eq!((Moments::NAMES, Moments::OPTIONAL), (&["mean", "rstd"][..], 0b01));
/// assert_eq!(Moments::items(needed), [false, true]);
/// ```
#[macro_export]
macro_rules! slots {
    ($(#[$meta:meta])* $vis:vis struct $name:ident { $($slots:tt)* }) => {
        $crate::slots!(@munch [$(#[$meta])* $vis $name] [] $($slots)*);
    };

    (@munch $head:tt [$($done:tt)*] $slot:ident ? ! $(, $($rest:tt)*)?) => {
        $crate::slots!(@munch $head [$($done)* ($slot Optional 1 1)] $($($rest)*)?);
    };
    (@munch $head:tt [$($done:tt)*] $slot:ident ? $(, $($rest:tt)*)?) => {
        $crate::slots!(@munch $head [$($done)* ($slot Optional 1 0)] $($($rest)*)?);
    };
    (@munch $head:tt [$($done:tt)*] $slot:ident ! $(, $($rest:tt)*)?) => {
        $crate::slots!(@munch $head [$($done)* ($slot Required 0 1)] $($($rest)*)?);
    };
    (@munch $head:tt [$($done:tt)*] $slot:ident $(, $($rest:tt)*)?) => {
        $crate::slots!(@munch $head [$($done)* ($slot Required 0 0)] $($($rest)*)?);
    };
    (@munch [$(#[$meta:meta])* $vis:vis $name:ident] [$(($slot:ident $leaf:ident $optional:literal $constant:literal))+]) => {
        $(#[$meta])*
        $vis struct $name<L: $crate::operator::Leaf = $crate::operator::Names> {
            $(
                #[doc = concat!("The tensor `", stringify!($slot), "`.")]
                $vis $slot: L::$leaf,
            )+
        }

        impl<L: $crate::operator::Leaf> Clone for $name<L>
        where
            $(L::$leaf: Clone,)+
        {
            fn clone(&self) -> Self {
                $name { $($slot: self.$slot.clone()),+ }
            }
        }

        impl<L: $crate::operator::Leaf> std::fmt::Debug for $name<L>
        where
            $(L::$leaf: std::fmt::Debug,)+
        {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($name))$(.field(stringify!($slot), &self.$slot))+.finish()
            }
        }

        impl $crate::operator::Slots for $name {
            type Of<L: $crate::operator::Leaf> = $name<L>;
            type List<T> = [T; { [$(stringify!($slot)),+].len() }];

            const NAMES: &'static [&'static str] = &[$(stringify!($slot)),+];
            const OPTIONAL: u64 = $crate::operator::bits(&[$($optional == 1),+]);
            const CONSTANT: u64 = $crate::operator::bits(&[$($constant == 1),+]);

            #[inline]
            #[allow(unused_mut, unused_variables)]
            fn build<L: $crate::operator::Leaf>(
                mut required: impl FnMut(usize) -> $crate::Result<L::Required>,
                mut optional: impl FnMut(usize) -> $crate::Result<L::Optional>,
            ) -> $crate::Result<$name<L>> {
                let mut places = 0..;
                Ok($name {
                    $($slot: $crate::slots!(@call $leaf required optional (places.next().unwrap_or(0)))?),+
                })
            }

            #[inline]
            #[allow(unused_mut, unused_variables)]
            fn list<L: $crate::operator::Leaf, T>(
                of: $name<L>,
                mut required: impl FnMut(L::Required) -> T,
                mut optional: impl FnMut(L::Optional) -> T,
            ) -> Self::List<T> {
                [$($crate::slots!(@call $leaf required optional (of.$slot))),+]
            }

            #[inline]
            fn borrow(of: &$name<$crate::operator::Own>) -> $name<$crate::operator::Borrowed<'_>> {
                $name { $($slot: $crate::slots!(@borrow $leaf of.$slot)),+ }
            }

            #[inline]
            fn tensors<'a>(
                of: &$name<$crate::operator::Borrowed<'a>>,
            ) -> Self::List<Option<&'a $crate::operator::Tensor>>
            where
                'a: 'a,
            {
                [$($crate::slots!(@tensor $leaf of.$slot)),+]
            }

            #[inline]
            fn array<T>(item: impl FnMut(usize) -> T) -> Self::List<T> {
                std::array::from_fn(item)
            }
        }
    };

    (@call Required $required:ident $optional:ident ($argument:expr)) => { $required($argument) };
    (@call Optional $required:ident $optional:ident ($argument:expr)) => { $optional($argument) };
    (@borrow Required $of:ident.$slot:ident) => { &$of.$slot };
    (@borrow Optional $of:ident.$slot:ident) => { $of.$slot.as_ref() };
    (@tensor Required $of:ident.$slot:ident) => { Some($of.$slot) };
    (@tensor Optional $of:ident.$slot:ident) => { $of.$slot };

    (@munch $head:tt $done:tt $($rest:tt)*) => {
        compile_error!(concat!(
            "slots!: `", stringify!($($rest)*),
            "`: expected the names of tensors: `x`, `x?` if it may be absent, `x!` if it has no gradient, `x?!`"
        ));
    };
    ($($other:tt)*) => {
        compile_error!("slots!: expected `pub struct NAME { x, y?, z! }`");
    };
}

/// One bit for each, the first one lowest.
#[doc(hidden)]
pub const fn bits(flags: &[bool]) -> u64 {
    assert!(flags.len() <= 64, "slots!: a list has at most 64 tensors");
    let (mut bits, mut index) = (0, 0);
    while index < flags.len() {
        bits |= (flags[index] as u64) << index;
        index += 1;
    }
    bits
}
