//! Sequences that `csrc/recurrent/cluster` computes in one kernel.

use super::resident::{Gpu, Pass};
use super::sizes::{Direction, Product, counts_in_32_bits};
use crate::ops::costs::{Each, Unit, Visit, cheapest};

/// How many rows of the batch a cluster computes.
const ROWS: i64 = 8;

/// A kernel that is compiled, up to some hidden size, and what a step of it costs.
#[derive(Clone, Debug)]
pub(in crate::ops) struct Entry {
    pub product: Product,
    /// The largest H.
    pub hidden: i64,
    /// How many blocks share rows: 8 or 16.
    pub cluster: i64,
    /// How many blocks share a multiprocessor, forward and backward: small blocks may.
    pub share: [i64; 2],
    /// What a step costs, forward and backward; `None` if there is no kernel.
    pub step: [Option<f64>; 2],
}

impl Entry {
    /// A kernel for these directions.
    pub fn new(
        (product, hidden, cluster): (Product, i64, i64),
        share: [i64; 2],
        directions: &[Direction],
    ) -> Entry {
        let of = |direction| directions.contains(&direction).then_some(0.0);
        let step = [Direction::Forward, Direction::Backward].map(of);
        Entry { product, hidden, cluster, share, step }
    }
}

impl Entry {
    /// Those that every cell has: of half kinds and of scaled values up to this H, and of `Float` and
    /// `Double` up to 128.
    pub fn of_cells(widest: i64) -> Vec<Entry> {
        const BOTH: [Direction; 2] = [Direction::Forward, Direction::Backward];
        let sizes = [(128, 8, 2), (256, 8, 2), (512, 16, 1), (512, 8, 1), (768, 16, 1)];
        let of = |product| {
            let sizes = sizes.into_iter().filter(move |(hidden, ..)| *hidden <= widest);
            sizes.map(move |(hidden, cluster, share)| {
                Entry::new((product, hidden, cluster), [share; 2], &BOTH)
            })
        };
        let plain = |product| Entry::new((product, 128, 8), [2, 1], &BOTH);
        let plain = [Product::Float, Product::Double].map(plain);
        of(Product::Half).chain(of(Product::Scaled)).chain(plain).collect()
    }
}

impl Each for Entry {
    fn each(&mut self, name: &str, unit: Unit, visit: &mut Visit<'_>) {
        let Entry { product, hidden, cluster, .. } = *self;
        self.step.each(&format!("{name}.{}_{hidden}_{cluster}", product.name()), unit, visit);
    }
}

/// A kernel for clusters, and what it costs.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct Kernel {
    /// How many blocks share rows.
    pub cluster: i64,
    /// Whether no two blocks have to share a multiprocessor.
    pub has_room: bool,
    /// How many clusters run at a time.
    at_a_time: i64,
    /// What one step of a cluster costs.
    step: f64,
}

impl Kernel {
    /// The fastest kernel for these sizes, if there is one. The weights have to fit on the chip,
    /// and the kernel counts in 32 bits.
    ///
    /// `kernels` are a cell's, by their products and hidden sizes, and `values` is V of
    /// [`counts_in_32_bits`].
    pub fn new((kernels, values): (&[Entry], i64), pass: &Pass) -> Option<Kernel> {
        let Pass { direction, sizes, kind, tf32, gpu: Gpu { clusters, .. } } = *pass;
        if !counts_in_32_bits(sizes, values) {
            return None;
        }
        let product = Product::of(kind, tf32);
        let of_product = || kernels.iter().filter(|entry| entry.product == product);
        let hidden = of_product().map(|entry| entry.hidden).find(|&most| sizes.hidden <= most)?;
        let kernels = of_product().filter(|entry| entry.hidden == hidden).filter_map(|entry| {
            let direction = usize::from(direction == Direction::Backward);
            let clusters = if entry.cluster == 8 { clusters.of_8 } else { clusters.of_16 };
            Some(Kernel {
                cluster: entry.cluster,
                has_room: sizes.batch <= ROWS * clusters,
                at_a_time: entry.share[direction] * clusters,
                step: entry.step[direction]?,
            })
        });
        let there = kernels.filter(|kernel| kernel.at_a_time > 0);
        cheapest(there.map(|kernel| (kernel, kernel.cost(sizes.batch)))).map(|(kernel, _)| kernel)
    }

    /// How many rounds of clusters run one after the other.
    fn rounds(&self, batch: i64) -> i64 {
        let clusters = batch.saturating_add(ROWS - 1) / ROWS;
        clusters.saturating_add(self.at_a_time - 1) / self.at_a_time
    }

    /// What a step costs for all rows of the batch.
    pub fn cost(&self, batch: i64) -> f64 {
        self.rounds(batch) as f64 * self.step
    }
}
