//! The results of an operator.

use super::{Layout, MemoryFormat, Output, SymInt};
use std::any::type_name;
use tch::{Device, Kind, Tensor};

/// A type that [`Operator::call`](super::Operator::call) can return for a single value.
pub trait FromOutput: Sized {
    /// Converts the output. If it is of another type, the output itself is returned as the error.
    ///
    /// # Errors
    /// When the output is of another type.
    fn from_output(output: Output) -> Result<Self, Output>;

    /// Converts all results of a call to one value. There must be exactly one result; a list
    /// accepts any number.
    ///
    /// # Errors
    /// A description of the mismatch, when the results are of another number or type.
    fn from_results(outputs: Vec<Output>) -> Result<Self, String> {
        check_count(&outputs, 1)?;
        one(outputs.into_iter().next(), 0)
    }
}

/// A type that [`Operator::call`](super::Operator::call) can return:
/// - `()`, for an operator without a result;
/// - any [`FromOutput`] type, for an operator with a single result;
/// - a tuple of up to twelve such types, for an operator with that many results, or with a single
///   result that is a list of that length;
/// - a vector such as `Vec<Tensor>`, for any number of results of one type; if the single result is
///   a list, the vector has its items;
/// - [`Outputs`], for any results.
///
/// ```
/// use tch::Tensor;
/// use tch_extension::{args, library::Operator};
///
/// let topk = Operator::find("aten::topk")?;
/// let results: Vec<Tensor> = topk.call(args![&Tensor::from_slice(&[1, 7, 5]), 2])?;
/// assert_eq!(results, [Tensor::from_slice(&[7, 5]), Tensor::from_slice(&[1_i64, 2])]);
/// # Ok::<(), tch_extension::Error>(())
/// ```
pub trait FromOutputs: Sized {
    /// Converts the results.
    ///
    /// # Errors
    /// A description of the mismatch, when the results are of another number or type.
    fn from_outputs(outputs: Vec<Output>) -> Result<Self, String>;
}

/// All results of a call, of any number and of any types.
///
/// ```
/// use tch::Tensor;
/// use tch_extension::{args, library::{Operator, Output, Outputs}};
///
/// let topk = Operator::find("aten::topk")?;
/// let Outputs(results) = topk.call(args![&Tensor::from_slice(&[1, 7, 5]), 2])?;
/// assert!(matches!(&results[..], [Output::Tensor(_), Output::Tensor(_)]));
/// # Ok::<(), tch_extension::Error>(())
/// ```
#[derive(Debug)]
pub struct Outputs(pub Vec<Output>);

impl FromOutputs for Outputs {
    fn from_outputs(outputs: Vec<Output>) -> Result<Self, String> {
        Ok(Outputs(outputs))
    }
}

macro_rules! from_output {
    ($($type:ty: $variant:ident;)*) => {$(
        impl FromOutput for $type {
            fn from_output(output: Output) -> Result<Self, Output> {
                match output {
                    Output::$variant(value) => Ok(value),
                    other => Err(other),
                }
            }
        }
    )*};
}

from_output! {
    Tensor: Tensor;
    i64: Int;
    f64: Float;
    bool: Bool;
    String: String;
    Device: Device;
    Kind: Kind;
    Layout: Layout;
    MemoryFormat: MemoryFormat;
}

impl FromOutput for Output {
    fn from_output(output: Output) -> Result<Self, Output> {
        Ok(output)
    }
}

impl<T: FromOutput> FromOutput for Option<T> {
    fn from_output(output: Output) -> Result<Self, Output> {
        match output {
            Output::None => Ok(None),
            some => T::from_output(some).map(Some),
        }
    }
}

impl FromOutput for SymInt {
    fn from_output(output: Output) -> Result<Self, Output> {
        match output {
            Output::Int(number) => Ok(number.into()),
            Output::SymInt(value) => Ok(value),
            other => Err(other),
        }
    }
}

impl<T: FromOutput> FromOutput for Vec<T> {
    fn from_output(output: Output) -> Result<Self, Output> {
        match output {
            Output::List(items) => items.into_iter().map(T::from_output).collect(),
            other => Err(other),
        }
    }

    fn from_results(mut outputs: Vec<Output>) -> Result<Self, String> {
        if matches!(outputs[..], [Output::List(_)]) {
            return one(outputs.pop(), 0);
        }
        outputs.into_iter().enumerate().map(|(index, output)| one(Some(output), index)).collect()
    }
}

/// Converts the result with this index.
fn one<T: FromOutput>(output: Option<Output>, index: usize) -> Result<T, String> {
    let output = output.ok_or_else(|| format!("there is no result {index}"))?;
    T::from_output(output).map_err(|output| {
        format!("result {index} is {output:?}, and {} was asked for", type_name::<T>())
    })
}

fn check_count(outputs: &[Output], wanted: usize) -> Result<(), String> {
    if outputs.len() == wanted {
        return Ok(());
    }
    Err(format!("it has {} results, and {wanted} were asked for", outputs.len()))
}

impl<T: FromOutput> FromOutputs for T {
    fn from_outputs(outputs: Vec<Output>) -> Result<Self, String> {
        T::from_results(outputs)
    }
}

impl FromOutputs for () {
    fn from_outputs(outputs: Vec<Output>) -> Result<Self, String> {
        check_count(&outputs, 0)
    }
}

/// A tuple is all results, or the items of a list, which may be the single result.
macro_rules! from_output_tuple {
    ($count:literal: $($part:ident $index:literal),*) => {
        impl<$($part: FromOutput),*> FromOutput for ($($part,)*) {
            fn from_output(output: Output) -> Result<Self, Output> {
                match output {
                    Output::List(items) if items.len() == $count => {
                        let mut items = items.into_iter();
                        Ok(($($part::from_output(items.next().unwrap_or(Output::None))?,)*))
                    }
                    other => Err(other),
                }
            }

            fn from_results(mut outputs: Vec<Output>) -> Result<Self, String> {
                if matches!(outputs[..], [Output::List(_)]) && $count > 1 {
                    return one(outputs.pop(), 0);
                }
                check_count(&outputs, $count)?;
                let mut outputs = outputs.into_iter();
                Ok(($(one::<$part>(outputs.next(), $index)?,)*))
            }
        }
    };
}

from_output_tuple!(1: A 0);
from_output_tuple!(2: A 0, B 1);
from_output_tuple!(3: A 0, B 1, C 2);
from_output_tuple!(4: A 0, B 1, C 2, D 3);
from_output_tuple!(5: A 0, B 1, C 2, D 3, E 4);
from_output_tuple!(6: A 0, B 1, C 2, D 3, E 4, F 5);
from_output_tuple!(7: A 0, B 1, C 2, D 3, E 4, F 5, G 6);
from_output_tuple!(8: A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7);
from_output_tuple!(9: A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8);
from_output_tuple!(10: A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9);
from_output_tuple!(11: A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9, K 10);
from_output_tuple!(12: A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9, K 10, L 11);
