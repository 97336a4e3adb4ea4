//! The list of the operators.
//!
//! `operators!(name)` calls the macro `name` with the whole list. What needs all operators is made
//! from it: the re-exports of `ops`, the sources that `build.rs` leaves out, the cases of
//! `benches/main.rs`, and the checks of `tests/layout.rs`, which fail while a file of an operator is
//! missing or not listed.

/// An entry consists of
/// - the operator's name, which its folders in `csrc`, `src/ops` and `tests`, and its file in
///   `benches` have, too; it has no folder in `csrc` if all its kernels are those of its family;
/// - its family, the folder of `csrc` whose code it shares with other operators, and the feature of
///   this crate without which neither is compiled;
/// - its definition, an `Operator` that the package for Python registers, and the list of its tensors;
/// - the public functions of its module, and its public name for the module's `Way`, unless its
///   ways are those of the family;
/// - the files or folders of `csrc` that compute its ways, in addition to the operator's `cpu.cpp`
///   and `cuda.cu`.
macro_rules! operators {
    ($callback:ident) => {
        $callback! {
            add_layer_norm of "norm" {
                operator: [AddLayerNorm, AddLayerNormIn],
                functions: [add_layer_norm, f_add_layer_norm, add_layer_norm_reference],
                way: [],
                files: ["add_layer_norm/add_forward.cu", "add_layer_norm/add_backward.cu"],
            }
            add_rms_norm of "norm" {
                operator: [AddRmsNorm, AddRmsNormIn],
                functions: [add_rms_norm, f_add_rms_norm, add_rms_norm_reference],
                way: [],
                files: ["add_rms_norm/add_forward.cu", "add_rms_norm/add_backward.cu"],
            }
            cross_entropy of "loss" {
                operator: [CrossEntropy, CrossEntropyIn],
                functions: [cross_entropy, f_cross_entropy, cross_entropy_reference],
                way: [],
                files: ["loss/cpu.cpp", "loss/cuda.cu", "loss/rows_hopper.cu"],
            }
            linear_cross_entropy of "loss" {
                operator: [LinearCrossEntropy, LinearCrossEntropyIn],
                functions: [
                    linear_cross_entropy, f_linear_cross_entropy, linear_cross_entropy_reference
                ],
                way: [],
                files: ["loss/cpu.cpp", "loss/cuda.cu", "loss/rows_hopper.cu"],
            }
            gelu_mlp of "mlp" {
                operator: [GeluMlp, GeluMlpIn],
                functions: [gelu_mlp, f_gelu_mlp, gelu_mlp_reference],
                way: [],
                files: ["mlp/cpu.cpp", "mlp/cuda.cu"],
            }
            layer_norm of "norm" {
                operator: [LayerNorm, LayerNormIn],
                functions: [layer_norm, f_layer_norm, layer_norm_reference],
                way: [],
                files: [
                    "layer_norm/forward_registers.cu",
                    "layer_norm/forward_passes.cu",
                    "layer_norm/forward_shifted.cu",
                    "layer_norm/backward_registers.cu",
                    "layer_norm/backward_passes.cu",
                    "layer_norm/backward_cluster.cu",
                    "layer_norm/backward_few.cu",
                    "layer_norm/backward_in_place.cu",
                    "layer_norm/backward_ring.cu",
                ],
            }
            linear of "gemm" {
                operator: [Linear, LinearIn],
                functions: [linear, f_linear, linear_reference],
                way: [],
                files: [
                    "gemm/hopper.cu",
                    "gemm/padded.cu",
                    "gemm/plan.cpp",
                    "gemm/skinny.cu",
                    "gemm/skinny_tensor.cu",
                    "gemm/small.cu",
                ],
            }
            gru of "recurrent" {
                operator: [Gru, GruIn],
                functions: [
                    gru, f_gru, gru_reference
                ],
                way: [],
                files: [
                    "recurrent/cpu",
                    "recurrent/cudnn.cpp",
                    "recurrent/step",
                    "recurrent/block",
                    "gru/block.cu",
                    "recurrent/cluster",
                    "gru/cluster_forward.cu",
                    "gru/cluster_backward.cu",
                    "recurrent/grid",
                    "gru/grid_forward_hopper.cu",
                    "gru/grid_backward_hopper.cu",
                    "recurrent/wide_grid",
                    "gru/wide_grid_forward_hopper.cu",
                    "gru/wide_grid_backward_hopper.cu",
                ],
            }
            lltm of "recurrent" {
                operator: [Lltm, LltmIn],
                functions: [lltm, f_lltm, lltm_reference],
                way: [],
                files: [
                    "recurrent/cpu",
                    "recurrent/step",
                    "recurrent/cluster",
                    "lltm/cluster_forward.cu",
                    "lltm/cluster_backward.cu",
                    "recurrent/grid",
                    "lltm/grid_forward_hopper.cu",
                    "lltm/grid_backward_hopper.cu",
                    "lltm/plain_grid_forward_hopper.cu",
                    "lltm/plain_grid_backward_hopper.cu",
                    "recurrent/wide_grid",
                    "lltm/wide_grid_forward_hopper.cu",
                    "lltm/wide_grid_backward_hopper.cu",
                    "lltm_cell/fused_forward.cu",
                    "lltm_cell/fused_backward.cu",
                    "lltm_cell/hopper_forward.cu",
                ],
            }
            lltm_cell of "recurrent" {
                operator: [LltmCell, LltmCellIn],
                functions: [lltm_cell, f_lltm_cell, lltm_cell_reference],
                way: [LltmCellWay],
                files: [
                    "lltm_cell/cpu_fused.cpp",
                    "lltm_cell/fused_forward.cu",
                    "lltm_cell/fused_backward.cu",
                    "lltm_cell/hopper_forward.cu",
                ],
            }
            lstm of "recurrent" {
                operator: [Lstm, LstmIn],
                functions: [
                    lstm, f_lstm, lstm_reference
                ],
                way: [],
                files: [
                    "recurrent/cpu",
                    "recurrent/cudnn.cpp",
                    "recurrent/onednn.cpp",
                    "recurrent/step",
                    "recurrent/block",
                    "lstm/block.cu",
                    "recurrent/cluster",
                    "lstm/cluster_forward.cu",
                    "lstm/cluster_backward.cu",
                    "recurrent/grid",
                    "lstm/grid_forward_hopper.cu",
                    "lstm/grid_backward_hopper.cu",
                    "recurrent/wide_grid",
                    "lstm/wide_grid_forward_hopper.cu",
                ],
            }
            matmul_add_relu of "gemm" {
                operator: [MatmulAddRelu, MatmulAddReluIn],
                functions: [matmul_add_relu, f_matmul_add_relu, matmul_add_relu_reference],
                way: [],
                files: [
                    "gemm/hopper.cu",
                    "gemm/padded.cu",
                    "gemm/plan.cpp",
                    "gemm/skinny.cu",
                    "gemm/skinny_tensor.cu",
                    "gemm/small.cu",
                    "matmul_add_relu/cpu_product.cpp",
                ],
            }
            rms_norm of "norm" {
                operator: [RmsNorm, RmsNormIn],
                functions: [rms_norm, f_rms_norm, rms_norm_reference],
                way: [],
                files: [
                    "rms_norm/forward_registers.cu",
                    "rms_norm/forward_passes.cu",
                    "rms_norm/forward_shifted.cu",
                    "rms_norm/backward_registers.cu",
                    "rms_norm/backward_passes.cu",
                    "rms_norm/backward_cluster.cu",
                    "rms_norm/backward_few.cu",
                    "rms_norm/backward_in_place.cu",
                    "rms_norm/backward_ring.cu",
                ],
            }
            rope of "rope" {
                operator: [Rope, RopeIn],
                functions: [rope, f_rope, rope_reference, rope_tables, f_rope_tables],
                way: [],
                files: [],
            }
            swiglu_mlp of "mlp" {
                operator: [SwigluMlp, SwigluMlpIn],
                functions: [swiglu_mlp, f_swiglu_mlp, swiglu_mlp_reference],
                way: [],
                files: ["mlp/cpu.cpp", "mlp/cuda.cu"],
            }
        }
    };
}
