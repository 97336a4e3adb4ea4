//! Layers that `csrc/recurrent/block` computes in one kernel a direction.

use super::resident::Pass;
use super::sizes::{Line, Product, Sizes};
use crate::ops::costs::{Each, Unit, Visit};
use crate::ops::kinds::Kind;

/// A kernel that is compiled, up to some number of columns, and what a step of it costs.
#[derive(Clone, Debug)]
pub(in crate::ops) struct Entry {
    pub product: Product,
    /// The largest H, and the largest F.
    pub columns: i64,
    /// What a step costs, forward and backward, by the number of rows for each multiprocessor.
    pub step: [Line; 2],
}

impl Entry {
    /// All that there are.
    pub fn all() -> Vec<Entry> {
        let of = |product, columns: &[i64]| {
            let entry = |&columns| Entry { product, columns, step: Default::default() };
            columns.iter().map(entry).collect::<Vec<_>>()
        };
        // The registers have no room for more columns.
        [
            of(Product::Half, &[8, 16, 32, 64]),
            of(Product::Float, &[8, 16, 32, 64]),
            of(Product::Double, &[8, 16, 32]),
        ]
        .concat()
    }
}

impl Each for Entry {
    fn each(&mut self, name: &str, unit: Unit, visit: &mut Visit<'_>) {
        let Entry { product, columns, .. } = *self;
        self.step.each(&format!("{name}.{}_{columns}", product.name()), unit, visit);
    }
}

/// Whether the kernel sums the gradients of the weights, too: for more columns, registers have no room.
pub(in crate::ops) fn sums_weights(kind: Kind, Sizes { features, hidden, .. }: Sizes) -> bool {
    let most = if kind == Kind::Double { 16 } else { 32 };
    features.max(hidden) <= most
}

/// How many blocks share the rows, and what a step costs; `None` if there is no kernel.
pub(super) fn share(entries: &[Entry], pass: &Pass) -> Option<(i32, f64)> {
    let Pass { direction, sizes, kind, gpu, .. } = pass;
    let product = Product::of(*kind, false);
    let columns = sizes.hidden.max(sizes.features);
    let entry = entries.iter().find(|of| of.product == product && columns <= of.columns)?;
    if gpu.processors == 0 {
        return None;
    }
    let rows = sizes.batch.saturating_add(gpu.processors - 1) / gpu.processors;
    let step = entry.step[*direction as usize].at(rows);
    Some((blocks(sizes.batch, columns, gpu.processors), step))
}

/// As many blocks as about fit at a time: each of them sums gradients of the weights.
fn blocks(batch: i64, columns: i64, processors: i64) -> i32 {
    let at_a_time = match columns {
        ..=8 => 32,
        9..=16 => 8,
        17..=32 => 2,
        _ => 1,
    };
    i32::try_from(batch.min(at_a_time * processors)).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::{Direction, Gpu};
    use super::*;

    fn shared(kind: Kind, [batch, features, hidden]: [i64; 3], gpu: Gpu) -> Option<(i32, f64)> {
        let mut entries = Entry::all();
        entries.iter_mut().for_each(|entry| entry.step = [Line { fixed: 0.3, each: 0.1 }; 2]);
        let sizes = Sizes { steps: 10, batch, features, hidden };
        let pass = Pass { direction: Direction::Forward, sizes, kind, tf32: false, gpu };
        share(&entries, &pass)
    }

    #[test]
    fn blocks_have_rows_and_columns_that_fit() {
        let of = |kind, sizes| shared(kind, sizes, Gpu::H200).map(|(blocks, _)| blocks);
        assert_eq!(of(Kind::Float, [1, 1, 1]), Some(1));
        assert_eq!(of(Kind::Float, [5000, 8, 8]), Some(32 * 132));
        assert_eq!(of(Kind::Half, [5000, 9, 2]), Some(8 * 132));
        assert_eq!(of(Kind::BFloat16, [100, 2, 32]), Some(100));
        assert_eq!(of(Kind::Double, [3, 2, 16]), Some(3));
        assert_eq!(of(Kind::Float, [300, 33, 2]), Some(132));
        assert_eq!(of(Kind::Double, [3, 2, 33]), None);
        assert_eq!(of(Kind::Float, [3, 65, 2]), None);
        let step = |batch| shared(Kind::Float, [batch, 4, 4], Gpu::H200).map(|(_, step)| step);
        assert_eq!(step(132), step(1));
        assert!(step(133) > step(132));
    }

    #[test]
    fn a_build_without_cuda_has_none() {
        assert_eq!(shared(Kind::Float, [1, 1, 1], Gpu::default()), None);
    }
}
