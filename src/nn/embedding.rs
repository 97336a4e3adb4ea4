//! A table of embeddings as a module.

use crate::ffi::tensor::{is_plain, plain};
use crate::operator::{
    Again, Args, Call, Dim, Gradients, Incoming, Made, Meta, Metas, Needs, Operator, Outputs,
    Second, Slots, call, metas_of,
};
use crate::{Error, Result, check};
use std::borrow::Borrow;
use tch::nn::{EmbeddingConfig, Module, Path};
use tch::{Device, Kind, Tensor};

use super::kernels::{add_rows, adds_rows};

const OP: &str = "nn::Embedding";
const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];
const INDEX_KINDS: [Kind; 2] = [Kind::Int64, Kind::Int];

/// A table of `num_embeddings` vectors, whose gradient has the same bits in every run. Made by
/// [`embedding`](embedding()).
#[derive(Debug)]
pub struct Embedding {
    /// `[num_embeddings, embedding_dim]`.
    pub ws: Tensor,
    config: EmbeddingConfig,
}

/// Makes a table that equals [`tch::nn::embedding`] except for its backward pass. Its
/// configuration, the name of its parameter (`weight`) and initial values are tch's, so the weights
/// of either can be loaded into the other.
///
/// The backward pass is libtorch's too, but called in such a way that it is deterministic and
/// accurate:
/// - On CUDA, libtorch 2.11 adds with atomics if there are more than 3072 indices and the table is
///   small, for example a vocabulary of characters. Here it never does. The gradients of very few
///   rows are summed without libtorch's kernels for tables, which sort the indices.
/// - On the CPU, libtorch adds up gradients in `Half` and `BFloat16` in these kinds, so that a row
///   that occurs often stops growing. Here they are added in `Float` and rounded once.
///
/// With `sparse` everything is libtorch's. A `padding_idx` of -1 means none. An index that is out
/// of range is an error on the CPU. On CUDA it fails an assertion of libtorch on the device, after
/// which the process cannot use CUDA any more.
///
/// ```
/// use tch::{Device, Tensor, nn::{Module, VarStore}};
/// use tch_extension::nn::embedding;
///
/// let vs = VarStore::new(Device::Cpu);
/// let table = embedding(vs.root(), 65, 8, Default::default());
/// let output = table.forward(&Tensor::from_slice(&[3_i64, 1, 4]).view([1, 3]));
/// assert_eq!(output.size(), [1, 3, 8]);
/// ```
///
/// # Panics
/// When a size is negative, or `padding_idx` is neither -1 nor a row of the table.
pub fn embedding<'a, T: Borrow<Path<'a>>>(
    vs: T,
    num_embeddings: i64,
    embedding_dim: i64,
    config: EmbeddingConfig,
) -> Embedding {
    for (name, size) in [("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)] {
        assert!(size >= 0, "{OP}: {name}: expected at least 0, got {size}");
    }
    assert!(
        (-1..num_embeddings).contains(&config.padding_idx),
        "{OP}: padding_idx: expected -1 or one of {num_embeddings} rows, got {}",
        config.padding_idx
    );
    let size = [num_embeddings, embedding_dim];
    Embedding { ws: vs.borrow().var("weight", &size, config.ws_init), config }
}

impl Embedding {
    /// Like [`Module::forward`], but returns an error instead of panicking.
    ///
    /// # Errors
    /// When the indices are not of kind `Int64` or `Int` on the table's device, when one is out of
    /// range on the CPU, or if libtorch or CUDA fails.
    pub fn f_forward(&self, indices: &Tensor) -> Result<Tensor> {
        let EmbeddingConfig { sparse, scale_grad_by_freq, padding_idx, .. } = self.config;
        let (weight, lookup) = (&self.ws, Lookup { padding_idx, scale_grad_by_freq });
        if sparse {
            check!(OP, indices).defined()?;
            let metas = metas_of::<Lookup>(&[Some(weight), Some(indices)])?;
            lookup.rule(&metas, &LookupIn::each(|_| false))?;
            let lookup =
                Tensor::f_embedding(weight, indices, padding_idx, scale_grad_by_freq, true);
            return lookup.map_err(Error::from);
        }
        Ok(call(lookup, &LookupIn { weight, indices })?.output)
    }

    /// The rows at these indices, as [`f_forward`](Self::f_forward), and the table once more, for an
    /// output layer with the same weight. Give it to that layer in place of [`ws`](Self::ws): the table's
    /// gradient is then made once. The output layer's gradient arrives first, and the rows' gradients are
    /// added to it in place, unless somebody else holds it. Otherwise a table of zeros would be filled, the
    /// rows' gradients added, and then both tables.
    ///
    /// The second tensor shares the table's memory. It must not be changed in place, and autocast casts it
    /// again for each call. Rows with `padding_idx` or `scale_grad_by_freq` are added up in a table of their
    /// own, and so are those of half kinds on the CPU, and more rows than the table has. With `sparse` the
    /// second tensor is the table itself.
    ///
    /// ```
    /// use tch::{Device, Tensor, nn::VarStore};
    /// use tch_extension::nn::embedding;
    /// use tch_extension::ops::f_linear_cross_entropy;
    ///
    /// let vs = VarStore::new(Device::Cpu);
    /// let table = embedding(vs.root(), 65, 8, Default::default());
    /// let (inputs, targets) = (Tensor::from_slice(&[3_i64, 1, 4]), Tensor::from_slice(&[1_i64, 4, 1]));
    /// let (rows, weight) = table.f_forward_tied(&inputs)?;
    /// let loss = f_linear_cross_entropy(&rows.tanh(), &weight, &targets, None, &Default::default())?;
    /// loss.backward();
    /// assert_eq!(table.ws.grad().size(), [65, 8]);
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`f_forward`](Self::f_forward).
    pub fn f_forward_tied(&self, indices: &Tensor) -> Result<(Tensor, Tensor)> {
        let EmbeddingConfig { sparse, scale_grad_by_freq, padding_idx, .. } = self.config;
        let weight = &self.ws;
        if sparse {
            return Ok((self.f_forward(indices)?, weight.shallow_clone()));
        }
        let lookup = TiedLookup { padding_idx, scale_grad_by_freq };
        let TiedLookupOut { output, table } = call(lookup, &TiedLookupIn { weight, indices })?;
        Ok((output, table))
    }
}

