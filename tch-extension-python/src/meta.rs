//! What fake kernels are made of. They read sizes as [`SymInt`]s, so that torch.compile makes one graph
//! for all sizes.

use tch::{Kind, Tensor};
use tch_extension::library::{SymInt, empty, sizes};
use tch_extension::{Error, Result, check};

/// The kinds that operators take.
const KINDS: [Kind; 4] = [Kind::Double, Kind::Float, Kind::Half, Kind::BFloat16];

/// What fake kernels check: the number of dimensions of each argument, and that sizes of one name are
/// equal. Symbols are not compared, because what is traced would then hold for one size only; the kernel
/// checks their values.
pub struct Shapes {
    op: &'static str,
    known: Vec<(&'static str, i64)>,
}

impl Shapes {
    /// Begins the checks with the kind of an argument.
    ///
    /// # Errors
    /// If no operator takes this kind.
    pub fn of(op: &'static str, argument: &str, tensor: &Tensor) -> Result<Self> {
        check!(op, argument, *tensor).defined()?.kind_in(&KINDS)?;
        Ok(Shapes { op, known: Vec::new() })
    }

    /// Checks an argument, unless it is absent. Each of `names` stands for a size: `H`, 4 times `H` as
    /// `4H`, or the number `1`. `...` at the front stands for any number of sizes.
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
        let (is_open, named) = match names {
            ["...", named @ ..] => (true, named),
            named => (false, named),
        };
        let extra = sizes.len().checked_sub(named.len());
        let Some(extra) = extra.filter(|extra| is_open || *extra == 0) else {
            return Err(self.refuse(argument, names, &sizes));
        };
        for (name, size) in named.iter().zip(&sizes[extra..]) {
            let Some(size) = size.number() else { continue };
            match self.expected(name) {
                Some(expected) if expected != size => {
                    return Err(self.refuse(argument, names, &sizes));
                }
                None if name.starts_with(char::is_alphabetic) => self.known.push((name, size)),
                _ => {}
            }
        }
        Ok(self)
    }

    /// What a size of this name must be, if it is known.
    fn expected(&self, name: &str) -> Option<i64> {
        let base = name.trim_start_matches(|digit: char| digit.is_ascii_digit());
        let factor = name[..name.len() - base.len()].parse().unwrap_or(1);
        if base.is_empty() { Some(factor) } else { Some(factor * self.known(base)?) }
    }

    /// The size of this name, if it is known.
    pub fn known(&self, name: &str) -> Option<i64> {
        self.known.iter().find(|(known, _)| *known == name).map(|(_, size)| *size)
    }

    fn refuse(&self, argument: &str, names: &[&str], sizes: &[SymInt]) -> Error {
        let known: Vec<_> =
            self.known.iter().map(|(name, size)| format!("{name} = {size}")).collect();
        let given = if known.is_empty() { String::new() } else { " with ".to_string() };
        let expected = format!("shape [{}]{given}{}", names.join(", "), known.join(", "));
        Error::argument(self.op, argument, expected, format!("{sizes:?}"), "")
    }
}

/// In the place of a tensor that is absent.
///
/// # Errors
/// An error of libtorch.
pub fn nothing(like: &Tensor) -> Result<Tensor> {
    empty(&[SymInt::from(0)], like.f_kind()?, like)
}
