//! What fake kernels are made of. They read sizes as [`SymInt`]s, so that torch.compile makes one graph
//! for all sizes.

use crate::node::{Needs, is_needed};
use tch::{Kind, Tensor};
use tch_extension::library::{SymInt, empty, sizes};
use tch_extension::{Error, Result, check};

/// The kinds that operators take.
const KINDS: [Kind; 4] = [Kind::Double, Kind::Float, Kind::Half, Kind::BFloat16];

/// What fake kernels check: the numbers of dimensions, and that sizes of one name are equal. Where one of
/// them is a symbol, that is left to the kernel, because a comparison would make what is traced hold for
/// this size only.
pub struct Shapes {
    op: &'static str,
    known: Vec<(&'static str, i64)>,
}

impl Shapes {
    /// Begins the checks. `input` decides the kind.
    ///
    /// # Errors
    /// If no operator takes its kind.
    pub fn of(op: &'static str, argument: &str, input: &Tensor) -> Result<Self> {
        check!(op, argument, *input).defined()?.kind_in(&KINDS)?;
        Ok(Shapes { op, known: Vec::new() })
    }

    /// Checks an argument, unless it is absent. Each of `names` stands for a size; `4H` is 4 times the size
    /// `H`, and `...` at the front is any number of sizes.
    ///
    /// # Errors
    /// If the shape is another.
    pub fn has<'a>(
        mut self,
        argument: &str,
        tensor: impl Into<Option<&'a Tensor>>,
        names: &[&'static str],
    ) -> Result<Self> {
        let Some(tensor) = tensor.into() else { return Ok(self) };
        let sizes = sizes(tensor);
        let (is_open, fixed) = match names {
            ["...", fixed @ ..] => (true, fixed),
            fixed => (false, fixed),
        };
        let fits = sizes.len() == fixed.len() || is_open && sizes.len() > fixed.len();
        if !fits {
            return Err(self.refuse(argument, names, &sizes));
        }
        for (name, size) in fixed.iter().zip(&sizes[sizes.len() - fixed.len()..]) {
            let Some(size) = size.number() else { continue };
            let digits = name.len() - name.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            let (factor, base) = name.split_at(digits);
            let known = self.known.iter().find(|(known, _)| *known == base);
            match (known, factor.parse::<i64>()) {
                (Some((_, known)), factor) if known * factor.clone().unwrap_or(1) != size => {
                    return Err(self.refuse(argument, names, &sizes));
                }
                (None, Err(_)) => self.known.push((base, size)),
                _ => {}
            }
        }
        Ok(self)
    }

    /// The size of this name, if it is known.
    pub fn known(&self, name: &str) -> Option<i64> {
        self.known.iter().find(|(known, _)| *known == name).map(|(_, size)| *size)
    }

