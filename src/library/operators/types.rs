//! The types of a signature in [`operators!`](crate::operators): how the schema writes them, and how
//! kernels get them.

use crate::Result;
use crate::ffi::define::{self as ffi, Borrowed, BorrowedList, Call};
use crate::ffi::library::Value;
use crate::library::{Output, SymInt};
use tch::{Device, Kind, Tensor};

/// What a kernel can get.
pub trait Read {
    /// What is kept while the kernel runs.
    type Held<'c>;
    /// What the kernel gets.
    type Given<'a>;

    /// Reads an argument, or an item of one.
    fn hold(argument: ffi::Argument<'_>) -> Result<Self::Held<'_>>;
    /// Passes it to the kernel.
    fn give<'a>(held: &'a mut Self::Held<'_>) -> Self::Given<'a>;
}

/// A type that an argument can have in a signature.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no type of an argument in `operators!`",
    label = "no type of an argument",
    note = "an argument is a `&Tensor`, `&mut Tensor`, `&[Tensor]`, `&[Option<Tensor>]`, `i64`, `SymInt`, `f64`, `bool`, `&str`, \
            `Kind`, `Device`, `&[i64]`, `Vec<i64>`, `&[SymInt]`, `&[f64]` or `&[bool]`, or an `Option` of one of them"
)]
pub trait ArgumentType {
    /// What the kernels of a device get.
    type Kernel: Read;
    /// What other kernels get, which may run while a program is traced.
    type Traced: Read;
    /// What a default value is written as.
    type Default;

    /// The type in the schema. `index` is that of the argument.
    fn schema(index: usize) -> String;
    /// Whether the operator writes to it.
    const WRITTEN: bool = false;
    /// How many tensors it is.
    const TENSORS: Tensors = Tensors::None;
    /// A default value in the schema.
    fn default(value: Self::Default) -> Default;
}

/// How many tensors an argument is.
#[derive(Clone, Copy, PartialEq)]
pub enum Tensors {
    /// It is something else.
    None,
    /// One, which may be absent.
    One,
    /// A list.
    List,
}

/// A default value.
pub struct Default {
    /// As the schema writes it.
    pub text: String,
    /// As libtorch must have understood it.
    pub value: Output,
}

impl Default {
    fn new(text: impl ToString, value: Output) -> Self {
        Default { text: text.to_string(), value }
    }

    /// A list of ints.
    pub fn ints(items: &[i64]) -> Self {
        Default::list(items, int)
    }

    fn list<T>(items: &[T], item: impl Fn(&T) -> Default) -> Self {
        let items = items.iter().map(item);
        let (texts, values): (Vec<_>, Vec<_>) = items.map(|item| (item.text, item.value)).unzip();
        Default::new(format!("[{}]", texts.join(", ")), Output::List(values))
    }
}

/// The type of the default values of arguments that can have none.
#[derive(Debug)]
pub enum NoDefault {}

/// Types that kernels get by value.
macro_rules! read_values {
    ($($type:ty: $method:ident;)*) => {$(
        impl Read for $type {
            type Held<'c> = $type;
            type Given<'a> = $type;

            #[inline]
            fn hold(argument: ffi::Argument<'_>) -> Result<$type> {
                argument.$method()
            }

            #[inline]
            fn give(held: &mut $type) -> $type {
                held.clone()
            }
        }
    )*};
}

read_values! {
    i64: int;
    f64: float;
    bool: bool;
    SymInt: sym_int;
    Kind: kind;
    Device: device;
}

/// Lists that kernels get as slices.
macro_rules! read_lists {
    ($($item:ty: $method:ident;)*) => {$(
        impl Read for &[$item] {
            type Held<'c> = Vec<$item>;
            type Given<'a> = &'a [$item];

            fn hold(argument: ffi::Argument<'_>) -> Result<Vec<$item>> {
                argument.list(|item| item.$method())
            }

            fn give(held: &mut Vec<$item>) -> &[$item] {
                held
            }
        }
    )*};
}

read_lists! {
    i64: int;
    f64: float;
    bool: bool;
    SymInt: sym_int;
}

impl Read for Vec<i64> {
    type Held<'c> = Vec<i64>;
    type Given<'a> = Vec<i64>;

    fn hold(argument: ffi::Argument<'_>) -> Result<Vec<i64>> {
        argument.list(|item| item.int())
    }

    fn give(held: &mut Vec<i64>) -> Vec<i64> {
        std::mem::take(held)
    }
}

impl Read for &Tensor {
    type Held<'c> = Borrowed<'c>;
    type Given<'a> = &'a Tensor;