impl Module for Embedding {
    fn forward(&self, indices: &Tensor) -> Tensor {
        self.f_forward(indices).unwrap_or_else(|error| panic!("{error}"))
    }
}

crate::signature! {
    /// The rows of a table at these indices.
    Lookup: LookupIn -> LookupOut =
        "nn::Embedding"(weight, indices!, padding_idx: i64 = -1, scale_grad_by_freq: bool = false) -> (output)
}

impl Operator for Lookup {
    type Kept = ();
    type Plan = ();

    // Not `Linear`: the gradient leaves out the padding row, and may be scaled.
    const SECOND: Second = Second::Itself;

    fn rule<D: Dim>(&self, of: &Metas<Self, D>, _: &Needs<Self>) -> Result<Made<Self, Meta<D>>> {
        let weight = of.weight.kind_in(&KINDS)?.dim(2, "[num_embeddings, embedding_dim]")?;
        let indices = of.indices.kind_in(&INDEX_KINDS)?.same_device_as(weight)?;
        let sizes = [indices.sizes(), &weight.sizes()[1..]].concat();
        Ok(Made::only(LookupOut { output: weight.sized(sizes) }))
    }

    fn reads(&self, _: &Needs<Self>) -> Needs<Self> {
        LookupIn { weight: false, indices: true }
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        call.check()?;
        let LookupIn { weight, indices } = call.of;
        let output = Tensor::f_embedding(weight, indices, -1, false, false)?;
        Ok(Made::only(LookupOut { output }))
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        let rows = again.metas()?.weight.sizes()[0];
        let weight = match (&grads.output, &again.of.indices) {
            (Some(grad), Some(indices)) => {
                Some(self.gradient(grad, indices, rows, again.is_recorded)?)
            }
            _ => None,
        };
        Ok(LookupIn { weight, indices: None })
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        let Lookup { padding_idx, scale_grad_by_freq } = *self;
        let output =
            Tensor::f_embedding(of.weight, of.indices, padding_idx, scale_grad_by_freq, false)?;
        Ok(LookupOut { output })
    }
}

crate::signature! {
    /// The rows of a table at these indices, and the table.
    TiedLookup: TiedLookupIn -> TiedLookupOut =
        "nn::Embedding"(weight, indices!, padding_idx: i64 = -1, scale_grad_by_freq: bool = false) -> (output, table)
}

