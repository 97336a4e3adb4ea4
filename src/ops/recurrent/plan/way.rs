//! The ways to compute a sequence.

/// The ways to compute a sequence of LSTM, GRU or LLTM. Where a description begins with a name and a
/// colon, the kernels are in that folder of `csrc/recurrent`. A way of the other device is another one: on the
/// CPU `Packed` or what the plan chooses, and on CUDA `Step`, what the plan chooses or, for an LLTM, `Fused`. So
/// are ways of other cells, and those without a kernel for the arguments; a grid may be a plain one, and an
/// LLTM's wide grid a grid.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// The plan chooses.
    #[default]
    Automatic,
    /// LSTM, GRU: cuDNN's layer, as libtorch calls it.
    Cudnn,
    /// On the CPU, `cpu`: the weights are packed, and threads stay together for all steps.
    Packed,
    /// LSTM on the CPU: oneDNN's layer, as libtorch calls it. It is for `Float`.
    Onednn,
    /// LLTM: a loop of `lltm_cell`.
    Cells,
    /// `step`: libtorch's product and one kernel for each step.
    Step,
    /// LLTM on CUDA: one kernel of `csrc/lltm_cell` for each step.
    Fused,
    /// LLTM, forward on CUDA: one tensor-core kernel of `csrc/lltm_cell` for each step.
    TensorCores,
    /// LSTM, GRU, `block`: one block computes whole rows, with the products over all steps.
    Block,
    /// A cluster if there is one for the sizes, and otherwise a grid. Only tests and benchmarks force it.
    Resident,
    /// `cluster`: the blocks of a cluster share the weights, and each cluster has rows of its own.
    Cluster,
    /// `grid`: the blocks of the whole GPU share the weights; half kinds, or scaled fp16 values.
    Grid,
    /// LLTM, `grid`: for Float and Double, without rounding them to a narrower kind.
    PlainGrid,
    /// `wide_grid`: a grid whose blocks compute tiles of 64 rows at a time.
    WideGrid,
    /// A grid of more blocks than any GPU runs at once, as happens where other processes leave too
    /// few multiprocessors free. Only tests force it.
    CrowdedGrid,
}

crate::ops::way::ways!(Way);
