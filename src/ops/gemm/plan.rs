//! Which way computes a product on CUDA. `csrc/gemm` describes the product and what its kernels can
//! read; this module only compares costs. Which of cuBLASLt's algorithms a `Plan` takes is decided
//! in `csrc/gemm/choice.cpp`, because that is where cuBLASLt's heuristic is queried.

use crate::ffi::kind_code;
use std::ffi::c_void;
use tch::Kind;

/// The ways to compute a product. Each is a file of `csrc/gemm`.
#[doc(hidden)]
#[repr(i32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// The way that was measured to be fastest.
    #[default]
    Automatic,
    /// One call of cuBLASLt, with a plan that is kept for later calls.
    Plan,
    /// A kernel of this crate for small products.
    Small,
    /// A kernel of this crate for compute capability 9.0: half kinds with a bias of full shape.
    Hopper,
    /// Dot products, for at most 4 rows or columns.
    Skinny,
    /// One call of cuBLASLt on padded copies, whose rows begin at multiples of 16 bytes.
    Padded,
    /// One call of cuBLASLt, followed by a kernel for the ReLU.
    Pass,
    /// libtorch's product, followed by a kernel for the rest.
    Composite,
}

/// Counters of this thread's cache of plans.
#[doc(hidden)]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub hits: i64,
    pub misses: i64,
    /// How many plans the cache holds now.
    pub plans: i64,
    /// How many products had a GELU in their epilogue.
    pub gelus: i64,
}

crate::ops::way::ways!(Way);

/// A batch of matrices with strides in elements. A stride is 0 along a dimension that is broadcast.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrices {
    pub data: *const c_void,
    pub row: i64,
    pub column: i64,
    pub batch: i64,
}

/// A matrix product with an optional bias and ReLU, of tensors in their own layouts, without a
/// copy:
///
/// `out[b, m, n] = relu?(Σ_k lhs[b, m, k] rhs[b, k, n] + bias[b, m, n])`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    /// B.
    pub batch: i64,
    pub m: i64,
    pub n: i64,
    pub k: i64,
    /// `[B, M, K]`.
    pub lhs: Matrices,
    /// `[B, K, N]`.
    pub rhs: Matrices,
    /// `[B, M, N]`; its data is null if there is no bias.
    pub bias: Matrices,
    /// `[B, M, N]`, contiguous.
    pub out: *mut c_void,
    /// The `TchExtensionKind` of all matrices.
    pub kind: i32,
    /// Whether negative sums become 0; NaN stays NaN.
    pub relu: i32,
}

/// How `Skinny` would compute a product. The long factor has many rows, the short one at most 4.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Skinny {
    /// The rows of the long factor.
    pub rows: i64,
    /// The rows of the short factor.
    pub shorts: i64,
    /// Whether the long factor is contiguous along K. Otherwise it is contiguous along its rows.
    pub by_rows: i32,
    /// Whether 16-byte loads can read the long factor along its rows.
    pub whole: i32,
}

/// How many elements `Padded` would read, write and copy.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Padding {
    pub lhs: f64,
    pub rhs: f64,
    pub out: f64,
    /// The elements of all matrices that have to be copied.
    pub copied: f64,
    /// How many kernels copy: one for all operands and one for the output.
    pub launches: i64,
}

/// An output with more dimensions is left to libtorch.
const MOST_DIMS: usize = 8;

/// A product, and what each way can do with it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Description {
    /// Without an output, which `tch_extension_gemm_run` allocates.
    pub product: Product,
    /// `rows` is 0 if `Skinny` cannot compute the product.
    pub skinny: Skinny,
    /// `launches` is 0 if `Padded` cannot compute the product, or there is nothing to pad.
    pub padding: Padding,
    /// The output's size, of `dims` dimensions.
    pub size: [i64; MOST_DIMS],
    pub dims: i32,
    /// The index of the tensors' device.
    pub device: i32,
    /// Whether libtorch allows tf32 in products of `Float`.
    pub tf32: bool,
    /// Whether `Small` can compute the product.
    pub small: bool,
    /// Whether `Hopper` can compute the product on its device.
    pub hopper: bool,
}

/// The way that was measured to be fastest. `Composite` stands for libtorch's product.
pub(super) fn choose(described: &Description) -> Way {
    if described.small_is_faster() {
        return Way::Small;
    }
    if described.skinny_is_faster() {
        return Way::Skinny;
    }
    if described.padded_is_faster() {
        return Way::Padded;
    }
    if described.hopper_is_faster() {
        return Way::Hopper;
    }
    if described.libtorch_is_faster() { Way::Composite } else { Way::Plan }
}