impl TiedLookup {
    fn untied(&self) -> Lookup {
        let TiedLookup { padding_idx, scale_grad_by_freq } = *self;
        Lookup { padding_idx, scale_grad_by_freq }
    }

    /// Whether rows are added to the table's gradient without a table of their own, which is worth it if
    /// the table has more rows.
    fn adds_in_place(&self, table: &Tensor, indices: &Tensor) -> Result<bool> {
        let (rows, count) = (table.size2()?.0, indices.numel() as i64);
        let is_plain_sum = self.padding_idx < 0 && !self.scale_grad_by_freq;
        let has_kernel = match table.device() {
            // libtorch would add half kinds in these kinds.
            Device::Cpu => matches!(table.f_kind()?, Kind::Float | Kind::Double),
            device => adds_rows(device, rows, count),
        };
        Ok(is_plain_sum && has_kernel && 0 < count && count <= rows)
    }
}

impl Operator for TiedLookup {
    type Kept = ();
    type Plan = ();

    const SECOND: Second = Second::Itself;

    fn rule<D: Dim>(&self, of: &Metas<Self, D>, _: &Needs<Self>) -> Result<Made<Self, Meta<D>>> {
        let TiedLookupIn { weight, indices } = of.clone();
        let of = LookupIn { weight, indices };
        let output = self.untied().rule(&of, &LookupIn::each(|_| false))?.outputs.output;
        Ok(Made::only(TiedLookupOut { output, table: of.weight }))
    }

    fn reads(&self, _: &Needs<Self>) -> Needs<Self> {
        TiedLookupIn { weight: false, indices: true }
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        call.check()?;
        let TiedLookupIn { weight, indices } = call.of;
        let output = Tensor::f_embedding(weight, indices, -1, false, false)?;
        Ok(Made::only(TiedLookupOut { output, table: weight.shallow_clone() }))
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        let (rows, is_recorded) = (again.metas()?.weight.sizes()[0], again.is_recorded);
        let weight = match (&grads.output, &again.of.indices, grads.table) {
            (Some(grad), Some(indices), Some(table))
                if !is_recorded && self.adds_in_place(&table, indices)? =>
            {
                let may_overwrite = again.may_overwrite_gradient(TABLE) && is_plain(&table);
                let mut table = if may_overwrite {
                    table
                } else {
                    plain(&table.f_to_dtype(table.f_kind()?, false, true)?)?
                };
                let columns = table.size2()?.1;
                let (grad, indices) = (grad.f_reshape([-1, columns])?, indices.f_reshape([-1])?);
                match table.device() {
                    Device::Cpu => {
                        let _ = table.f_index_add_(0, &indices, &grad)?;
                    }
                    _ => add_rows(&mut table, &plain(&grad)?, &indices)?,
                }
                Some(table)
            }
            (Some(grad), Some(indices), table) => {
                let sum = self.untied().gradient(grad, indices, rows, is_recorded)?;
                Some(match table {
                    Some(table) => table.f_add(&sum)?,
                    None => sum,
                })
            }
            (_, _, table) => table,
        };
        Ok(TiedLookupIn { weight, indices: None })
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        let TiedLookupIn { weight, indices } = *of;
        let LookupOut { output } = self.untied().reference(&LookupIn { weight, indices })?;
        Ok(TiedLookupOut { output, table: weight.f_alias()? })
    }
}

/// The place of the table among the outputs.
const TABLE: usize = 1;

impl Lookup {
    fn gradient(
        &self,
        grad: &Tensor,
        indices: &Tensor,
        rows: i64,
        is_recorded: bool,
    ) -> Result<Tensor> {
        let kind = grad.f_kind()?;
        let columns = grad.size().last().copied().unwrap_or(0);
        if grad.numel() == 0 {
            // libtorch's kernel for CUDA would divide by the number of columns.
            return Ok(Tensor::f_zeros([rows, columns], (kind, grad.device()))?);
        }
        if self.scale_grad_by_freq && is_recorded {
            // libtorch's second derivative forgets the scale. Half kinds do not hold all counts.
            let compute = if kind == Kind::Double { kind } else { Kind::Float };
            let inverse = inverse_counts(indices, rows, compute)?;
            let scaled = grad.f_to_kind(compute)?.f_mul(&inverse)?;
            return Ok(self.sum(&scaled, indices, rows, false)?.f_to_kind(kind)?);
        }
        self.sum(grad, indices, rows, self.scale_grad_by_freq)
    }

