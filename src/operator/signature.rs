//! What an operator takes and returns, written once: its struct of options, its lists of tensors, and
//! its schema.

use super::Slots;
use crate::Result;
use crate::ffi::define::{Borrowed, Call};
use crate::library::expansion::{Argument, ArgumentType, Default as InSchema, Read};
use crate::library::{Args, FromOutputs, Operator as Registration, Value};
use std::sync::OnceLock;
use tch::Tensor;

/// What an operator takes and returns, made by [`signature!`](crate::signature!). The value itself is
/// what it takes besides tensors.
pub trait Signature: Clone + Send + Sync + 'static {
    /// The operator's name.
    const NAME: &'static str;
    /// The name of what computes outputs and what is kept, where a program is traced.
    #[doc(hidden)]
    const FORWARD: &'static str;
    /// The name of what computes gradients, where a program is traced.
    #[doc(hidden)]
    const BACKWARD: &'static str;

    /// The tensors that it takes.
    type In: Slots;
    /// The tensors that it returns.
    type Out: Slots;

    /// The arguments in the schema.
    #[doc(hidden)]
    fn arguments() -> Vec<Argument>;

    /// Reads the arguments of a call, from this index on.
    ///
    /// # Errors
    /// When one has another type.
    #[doc(hidden)]
    fn read<'c>(call: &'c Call<'_>, index: &mut usize) -> Result<(Self, Inputs<'c, Self>)>;

    /// The arguments of a call, in the order of the schema.
    #[doc(hidden)]
    fn values<'a>(&'a self, inputs: &[Option<&'a Tensor>]) -> Vec<Value<'a>>;

    /// Where the operator is registered.
    #[doc(hidden)]
    fn registered() -> &'static Registered;
}

/// The tensors of a call that libtorch makes.
pub type Inputs<'c, O> = <<O as Signature>::In as Slots>::List<Option<Borrowed<'c>>>;

/// An argument of an operator: the names of both, for an error.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub op: &'static str,
    pub argument: &'static str,
}

/// A type that an operator can take besides tensors.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no type of an option in `signature!`",
    label = "no type of an option",
    note = "an option is an `i64`, `f64`, `bool`, `Vec<i64>` or `Reduction`, or an `Option` of an `i64`, `f64` or `Vec<i64>`"
)]
pub trait OptionType: Clone + Send + Sync + 'static {
    /// The argument in the schema.
    #[doc(hidden)]
    fn argument(name: &'static str, default: Option<Self>) -> Argument;
    /// Reads the next argument.
    ///
    /// # Errors
    /// When it has another type.
    #[doc(hidden)]
    fn read(call: &Call<'_>, index: &mut usize, of: Place) -> Result<Self>;
    /// The argument of a call.
    #[doc(hidden)]
    fn value(&self) -> Value<'_>;
}

macro_rules! options {
    ($($type:ty: $value:ident => $default:expr, $argument:expr;)*) => {$(
        impl OptionType for $type {
            fn argument(name: &'static str, default: Option<Self>) -> Argument {
                let default = default.map(|$value| -> InSchema { $default });
                let schema = <$type as ArgumentType>::schema(0);
                Argument { name: name.into(), schema, default, written: false }
            }

            fn read(call: &Call<'_>, index: &mut usize, _: Place) -> Result<Self> {
                let mut held = <$type as Read>::hold(call.argument(*index))?;
                *index += 1;
                Ok(<$type as Read>::give(&mut held))
            }

            fn value(&self) -> Value<'_> {
                let $value = self;
                $argument
            }
        }
    )*};
}

options! {
    i64: value => <i64 as ArgumentType>::default(value), (*value).into();
    f64: value => <f64 as ArgumentType>::default(value), (*value).into();
    bool: value => <bool as ArgumentType>::default(value), (*value).into();
    Option<i64>: value => <Option<i64> as ArgumentType>::default(value), (*value).into();
    Option<f64>: value => <Option<f64> as ArgumentType>::default(value), (*value).into();
    Vec<i64>: value => InSchema::ints(&value), value.into();
    Option<Vec<i64>>: value => match value {
        None => <Option<Vec<i64>> as ArgumentType>::default(None),
        Some(value) => InSchema::ints(&value),
    }, value.as_ref().into();
}

/// The words as a choice: `a, b or c`.
#[doc(hidden)]
pub fn one_of(words: &[&str]) -> String {
    match words {
        [first @ .., before, last] => {
            [first, &[&format!("{before} or {last}")]].concat().join(", ")
        }
        _ => words.concat(),
    }
}

