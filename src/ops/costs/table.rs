//! Tables of costs, as text: the facts of a card, then a line for each cost, then a checksum.

use super::{Each, Facts, Unit};
use crate::{Error, Result};
use std::fmt::Write;

const TITLE: &str = "tch-extension: costs, in microseconds. `cargo xtask tune` writes this table.";
const CHECKSUM: &str = "checksum";

/// The costs of a card by their names.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::ops) struct Table {
    pub facts: Facts,
    pub costs: Vec<(String, f64)>,
}

/// FNV-1a, which finds a line that was changed by accident.
fn checksum(text: &str) -> String {
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

impl Table {
    /// The text of the table.
    pub fn text(&self) -> String {
        let mut text = format!("# {TITLE}\n");
        let mut line = |name: &str, value: &str| {
            let _ = writeln!(text, "{name} = {value}");
        };
        self.facts.named().iter().for_each(|(name, value)| line(name, value));
        self.costs.iter().for_each(|(name, cost)| line(name, &rounded(*cost)));
        let sum = checksum(&text);
        let _ = writeln!(text, "{CHECKSUM} = {sum}");
        text
    }

    /// Reads a table.
    ///
    /// # Errors
    /// When the text is no table, or was damaged.
    pub fn read(text: &str) -> Result<Table> {
        if text.trim().is_empty() {
            return Err(Error::msg("it is empty"));
        }
        let end = text.rfind(CHECKSUM).ok_or_else(|| Error::msg("its end is missing"))?;
        let found = text[end..].split_once('=').map(|(_, sum)| sum.trim());
        if found != Some(&checksum(&text[..end])) {
            return Err(Error::msg("it was changed, because its checksum is another one"));
        }
        let mut table = Table { facts: Facts::default(), costs: Vec::new() };
        for line in text[..end].lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line
                .split_once(" = ")
                .ok_or_else(|| Error::msg(format!("a line of it is no cost: {line}")))?;
            match name.contains('.') {
                true => table.costs.push((name.to_string(), cost(name, value)?)),
                false => table.facts.set(name, value)?,
            }
        }
        Ok(table)
    }

    /// Writes the costs whose names begin with `name` into `costs`.
    ///
    /// # Errors
    /// When one is missing.
    pub fn apply(&self, name: &str, costs: &mut impl Each) -> Result<()> {
        let mut missing = None;
        costs.each(name, Unit::Latency, &mut |name, _, cost| match self.cost(name) {
            Some(value) => *cost = value,
            None => missing = missing.take().or(Some(name.to_string())),
        });
        match missing {
            Some(name) => Err(Error::msg(format!("it has no {name}, so another version wrote it"))),
            None => Ok(()),
        }
    }

    /// Refuses a table that lacks a cost of the first of the others.
    pub fn has_all_of(&self, others: &[Table]) -> Result<()> {
        let mut names = others.iter().take(1).flat_map(|other| &other.costs);
        match names.find(|(name, _)| self.cost(name).is_none()) {
            Some((name, _)) => {
                Err(Error::msg(format!("it has no {name}, so another version wrote it")))
            }
            None => Ok(()),
        }
    }

    pub fn cost(&self, name: &str) -> Option<f64> {
        self.costs.iter().find(|(of, _)| of == name).map(|(_, cost)| *cost)
    }

    /// Changes costs that the table has.
    pub fn set(&mut self, names: &[String], costs: &[f64]) {
        for (name, cost) in names.iter().zip(costs) {
            if let Some((_, of_name)) = self.costs.iter_mut().find(|(of, _)| of == name) {
                *of_name = *cost;
            }
        }
    }
}

fn cost(name: &str, value: &str) -> Result<f64> {
    let cost: Option<f64> = value.parse().ok();
    cost.filter(|cost| cost.is_finite() && *cost >= 0.0)
        .ok_or_else(|| Error::msg(format!("{name} is no cost: {value}")))
}

/// Four digits are as exact as measurements are.
fn rounded(cost: f64) -> String {
    let digits = (3 - cost.abs().max(1e-9).log10().floor() as i32).max(0) as usize;
    let text = format!("{cost:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tuning::h200;
    use super::*;

    #[test]
    fn a_table_is_what_was_written() {
        let table = h200();
        assert_eq!(Table::read(&table.text()).expect("a table"), table);
        assert_eq!([1.0, 0.123_456, 123.456, 0.0].map(rounded), ["1", "0.1235", "123.5", "0"]);
    }

    #[test]
    fn damaged_tables_are_refused() {
        let text = h200().text();
        let refused = |text: &str| Table::read(text).expect_err("a damaged table").to_string();
        assert_eq!(refused(""), "it is empty");
        assert_eq!(refused(&text[..text.len() / 2]), "its end is missing");
        let changed = text.replacen("clock = 1", "clock = 2", 1);
        assert_ne!(changed, text);
        assert!(refused(&changed).contains("checksum"));
        let with = |line: &str| {
            let body = format!("{line}\n");
            format!("{body}{CHECKSUM} = {}\n", checksum(&body))
        };
        assert_eq!(refused(&with("a.b = -1")), "a.b is no cost: -1");
        assert_eq!(refused(&with("a.b = inf")), "a.b is no cost: inf");
        assert_eq!(refused(&with("l2 = x")), "its l2 is no number: x");
        assert_eq!(refused(&with("words")), "a line of it is no cost: words");
        assert_eq!(refused(&with("power = 3")), "it has a line `power`, which no table has");
    }

    #[test]
    fn a_table_without_a_cost_is_refused() {
        let costs = [("a.forward".to_string(), 1.0), ("a.backward".to_string(), 2.0)];
        let table = Table { facts: Facts::default(), costs: costs.to_vec() };
        let mut both = [0.0; 2];
        table.apply("a", &mut both).expect("both");
        assert_eq!(both, [1.0, 2.0]);
        let error = table.apply("b", &mut both).expect_err("no such costs").to_string();
        assert!(error.contains("b.forward"), "{error}");
    }
}
