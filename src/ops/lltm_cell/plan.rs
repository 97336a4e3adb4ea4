//! Which kernels compute a cell, by its sizes, kind and device.

use crate::ffi::precision::matmul_allow_tf32;
use crate::ops::kinds::{Device, Kind};

/// The ways to compute a cell, which tests force.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// The way that is faster at these sizes.
    #[default]
    Automatic,
    /// libtorch's product, and one kernel for the rest.
    Product,
    /// One kernel for everything. Falls back to `Product` for empty states and, on the CPU, for
    /// half kinds and for wide weights in the forward.
    Fused,
    /// One kernel for the forward, with the tensor cores of compute capability 9.0. It needs half
    /// kinds, H a multiple of 64, and rows that begin at multiples of 16 bytes. Falls back to
    /// `Product` elsewhere and in the backward.
    TensorCores,
}

super::super::way::ways!(Way);

/// The rows and hidden columns of a tile of the tensor-core kernel: the same as `kRows` and
/// `kColumns` in `csrc/lltm_cell/hopper_forward.cu`.
const TILE: (i64, i64) = (128, 64);

/// With more multiplications, libtorch's products by tensor cores are faster.
const MOST_WITH_TENSOR_CORES: f64 = 28e6;

/// Up to how many multiplications (P) one kernel is faster on CUDA: kind, largest B, largest P. For
/// each kind the rows are in the order of B, and there is none for more rows than the last. As
/// measured on an H200 (docs/lab/lltm_cell.md).
type Bounds<const N: usize> = [(Kind, i64, f64); N];

/// libtorch is best at long products of many rows.
const FORWARD: Bounds<6> = [
    (Kind::Float, 128, 256e6),
    (Kind::Float, 512, 128e6),
    (Kind::Float, i64::MAX, 32e6),
    (Kind::Double, i64::MAX, 32e6),
    (Kind::Half, i64::MAX, MOST_WITH_TENSOR_CORES),
    (Kind::BFloat16, i64::MAX, MOST_WITH_TENSOR_CORES),
];

/// Each block goes over all rows.
const BACKWARD: Bounds<4> = [
    (Kind::Float, 192, 80e6),
    (Kind::Double, 128, 10e6),
    (Kind::Half, 128, 25e6),
    (Kind::BFloat16, 128, 25e6),
];

fn most_products<const N: usize>(bounds: &Bounds<N>, kind: Kind, batch: i64) -> f64 {
    let of = |&&(of, rows, _): &&(Kind, i64, f64)| of == kind && batch <= rows;
    bounds.iter().find(of).map_or(0.0, |&(_, _, most)| most)
}

/// The sizes B, F and H.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sizes {
    pub batch: i64,
    pub features: i64,
    pub hidden: i64,
}

impl Sizes {
    /// The number of multiply-adds in `[h, x] Wᵀ`.
    fn products(&self) -> f64 {
        3.0 * self.batch as f64 * self.hidden as f64 * (self.hidden as f64 + self.features as f64)
    }

    /// Whether there is anything to compute, and whether a grid can be large enough for it.
    fn fit(&self) -> bool {
        let most = f64::from(1 << 30);
        let columns = (self.hidden as f64) + (self.features as f64);
        self.batch > 0
            && self.hidden > 0
            && self.batch as f64 * columns < most
            && columns * columns < most
    }

    /// Whether the forward in one kernel is faster than libtorch's product with one kernel before
    /// and one after it.
    pub fn fuse_forward(&self, way: Way, kind: Kind, device: Device) -> bool {
        let allows_tf32 = || matmul_allow_tf32().unwrap_or(false);
        self.fuse_forward_where(way, kind, device, allows_tf32)
    }

    /// The same where `allows_tf32` says whether products may use tf32.
    pub fn fuse_forward_where(
        &self,
        way: Way,
        kind: Kind,
        device: Device,
        allows_tf32: impl FnOnce() -> bool,
    ) -> bool {
        if device == Device::Cpu {
            // Vectors hold values of several rows of the batch.
            let most = if self.batch < cpu::LEAST_ROWS { 0.0 } else { cpu::MOST_PRODUCTS };
            return cpu::exists(kind)
                && self.columns() <= cpu::MOST_COLUMNS
                && self.chosen(way, most);
        }
        let may_be_tf32 = kind == Kind::Float && self.products() > MOST_WITH_TENSOR_CORES;
        let most = match may_be_tf32 && allows_tf32() {
            true => MOST_WITH_TENSOR_CORES,
            false => most_products(&FORWARD, kind, self.batch),
        };
        matches!(device, Device::Cuda(_)) && self.chosen(way, most)
    }

    /// The same for the backward.
    pub fn fuse_backward(&self, way: Way, kind: Kind, device: Device) -> bool {
        let most = match device {
            Device::Cpu => cpu::MOST_PRODUCTS,
            _ => most_products(&BACKWARD, kind, self.batch),
        };
        let exists =
            matches!(device, Device::Cuda(_)) || device == Device::Cpu && cpu::exists(kind);
        exists && self.chosen(way, most)
    }

    /// Whether the tensor-core kernel can compute these sizes, if a GPU has it and rows begin at
    /// multiples of 16 bytes.
    pub fn fit_tensor_cores(&self, kind: Kind, device: Device) -> bool {
        matches!(kind, Kind::Half | Kind::BFloat16)
            && self.hidden % TILE.1 == 0
            && matches!(device, Device::Cuda(_))
            && self.fit()
    }

    /// How many tiles the tensor-core kernel computes.
    pub fn tiles(&self) -> i64 {
        (self.batch + TILE.0 - 1) / TILE.0 * (self.hidden / TILE.1)
    }

