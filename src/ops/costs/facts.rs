//! What is known of a card without measuring it.

use super::Unit;
use crate::cuda::device_properties;
use crate::ops::kinds::Device;
use crate::{Error, Result, library};
use std::path::PathBuf;

/// What tells one card from another, and what its costs depend on. The versions belong to it, because
/// they decide which kernels cuBLAS and cuDNN have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::ops) struct Facts {
    pub card: String,
    pub multiprocessors: u32,
    /// In MHz.
    pub clock: u32,
    /// Of the memory, in GB/s.
    pub bandwidth: u32,
    /// Bytes of the L2 cache.
    pub l2: u64,
    /// The runtime's version: 13000 for 13.0.
    pub cuda: u32,
    pub libtorch: String,
}

impl Facts {
    /// Those of a CUDA device.
    ///
    /// # Errors
    /// When `device` is not an existing CUDA device, or this build has no CUDA.
    pub fn of(device: Device) -> Result<Facts> {
        let found = device_properties(device.into())?;
        let bits = f64::from(found.memory_bus_width) * f64::from(found.memory_clock_rate) * 2.0;
        Ok(Facts {
            card: found.name,
            multiprocessors: found.multi_processor_count,
            clock: found.clock_rate / 1000,
            bandwidth: (bits / 8e6) as u32,
            l2: found.l2_cache_size,
            cuda: crate::cuda::runtime_version()?,
            libtorch: library::libtorch_version(),
        })
    }

    /// Where the table of this card is kept, in the folder of the compile cache; `None` without a home
    /// folder.
    pub fn file(&self) -> Option<PathBuf> {
        let variable =
            |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let folder = variable("TCH_EXTENSION_CACHE")
            .or_else(|| {
                Some(
                    variable("XDG_CACHE_HOME")
                        .filter(|home| home.is_absolute())?
                        .join("tch_extension"),
                )
            })
            .or_else(|| Some(variable("HOME")?.join(".cache/tch_extension")))?;
        let plain = |of: char| if of.is_ascii_alphanumeric() { of } else { '_' };
        let card: String = self.card.chars().map(plain).collect();
        let Facts { multiprocessors, cuda, libtorch, .. } = self;
        let name = format!("{card}-{multiprocessors}-cuda-{cuda}-libtorch-{libtorch}.txt");
        Some(folder.join("costs").join(name.to_lowercase()))
    }

    /// The names and values of all facts, in the order of a table's head.
    pub(super) fn named(&self) -> [(&'static str, String); 7] {
        [
            ("card", self.card.clone()),
            ("multiprocessors", self.multiprocessors.to_string()),
            ("clock", self.clock.to_string()),
            ("bandwidth", self.bandwidth.to_string()),
            ("l2", self.l2.to_string()),
            ("cuda", self.cuda.to_string()),
            ("libtorch", self.libtorch.clone()),
        ]
    }

    pub(super) fn set(&mut self, name: &str, value: &str) -> Result<()> {
        fn number<T: std::str::FromStr>(name: &str, value: &str) -> Result<T> {
            value.parse().map_err(|_| Error::msg(format!("its {name} is no number: {value}")))
        }
        match name {
            "card" => self.card = value.to_string(),
            "multiprocessors" => self.multiprocessors = number(name, value)?,
            "clock" => self.clock = number(name, value)?,
            "bandwidth" => self.bandwidth = number(name, value)?,
            "l2" => self.l2 = number(name, value)?,
            "cuda" => self.cuda = number(name, value)?,
            "libtorch" => self.libtorch = value.to_string(),
            _ => return Err(Error::msg(format!("it has a line `{name}`, which no table has"))),
        }
        Ok(())
    }

    /// The first fact in which a table for `self` is not for this card, with both values.
    pub(super) fn differs(&self, card: &Facts) -> Option<String> {
        let mut pairs = self.named().into_iter().zip(card.named());
        let (table, found) = pairs.find(|(table, found)| table != found)?;
        Some(format!("it is for {} {}, and here it is {}", table.0, table.1, found.1))
    }

    /// How many times as long something takes on `card` as on the card of `self`.
    pub(super) fn times(&self, card: &Facts, unit: Unit) -> f64 {
        let ratio = |of: fn(&Facts) -> u32| match (of(self), of(card)) {
            (0, _) | (_, 0) => 1.0,
            (here, there) => f64::from(here) / f64::from(there),
        };
        let clock = ratio(|facts| facts.clock);
        match unit {
            Unit::Latency => clock,
            Unit::Work => clock * ratio(|facts| facts.multiprocessors),
            Unit::Memory => ratio(|facts| facts.bandwidth),
            Unit::Host | Unit::Parts => 1.0,
        }
    }
}