    fn refuse(&self, argument: &str, names: &[&str], sizes: &[SymInt]) -> Error {
        let known = self.known.iter().map(|(name, size)| format!("{name} = {size}"));
        let known = known.collect::<Vec<_>>().join(", ");
        let of = if known.is_empty() { String::new() } else { format!(" with {known}") };
        let expected = format!("shape [{}]{of}", names.join(", "));
        Error::argument(self.op, argument, expected, format!("{sizes:?}"), "")
    }
}

/// Checks that the first argument has the shape of the second one.
///
/// # Errors
/// If it has not.
pub fn same_shape(op: &str, this: (&str, &Tensor), other: (&str, &Tensor)) -> Result<()> {
    let (found, wanted) = (sizes(this.1), sizes(other.1));
    let differ =
        |(a, b): (&SymInt, &SymInt)| a.number().zip(b.number()).is_some_and(|(a, b)| a != b);
    if found.len() == wanted.len() && !found.iter().zip(&wanted).any(differ) {
        return Ok(());
    }
    let expected = format!("the shape of {}, {wanted:?}", other.0);
    Err(Error::argument(op, this.0, expected, format!("{found:?}"), ""))
}

/// Checks that these are the trailing sizes of the input, and the shape of each parameter.
///
/// # Errors
/// If they are not, or if there are none.
pub fn normalized(
    op: &'static str,
    input: &Tensor,
    shape: &[i64],
    parameters: &[(&str, Option<&Tensor>)],
) -> Result<()> {
    check!(op, "input", *input).defined()?.kind_in(&KINDS)?;
    let differs = |sizes: &[SymInt]| {
        sizes.len() != shape.len()
            || sizes
                .iter()
                .zip(shape)
                .any(|(size, wanted)| size.number().is_some_and(|n| n != *wanted))
    };
    let of_input = sizes(input);
    let trailing = of_input.len().checked_sub(shape.len()).map(|first| &of_input[first..]);
    if shape.is_empty() || trailing.is_none_or(differs) {
        let expected = format!("trailing sizes of the input's shape {of_input:?}");
        return Err(Error::argument(op, "normalized_shape", expected, format!("{shape:?}"), ""));
    }
    for (name, parameter) in parameters {
        let Some(parameter) = parameter else { continue };
        let found = sizes(parameter);
        if differs(&found) {
            let expected = format!("shape normalized_shape = {shape:?}");
            return Err(Error::argument(op, name, expected, format!("{found:?}"), ""));
        }
    }
    Ok(())
}

/// The kind in which tensors of this kind are computed.
pub fn compute_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// A contiguous tensor of these sizes and this kind.
///
/// # Errors
/// An error of libtorch.
pub fn contiguous(sizes: &[SymInt], kind: Kind, like: &Tensor) -> Result<Tensor> {
    empty(sizes, kind, like)
}

/// In the place of a tensor that is absent.
///
/// # Errors
/// An error of libtorch.
pub fn nothing(like: &Tensor) -> Result<Tensor> {
    empty(&[SymInt::from(0)], like.f_kind()?, like)
}

/// The product of sizes, 1 for none.
pub fn product(sizes: &[SymInt]) -> SymInt {
    sizes.iter().cloned().fold(SymInt::from(1), |product, size| product * size)
}

/// As [`crate::node::returned`]: a contiguous tensor like each that needs a gradient.
///
/// # Errors
/// An error of libtorch.
pub fn likes<const N: usize>(tensors: [Option<&Tensor>; N], needs: Needs) -> Result<[Tensor; N]> {
    let first = tensors[0];
    let like = |(place, tensor): (usize, Option<&Tensor>)| match (tensor, first) {
        (Some(tensor), _) if is_needed(needs, place) => {
            contiguous(&sizes(tensor), tensor.f_kind()?, tensor)
        }
        (tensor, first) => match first.or(tensor) {
            Some(like) => nothing(like),
            None => Err(Error::msg("internal error: the first tensor is absent")),
        },
    };
    let made: Vec<Tensor> = tensors.into_iter().enumerate().map(like).collect::<Result<_>>()?;
    made.try_into().map_err(|_| Error::msg("internal error: the number changed"))
}

/// The sizes to which two lists of sizes broadcast.
///
/// # Errors
/// If they do not.
pub fn broadcast(a: &[SymInt], b: &[SymInt]) -> Result<Vec<SymInt>> {
    let dims = a.len().max(b.len());
    let of = |size: &[SymInt], dim: usize| {
        (dim + size.len()).checked_sub(dims).and_then(|place| size.get(place).cloned())
    };
    let one = SymInt::from(1);
    (0..dims)
        .map(|dim| match (of(a, dim), of(b, dim)) {
            (Some(a), None) => Ok(a),
            (None, Some(b)) => Ok(b),
            (Some(a), Some(b)) if b == one || a == b => Ok(a),
            (Some(a), Some(b)) if a == one => Ok(b),
            _ => Err(Error::msg("the sizes do not broadcast")),
        })
        .collect()
}
