//! `csrc/lltm_cell/hopper_forward.cu`: the cell's kernel with tensor cores for each step of many
//! rows, of which libtorch's products would write gates in f32 that another kernel then reads.

use super::sizes::Sizes;
use crate::ops::lltm::kernels::device::TensorCores;
use crate::ops::lltm_cell::plan as cell;
use tch::{Device, Kind};

/// Tiles of a step, 128 rows and 64 hidden columns each, which the multiprocessors go through in
/// rounds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiles {
    sizes: Sizes,
    tiles: f64,
    processors: f64,
    is_one_small_kernel: bool,
}

impl Tiles {
    const ROWS: i64 = 128;
    const COLUMNS: i64 = 64;

    /// None where the kernel cannot compute a step.
    pub fn new(sizes: Sizes, product: Kind, on: TensorCores) -> Option<Tiles> {
        /// Of a half kind in 16 bytes: rows of x and of W have to be whole ones.
        const LANES: i64 = 8;
        let Sizes { batch, features, hidden, .. } = sizes;
        let step = cell::Sizes { batch, features, hidden };
        // Which one makes no difference to what is asked of it here.
        let device = Device::Cuda(0);
        let can = on.are_there()
            && features % LANES == 0
            && step.try_tensor_cores(cell::Way::TensorCores, product, device);
        let tiles = || Tiles {
            sizes,
            tiles: (((batch - 1) / Tiles::ROWS + 1) * (hidden / Tiles::COLUMNS)) as f64,
            processors: on.processors as f64,
            is_one_small_kernel: step.fuse_forward(cell::Way::Automatic, product, device),
        };
        can.then(tiles)
    }

    /// Of [h, x].
    fn columns(&self) -> f64 {
        (self.sizes.hidden + self.sizes.features) as f64
    }

    /// Of h, for what so many multiprocessors as an H200 has.
    fn cells(&self) -> f64 {
        const PROCESSORS: f64 = 132.0;
        self.sizes.batch as f64 * self.sizes.hidden as f64 * PROCESSORS / self.processors
    }

    /// Of a step, in hundredths of a microsecond, as all costs here: about, as measured on an H200.
    fn cost(&self) -> f64 {
        let rounds = self.tiles / self.processors;
        let products = self.columns() * (0.66 + 0.85 * (rounds.ceil() - 1.0));
        700.0 + products + (100.0 + 0.07 * self.columns()) * rounds
    }

    /// The input's part of a step, where it is multiplied for all steps at once.
    fn cost_of_input(&self) -> f64 {
        self.cells() * (self.sizes.features as f64 * 8e-7 + 2.4e-4)
    }

    /// With a product of libtorch's for all steps, and one and a kernel for each.
    fn cost_by_products(&self) -> f64 {
        570.0 + self.cells() * (self.columns() * 9.2e-7 + 9.7e-4)
    }

    /// Than other ways to compute one step after the other.
    pub fn are_faster(&self) -> bool {
        !self.is_one_small_kernel && self.cost() < self.cost_by_products()
    }

    /// For those whose cost is that of what comes behind the input's product.
    pub fn cost_beside_input(&self) -> i64 {
        (self.cost() - self.cost_of_input()) as i64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(batch: i64, features: i64, hidden: i64) -> Option<Tiles> {
        let sizes = Sizes { steps: 32, batch, features, hidden };
        Tiles::new(sizes, Kind::BFloat16, TensorCores::H200)
    }

    #[test]
    fn what_bulk_copies_cannot_reach_has_none() {
        assert!(of(1, 8, 64).is_some() && of(1, 0, 64).is_some());
        assert!(of(4096, 12, 64).is_none() && of(4096, 8, 72).is_none());
        let sizes = Sizes { steps: 32, batch: 4096, features: 512, hidden: 512 };
        assert!(Tiles::new(sizes, Kind::Float, TensorCores::H200).is_none());
        assert!(Tiles::new(sizes, Kind::Half, TensorCores::default()).is_none());
    }

    /// Each of these was measured on an H200 in both ways; most are in docs/lab/lltm.md.
    #[test]
    fn the_faster_way_is_taken() {
        let are_faster =
            |batch, hidden| of(batch, hidden, hidden).is_some_and(|tiles| tiles.are_faster());
        let faster = [
            (64, &[4096, 16384][..]),
            (128, &[2560, 4096]),
            (256, &[1536, 2048, 6144, 12288]),
            (512, &[1024, 1280, 2560, 4096, 8192]),
            (768, &[768, 2048, 4096]),
            (1024, &[640, 1280, 4096]),
            (1536, &[512, 1024, 2048]),
            (2048, &[384, 512, 768, 2048]),
            (4096, &[256, 1024]),
        ];
        let slower = [
            (64, &[1024, 2048][..]),
            (128, &[1024]),
            (512, &[512, 720]),
            (768, &[336, 640]),
            (1024, &[320, 512]),
            (1536, &[128, 256, 704]),
            (2048, &[64, 256]),
            (4096, &[128]),
        ];
        for (all, expected) in [(&faster[..], true), (&slower[..], false)] {
            for &(hidden, rows) in all {
                for &batch in rows {
                    assert_eq!(are_faster(batch, hidden), expected, "H = {hidden}, B = {batch}");
                }
            }
        }
    }
}