    /// Whether the forward in one tensor-core kernel is faster than a product and another kernel,
    /// on a GPU with that kernel and this many multiprocessors.
    pub fn use_tensor_cores(&self, way: Way, processors: i64) -> bool {
        match way {
            // Measured on an H200: the last round of tiles has to be nearly full.
            Way::Automatic => {
                let room = (self.tiles() + processors - 1) / processors.max(1) * processors;
                processors > 0 && 5 * self.tiles() >= 4 * room
            }
            Way::TensorCores => processors > 0,
            Way::Product | Way::Fused => false,
        }
    }

    fn columns(&self) -> f64 {
        self.hidden as f64 + self.features as f64
    }

    fn chosen(&self, way: Way, most: f64) -> bool {
        let wanted = match way {
            Way::Automatic => self.products() <= most,
            Way::Product | Way::TensorCores => false,
            Way::Fused => true,
        };
        wanted && self.fit()
    }
}

/// What `csrc/lltm_cell/cpu_fused.cpp` can compute, and where it is fast.
mod cpu {
    use crate::ops::kinds::Kind;

    pub fn exists(kind: Kind) -> bool {
        matches!(kind, Kind::Float | Kind::Double)
    }

    /// The same as `kMostColumns` in `cpu_fused.cpp`.
    pub const MOST_COLUMNS: f64 = 1024.0;
    pub const LEAST_ROWS: i64 = 8;
    pub const MOST_PRODUCTS: f64 = 20e6;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_cells_are_fused_and_large_ones_are_not() {
        let gpu = Device::Cuda(0);
        let of = |batch, features, hidden| Sizes { batch, features, hidden };
        let (small, large) = (of(16, 32, 128), of(1024, 1024, 1024));
        for kind in [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16] {
            let both = |sizes: Sizes, way, device| {
                [sizes.fuse_forward(way, kind, device), sizes.fuse_backward(way, kind, device)]
            };
            assert_eq!(both(small, Way::Automatic, gpu), [true; 2]);
            assert_eq!(both(large, Way::Automatic, gpu), [false; 2]);
            assert_eq!(both(small, Way::Product, gpu), [false; 2]);
            assert_eq!(both(large, Way::Fused, gpu), [true; 2]);
            // Nothing to compute, or too large for a grid.
            for sizes in [of(0, 3, 4), of(3, 4, 0), of(1 << 40, 3, 4), of(1, 1 << 40, 1)] {
                assert_eq!(both(sizes, Way::Fused, gpu), [false; 2]);
            }
            assert_eq!(both(of(3, 0, 4), Way::Automatic, gpu), [true; 2]);
        }
    }

    #[test]
    fn tensor_cores_take_half_kinds_whose_tiles_fill_the_gpu() {
        const H200: i64 = 132;
        let of = |batch, features, hidden| Sizes { batch, features, hidden };
        let gpu = Device::Cuda(0);
        for kind in [Kind::Half, Kind::BFloat16] {
            for sizes in [of(1024, 1000, 1024), of(1, 0, 64)] {
                assert!(sizes.fit_tensor_cores(kind, gpu));
                assert!(!sizes.fit_tensor_cores(kind, Device::Cpu));
            }
            assert!(!of(1024, 1000, 1032).fit_tensor_cores(kind, gpu));
            assert!(!of(0, 8, 64).fit_tensor_cores(kind, gpu));
        }
        assert!(!of(1024, 1000, 1024).fit_tensor_cores(Kind::Float, gpu));

        // 105, 106, 132 and 133 tiles, then two rounds that are not and are full enough.
        for (tiles, expected) in [(105, false), (106, true), (132, true), (133, false)]
            .into_iter()
            .chain([(211, false), (212, true)])
        {
            let sizes = of(1, 8, 64 * tiles);
            assert_eq!(sizes.tiles(), tiles);
            assert_eq!(sizes.use_tensor_cores(Way::Automatic, H200), expected, "{tiles}");
            assert!(sizes.use_tensor_cores(Way::TensorCores, H200));
            for (way, processors) in [
                (Way::Product, H200),
                (Way::Fused, H200),
                (Way::Automatic, 0),
                (Way::TensorCores, 0),
            ] {
                assert!(!sizes.use_tensor_cores(way, processors));
            }
        }
        assert_eq!((of(128, 0, 64).tiles(), of(129, 0, 128).tiles()), (1, 4));
    }

    #[test]
    fn on_the_cpu_there_are_kernels_of_wide_kinds_for_some_sizes() {
        let both = |(batch, features, hidden), way, kind| {
            let sizes = Sizes { batch, features, hidden };
            let cpu = Device::Cpu;
            [sizes.fuse_forward(way, kind, cpu), sizes.fuse_backward(way, kind, cpu)]
        };
        for kind in [Kind::Float, Kind::Double] {
            assert_eq!(both((16, 32, 128), Way::Automatic, kind), [true; 2]);
            assert_eq!(both((16, 32, 128), Way::Product, kind), [false; 2]);
            assert_eq!(both((1, 32, 128), Way::Automatic, kind), [false, true]);
            assert_eq!(both((1 << 20, 32, 128), Way::Automatic, kind), [false; 2]);
            assert_eq!(both((1 << 20, 32, 128), Way::Fused, kind), [true; 2]);
            // The forward keeps its operands on the stack, which limits the number of columns.
            assert_eq!(both((4, 1000, 24), Way::Fused, kind), [true; 2]);
            assert_eq!(both((4, 1001, 24), Way::Fused, kind), [false, true]);
        }
        assert_eq!(both((16, 32, 128), Way::Fused, Kind::Half), [false; 2]);
        assert_eq!(both((16, 32, 128), Way::Fused, Kind::BFloat16), [false; 2]);
    }
}
