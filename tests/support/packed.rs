//! Packed sequences of libtorch's own layers, the rivals of padded batches.

use tch::Tensor;
use tch_extension::Result;

/// A batch `[T, B, F]` as libtorch packs it, which is with the longest sequence first.
pub struct Packed {
    pub data: Tensor,
    pub batch_sizes: Tensor,
    order: Tensor,
    steps: i64,
}

impl Packed {
    pub fn new(input: &Tensor, lengths: &[i64]) -> Result<Packed> {
        let lengths = Tensor::from_slice(lengths);
        let (sorted, order) = lengths.f_sort_stable(true, 0, true)?;
        let order = order.f_to_device(input.device())?;
        let (data, batch_sizes) =
            input.f_index_select(1, &order)?.f_internal_pack_padded_sequence(&sorted, false)?;
        Ok(Packed { data, batch_sizes, order, steps: input.size()[0] })
    }

    /// A state `[…, B, H]` in the order of the packed sequences.
    pub fn sorted(&self, state: &Tensor) -> Result<Tensor> {
        Ok(state.f_index_select(-2, &self.order)?)
    }

    pub fn unsorted(&self, state: &Tensor) -> Result<Tensor> {
        Ok(state.f_index_select(-2, &self.order.f_argsort(0, false)?)?)
    }

    /// An output `[T, B, H]`.
    pub fn padded(&self, output: &Tensor) -> Result<Tensor> {
        let sizes = &self.batch_sizes;
        let (padded, _) =
            Tensor::f_internal_pad_packed_sequence(output, sizes, false, 0.0, self.steps)?;
        self.unsorted(&padded)
    }
}

/// The input with NaN in its padding.
pub fn with_padding_of_nan(input: &Tensor, lengths: &[i64]) -> Tensor {
    let input = input.copy();
    for (row, &length) in (0..).zip(lengths) {
        let padding = input.size()[0] - length;
        let _ = input.narrow(1, row, 1).narrow(0, length, padding).fill_(f64::NAN);
    }
    input
}

/// Whether a tensor `[T, B, …]` is zero in all padding.
pub fn is_zero_in_padding(tensor: &Tensor, lengths: &[i64]) -> bool {
    (0..).zip(lengths).all(|(row, &length)| {
        let padding = tensor.narrow(1, row, 1).narrow(0, length, tensor.size()[0] - length);
        padding.equal(&padding.zeros_like())
    })
}
