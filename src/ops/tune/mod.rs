//! Costs from measured times, for `cargo xtask tune`: each family predicts the times of its ways from
//! its costs, and [`fit`] changes the costs until they agree with what was measured.

mod families;
mod measured;
mod solve;

pub use measured::Measured;

use super::costs::{Facts, Loaded, Table};
use super::recurrent::kernels::device::{Clusters, Grid};
use super::recurrent::plan::Gpu as RnnGpu;
use crate::{Error, Result};
use families::{FAMILIES, Family, OTHERS};
use solve::Fit;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;
use tch::Device;

/// The operators whose costs are fitted.
pub fn operators() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().flat_map(|family| family.operators).copied()
}

/// A table that was fitted, where plans look for it, and what it predicts.
#[derive(Debug)]
#[non_exhaustive]
pub struct Fitted {
    pub text: String,
    pub path: Option<PathBuf>,
    pub report: String,
}

/// A card: what it is, and what plans ask it beside its costs.
#[derive(Clone, Debug)]
pub(super) struct Card {
    facts: Facts,
    pub rows: RnnGpu,
}

impl Card {
    pub fn processors(&self) -> i64 {
        self.facts.multiprocessors.into()
    }
}

/// The first lines of a file with measured times, which say on which card they were measured.
///
/// # Errors
/// When `device` is not an existing CUDA device.
pub fn head(device: Device) -> Result<String> {
    let RnnGpu { clusters, grid, .. } = RnnGpu::of(device.into())?;
    let table = Table { facts: Facts::of(device.into())?, costs: Vec::new() };
    let counts = [clusters.of_8, clusters.of_16, grid.blocks];
    Ok(format!("{}{RUNNING}{counts:?}\n", table.text()))
}

/// Before the numbers of clusters of 8 and of 16 blocks, and of blocks, that run at the same time.
const RUNNING: &str = "running = ";

/// Fits the costs of a card to the times that were measured on it: the text of [`head`], and a line for
/// each of them. Costs stay as they were as far as nothing was measured.
///
/// # Errors
/// When the text is another one.
pub fn fit(text: &str) -> Result<Fitted> {
    let other = || Error::msg("this file does not begin as those with measured times do");
    let (head, rest) = text.split_once(RUNNING).ok_or_else(other)?;
    let (counts, lines) = rest.split_once('\n').ok_or_else(other)?;
    let counts: Option<Vec<i64>> =
        counts.trim_matches(['[', ']']).split(", ").map(|count| count.parse().ok()).collect();
    let Some(&[of_8, of_16, blocks]) = counts.as_deref() else { return Err(other()) };
    let measured: Result<Vec<Measured>> = lines.lines().map(Measured::read).collect();
    let facts = Table::read(head)?.facts;
    let rows = RnnGpu {
        clusters: Clusters { of_8, of_16 },
        grid: Grid { blocks },
        processors: facts.multiprocessors.into(),
    };
    let card = Card { facts, rows };
    let mut table = Table { facts: card.facts.clone(), costs: Vec::new() };
    let before = Loaded::of(&card.facts);
    for place in FAMILIES.iter().flat_map(|family| family.places).chain(&OTHERS) {
        table.costs.extend(place.costs(&before));
    }
    let report = fit_all(&mut table, &card, &measured?)?;
    Ok(Fitted { text: table.text(), path: table.facts.file(), report })
}

/// Fewer times say too little about as many costs as a family has.
const FEWEST: usize = 300;