/// Rates that were measured on an H200, per microsecond.
mod rate {
    /// Bytes that a copy reads and writes.
    pub const BANDWIDTH: f64 = 2.4e6;
    /// Operations of padded products by cuBLASLt: tf32, half kinds.
    pub const PADDED: [f64; 2] = [200e6, 400e6];
    /// Operations of unpadded products by cuBLAS; bias and ReLU are a separate kernel.
    pub const PLAIN: [f64; 2] = [60e6, 75e6];
    /// Operations of unpadded products by cuBLASLt with a fused bias: it has fewer kernels for such
    /// rows.
    pub const WITH_BIAS: [f64; 2] = [60e6, 40e6];
    /// What a launch takes, in microseconds.
    pub const LAUNCH: f64 = 1.5;
}

/// `Small` computes a tile of 16×16 per block.
const SMALL_TILE: i64 = 16;
/// `Skinny` takes at most this many rows or columns.
const MOST_SHORT: i64 = 4;
/// `Hopper` computes tiles of 128×128.
const HOPPER_TILE: i64 = 128;

impl Product {
    fn kind_is(&self, kinds: &[Kind]) -> bool {
        kinds.iter().any(|&kind| kind_code(kind).is_ok_and(|code| code == self.kind))
    }

    fn is_half(&self) -> bool {
        self.kind_is(&[Kind::Half, Kind::BFloat16])
    }

    fn is_double(&self) -> bool {
        self.kind_is(&[Kind::Double])
    }

    fn element_size(&self) -> i64 {
        if self.is_half() {
            2
        } else if self.is_double() {
            8
        } else {
            4
        }
    }

    /// The number of the output's elements.
    fn outputs(&self) -> i64 {
        (self.m * self.n).saturating_mul(self.batch)
    }

    fn has_bias(&self) -> bool {
        !self.bias.data.is_null()
    }
}

impl Description {
    /// Whether a way that is forced exists for this product.
    pub fn can(&self, way: Way) -> bool {
        match way {
            Way::Small => self.small,
            Way::Hopper => self.hopper,
            Way::Skinny => self.skinny.rows > 0,
            Way::Padded => self.padding.launches > 0,
            _ => true,
        }
    }

    /// Whether tensor cores compute the product.
    fn uses_tensor_cores(&self) -> bool {
        self.product.is_half() || (self.product.kind_is(&[Kind::Float]) && self.tf32)
    }

    fn small_is_faster(&self) -> bool {
        let product = &self.product;
        let tiles = |size: i64| (size + SMALL_TILE - 1) / SMALL_TILE;
        let blocks = product.batch.saturating_mul(tiles(product.m) * tiles(product.n));
        // In half precision, libtorch and cuBLASLt use tensor cores, which are faster unless there
        // is very little to compute.
        if product.is_half() {
            return product.k <= 32 && blocks <= 256;
        }
        // A product with a bias competes with cuBLASLt, which has kernels for narrow products; the
        // plain product without a bias has none.
        let narrow = if product.has_bias() { [8, 16] } else { [2, 2] };
        let is_wide = |size: i64| product.m.min(product.n) > size;
        match product.k {
            ..=32 => blocks <= 384,
            33..=64 => blocks <= 144 && is_wide(narrow[0]),
            65..=128 => blocks <= 32 && is_wide(narrow[1]),
            _ => false,
        }
    }

    fn skinny_is_faster(&self) -> bool {
        // If there are only a few rows and K is very long, K would have to be split between blocks,
        // as cuBLAS does.
        const FEW_ROWS: i64 = 132;
        const LONGEST: i64 = 8192;
        let Self { product, skinny, .. } = self;
        if skinny.rows == 0 || product.m.min(product.n) > MOST_SHORT || product.k < 32 {
            return false;
        }
        let rows = skinny.rows.saturating_mul(product.batch);
        if skinny.by_rows != 0 {
            return rows >= FEW_ROWS || product.k <= LONGEST;
        }
        if !(64..=LONGEST).contains(&product.k) {
            return false;
        }
        let (has_bias, is_whole) = (product.has_bias(), skinny.whole != 0);
        // In half precision, tensor cores are faster unless they have very few rows, or their
        // kernels are the slow ones for any alignment.
        if product.is_half() {
            return has_bias
                && match is_whole {
                    true => skinny.shorts <= 2 && skinny.rows <= 64 && product.k >= 2048,
                    false => skinny.shorts >= 2 && skinny.rows <= 32 && product.k >= 512,
                };
        }
        match skinny.shorts {
            // cuBLAS's plain product has good kernels for a row times a matrix.
            1 => !product.is_double() && has_bias && is_whole && rows <= 2048 && product.k >= 256,
            2 => true,
            _ => has_bias && rows <= 4096 && (is_whole || skinny.rows <= 64 || product.k >= 512),
        }
    }

