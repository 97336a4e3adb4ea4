//! The costs of one operator or family on each device.

#[cfg(test)]
use super::tuning;
use super::tuning::{Loaded, loaded};
use super::{Each, Table, Unit};
use crate::ops::kinds::Device;
use crate::{Error, Result};
use std::sync::OnceLock;

const MOST_DEVICES: usize = 64;

/// Costs whose names begin with `name`, which are read once for each device.
pub(in crate::ops) struct Place<T> {
    name: &'static str,
    /// The ways that there are, without costs.
    unknown: fn() -> T,
    /// Whether costs from another card are scaled to this one.
    is_scaled: bool,
    on_devices: [OnceLock<T>; MOST_DEVICES],
    #[cfg(test)]
    on_h200: OnceLock<T>,
}

impl<T: Each> Place<T> {
    pub const fn new(name: &'static str, unknown: fn() -> T) -> Place<T> {
        Place::with(name, unknown, true)
    }

    /// The same as they are in the table, because plans compare them with numbers of that card.
    pub const fn unscaled(name: &'static str, unknown: fn() -> T) -> Place<T> {
        Place::with(name, unknown, false)
    }

    const fn with(name: &'static str, unknown: fn() -> T, is_scaled: bool) -> Place<T> {
        Place {
            name,
            unknown,
            is_scaled,
            on_devices: [const { OnceLock::new() }; MOST_DEVICES],
            #[cfg(test)]
            on_h200: OnceLock::new(),
        }
    }

    /// Those of a CUDA device.
    pub fn of(&self, device: Device) -> Result<&T> {
        let index = if let Device::Cuda(index) = device { index } else { MOST_DEVICES };
        let place = self
            .on_devices
            .get(index)
            .ok_or_else(|| Error::msg(format!("{device:?} is no device whose costs are known")))?;
        if let Some(costs) = place.get() {
            return Ok(costs);
        }
        let loaded = loaded(device)?;
        let mut costs = self.fill(&loaded.table)?;
        if self.is_scaled {
            costs.each(self.name, Unit::Latency, &mut |_, unit, cost| *cost *= loaded.times(unit));
        }
        Ok(place.get_or_init(|| costs))
    }

    /// Those of an H200.
    #[cfg(test)]
    pub fn h200(&self) -> &T {
        self.on_h200.get_or_init(|| {
            let mut costs = (self.unknown)();
            tuning::h200().apply(self.name, &mut costs).expect("all costs");
            costs
        })
    }

    /// The costs in a table.
    pub fn fill(&self, table: &Table) -> Result<T> {
        let mut costs = (self.unknown)();
        table.apply(self.name, &mut costs).map(|()| costs)
    }
}

/// Costs by their names.
pub(in crate::ops) trait Named {
    /// The names and units of all costs.
    fn names(&self) -> Vec<(String, Unit)>;

    fn is_scaled(&self) -> bool;

    /// All costs, as they were loaded.
    fn costs(&self, loaded: &Loaded) -> Vec<(String, f64)> {
        let of = |(name, unit): (String, Unit)| {
            // Tables are whole (`tuning.rs:load`).
            let cost = loaded.table.cost(&name).unwrap_or(0.0);
            (name, cost * if self.is_scaled() { loaded.times(unit) } else { 1.0 })
        };
        self.names().into_iter().map(of).collect()
    }
}

impl<T: Each> Named for Place<T> {
    fn is_scaled(&self) -> bool {
        self.is_scaled
    }

    fn names(&self) -> Vec<(String, Unit)> {
        let mut names = Vec::new();
        let mut note = |name: &str, unit, _: &mut f64| names.push((name.to_string(), unit));
        (self.unknown)().each(self.name, Unit::Latency, &mut note);
        names
    }
}