    /// `[rows, columns]`: for each row of the table, the sum of the gradients at its indices.
    fn sum(&self, grad: &Tensor, indices: &Tensor, rows: i64, scale: bool) -> Result<Tensor> {
        let kind = grad.f_kind()?;
        let sum = |grad: &Tensor, indices: &Tensor, rows| {
            let padding = self.padding_idx;
            Tensor::f_embedding_dense_backward(grad, indices, rows, padding, scale)
        };
        let is_half = matches!(kind, Kind::Half | Kind::BFloat16);
        match grad.device() {
            Device::Cpu if is_half && self.padding_idx < 0 && (indices.numel() as i64) < rows => {
                // Only the rows that occur are held in `Float`.
                let (occurring, places, _) = indices.f_internal_unique2(true, true, false)?;
                let count = occurring.size1()?;
                let sums = sum(&grad.f_to_kind(Kind::Float)?, &places, count)?.f_to_kind(kind)?;
                let table = Tensor::f_zeros([rows, sums.size2()?.1], (kind, Device::Cpu))?;
                Ok(table.f_index_copy(0, &occurring.f_to_kind(Kind::Int64)?, &sums)?)
            }
            Device::Cpu if is_half => {
                Ok(sum(&grad.f_to_kind(Kind::Float)?, indices, rows)?.f_to_kind(kind)?)
            }
            Device::Cpu => Ok(sum(grad, indices, rows)?),
            _ if !scale && are_few(rows, indices.numel() as i64, grad.numel() as i64, kind) => {
                self.sum_by_masks(grad, indices, rows)
            }
            _ => {
                let enough = rows_without_atomics(rows, indices.numel() as i64);
                let sums = sum(grad, indices, enough)?;
                if enough == rows {
                    return Ok(sums);
                }
                // A view would keep the memory of all rows.
                Ok(sums.f_narrow(0, 0, rows)?.f_to_dtype(kind, false, true)?)
            }
        }
    }

    /// The same for a table of few rows: a copy of the gradients for each row, with zeros at the other
    /// rows' indices, and the sums of its columns, which libtorch adds in an order of the sizes alone.
    fn sum_by_masks(&self, grad: &Tensor, indices: &Tensor, rows: i64) -> Result<Tensor> {
        let (kind, device) = (grad.f_kind()?, grad.device());
        let columns = grad.size().last().copied().unwrap_or(0);
        let mut grad = grad.f_reshape([-1, 1, columns])?;
        if rows != 1 || self.padding_idx >= 0 {
            let places = Tensor::f_arange(rows, (indices.f_kind()?, device))?;
            if self.padding_idx >= 0 {
                // No index is -1.
                let _ = places.f_narrow(0, self.padding_idx, 1)?.f_fill_(-1_i64)?;
            }
            // [N, V, 1]
            let is_here = indices.f_reshape([-1, 1])?.f_eq_tensor(&places)?.f_unsqueeze(-1)?;
            // A product with zeros would make NaN of infinity.
            let zero = Tensor::f_zeros([0_i64; 0], (kind, device))?;
            grad = grad.f_where_self(&is_here, &zero)?;
        }
        Ok(grad.f_sum_dim_intlist([0_i64].as_slice(), false, kind)?)
    }
}

/// Whether masks are faster on CUDA than libtorch's sums, for so many elements of the gradient of the
/// output, by times on an H200 in µs (docs/lab/embedding.md). libtorch sorts more than 3072 indices, and else
/// a block goes through all of them. Masks are five short kernels, and copies of all elements for each row.
fn are_few(rows: i64, indices: i64, elements: i64, kind: Kind) -> bool {
    const MOST_ROWS: i64 = 32;
    const MOST_UNSORTED: i64 = 3072;
    const SORT: f64 = 90.0;
    const OF_INDEX: f64 = 0.023;
    const KERNELS: f64 = 14.0;
    const OF_MIB: f64 = 2.5;
    let mib = rows as f64 * elements as f64 * kind.elt_size_in_bytes() as f64 / (1 << 20) as f64;
    let of_libtorch = if indices > MOST_UNSORTED { SORT } else { OF_INDEX * indices as f64 };
    // One row needs no copy, and one kernel.
    rows == 1 && indices > 4
        || (2..=MOST_ROWS).contains(&rows) && KERNELS + OF_MIB * mib < of_libtorch
}

