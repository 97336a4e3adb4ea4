//! Cards without a table, for which plans are checked as far as that needs no card.

/// What is known of a card.
pub(in crate::ops) struct Known {
    pub name: &'static str,
    pub multiprocessors: u32,
    /// In MHz.
    pub clock: u32,
    /// In GB/s.
    pub bandwidth: u32,
    /// The most shared memory that a block can have, in bytes.
    pub shared_memory: i32,
    /// Whether blocks can form clusters. No kernel of `csrc/recurrent` for clusters or grids has code for
    /// these cards.
    pub clusters: bool,
}

pub(in crate::ops) const CARDS: [Known; 4] = [
    Known {
        name: "NVIDIA A100-SXM4-80GB",
        multiprocessors: 108,
        clock: 1410,
        bandwidth: 2039,
        shared_memory: 163 << 10,
        clusters: false,
    },
    Known {
        name: "NVIDIA GeForce RTX 4090",
        multiprocessors: 128,
        clock: 2520,
        bandwidth: 1008,
        shared_memory: 99 << 10,
        clusters: false,
    },
    Known {
        name: "NVIDIA L4",
        multiprocessors: 58,
        clock: 2040,
        bandwidth: 300,
        shared_memory: 99 << 10,
        clusters: false,
    },
    Known {
        name: "NVIDIA B200",
        multiprocessors: 148,
        clock: 1965,
        bandwidth: 8000,
        shared_memory: 227 << 10,
        clusters: true,
    },
];