/// Changes a table's costs, and says how well they predict.
fn fit_all(table: &mut Table, card: &Card, measured: &[Measured]) -> Result<String> {
    let mut report = String::new();
    for family in &FAMILIES {
        let rows = family.rows(measured);
        if rows.len() < FEWEST {
            let names = family.operators.join(", ");
            let _ =
                writeln!(report, "{names}: {} times are too few, so the costs stay", rows.len());
            continue;
        }
        let micros: Vec<f64> = rows.iter().map(|row| row.micros).collect();
        let before = report_of(family, table, card, &rows)?;
        let places = family.places.iter().flat_map(|place| place.names());
        let names: Vec<String> = places.map(|(name, _)| name).collect();
        let predict = |costs: &[f64]| {
            let mut table = table.clone();
            table.set(&names, costs);
            (family.predict)(&table, &rows, card).unwrap_or_else(|_| vec![None; rows.len()])
        };
        let start: Vec<f64> = names.iter().map(|name| table.cost(name).unwrap_or(0.0)).collect();
        let found = Fit { micros: &micros, predict: &predict }.solve(&start);
        table.set(&names, &found);
        let after = report_of(family, table, card, &rows)?;
        let ways = report_of_ways(&rows, &(family.predict)(table, &rows, card)?);
        let _ = write!(report, "before:\n{before}after:\n{after}{ways}");
    }
    Ok(report)
}

/// How far predictions are off, and what the plans lose by it.
fn report_of(family: &Family, table: &Table, card: &Card, rows: &[&Measured]) -> Result<String> {
    let predicted = (family.predict)(table, rows, card)?;
    let mut text = String::new();
    for operator in family.operators {
        for both in [false, true] {
            let of: Vec<(&Measured, f64)> = rows
                .iter()
                .zip(&predicted)
                .filter(|(row, _)| row.operator == *operator && row.both == both)
                .filter_map(|(row, predicted)| Some((*row, (*predicted)?)))
                .collect();
            let direction = if both { "both" } else { "forward" };
            let off: Vec<f64> =
                of.iter().map(|(row, cost)| (cost / row.micros).ln().abs()).collect();
            let mean = off.iter().sum::<f64>() / off.len().max(1) as f64;
            let [regret, worst, before] = regrets(&of, rows, family);
            let _ = writeln!(
                text,
                "{operator} {direction}: {} times, off by {:.0} %; chosen ways take {regret:.3} of the best, at worst {worst:.2}; {before:.3} of the former plan's",
                of.len(),
                100.0 * mean.exp_m1(),
            );
        }
    }
    Ok(text)
}

/// How far predictions of each way are off, and to which side.
fn report_of_ways(rows: &[&Measured], predicted: &[Option<f64>]) -> String {
    let mut ways: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for (row, predicted) in rows.iter().zip(predicted) {
        let Some(predicted) = predicted else { continue };
        let Measured { operator, both, kind, tf32, way, micros, .. } = row;
        let (direction, tf32) =
            (if *both { "both" } else { "forward" }, if *tf32 { " tf32" } else { "" });
        let name = format!("{operator} {direction} {kind:?}{tf32} {way}");
        ways.entry(name).or_default().push((predicted / micros).ln());
    }
    let line = |(name, off): (&String, &Vec<f64>)| {
        let mean = |of: fn(f64) -> f64| off.iter().copied().map(of).sum::<f64>() / off.len() as f64;
        let (far, side) = (mean(f64::abs), mean(|off| off));
        format!(
            "  {name}: {} times, off by {:.0} %, {:+.0} %\n",
            off.len(),
            100.0 * far,
            100.0 * side
        )
    };
    ways.iter().map(line).collect()
}