    #[inline]
    fn hold(argument: ffi::Argument<'_>) -> Result<Borrowed<'_>> {
        argument.tensor()
    }

    #[inline]
    fn give<'a>(held: &'a mut Borrowed<'_>) -> &'a Tensor {
        held
    }
}

impl Read for &mut Tensor {
    /// A handle of our own, because the kernel could put another tensor in its place.
    type Held<'c> = Tensor;
    type Given<'a> = &'a mut Tensor;

    fn hold(argument: ffi::Argument<'_>) -> Result<Tensor> {
        argument.tensor().map(|tensor| tensor.shallow_clone())
    }

    fn give(held: &mut Tensor) -> &mut Tensor {
        held
    }
}

impl Read for &[Tensor] {
    type Held<'c> = BorrowedList<'c>;
    type Given<'a> = &'a [Tensor];

    fn hold(argument: ffi::Argument<'_>) -> Result<BorrowedList<'_>> {
        argument.tensors()
    }

    fn give<'a>(held: &'a mut BorrowedList<'_>) -> &'a [Tensor] {
        held
    }
}

impl Read for &[Option<Tensor>] {
    type Held<'c> = Vec<Option<Tensor>>;
    type Given<'a> = &'a [Option<Tensor>];

    fn hold(argument: ffi::Argument<'_>) -> Result<Vec<Option<Tensor>>> {
        argument.list(|item| match item.is_none() {
            true => Ok(None),
            false => item.tensor().map(|tensor| Some(tensor.shallow_clone())),
        })
    }

    fn give(held: &mut Vec<Option<Tensor>>) -> &[Option<Tensor>] {
        held
    }
}

impl Read for &str {
    type Held<'c> = &'c str;
    type Given<'a> = &'a str;

    fn hold(argument: ffi::Argument<'_>) -> Result<&str> {
        argument.str()
    }

    fn give<'a>(held: &'a mut &str) -> &'a str {
        held
    }
}

impl<T: Read> Read for Option<T> {
    type Held<'c> = Option<T::Held<'c>>;
    type Given<'a> = Option<T::Given<'a>>;

    #[inline]
    fn hold(argument: ffi::Argument<'_>) -> Result<Self::Held<'_>> {
        if argument.is_none() { Ok(None) } else { T::hold(argument).map(Some) }
    }

    #[inline]
    fn give<'a>(held: &'a mut Option<T::Held<'_>>) -> Self::Given<'a> {
        held.as_mut().map(T::give)
    }
}

/// Types of which all kernels get the same.
macro_rules! argument_types {
    ($($type:ty: $schema:literal, $tensors:ident, $value:ident: $default:ty => $made:expr;)*) => {$(
        impl ArgumentType for $type {
            type Kernel = Self;
            type Traced = Self;
            type Default = $default;

            fn schema(_: usize) -> String {
                $schema.to_string()
            }

            const TENSORS: Tensors = Tensors::$tensors;

            fn default($value: $default) -> Default {
                $made
            }
        }
    )*};
}

argument_types! {
    &Tensor: "Tensor", One, value: NoDefault => match value {};
    &[Tensor]: "Tensor[]", List, value: NoDefault => match value {};
    &[Option<Tensor>]: "Tensor?[]", List, value: NoDefault => match value {};
    i64: "int", None, value: i64 => int(&value);
    f64: "float", None, value: f64 => float(&value);
    bool: "bool", None, value: bool => boolean(&value);
    &str: "str", None, value: &'static str => Default::new(quoted(value), Output::String(value.to_string()));
    Kind: "ScalarType", None, value: NoDefault => match value {};
    Device: "Device", None, value: NoDefault => match value {};
    &[i64]: "int[]", None, value: &'static [i64] => Default::list(value, int);
    Vec<i64>: "int[]", None, value: &'static [i64] => Default::list(value, int);
    &[f64]: "float[]", None, value: &'static [f64] => Default::list(value, float);
    &[bool]: "bool[]", None, value: &'static [bool] => Default::list(value, boolean);
}

impl ArgumentType for SymInt {
    type Kernel = i64;
    type Traced = SymInt;
    type Default = i64;

    fn schema(_: usize) -> String {
        "SymInt".to_string()
    }

    fn default(value: i64) -> Default {
        int(&value)
    }
}

impl ArgumentType for &[SymInt] {
    type Kernel = &'static [i64];
    type Traced = &'static [SymInt];
    type Default = &'static [i64];

    fn schema(_: usize) -> String {
        "SymInt[]".to_string()
    }

    fn default(value: &'static [i64]) -> Default {
        Default::list(value, int)
    }
}

impl ArgumentType for &mut Tensor {
    type Kernel = &'static mut Tensor;
    type Traced = &'static mut Tensor;
    type Default = NoDefault;

    fn schema(index: usize) -> String {
        format!("Tensor(a{index}!)")
    }

