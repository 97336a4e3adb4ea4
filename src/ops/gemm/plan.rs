//! Which way computes a product on CUDA. `csrc/gemm` describes the product and what its kernels can
//! read; this module only compares costs. Which of cuBLASLt's algorithms a `Plan` takes is decided
//! in `csrc/gemm/choice.cpp`, because that is where cuBLASLt's heuristic is queried.

use super::costs::{Aligned, Costs, Load, Padded};
use crate::Result;
use crate::ops::costs::{cheapest, is_clearly_cheaper};
use crate::ops::kinds::Kind;
use std::ffi::c_void;

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
    /// Dot products, for at most 4 rows or columns, or 8 by tensor cores.
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
pub(in crate::ops) struct Matrices {
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
pub(in crate::ops) struct Product {
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

/// How `Skinny` would compute a product. The long factor has many rows, the short one at most 4, or
/// 8 by tensor cores.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::ops) struct Skinny {
    /// The rows of the long factor.
    pub rows: i64,
    /// The rows of the short factor.
    pub shorts: i64,
    /// Whether the long factor is contiguous along K. Otherwise it is contiguous along its rows.
    pub by_rows: i32,
    /// Whether tensor cores compute it: half kinds whose rows of both factors can be read in 16
    /// bytes.
    pub by_tensor: i32,
}

/// How many elements `Padded` would read, write and copy.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::ops) struct Padding {
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
pub(in crate::ops) struct Description {
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

/// The fastest way. `Composite` stands for libtorch's product. `costs` are those of the GPU, and how many
/// multiprocessors it has.
pub(super) fn choose<'a>(
    described: &Description,
    costs: impl FnOnce() -> Result<(&'a Costs, i64)>,
) -> Result<Way> {
    if described.hopper_is_faster() {
        return Ok(Way::Hopper);
    }
    // Costs of the two are too alike to choose by them. Without a bias, libtorch's product is cuBLAS's,
    // which has more kernels than cuBLASLt.
    let product = &described.product;
    let is_slow = product.is_large_double() || described.has_uneven_bias();
    let library = if product.has_bias() && !is_slow { Way::Plan } else { Way::Composite };
    let (costs, processors) = costs()?;
    let cost = |way| described.cost(way, costs, processors);
    let skinny = described.fills(processors).then(|| cost(Way::Skinny)).flatten();
    // Each is computed once: every call of the operator comes here.
    let all = [(library, cost(library)), (Way::Small, cost(Way::Small)), (Way::Skinny, skinny)];
    let known = all.into_iter().filter_map(|(way, cost)| Some((way, cost?)));
    let (way, least) = cheapest(known).unwrap_or((library, 0.0));
    // These are predicted less well.
    let padded = described.may_be_padded().then(|| cost(Way::Padded)).flatten();
    Ok(match padded.is_some_and(|padded| is_clearly_cheaper(padded, least)) {
        true => Way::Padded,
        false => way,
    })
}

/// `Small` computes a tile of 16×16 per block.
const SMALL_TILE: i64 = 16;
/// `Skinny` takes at most this many rows or columns.
const MOST_SHORT: i64 = 4;
/// By tensor cores, of sums that are long enough.
pub(super) const MOST_SHORT_BY_TENSOR: i64 = 8;
/// `Hopper` computes tiles of 128×128.
const HOPPER_TILE: i64 = 128;

impl Product {
    fn kind_is(&self, kinds: &[Kind]) -> bool {
        kinds.iter().any(|kind| kind.code() == self.kind)
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

    /// Whether this is a product in f64 of more than 2²⁴ multiplications, for some of which cuBLASLt's
    /// heuristic proposes kernels that take five times as long as cuBLAS's.
    fn is_large_double(&self) -> bool {
        const MOST: i64 = 1 << 24;
        self.is_double() && self.outputs() > MOST / self.k.max(1)
    }
}

impl Description {
    /// Whether a way that is forced exists for this product.
    pub fn can(&self, way: Way) -> bool {
        match way {
            Way::Small => self.small,
            Way::Hopper => self.hopper,
            Way::Skinny => {
                let most = match self.skinny.by_tensor {
                    0 => MOST_SHORT,
                    _ => MOST_SHORT_BY_TENSOR,
                };
                self.skinny.rows > 0 && self.product.m.min(self.product.n) <= most
            }
            Way::Padded => self.padding.launches > 0,
            _ => true,
        }
    }

    /// Whether `Skinny` by tensor cores computes the product in one launch with others of the same lhs.
    pub fn can_join(&self) -> bool {
        let Self { product, skinny, .. } = self;
        // The rhs is the long factor.
        skinny.by_tensor != 0 && product.batch == 1 && product.n > MOST_SHORT_BY_TENSOR
    }

    /// Whether tensor cores compute the product.
    fn uses_tensor_cores(&self) -> bool {
        self.product.is_half() || (self.product.kind_is(&[Kind::Float]) && self.tf32)
    }

    /// How many tiles of `Small` there are for each multiprocessor.
    fn tiles(&self, processors: i64) -> f64 {
        let Product { batch, m, n, .. } = self.product;
        let tiles = |size: i64| (size as f64 / SMALL_TILE as f64).ceil();
        batch as f64 * tiles(m) * tiles(n) / processors.max(1) as f64
    }

