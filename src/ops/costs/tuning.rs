//! Which table a device gets. It is chosen once, at the first plan that needs it, and kept.

use super::{Facts, Table, Unit};
use crate::ops::kinds::Device;
use crate::{Error, Result};
use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The tables that come with this crate. A card without a table gets the costs of the first one, scaled.
const SHIPPED: [&str; 1] = [include_str!("nvidia_h200.txt")];
/// The variable that names a table.
const VARIABLE: &str = "TCH_EXTENSION_COSTS";

/// Where a device's costs come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CostSource {
    /// A table of this card that comes with this crate.
    Shipped,
    /// A table that was measured here.
    File(PathBuf),
    /// The costs of this other card, changed by the clock, the multiprocessors and the bandwidth.
    Untuned(String),
}

impl fmt::Display for CostSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CostSource::Shipped => write!(f, "measured for this card, and part of tch-extension"),
            CostSource::File(path) => write!(f, "measured here: {}", path.display()),
            CostSource::Untuned(card) => {
                write!(f, "untuned: those of {card}, scaled; `cargo xtask tune` measures them")
            }
        }
    }
}

/// The costs by which plans choose on a device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Tuning {
    /// The card's name.
    pub card: String,
    /// Where they come from.
    pub source: CostSource,
    /// Why a table that was found is not used.
    pub refused: Option<String>,
}

pub(in crate::ops) struct Loaded {
    pub(super) tuning: Tuning,
    pub table: Table,
    /// The card, if the table is another one's.
    scaled_to: Option<Facts>,
}

impl Loaded {
    /// The costs of a card, wherever they come from.
    pub fn of(facts: &Facts) -> Loaded {
        load(facts, facts.file().filter(|path| path.exists()))
    }

    /// How many times as long something takes here as the table says.
    pub fn times(&self, unit: Unit) -> f64 {
        self.scaled_to.as_ref().map_or(1.0, |card| self.table.facts.times(card, unit))
    }
}

/// How many multiprocessors a CUDA device has.
pub(in crate::ops) fn multiprocessors(device: Device) -> Result<i64> {
    let loaded = loaded(device)?;
    let card = loaded.scaled_to.as_ref().unwrap_or(&loaded.table.facts);
    Ok(card.multiprocessors.into())
}

/// The table of a device, which is read once.
pub(super) fn loaded(device: Device) -> Result<&'static Loaded> {
    static LOADED: [OnceLock<Loaded>; 64] = [const { OnceLock::new() }; 64];
    let index = if let Device::Cuda(index) = device { index } else { usize::MAX };
    let place = LOADED
        .get(index)
        .ok_or_else(|| Error::msg(format!("{device:?} is no device whose costs are known")))?;
    if let Some(loaded) = place.get() {
        return Ok(loaded);
    }
    let facts = Facts::of(device)?;
    Ok(place.get_or_init(|| {
        let named = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
        let loaded = match named {
            Some(path) => load(&facts, Some(path)),
            None => Loaded::of(&facts),
        };
        loaded.tuning.refused.iter().for_each(|reason| refuse(reason));
        loaded
    }))
}

/// A user put a table there, and has to know that it does nothing.
fn refuse(reason: &str) {
    // Unlike `eprintln!`, this does not panic if nobody reads it.
    let _ = writeln!(std::io::stderr(), "tch-extension: {reason}");
}

pub(super) fn shipped() -> Vec<Table> {
    // `the_shipped_tables_are_whole` reads them all.
    SHIPPED.iter().filter_map(|text| Table::read(text).ok()).collect()
}

#[cfg(test)]
pub(super) fn h200() -> Table {
    let mut tables = shipped().into_iter();
    tables.find(|table| table.facts.card == "NVIDIA H200").expect("the table of the H200")
}

/// The file's table if it is for this card, or the shipped one, or one to be scaled.
fn load(facts: &Facts, file: Option<PathBuf>) -> Loaded {
    let mut refused = None;
    let card = facts.card.clone();
    if let Some(path) = file {
        match read(&path, facts) {
            Ok(table) => {
                let tuning = Tuning { card, source: CostSource::File(path), refused };
                return Loaded { tuning, table, scaled_to: None };
            }
            Err(error) => {
                refused = Some(format!(
                    "the costs in {} are not used: {error}; `cargo xtask tune` (in a bundle `run.sh tune`) writes a new table",
                    path.display()
                ));
            }
        }
    }
    let mut tables = shipped();
    let at = tables.iter().position(|table| table.facts.differs(facts).is_none());
    // The same card with other versions, or any.
    let like = tables.iter().position(|table| table.facts.card == facts.card);
    let table = match tables.is_empty() {
        true => Table::default(),
        false => tables.swap_remove(at.or(like).unwrap_or(0)),
    };
    match at {
        Some(_) => Loaded {
            tuning: Tuning { card, source: CostSource::Shipped, refused },
            table,
            scaled_to: None,
        },
        None => {
            let source = CostSource::Untuned(table.facts.card.clone());
            let tuning = Tuning { card, source, refused };
            Loaded { tuning, table, scaled_to: Some(facts.clone()) }
        }
    }
}