    const WRITTEN: bool = true;
    const TENSORS: Tensors = Tensors::One;

    fn default(value: NoDefault) -> Default {
        match value {}
    }
}

impl<T: ArgumentType> ArgumentType for Option<T> {
    type Kernel = Option<T::Kernel>;
    type Traced = Option<T::Traced>;
    type Default = Option<T::Default>;

    fn schema(index: usize) -> String {
        format!("{}?", T::schema(index))
    }

    const WRITTEN: bool = T::WRITTEN;
    const TENSORS: Tensors = T::TENSORS;

    fn default(value: Option<T::Default>) -> Default {
        value.map_or_else(|| Default::new("None", Output::None), T::default)
    }
}

fn int(value: &i64) -> Default {
    Default::new(value, Output::Int(*value))
}

fn float(value: &f64) -> Default {
    // The shortest text that is this number, with a point or an exponent: 1.0, 1e-5.
    Default::new(format!("{value:?}"), Output::Float(*value))
}

fn boolean(value: &bool) -> Default {
    Default::new(if *value { "True" } else { "False" }, Output::Bool(*value))
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// What a kernel can return.
pub trait Give {
    /// Gives the result with this index to libtorch.
    ///
    /// # Errors
    /// When libtorch does not accept it.
    fn give(self, call: &mut Call<'_>, index: usize) -> Result<()>;
}

/// A type that a result can have in a signature.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no type of a result in `operators!`",
    label = "no type of a result",
    note = "a result is a `Tensor`, `Option<Tensor>`, `Vec<Tensor>`, `i64`, `SymInt`, `f64` or `bool`, or a tuple of up to 8 of them; \
            without `->`, there is none"
)]
pub trait ResultType {
    /// What the kernels of a device return.
    type Kernel: Give;
    /// What other kernels return.
    type Traced: Give;

    /// The type in the schema.
    fn schema() -> String;
}

impl Give for Tensor {
    #[inline]
    fn give(self, call: &mut Call<'_>, _: usize) -> Result<()> {
        call.give_tensor(Some(self));
        Ok(())
    }
}

impl Give for Option<Tensor> {
    fn give(self, call: &mut Call<'_>, _: usize) -> Result<()> {
        call.give_tensor(self);
        Ok(())
    }
}

impl Give for Vec<Tensor> {
    fn give(self, call: &mut Call<'_>, _: usize) -> Result<()> {
        call.give_tensors(self);
        Ok(())
    }
}

macro_rules! give_values {
    ($($type:ty: $method:ident;)*) => {$(
        impl Give for $type {
            fn give(self, call: &mut Call<'_>, index: usize) -> Result<()> {
                call.give(index, &Value::$method(self))
            }
        }
    )*};
}

give_values! {
    i64: int;
    f64: float;
    bool: bool;
}

impl Give for SymInt {
    fn give(self, call: &mut Call<'_>, index: usize) -> Result<()> {
        call.give(index, &Value::sym_int(&self))
    }
}

macro_rules! result_types {
    ($($type:ty: $schema:literal, $kernel:ty;)*) => {$(
        impl ResultType for $type {
            type Kernel = $kernel;
            type Traced = $type;

            fn schema() -> String {
                $schema.to_string()
            }
        }
    )*};
}

result_types! {
    Tensor: "Tensor", Tensor;
    Option<Tensor>: "Tensor?", Option<Tensor>;
    Vec<Tensor>: "Tensor[]", Vec<Tensor>;
    i64: "int", i64;
    SymInt: "SymInt", i64;
    f64: "float", f64;
    bool: "bool", bool;
    (): "()", ();
}

impl Give for () {
    fn give(self, _: &mut Call<'_>, _: usize) -> Result<()> {
        Ok(())
    }
}

macro_rules! tuples {
    ($($part:ident $index:tt),*) => {
        impl<$($part: Give),*> Give for ($($part,)*) {
            #[inline]
            fn give(self, call: &mut Call<'_>, _: usize) -> Result<()> {
                $(self.$index.give(call, $index)?;)*
                Ok(())
            }
        }

        impl<$($part: ResultType),*> ResultType for ($($part,)*) {
            type Kernel = ($($part::Kernel,)*);
            type Traced = ($($part::Traced,)*);

            fn schema() -> String {
                format!("({})", [$($part::schema()),*].join(", "))
            }
        }
    };
}

tuples!(A 0);
tuples!(A 0, B 1);
tuples!(A 0, B 1, C 2);
tuples!(A 0, B 1, C 2, D 3);
tuples!(A 0, B 1, C 2, D 3, E 4);
tuples!(A 0, B 1, C 2, D 3, E 4, F 5);
tuples!(A 0, B 1, C 2, D 3, E 4, F 5, G 6);
tuples!(A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7);