/// For each index, 1 / how often it occurs, with a last dimension of 1.
fn inverse_counts(indices: &Tensor, rows: i64, kind: Kind) -> Result<Tensor> {
    let flat = indices.f_reshape([-1])?.f_to_kind(Kind::Int64)?;
    let counts = flat.f_bincount(None::<&Tensor>, rows)?;
    let counts = counts.f_index_select(0, &flat)?.f_reshape(indices.size())?.f_unsqueeze(-1)?;
    Ok(counts.f_to_kind(kind)?.f_reciprocal()?)
}

/// A number of rows, at least as many as the table has, for which libtorch adds without atomics.
///
/// libtorch 2.11 (`EmbeddingBackwardKernel.cu`) sorts the indices, adds groups of at most 10 equal
/// ones, and then either adds up the groups of each row in order, or, if rows are few, all groups
/// at once by atomics. It takes atomics only if `n / 10 + m > 4·g`, where m is the lesser of the
/// numbers of indices n and rows, and g, the number of blocks, is at least m. With `m ≥ n / 30`
/// that is never true. So a table with fewer rows gets some more, which nothing is added to.
fn rows_without_atomics(rows: i64, indices: i64) -> i64 {
    rows.max(indices / 30 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// libtorch's condition, for tables whose rows fit a block, where its number of blocks is
    /// least.
    fn takes_atomics(rows: i64, indices: i64) -> bool {
        let segments = rows.min(indices);
        indices / 10 + segments > 4 * segments
    }

    #[test]
    fn no_table_is_small_enough_for_atomics() {
        let mut would = 0;
        for indices in (1..100_000).step_by(37).chain([3072, 3073, 1 << 24, 1 << 40]) {
            for rows in [1, 2, 65, 256, 1024, 50257] {
                would += i32::from(takes_atomics(rows, indices));
                let enough = rows_without_atomics(rows, indices);
                assert!(enough >= rows && !takes_atomics(enough, indices), "{rows} {indices}");
            }
        }
        assert!(would > 1000, "the condition is not trivial: {would}");
    }

    #[test]
    fn masks_are_for_few_rows_of_few_columns() {
        let of = |rows: i64, indices: i64, columns: i64| {
            are_few(rows, indices, indices * columns, Kind::Half)
        };
        for [rows, indices, columns] in [
            [1, 5, 1],
            [1, 25_322, 848],
            [1, 1 << 40, 1 << 10],
            [3, 23_904, 9],
            [4, 1761, 1],
            [2, 4096, 1024],
            [9, 768, 8],
            [32, 1024, 32],
            [32, 1 << 18, 1],
        ] {
            assert!(of(rows, indices, columns), "{rows} {indices} {columns}");
        }
        for [rows, indices, columns] in [
            [0, 5000, 8],
            [1, 4, 8],
            [33, 5000, 8],
            [2, 600, 8],
            [2, 1024, 1025],
            [2, 16384, 513],
            [25, 35_075, 64],
            [32, 1 << 40, 1 << 20],
        ] {
            assert!(!of(rows, indices, columns), "{rows} {indices} {columns}");
        }
        let of = |kind| are_few(13, 20_000, 20_000 * 24, kind);
        assert_eq!([Kind::Half, Kind::Double].map(of), [true, false]);
        let of = |kind| are_few(2, 768, 768 * 1024, kind);
        assert_eq!([Kind::Half, Kind::Double].map(of), [false; 2]);
    }

    #[test]
    fn masks_sum_what_libtorch_sums() {
        for (rows, padding_idx) in [(1, -1), (1, 0), (3, -1), (3, 2)] {
            for index_kind in INDEX_KINDS {
                let indices = Tensor::randint(rows, [20, 3], (index_kind, Device::Cpu));
                let grad = Tensor::randn([20, 3, 5], (Kind::Double, Device::Cpu));
                // Infinity stays in the column and the row of its index.
                let _ = grad.get(7).get(1).get(2).fill_(f64::INFINITY);
                let lookup = Lookup { padding_idx, scale_grad_by_freq: false };
                let found = lookup.sum_by_masks(&grad, &indices, rows).expect("sums");
                let expected =
                    Tensor::embedding_dense_backward(&grad, &indices, rows, padding_idx, false);
                assert!(found.is_contiguous() && found.size() == [rows, 5]);
                assert!(found.allclose(&expected, 1e-12, 1e-12, false), "{rows} {padding_idx}");
            }
        }
    }
}
