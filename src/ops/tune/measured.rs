//! Times that were measured.

use crate::{Error, Result};
use tch::Kind;

/// The GPU's time of a call in a way that was forced.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    pub operator: String,
    /// Whether gradients are computed, too.
    pub both: bool,
    pub kind: Kind,
    pub tf32: bool,
    /// The sizes of the operator's tensors.
    pub inputs: Vec<Vec<i64>>,
    /// How many elements the first tensor begins after an aligned address.
    pub offset: i64,
    pub way: String,
    pub micros: f64,
}

const KINDS: [Kind; 4] = [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double];

impl Measured {
    /// A line of a file.
    pub fn line(&self) -> String {
        let Measured { operator, both, kind, tf32, inputs, offset, way, micros } = self;
        format!("{operator};{both};{kind:?};{tf32};{inputs:?};{offset};{way};{micros:.3}")
    }

    /// The same from a line.
    ///
    /// # Errors
    /// When the line is another one.
    pub fn read(line: &str) -> Result<Measured> {
        let fields: Vec<&str> = line.split(';').collect();
        let parsed = || -> Option<Measured> {
            let [operator, both, kind, tf32, inputs, offset, way, micros, ..] = fields[..] else {
                return None;
            };
            Some(Measured {
                operator: operator.to_string(),
                both: both.parse().ok()?,
                kind: *KINDS.iter().find(|of| format!("{of:?}") == kind)?,
                tf32: tf32.parse().ok()?,
                inputs: sizes(inputs)?,
                offset: offset.parse().ok()?,
                way: way.to_string(),
                micros: micros.parse().ok()?,
            })
        };
        let makes_sense = |measured: &Measured| {
            let sizes = measured.inputs.iter().flatten().chain([&measured.offset]);
            measured.micros.is_finite() && measured.micros > 0.0 && sizes.min() >= Some(&0)
        };
        parsed()
            .filter(makes_sense)
            .ok_or_else(|| Error::msg(format!("this line is no measured time: {line}")))
    }

    /// Whether another one is the same call in any way.
    pub fn is_like(&self, other: &Measured) -> bool {
        let with = |of: &Measured| Measured { way: String::new(), micros: 0.0, ..of.clone() };
        with(self) == with(other)
    }
}

/// `[[1, 2], [3]]`
fn sizes(text: &str) -> Option<Vec<Vec<i64>>> {
    let all = text.strip_prefix('[')?.strip_suffix(']')?;
    let of = |size: &str| -> Option<Vec<i64>> {
        let size = size.trim_matches(['[', ']']);
        size.split(", ").filter(|of| !of.is_empty()).map(|of| of.parse().ok()).collect()
    };
    all.split("], [").map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_as_it_was_written() {
        let measured = Measured {
            operator: "linear".into(),
            both: true,
            kind: Kind::BFloat16,
            tf32: false,
            inputs: vec![vec![2, 3], vec![], vec![4]],
            offset: 5,
            way: "Plan".into(),
            micros: 6.125,
        };
        let line = measured.line();
        assert_eq!(Measured::read(&line).expect("a line"), measured);
        assert!(Measured::read(&format!("{line};more")).is_ok());
        let other = |from: &str, to: &str| line.replace(from, to);
        let wrong = [
            other(";5;", ";-5;"),
            other("6.125", "0.0"),
            other("6.125", "NaN"),
            other("[2,", "[-2,"),
        ];
        let lines = ["", "linear;true", "a;b;c;d;e;f;g;h"].map(String::from);
        for line in lines.iter().chain(&wrong) {
            assert!(Measured::read(line).is_err(), "{line}");
        }
    }
}