    fn padded_is_faster(&self) -> bool {
        let Self { product, padding, .. } = self;
        // A narrow product reads its large factor only once; a copy of that factor would add a read
        // and a write.
        let narrowest = if product.is_half() { 64 } else { 128 };
        let is_narrow = product.m.min(product.n) < narrowest;
        if padding.launches == 0 || is_narrow || !self.uses_tensor_cores() {
            return false;
        }
        let of_kind = |rates: [f64; 2]| rates[usize::from(product.is_half())];
        let [batch, m, n, k] =
            [product.batch, product.m, product.n, product.k].map(|size| size as f64);
        let work = 2.0 * batch * m * n * k;
        let micros = |elements: f64| elements * product.element_size() as f64 / rate::BANDWIDTH;
        // Each copy is a read and a write.
        let pass =
            |elements: f64, launches: i64| micros(2.0 * elements) + rate::LAUNCH * launches as f64;
        let plain = work / of_kind(rate::PLAIN);
        let unpadded = match product.has_bias() {
            true => (work / of_kind(rate::WITH_BIAS)).min(plain + pass(padding.out, 1)),
            false => plain,
        };
        let padded =
            (work / of_kind(rate::PADDED)).max(micros(padding.lhs + padding.rhs + padding.out));
        unpadded > padded + pass(padding.copied, padding.launches)
    }

    fn hopper_is_faster(&self) -> bool {
        let product = &self.product;
        let has_matrix = product.has_bias() && product.bias.row != 0 && product.bias.column != 0;
        let is_for_it = self.hopper && product.is_half() && has_matrix;
        if !is_for_it || !(512..=2048).contains(&product.k) {
            return false;
        }
        // A product of 1000×1000 took a quarter longer than with a plan, because its rows begin in
        // the middle of a cache line.
        const LINE: i64 = 64;
        let rhs_row = if product.rhs.column == 1 { product.rhs.row } else { product.rhs.column };
        if [product.lhs.row, rhs_row, product.bias.row, product.n].iter().any(|row| row % LINE != 0)
        {
            return false;
        }
        // There must be enough tiles for the two work-groups to alternate, and little of the tiles
        // may lie outside the matrix.
        const FEWEST: i64 = 512;
        let of = |size: i64| (size + HOPPER_TILE - 1) / HOPPER_TILE;
        let tiles = product.batch.saturating_mul(of(product.m) * of(product.n));
        let in_tiles = tiles.saturating_mul(HOPPER_TILE * HOPPER_TILE / 16 * 15);
        tiles >= FEWEST && product.outputs() >= in_tiles
    }

    /// Whether libtorch's product, with a kernel of ours after it, is faster than a plan.
    fn libtorch_is_faster(&self) -> bool {
        let product = &self.product;
        // In f64, cuBLASLt's fused kernels are slower than cuBLAS's followed by a kernel of ours,
        // but they take less time to launch, so that only small products use them.
        const MOST: i64 = 1 << 24;
        let is_large_double = product.is_double() && product.outputs() > MOST / product.k.max(1);
        !product.has_bias() || self.has_uneven_bias() || is_large_double
    }

    /// Whether the product has a bias of full shape whose rows do not begin at multiples of 16
    /// bytes. Only slow tensor-core kernels read such a bias along with the product, whereas
    /// libtorch's product with a kernel of ours after it is never slower than the composite of
    /// libtorch's operations.
    fn has_uneven_bias(&self) -> bool {
        let product = &self.product;
        let is_full = product.m > 1 && product.bias.row != 0;
        is_full && product.n * product.element_size() % 16 != 0 && self.uses_tensor_cores()
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod ways;

#[cfg(test)]
pub(in crate::ops) use ways::ways_on_h200;
