//! `csrc/lltm/grid.h`: how blocks that fill the GPU share a sequence.

use super::{Direction, Sizes};
use super::persistent::counts_in_32_bits;
use crate::Result;
use tch::{Device, Kind};

/// How many blocks a GPU runs at the same time, one on each multiprocessor; none where there is no code for it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Grid {
    blocks: i64,
}

impl Grid {
    pub fn is_there(self) -> bool {
        self.blocks > 0
    }

    /// Asked once a device.
    pub fn of(device: Device) -> Result<Grid> {
        #[cfg(tch_extension_cuda)]
        if let Device::Cuda(index) = device {
            use std::sync::OnceLock;
            static KNOWN: [OnceLock<Grid>; 64] = [const { OnceLock::new() }; 64];
            let known = KNOWN.get(index);
            if let Some(grid) = known.and_then(OnceLock::get) {
                return Ok(*grid);
            }
            let _guard = crate::cuda::DeviceGuard::new(device)?;
            let mut blocks = 0;
            // SAFETY: the C side fills the place, and returns null or a constant text.
            let error = unsafe { tch_extension_lltm_grid_device(index as i32, &mut blocks) };
            if !error.is_null() {
                // SAFETY: as above.
                let reason = unsafe { std::ffi::CStr::from_ptr(error) }.to_string_lossy().into_owned();
                return Err(crate::Error::Cuda { op: "lltm".to_string(), reason });
            }
            let grid = Grid { blocks };
            return Ok(*known.map_or(&grid, |known| known.get_or_init(|| grid)));
        }
        let _ = device;
        Ok(Grid::default())
    }
}

#[cfg(tch_extension_cuda)]
unsafe extern "C" {
    fn tch_extension_lltm_grid_device(device: i32, blocks: *mut i64) -> *const std::ffi::c_char;
}

/// Rows that a block computes at a time.
const ROWS: i64 = 8;

/// Who computes what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    /// Columns of h of a block.
    pub columns: i64,
    /// Groups of blocks, each with some rows of the batch.
    pub row_groups: i64,
    /// How many times 8 rows a group works through in a step.
    turns: i64,
}

impl Share {
    /// For these sizes, if the weights fit into registers, and the kernel can count: `tf32` is whether products of `Float` may
    /// be made in it, which they always are here.
    pub fn new(
        direction: Direction,
        sizes: Sizes,
        product: Kind,
        tf32: bool,
        grid: Grid,
    ) -> Option<Share> {
        /// c of all rows of a block has to fit beside the rest.
        const MOST_TURNS: i64 = 64;
        let Sizes { batch, hidden, .. } = sizes;
        let widest = match product {
            Kind::Half | Kind::BFloat16 => 2048,
            Kind::Float if tf32 => 1024,
            _ => return None,
        };
        if hidden % 8 != 0 || hidden > widest || !counts_in_32_bits(sizes) {
            return None;
        }
        let tiles = batch.saturating_add(ROWS - 1) / ROWS;
        // Half as many columns take half the time of a product and twice the blocks. In the backward each block reads the
        // gradients for all gates, and fewer blocks get them sooner.
        let shares = [16, 32].into_iter().filter(|columns| hidden <= widest * 16 / columns);
        let shares = shares.filter_map(|columns| {
            let most = grid.blocks / ((hidden + columns - 1) / columns);
            if most == 0 {
                return None;
            }
            let turns = (tiles + most - 1) / most;
            // No more groups than the longest needs.
            let row_groups = (tiles + turns - 1) / turns;
            (turns <= MOST_TURNS).then_some(Share { columns, row_groups, turns })
        });
        match direction {
            Direction::Forward => shares.min_by_key(|share| share.turns * (share.columns + 16)),
            Direction::Backward => shares.max_by_key(|share| share.columns),
        }
    }

    /// Than clusters, and than one or two kernels for each step.
    pub fn is_faster(&self, direction: Direction, sizes: Sizes) -> bool {
        /// Fewer are over before the weights are on chip.
        const FEW: i64 = 8;
        /// Up to here clusters are faster.
        const NARROW: i64 = 256;
        // With more, a product and a kernel for each step are.
        let turns = match direction {
            Direction::Forward => 8,
            Direction::Backward => 4,
        };
        sizes.steps >= FEW && sizes.hidden > NARROW && self.turns <= turns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Grid = Grid { blocks: 132 };

    fn share(batch: i64, hidden: i64, kind: Kind, tf32: bool, grid: Grid) -> Option<(i64, i64)> {
        let sizes = Sizes { steps: 512, batch, features: hidden, hidden };
        Share::new(Direction::Forward, sizes, kind, tf32, grid).map(|share| (share.columns, share.row_groups))
    }

    #[test]
    fn there_is_a_share_where_the_weights_fit() {
        let of = |batch, hidden| share(batch, hidden, Kind::BFloat16, false, H200);
        assert_eq!(of(1, 8), Some((16, 1)));
        assert_eq!(of(16, 1024), Some((16, 2)));
        assert_eq!(of(64, 1024), Some((32, 4)));
        assert_eq!(of(64, 2048), Some((16, 1)));
        // Rows of h that are no whole vectors; more weights than registers; too many rows.
        assert_eq!(of(64, 1023), None);
        assert_eq!(of(64, 2056), None);
        assert_eq!(of(1 << 12, 1024), None);
        assert_eq!(of(i64::MAX, 8), None);
        // A part of a GPU, and another GPU.
        assert_eq!(share(64, 1024, Kind::Half, false, Grid { blocks: 33 }), Some((32, 1)));
        assert_eq!(share(64, 1024, Kind::Half, false, Grid { blocks: 31 }), None);
        assert_eq!(share(64, 8, Kind::Half, false, Grid::default()), None);
    }

    #[test]
    fn blocks_are_few_in_the_backward() {
        let of = |batch, hidden| {
            let sizes = Sizes { steps: 512, batch, features: hidden, hidden };
            let share = Share::new(Direction::Backward, sizes, Kind::Half, false, H200)?;
            Some((share.columns, share.row_groups))
        };
        assert_eq!(of(16, 1024), Some((32, 2)));
        assert_eq!(of(16, 512), Some((32, 2)));
        assert_eq!(of(64, 1032), Some((16, 2)));
    }

    #[test]
    fn it_is_taken_where_it_is_faster() {
        let faster = |steps, batch, hidden| {
            let sizes = Sizes { steps, batch, features: hidden, hidden };
            let share = Share::new(Direction::Forward, sizes, Kind::Half, false, H200);
            share.is_some_and(|share| share.is_faster(Direction::Forward, sizes))
        };
        let faster_back = |batch, hidden| {
            let sizes = Sizes { steps: 512, batch, features: hidden, hidden };
            let share = Share::new(Direction::Backward, sizes, Kind::Half, false, H200);
            share.is_some_and(|share| share.is_faster(Direction::Backward, sizes))
        };
        assert!(faster(8, 16, 264) && faster(512, 256, 1024));
        assert!(faster_back(16, 512) && faster_back(128, 1024) && !faster_back(256, 1024));
        assert!(!faster(7, 16, 1024) && !faster(512, 16, 256) && !faster(512, 512, 1024));
    }

    #[test]
    fn float_is_for_those_who_allow_tf32() {
        assert_eq!(share(16, 512, Kind::Float, false, H200), None);
        assert_eq!(share(16, 512, Kind::Float, true, H200), Some((16, 2)));
        assert_eq!(share(16, 1032, Kind::Float, true, H200), None);
        assert_eq!(share(16, 512, Kind::Double, true, H200), None);
    }
}