/// Makes a type with few values an option, which is a text in the schema.
macro_rules! text_option {
    ($type:ty { $($text:literal = $value:path),+ $(,)? }) => {
        impl $crate::operator::OptionType for $type {
            fn argument(name: &'static str, default: Option<Self>) -> $crate::library::expansion::Argument {
                use $crate::library::expansion::{Argument, ArgumentType};
                let default = default.and_then(|value| match value {
                    $($value => Some(<&str as ArgumentType>::default($text)),)+
                    #[allow(unreachable_patterns)]
                    _ => None,
                });
                let schema = <&str as ArgumentType>::schema(0);
                Argument { name: name.into(), schema, default, written: false }
            }

            fn read(
                call: &$crate::library::expansion::Call<'_>,
                index: &mut usize,
                of: $crate::operator::expansion::Place,
            ) -> $crate::Result<Self> {
                let text = call.argument(*index).str()?;
                *index += 1;
                match text {
                    $($text => Ok($value),)+
                    other => {
                        let expected = $crate::operator::expansion::one_of(&[$($text),+]);
                        Err($crate::Error::argument(of.op, of.argument, expected, other, ""))
                    }
                }
            }

            fn value(&self) -> $crate::library::Value<'_> {
                match *self {
                    $($value => $text,)+
                    #[allow(unreachable_patterns)]
                    _ => "",
                }
                .into()
            }
        }
    };
}
pub(crate) use text_option;

text_option! {
    tch::Reduction {
        "none" = tch::Reduction::None,
        "mean" = tch::Reduction::Mean,
        "sum" = tch::Reduction::Sum,
    }
}

/// Whether Python cannot have an argument of this name.
pub const fn is_keyword(name: &str) -> bool {
    const KEYWORDS: [&str; 35] = [
        "False", "None", "True", "and", "as", "assert", "async", "await", "break", "class",
        "continue", "def", "del", "elif", "else", "except", "finally", "for", "from", "global",
        "if", "import", "in", "is", "lambda", "nonlocal", "not", "or", "pass", "raise", "return",
        "try", "while", "with", "yield",
    ];
    let mut name = name.as_bytes();
    // `r#in` is Rust's spelling of a word that it has, too.
    if let [b'r', b'#', word @ ..] = name {
        name = word;
    }
    let mut at = 0;
    while at < KEYWORDS.len() {
        if is_same(KEYWORDS[at].as_bytes(), name) {
            return true;
        }
        at += 1;
    }
    false
}

const fn is_same(a: &[u8], b: &[u8]) -> bool {
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}

/// An argument that is a tensor. It has the default `None` if it may be absent.
#[doc(hidden)]
pub fn tensor_argument(name: &'static str, is_optional: bool) -> Argument {
    let (schema, default) = match is_optional {
        true => {
            let none = <Option<&Tensor> as ArgumentType>::default(None);
            (<Option<&Tensor> as ArgumentType>::schema(0), Some(none))
        }
        false => (<&Tensor as ArgumentType>::schema(0), None),
    };
    Argument { name: name.into(), schema, default, written: false }
}

/// Without the defaults of arguments that come before one without a default.
#[doc(hidden)]
pub fn with_defaults_last(mut arguments: Vec<Argument>) -> Vec<Argument> {
    let last = arguments.iter().rposition(|argument| argument.default.is_none());
    arguments[..last.unwrap_or(0)].iter_mut().for_each(|argument| argument.default = None);
    arguments
}

/// Reads a tensor, which may be absent.
///
/// # Errors
/// When the argument is something else.
#[doc(hidden)]
pub fn read_tensor<'c>(call: &'c Call<'_>, index: &mut usize) -> Result<Option<Borrowed<'c>>> {
    *index += 1;
    call.argument(*index - 1).tensor_or_none()
}

/// Where an operator is registered, and its operators there, once they were looked up.
#[doc(hidden)]
#[derive(Debug)]
pub struct Registered {
    namespace: OnceLock<&'static str>,
    own: OnceLock<Registration>,
    forward: OnceLock<Registration>,
    backward: OnceLock<Registration>,
}

/// The operators that one operator is registered as.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    Own,
    Forward,
    Backward,
}

