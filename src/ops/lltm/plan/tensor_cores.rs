//! `csrc/lltm_cell/hopper_forward.cu`: the cell's tensor-core kernel, for each step of many rows.
//! With libtorch's product, the gates would be written in f32 and read again by another kernel.

use crate::ops::kinds::{Device, Kind};
use crate::ops::lltm_cell::kernels::device::TensorCores;
use crate::ops::lltm_cell::plan as cell;
use crate::ops::recurrent::plan::Sizes;

/// The tiles of a step ([`cell::Sizes::tiles`]). The multiprocessors compute them in rounds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiles {
    sizes: Sizes,
    tiles: f64,
    processors: f64,
    is_one_small_kernel: bool,
}

impl Tiles {
    /// `None` if the kernel cannot compute a step of these sizes.
    pub fn new(sizes: Sizes, product: Kind, on: TensorCores) -> Option<Tiles> {
        /// How many values of a half kind 16 bytes hold: rows of x and of W have to be whole
        /// multiples of it.
        const LANES: i64 = 8;
        let Sizes { batch, features, hidden, .. } = sizes;
        let step = cell::Sizes { batch, features, hidden };
        // Any CUDA device gives the same answer to the questions asked here.
        let device = Device::Cuda(0);
        let can = on.are_there() && features % LANES == 0 && step.fit_tensor_cores(product, device);
        let tiles = || Tiles {
            sizes,
            tiles: step.tiles() as f64,
            processors: on.processors as f64,
            is_one_small_kernel: step.fuse_forward(cell::Way::Automatic, product, device),
        };
        can.then(tiles)
    }

    /// The number of columns of [h, x].
    fn columns(&self) -> f64 {
        (self.sizes.hidden + self.sizes.features) as f64
    }

    /// The number of elements of h, scaled to a GPU with as many multiprocessors as an H200.
    fn cells(&self) -> f64 {
        const PROCESSORS: f64 = 132.0;
        self.sizes.batch as f64 * self.sizes.hidden as f64 * PROCESSORS / self.processors
    }

    /// About what a step costs, as measured on an H200.
    fn cost(&self) -> f64 {
        let rounds = self.tiles / self.processors;
        let products = self.columns() * (0.0066 + 0.0085 * (rounds.ceil() - 1.0));
        7.0 + products + (1.0 + 0.0007 * self.columns()) * rounds
    }

    /// What the input's part of a step costs where it is multiplied for all steps at once.
    fn cost_of_input(&self) -> f64 {
        self.cells() * (self.sizes.features as f64 * 8e-9 + 2.4e-6)
    }

    /// What a step costs with libtorch's products: one for the input of all steps, and one per
    /// step, which a kernel follows.
    fn cost_by_products(&self) -> f64 {
        5.7 + self.cells() * (self.columns() * 9.2e-9 + 9.7e-6)
    }

    /// Whether the tiles beat the other ways to compute one step after the other.
    pub fn are_faster(&self) -> bool {
        !self.is_one_small_kernel && self.cost() < self.cost_by_products()
    }

    /// What a step costs without the input's product, to compare it with ways whose cost excludes
    /// that product.
    pub fn cost_without_input(&self) -> f64 {
        self.cost() - self.cost_of_input()
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

    /// Both ways were measured on an H200 for each of these sizes; most results are in
    /// docs/lab/lltm.md.
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