    /// Whether `Skinny` would use the GPU: its rows fill the multiprocessors, or a sum is so short that
    /// nobody splits it between blocks, as libraries do and `Skinny` does not. Costs are fitted to such
    /// products only.
    fn fills(&self, processors: i64) -> bool {
        const LONGEST: i64 = 8192;
        let Self { product, skinny, .. } = self;
        skinny.rows.saturating_mul(product.batch) >= processors || product.k <= LONGEST
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

    /// The bytes of which all addresses are multiples at which rows and matrices begin: 16 at most.
    fn alignment(&self) -> u32 {
        let product = &self.product;
        let size = product.element_size();
        let of = |matrices: &Matrices| {
            let strides = [matrices.row, matrices.column, matrices.batch];
            let apart = strides
                .into_iter()
                .filter(|&stride| stride != 1)
                .fold(0, |all, stride| all | stride);
            matrices.data.addr() as i64 | apart.wrapping_mul(size)
        };
        let bias = if product.bias.row == 0 { 0 } else { of(&product.bias) };
        let all = of(&product.lhs) | of(&product.rhs) | bias | product.n.wrapping_mul(size);
        1 << all.trailing_zeros().min(4)
    }

    fn load(&self, processors: i64) -> Load {
        let product = &self.product;
        let [batch, m, n, k] =
            [product.batch, product.m, product.n, product.k].map(|size| size as f64);
        let of = |matrices: &Matrices| if matrices.batch == 0 { 1.0 } else { batch };
        let megabytes = |elements: f64| megabytes(product, elements);
        let out = batch * m * n;
        let full_bias = if product.has_bias() && product.bias.row != 0 { out } else { 0.0 };
        let tiles = |size: f64| (size / HOPPER_TILE as f64).ceil();
        Load {
            operations: 2e-6 * out * k,
            bytes: megabytes(of(&product.lhs) * m * k + of(&product.rhs) * k * n + out + full_bias),
            output: megabytes(out + full_bias),
            depth: k / 1000.0,
            waves: (batch * tiles(m) * tiles(n) / processors.max(1) as f64).ceil(),
        }
    }

    /// The GPU's time; `None` for ways without costs, and those that cannot compute it.
    pub fn cost(&self, way: Way, costs: &Costs, processors: i64) -> Option<f64> {
        let product = &self.product;
        let uses_tensor_cores = self.uses_tensor_cores();
        let arithmetic = match () {
            () if product.is_half() => &costs.half,
            () if product.is_double() => &costs.double,
            () if uses_tensor_cores => &costs.tf32,
            () => &costs.float,
        };
        let aligned = |of: &Aligned| match self.alignment() {
            16 => of.of_16,
            8 => of.of_8,
            _ => of.of_less,
        };
        let load = self.load(processors);
        match way {
            Way::Plan => Some(aligned(&arithmetic.plan).of(&load)),
            Way::Composite => {
                // It reads what the product wrote, and writes it again.
                let once_more = load.output + megabytes(product, product.outputs() as f64);
                let pass = if product.has_bias() { costs.pass.of(1.0, once_more) } else { 0.0 };
                Some(aligned(&arithmetic.libtorch).of(&load) + pass)
            }
            Way::Small if self.can(way) => Some(arithmetic.small.of(&load, self.tiles(processors))),
            Way::Skinny if self.can(way) => {
                let Skinny { rows, by_rows, by_tensor, .. } = self.skinny;
                let of_kind = &arithmetic.skinny;
                let dots = match (by_tensor != 0, by_rows != 0) {
                    (true, _) => &costs.by_tensor,
                    (false, true) => &of_kind.by_rows,
                    (false, false) => &of_kind.by_columns,
                };
                let rows = rows as f64 * product.batch as f64;
                Some(dots.of(&load, 1e-3 * rows / processors.max(1) as f64))
            }
            Way::Padded if self.can(way) && uses_tensor_cores => {
                let Padding { lhs, rhs, out, copied, launches } = self.padding;
                let load = Load { bytes: megabytes(product, lhs + rhs + out), ..load };
                let of_kind =
                    if product.is_half() { &costs.padded.half } else { &costs.padded.tf32 };
                let Padded { product: times, copies } = of_kind;
                Some(times.of(&load) + copies.of(launches as f64, 2.0 * megabytes(product, copied)))
            }
            _ => None,
        }
    }

    /// Whether copies for tensor cores can win. A narrow product reads its large factor only once, so a
    /// copy of that factor would add a read and a write, unless only an address is off, for which
    /// cuBLASLt has slow kernels; cuBLAS has good ones for narrow products without a bias.
    fn may_be_padded(&self) -> bool {
        let product = &self.product;
        let narrowest = if product.is_half() { 64 } else { 128 };
        let is_narrow = product.m.min(product.n) < narrowest;
        let is_whole = |size: i64| size.wrapping_mul(product.element_size()) % 16 == 0;
        let is_only_off = product.has_bias() && is_whole(product.k) && is_whole(product.n);
        self.can(Way::Padded) && self.uses_tensor_cores() && (!is_narrow || is_only_off)
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
        // may lie outside the matrix. With 9900 a product took 8 % longer than with a plan; more than 2048
        // were not measured otherwise.
        const FEWEST: i64 = 512;
        const MOST: i64 = 2048;
        let of = |size: i64| (size + HOPPER_TILE - 1) / HOPPER_TILE;
        let tiles = product.batch.saturating_mul(of(product.m) * of(product.n));
        let in_tiles = tiles.saturating_mul(HOPPER_TILE * HOPPER_TILE / 16 * 15);
        (FEWEST..=MOST).contains(&tiles) && product.outputs() >= in_tiles
    }
}

/// MB of so many elements.
fn megabytes(product: &Product, elements: f64) -> f64 {
    elements * product.element_size() as f64 / 1e6
}

mod contiguous;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod ways;

pub(in crate::ops) use contiguous::{Bias, Layout, contiguous};

#[cfg(test)]
pub(in crate::ops) use ways::ways_on_h200;