impl Registered {
    #[allow(clippy::new_without_default)]
    pub const fn new() -> Self {
        Registered {
            namespace: OnceLock::new(),
            own: OnceLock::new(),
            forward: OnceLock::new(),
            backward: OnceLock::new(),
        }
    }

    /// Sets the namespace, unless it is known, and returns it.
    pub(super) fn is_in(&self, namespace: &'static str) -> &'static str {
        self.namespace.get_or_init(|| namespace)
    }

    pub(super) fn call<O: Signature, T: FromOutputs>(
        &self,
        part: Part,
        values: Vec<Value<'_>>,
    ) -> Result<T> {
        let (found, name) = match part {
            Part::Own => (&self.own, O::NAME),
            Part::Forward => (&self.forward, O::FORWARD),
            Part::Backward => (&self.backward, O::BACKWARD),
        };
        if found.get().is_none() {
            let namespace = self.namespace.get().copied().unwrap_or_default();
            let operator = Registration::find(&format!("{namespace}::{name}"))?;
            let _ = found.set(operator);
        }
        match found.get() {
            Some(operator) => operator.call(Args::positional(values)),
            None => unreachable!("it was set"),
        }
    }
}

/// Defines what an operator takes and returns: a struct of what it takes besides tensors, and the
/// two lists of its tensors. What is a tensor has no type: `x`, `x?` if it may be absent, `x!` if it
/// has no gradient, and `x?!`. What has a type may have a default. Options in braces at the end are no
/// part of the schema: only Rust can set them, and from elsewhere they have their type's default.
///
/// ```
/// use tch_extension::operator::Signature;
///
/// tch_extension::signature! {
///     /// The options of softcap.
///     pub Softcap: SoftcapIn -> SoftcapOut = "softcap"(x, cap: f64 = 30.0) -> (y)
/// }
///
/// let softcap = Softcap { cap: 50.0 };
/// assert_eq!((Softcap::NAME, softcap.cap), ("softcap", 50.0));
/// ```
///
/// Python sees these names, too, so none may be a keyword there: `lambd`, as in torch.
///
/// A tensor that may be absent is an `Option`, an option is checked in the rule, and a gradient is
/// computed where it is needed:
///
/// ```
/// use tch::{Kind, Tensor};
/// use tch_extension::operator::*;
/// use tch_extension::{Error, Result};
///
/// tch_extension::signature! {
///     /// `max(x, least) · gain`, with a gain `[N]` for each column.
///     pub Scaled: ScaledIn -> ScaledOut = "scaled"(x, least: f64, gain?) -> (y)
/// }
///
/// impl Operator for Scaled {
///     type Kept = ();
///     type Plan = ();
///
///     fn rule<D: Dim>(&self, of: &Metas<Self, D>, _: &Needs<Self>) -> Result<Made<Self, Meta<D>>> {
///         if self.least.is_nan() {
///             return Err(Error::argument(Self::NAME, "least", "a number", "NaN", ""));
///         }
///         let x = of.x.kind_in(&[Kind::Float, Kind::Double])?.dim(2, "[M, N]")?;
///         if let Some(gain) = &of.gain {
///             gain.like(x)?.shape("[N]", &x.sizes()[1..])?;
///         }
///         Ok(Made::only(ScaledOut { y: x.sized(x.sizes()) }))
///     }
///
///     fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
///         call.check()?;
///         let ScaledOut { y } = self.reference(&call.of)?;
///         Ok(Made::only(ScaledOut { y }))
///     }
///
///     fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
///         let (Some(x), Some(grad)) = (&again.of.x, grads.y) else { return Ok(ScaledIn::none()) };
///         let needs = again.needs;
///         let larger = || x.f_clamp_min(self.least);
///         let of_gain = || -> Result<Tensor> {
///             Ok(larger()?.f_mul(&grad)?.f_sum_to_size(&x.size()[1..])?)
///         };
///         let of_x = || -> Result<Tensor> {
///             let scaled = match &again.of.gain {
///                 Some(gain) => grad.f_mul(gain)?,
///                 None => grad.shallow_clone(),
///             };
///             Ok(scaled.f_mul(&x.f_ge(self.least)?)?)
///         };
///         Ok(ScaledIn {
///             x: needs.x.then(of_x).transpose()?,
///             gain: needs.gain.then(of_gain).transpose()?,
///         })
///     }
///
///     fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
///         let larger = of.x.f_clamp_min(self.least)?;
///         Ok(ScaledOut { y: of.gain.map_or_else(|| Ok(larger.shallow_clone()), |gain| larger.f_mul(gain))? })
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let x = Tensor::from_slice(&[-2.0, 3.0]).view([1, 2]);
/// let y = call(Scaled { least: 0.0 }, &ScaledIn { x: &x, gain: None })?.y;
/// assert_eq!(y, Tensor::from_slice(&[0.0, 3.0]).view([1, 2]));
/// # Ok(())
/// # }
/// ```
///
/// | type | in the schema |
/// |---|---|
/// | none, `?` | `Tensor`, `Tensor?` |
/// | `i64`, `f64`, `bool` | `int`, `float`, `bool` |
/// | `Vec<i64>`, `Option<Vec<i64>>` | `int[]`, `int[]?` |
/// | `Option<i64>`, `Option<f64>` | `int?`, `float?` |
/// | `tch::Reduction` | `str`: "none", "mean" or "sum" |
/// | `ops::Activation` | `str`: "gelu_tanh", "gelu", "relu_squared" or "silu" |
#[macro_export]
macro_rules! signature {
    ($(#[$meta:meta])* $vis:vis $name:ident: $in:ident -> $out:ident = $text:literal ($($arguments:tt)*) -> ($($outputs:tt)*)
     $({ $($(#[$own_meta:meta])* $own:ident: $own_type:ty),* $(,)? })?) => {
        $crate::slots! {
            #[doc = concat!("The tensors that `", $text, "` returns.")]
            $vis struct $out { $($outputs)* }
        }
        $crate::signature!(
            @munch [[$(#[$meta])*] $vis $name $in $out $text [$($(($(#[$own_meta])* $own $own_type))*)?]] [] [] [] $($arguments)*
        );
    };

    // The tensors, the options, and all arguments in their order.
    (@munch $head:tt [$($slots:tt)*] $options:tt [$($all:tt)*] $argument:ident ? ! $(, $($rest:tt)*)?) => {
        $crate::signature!(@munch $head [$($slots)* $argument ? !,] $options [$($all)* ($argument tensor true)] $($($rest)*)?);
    };
    (@munch $head:tt [$($slots:tt)*] $options:tt [$($all:tt)*] $argument:ident ? $(, $($rest:tt)*)?) => {
        $crate::signature!(@munch $head [$($slots)* $argument ?,] $options [$($all)* ($argument tensor true)] $($($rest)*)?);
    };
    (@munch $head:tt [$($slots:tt)*] $options:tt [$($all:tt)*] $argument:ident ! $(, $($rest:tt)*)?) => {
        $crate::signature!(@munch $head [$($slots)* $argument !,] $options [$($all)* ($argument tensor false)] $($($rest)*)?);
    };
    (@munch $head:tt $slots:tt $options:tt $all:tt $argument:ident: Tensor $($rest:tt)*) => {
        $crate::signature!(@tensor $argument);
    };
    (@munch $head:tt $slots:tt $options:tt $all:tt $argument:ident: &Tensor $($rest:tt)*) => {
        $crate::signature!(@tensor $argument);
    };
    (@munch $head:tt $slots:tt $options:tt $all:tt $argument:ident: Option<Tensor> $($rest:tt)*) => {
        $crate::signature!(@tensor $argument);
    };
    (@munch $head:tt $slots:tt [$($options:tt)*] [$($all:tt)*] $argument:ident: $type:ty = $default:expr $(, $($rest:tt)*)?) => {
        $crate::signature!(@munch $head $slots [$($options)* ($argument $type)] [$($all)* ($argument option $type, Some($default))] $($($rest)*)?);
    };
    (@munch $head:tt $slots:tt [$($options:tt)*] [$($all:tt)*] $argument:ident: $type:ty $(, $($rest:tt)*)?) => {
        $crate::signature!(@munch $head $slots [$($options)* ($argument $type)] [$($all)* ($argument option $type, None)] $($($rest)*)?);
    };
    (@munch $head:tt [$($slots:tt)*] $options:tt [$($all:tt)*] $argument:ident $(, $($rest:tt)*)?) => {
        $crate::signature!(@munch $head [$($slots)* $argument,] $options [$($all)* ($argument tensor false)] $($($rest)*)?);
    };

    (@munch [[$(#[$meta:meta])*] $vis:vis $name:ident $in:ident $out:ident $text:literal [$(($(#[$own_meta:meta])* $own:ident $own_type:ty))*]] [$($slots:tt)*] [$(($option:ident $type:ty))*] [$($all:tt)*]) => {
        $(#[$meta])*
        #[derive(Clone, Debug)]
        $vis struct $name {
            $(
                #[doc = concat!("The argument `", stringify!($option), "`.")]
                $vis $option: $type,
            )*
            $(
                $(#[$own_meta])*
                $vis $own: $own_type,
            )*
        }

        $crate::slots! {
            #[doc = concat!("The tensors that `", $text, "` takes.")]
            $vis struct $in { $($slots)* }
        }

        $($crate::signature!(@name $all);)*

        impl $crate::operator::Signature for $name {
            const NAME: &'static str = $text;
            const FORWARD: &'static str = concat!($text, "_forward");
            const BACKWARD: &'static str = concat!($text, "_backward");
            type In = $in;
            type Out = $out;

            fn arguments() -> Vec<$crate::library::expansion::Argument> {
                $crate::operator::expansion::with_defaults_last(vec![$($crate::signature!(@argument $all)),*])
            }

            fn read<'c>(
                call: &'c $crate::library::expansion::Call<'_>,
                index: &mut usize,
            ) -> $crate::Result<(Self, $crate::operator::expansion::Inputs<'c, Self>)> {
                let mut tensors = <$in as $crate::operator::Slots>::array(|_| None);
                let mut places = AsMut::<[_]>::as_mut(&mut tensors).iter_mut();
                $($crate::signature!(@read call index places $all);)*
                let _ = places;
                Ok(($name { $($option,)* $($own: Default::default(),)* }, tensors))
            }

            fn values<'a>(
                &'a self,
                inputs: &[Option<&'a $crate::operator::Tensor>],
            ) -> Vec<$crate::library::Value<'a>> {
                let mut inputs = inputs.iter();
                vec![$($crate::signature!(@value self inputs $all)),*]
            }

            fn registered() -> &'static $crate::operator::expansion::Registered {
                static REGISTERED: $crate::operator::expansion::Registered =
                    $crate::operator::expansion::Registered::new();
                &REGISTERED
            }
        }
    };

    (@tensor $argument:ident) => {
        compile_error!(concat!(
            "signature!: a tensor has no type: write `", stringify!($argument), "`, or `",
            stringify!($argument), "?` if it may be absent"
        ));
    };
    (@name ($argument:ident $($rest:tt)*)) => {
        const _: () = assert!(
            !$crate::operator::expansion::is_keyword(stringify!($argument)),
            concat!(
                "signature!: `", stringify!($argument), "` is a keyword of Python, where torch.ops takes \
                 arguments by name; choose another name, such as torch's `lambd`"
            )
        );
    };
    (@argument ($argument:ident tensor $is_optional:literal)) => {
        $crate::operator::expansion::tensor_argument(stringify!($argument), $is_optional)
    };
    (@argument ($argument:ident option $type:ty, $default:expr)) => {
        <$type as $crate::operator::OptionType>::argument(stringify!($argument), $default)
    };
    (@read $call:ident $index:ident $places:ident ($argument:ident tensor $is_optional:literal)) => {
        if let Some(place) = $places.next() {
            *place = $crate::operator::expansion::read_tensor($call, $index)?;
        }
    };
    (@read $call:ident $index:ident $places:ident ($argument:ident option $type:ty, $default:expr)) => {
        let $argument = {
            let of = $crate::operator::expansion::Place { op: Self::NAME, argument: stringify!($argument) };
            <$type as $crate::operator::OptionType>::read($call, $index, of)?
        };
    };
    (@value $self:ident $inputs:ident ($argument:ident tensor $is_optional:literal)) => {
        $inputs.next().copied().flatten().into()
    };
    (@value $self:ident $inputs:ident ($argument:ident option $type:ty, $default:expr)) => {
        $crate::operator::OptionType::value(&$self.$argument)
    };

    (@munch $head:tt $slots:tt $options:tt $all:tt $($rest:tt)*) => {
        compile_error!(concat!(
            "signature!: `", stringify!($($rest)*),
            "`: expected arguments: the tensors `x`, `x?`, `x!` and `x?!`, and options such as `eps: f64 = 1e-5`"
        ));
    };
    ($($other:tt)*) => {
        compile_error!(
            "signature!: expected `pub NAME: INPUTS -> OUTPUTS = \"name\"(x, weight?, eps: f64 = 1e-5) -> (y)`"
        );
    };
}
