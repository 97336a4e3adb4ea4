//! What products cost by the ways that plans compare.

use crate::ops::costs::{Place, coefficients};

pub(in crate::ops) static COSTS: Place<Costs> = Place::new("gemm", Costs::default);

coefficients! {
    #[derive(Default)]
    pub(in crate::ops) struct Costs {
        Parts half: Arithmetic,
        Parts tf32: Arithmetic,
        /// Strict.
        Parts float: Arithmetic,
        Parts double: Arithmetic,
        Parts padded: PaddedKinds,
        /// `Skinny` by tensor cores.
        Parts by_tensor: Dots,
        /// What follows libtorch's product: bias and ReLU.
        Parts pass: Pass,
        /// The sum of columns that is a bias' gradient, for predictions alone.
        Parts columns: Pass,
    }
}

coefficients! {
    #[derive(Default)]
    pub(in crate::ops) struct Arithmetic {
        /// One call of cuBLASLt.
        Parts plan: Aligned,
        /// libtorch's product, without what follows.
        Parts libtorch: Aligned,
        Parts small: Tiles,
        Parts skinny: Skinny,
    }
}

coefficients! {
    /// Copies pay off for tensor cores alone.
    #[derive(Default)]
    pub(in crate::ops) struct PaddedKinds {
        Parts half: Padded,
        Parts tf32: Padded,
    }
}

coefficients! {
    /// Small tiles: a fixed part, a thousand terms of a sum, a tile for each multiprocessor, and a thousand
    /// terms of it.
    #[derive(Copy, Default)]
    pub(in crate::ops) struct Tiles {
        Latency fixed: f64,
        Latency chain: f64,
        Latency tile: f64,
        Latency term: f64,
    }
}

impl Tiles {
    pub fn of(&self, load: &Load, tiles: f64) -> f64 {
        self.fixed + self.chain * load.depth + tiles * (self.tile + self.term * load.depth)
    }
}

coefficients! {
    /// Dot products, by whether the long factor is contiguous along K.
    #[derive(Copy, Default)]
    pub(in crate::ops) struct Skinny {
        Parts by_rows: Dots,
        Parts by_columns: Dots,
    }
}

coefficients! {
    /// A fixed part, a million operations, a MB, a thousand terms of a sum, and a thousand rows of the long
    /// factor for each multiprocessor.
    #[derive(Copy, Default)]
    pub(in crate::ops) struct Dots {
        Latency fixed: f64,
        Work product: f64,
        Memory bytes: f64,
        Latency chain: f64,
        Latency rows: f64,
    }
}

impl Dots {
    pub fn of(&self, load: &Load, rows: f64) -> f64 {
        self.fixed
            + self.product * load.operations
            + self.bytes * load.bytes
            + self.chain * load.depth
            + self.rows * rows
    }
}

coefficients! {
    /// By the bytes of which all addresses and rows are multiples. cuBLAS has other kernels for each.
    #[derive(Default)]
    pub(in crate::ops) struct Aligned {
        Parts of_16: Times,
        Parts of_8: Times,
        Parts of_less: Times,
    }
}

coefficients! {
    #[derive(Default)]
    pub(in crate::ops) struct Padded {
        Parts product: Times,
        /// A kernel that copies, and a MB that it copies.
        Parts copies: Pass,
    }
}

coefficients! {
    /// A kernel over all elements: a fixed part, and a MB.
    #[derive(Copy, Default)]
    pub(in crate::ops) struct Pass {
        Latency fixed: f64,
        Memory bytes: f64,
    }
}

coefficients! {
    /// A product: a fixed part, a million operations, a MB, a thousand terms of a sum, and as many in each
    /// round of tiles.
    #[derive(Copy, Default)]
    pub(in crate::ops) struct Times {
        Latency fixed: f64,
        Work product: f64,
        Memory bytes: f64,
        Latency chain: f64,
        Latency wave: f64,
    }
}

/// What a product's time depends on.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct Load {
    /// Millions of operations.
    pub operations: f64,
    /// MB that are read or written, and those of the output alone.
    pub bytes: f64,
    pub output: f64,
    /// Thousands of terms of a sum.
    pub depth: f64,
    /// How many rounds of tiles there are.
    pub waves: f64,
}

impl Times {
    pub fn of(&self, load: &Load) -> f64 {
        self.fixed
            + self.product * load.operations
            + self.bytes * load.bytes
            + self.chain * load.depth
            + self.wave * load.depth * load.waves
    }
}

impl Pass {
    pub fn of(&self, launches: f64, bytes: f64) -> f64 {
        self.fixed * launches + self.bytes * bytes
    }
}