fn read(path: &Path, facts: &Facts) -> Result<Table> {
    let text = std::fs::read_to_string(path).map_err(|error| Error::msg(error.to_string()))?;
    let table = Table::read(&text)?;
    match table.facts.differs(facts) {
        Some(difference) => Err(Error::msg(difference)),
        None => table.has_all_of(&shipped()).map(|()| table),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::costs::CARDS;

    #[test]
    fn the_shipped_tables_are_whole() {
        assert_eq!(shipped().len(), SHIPPED.len());
        assert!(shipped().iter().all(|table| !table.costs.is_empty()));
    }

    #[test]
    fn a_card_with_a_table_gets_it_and_another_one_is_scaled() {
        let facts = h200().facts;
        let known = load(&facts, None);
        assert_eq!(known.tuning.source, CostSource::Shipped);
        assert_eq!(known.times(Unit::Work), 1.0);
        let half = facts.multiprocessors / 2;
        let other = Facts { card: "Half".into(), multiprocessors: half, ..facts.clone() };
        let other = load(&other, None);
        assert_eq!(other.tuning.source, CostSource::Untuned("NVIDIA H200".into()));
        let units = [Unit::Work, Unit::Latency, Unit::Memory, Unit::Host];
        assert_eq!(units.map(|unit| other.times(unit)), [2.0, 1.0, 1.0, 1.0]);
        let memory = 1000.0 / f64::from(facts.bandwidth);
        let slow = Facts { clock: facts.clock / 2, bandwidth: 1000, ..facts };
        let times = units.map(|unit| load(&slow, None).times(unit));
        assert_eq!(times, [2.0, 2.0, 1.0 / memory, 1.0]);
    }

    #[test]
    fn other_cards_have_costs_of_a_sensible_size() {
        let known =
            CARDS.map(|card| (card.name, [card.multiprocessors, card.clock, card.bandwidth]));
        let nothing = ("a card that tells nothing", [0, 0, 0]);
        for (card, [multiprocessors, clock, bandwidth]) in known.into_iter().chain([nothing]) {
            let facts =
                Facts { card: card.into(), multiprocessors, clock, bandwidth, ..h200().facts };
            let loaded = load(&facts, None);
            assert_eq!(loaded.tuning.source, CostSource::Untuned("NVIDIA H200".into()), "{card}");
            for unit in [Unit::Work, Unit::Latency, Unit::Memory, Unit::Host] {
                let times = loaded.times(unit);
                assert!(
                    (0.5..20.0).contains(&times),
                    "{card}: {unit:?} takes {times} times as long"
                );
            }
        }
    }

    #[test]
    fn tables_that_are_not_for_this_card_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let (table, path) = (h200(), folder.path().join("costs.txt"));
        let facts = &table.facts;
        let of = |text: &str| {
            std::fs::write(&path, text).expect("a file");
            load(facts, Some(path.clone())).tuning
        };
        let good = of(&table.text());
        assert_eq!((good.source, good.refused), (CostSource::File(path.clone()), None));
        let other = |change: fn(&mut Facts)| {
            let mut table = table.clone();
            change(&mut table.facts);
            table.text()
        };
        for (text, says) in [
            (String::new(), "it is empty"),
            (table.text().replace("cuda = ", "cuda =  "), "checksum"),
            (
                other(|facts| facts.card = "NVIDIA L4".into()),
                "card NVIDIA L4, and here it is NVIDIA H200",
            ),
            (other(|facts| facts.libtorch = "2.13.0".into()), "libtorch 2.13.0"),
            (other(|facts| facts.cuda = 12080), "cuda 12080"),
            (other(|facts| facts.bandwidth = 1), "bandwidth 1"),
            (Table { costs: table.costs[1..].to_vec(), ..table.clone() }.text(), &table.costs[0].0),
        ] {
            let found = of(&text);
            assert_eq!(found.source, CostSource::Shipped, "{says}");
            let refused = found.refused.expect("a reason");
            assert!(refused.contains(says) && refused.contains("xtask tune"), "{refused}");
        }
        let none = load(facts, Some(folder.path().join("none.txt"))).tuning;
        assert!(none.refused.is_some_and(|reason| reason.contains("No such file")));
    }
}