/// The geometric mean, over calls, of the time of the way that plans take over that of the fastest way; the
/// largest of these; and the mean over the time of the plan that measured.
fn regrets(of: &[(&Measured, f64)], rows: &[&Measured], family: &Family) -> [f64; 3] {
    let mut groups: Vec<Vec<(&Measured, f64)>> = Vec::new();
    for &row in of {
        match groups.last_mut().filter(|group| group[0].0.is_like(row.0)) {
            Some(group) => group.push(row),
            None => groups.push(vec![row]),
        }
    }
    let (mut logs, mut worst, mut before, mut count) = (0.0, 1.0_f64, 0.0, 0);
    for group in groups.iter().filter(|group| group.len() > 1) {
        let is_plan = |row: &&&Measured| row.way == "Automatic" && row.is_like(group[0].0);
        let plan = rows.iter().find(is_plan).map(|row| row.micros);
        // A way without a prediction, which the plan chose by a rule of its own.
        let is_other = |plan| group.iter().all(|(row, _)| row.micros != plan);
        if plan.is_some_and(is_other) {
            continue;
        }
        let Some(chosen) = (family.choose)(group) else { continue };
        let best = group.iter().map(|(row, _)| row.micros).fold(f64::INFINITY, f64::min);
        logs += (chosen / best).ln();
        worst = worst.max(chosen / best);
        before += plan.map_or(0.0, |plan| (chosen / plan).ln());
        count += 1;
    }
    let mean = |logs: f64| (logs / f64::from(count.max(1))).exp();
    [mean(logs), worst, mean(before)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    const SHIPPED: &str = include_str!("../costs/nvidia_h200.txt");

    fn card() -> Card {
        Card { facts: Table::read(SHIPPED).expect("a table").facts, rows: RnnGpu::H200 }
    }

    /// Products of half kinds, by cuBLASLt and by padded copies, with these costs.
    fn times(table: &Table) -> Vec<Measured> {
        let sizes = [16_i64, 64, 256, 1000, 1024, 3000, 4096];
        let of = |way: &str, [m, k, n]: [i64; 3]| Measured {
            operator: "linear".into(),
            both: false,
            kind: Kind::BFloat16,
            tf32: false,
            inputs: vec![vec![m, k], vec![n, k], vec![n]],
            offset: i64::from(way == "Padded"),
            way: way.into(),
            micros: 1.0,
        };
        let mut all = Vec::new();
        for m in sizes {
            for k in sizes {
                all.extend(
                    sizes.iter().flat_map(|&n| ["Plan", "Padded"].map(|way| of(way, [m, k, n]))),
                );
            }
        }
        let rows: Vec<&Measured> = all.iter().collect();
        let predicted = (FAMILIES[1].predict)(table, &rows, &card()).expect("predictions");
        all.iter_mut().zip(predicted).for_each(|(row, time)| row.micros = time.expect("a time"));
        all
    }

    #[test]
    fn a_table_is_fitted_to_times() {
        let shipped = Table::read(SHIPPED).expect("a table");
        let mut other = shipped.clone();
        let names = ["gemm.half.plan.of_16.fixed", "gemm.padded.half.product.product"];
        let costs: Vec<f64> = names
            .iter()
            .zip([2.0, 1.5])
            .map(|(name, times)| times * shipped.cost(name).expect("a cost"))
            .collect();
        other.set(&names.map(String::from), &costs);
        let measured = times(&other);
        let head = Table { facts: shipped.facts.clone(), costs: Vec::new() }.text();
        let lines: String = measured.iter().map(|row| row.line() + "\n").collect();
        let fitted = fit(&format!("{head}{RUNNING}[15, 7, 132]\n{lines}")).expect("a table");
        let found = Table::read(&fitted.text).expect("a table");
        assert_eq!((&found.facts, found.costs.len()), (&shipped.facts, shipped.costs.len()));
        let predicted = times(&found);
        let mean = predicted
            .iter()
            .zip(&measured)
            .map(|(found, row)| (found.micros / row.micros).ln().abs());
        let off = mean.sum::<f64>() / measured.len() as f64;
        assert!(off < 0.03, "off by {off:.3}\n{}", fitted.report);
        // Nothing was measured of these.
        for name in [
            "gemm.tf32.plan.of_16.fixed",
            "lstm.cluster.half_128_8.forward",
            "lltm.cluster.half_128_8.forward",
        ] {
            let [before, after] = [&shipped, &found].map(|table| table.cost(name).expect("a cost"));
            assert!((after / before - 1.0).abs() < 1e-3, "{name}: {before} became {after}");
        }
    }

    #[test]
    fn other_files_are_no_times() {
        let head = Table { facts: card().facts, costs: Vec::new() }.text();
        for text in [
            "",
            "words",
            &head,
            &format!("{head}{RUNNING}[1, 2]\n"),
            &format!("{head}{RUNNING}[1, 2, 3]\nline\n"),
        ] {
            assert!(fit(text).is_err(), "{text}");
        }
        // Without times every cost stays.
        let fitted = fit(&format!("{head}{RUNNING}[15, 7, 132]\n")).expect("a table");
        assert!(fitted.report.contains("too few"), "{}", fitted.report);
    }
}
