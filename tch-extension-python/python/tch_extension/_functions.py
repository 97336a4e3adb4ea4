"""The operators as functions, as their definitions in Rust say: `cargo xtask python` writes this file."""

from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from ._typed import typed

_ops = torch.ops.tch_extension

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "cross_entropy",
    "gelu_mlp",
    "gru",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "lltm",
    "lltm_cell",
    "lstm",
    "matmul_add_relu",
    "rms_norm",
    "rope",
    "swiglu_mlp",
]


@typed
def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-5,
    dropout: float = 0.0,
) -> Tuple[Tensor, Tensor]:
    """`sum = dropout(input) + residual` and `layer_norm(sum)`; returns both.

    input and residual have one shape; the residual may be float32 next to an input in half precision. A
    dropout of 0 is none: pass `p if self.training else 0.0`.
    """
    return _ops.add_layer_norm(input, residual, normalized_shape, weight, bias, eps, dropout)


@typed
def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Optional[Tensor] = None,
    eps: Optional[float] = None,
    dropout: float = 0.0,
) -> Tuple[Tensor, Tensor]:
    """`sum = dropout(input) + residual` and `rms_norm(sum)`; returns both. Else as `add_layer_norm`."""
    return _ops.add_rms_norm(input, residual, normalized_shape, weight, eps, dropout)


@typed
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Optional[Tensor] = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The cross-entropy of logits `[M, V]` and classes `[M]` (int64), as torch.nn.functional.cross_entropy.

    Returns a scalar, or `[M]` if reduction is "none". A mean or sum has its gradient when the forward pass
    ends.
    """
    return _ops.cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing)


@typed
def gelu_mlp(
    input: Tensor,
    w1: Tensor,
    b1: Optional[Tensor],
    w2: Tensor,
    b2: Optional[Tensor] = None,
    activation: str = "gelu_tanh",
    save_activations: bool = True,
) -> Tensor:
    """`linear(f(linear(input, w1, b1)), w2, b2)`: the feed-forward part of GPT-2.

    f is "gelu_tanh", "gelu", "relu_squared" or "silu". Without save_activations the backward pass computes
    f again.
    """
    return _ops.gelu_mlp(input, w1, b1, w2, b2, activation, save_activations)


@typed
def gru(
    input: Tensor,
    h: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Optional[Tensor] = None,
    b_hh: Optional[Tensor] = None,
    lengths: Optional[Sequence[int]] = None,
) -> Tuple[Tensor, Tensor]:
    """One layer of torch.nn.GRU in one direction; returns (h of all steps `[T, B, H]`, h).

    input `[T, B, F]`, h `[B, H]`, w_ih `[3H, F]`, w_hh `[3H, H]`, b_ih and b_hh `[3H]`. With lengths, as
    for `lstm`.
    """
    return _ops.gru(input, h, w_ih, w_hh, b_ih, b_hh, lengths)


@typed
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-5,
) -> Tensor:
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last dimensions, as
    torch.nn.functional.layer_norm.

    weight and bias have the shape normalized_shape, which is the end of the input's.
    """
    return _ops.layer_norm(input, normalized_shape, weight, bias, eps)


@typed
def linear(
    input: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
) -> Tensor:
    """`input @ weight.T + bias`, as torch.nn.functional.linear, with a deterministic gradient of the bias.

    input `[..., in]`, weight `[out, in]`, bias `[out]`; returns `[..., out]`.
    """
    return _ops.linear(input, weight, bias)


@typed
def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor] = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: Optional[float] = None,
    z_loss: float = 0.0,
    memory: Optional[int] = None,
    accumulate_in_float: bool = False,
) -> Tensor:
    """`cross_entropy(linear(input, weight, bias), target)`, whose logits are never in memory as a whole.

    input `[N, D]`, weight `[V, D]`, target `[N]` (int64), bias `[V]`. The loss is float64 of float64, and
    otherwise float32: unlike torch's cross_entropy, also of half precision. The logits are computed for a
    chunk of rows at a time; memory is how many bytes the call may take besides its operands and their
    gradients. softcap s makes `s tanh(logits / s)` of the logits; z_loss k adds `k lse²` to each row's
    loss. accumulate_in_float adds up the weight's gradient in float32, also in half precision. A weight
    in float32 next to an input in half precision is rounded, and its gradient is float32.
    """
    return _ops.linear_cross_entropy(input, weight, target, bias, ignore_index, reduction, label_smoothing, softcap, z_loss, memory, accumulate_in_float)


@typed
def lltm(
    input: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    h: Tensor,
    c: Tensor,
) -> Tuple[Tensor, Tensor, Tensor]:
    """The LLTM over a whole sequence `[T, B, F]`; returns (h of all steps `[T, B, H]`, h, c)."""
    return _ops.lltm(input, weight, bias, h, c)


@typed
def lltm_cell(
    input: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    h: Tensor,
    c: Tensor,
) -> Tuple[Tensor, Tensor]:
    """One step of the LLTM of PyTorch's tutorial on C++ extensions; returns (h, c).

    input `[B, F]`, weight `[3H, H + F]`, bias `[3H]`, h and c `[B, H]`.
    """
    return _ops.lltm_cell(input, weight, bias, h, c)


@typed
def lstm(
    input: Tensor,
    h: Tensor,
    c: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Optional[Tensor] = None,
    b_hh: Optional[Tensor] = None,
    lengths: Optional[Sequence[int]] = None,
) -> Tuple[Tensor, Tensor, Tensor]:
    """One layer of torch.nn.LSTM in one direction; returns (h of all steps `[T, B, H]`, h, c).

    input `[T, B, F]`, h and c `[B, H]`, w_ih `[4H, F]`, w_hh `[4H, H]`, b_ih and b_hh `[4H]`. With lengths,
    sequence b has `lengths[b]` steps, from 1 to T, and padding after them: its h and c are those of its last
    step, and outputs after it are zero. `tch_extension.nn.LSTM` has layers and directions.
    """
    return _ops.lstm(input, h, c, w_ih, w_hh, b_ih, b_hh, lengths)


@typed
def matmul_add_relu(
    lhs: Tensor,
    rhs: Tensor,
    bias: Tensor,
) -> Tensor:
    """`relu(lhs @ rhs + bias)`, batched; all three are broadcast as `@` and `+` do it."""
    return _ops.matmul_add_relu(lhs, rhs, bias)


@typed
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Optional[Tensor] = None,
    eps: Optional[float] = None,
) -> Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimensions, as torch.nn.functional.rms_norm.

    Without eps it is the smallest step from 1 in the kind that is computed in.
    """
    return _ops.rms_norm(input, normalized_shape, weight, eps)


@typed
def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    offset: int = 0,
) -> Tuple[Tensor, Tensor]:
    """Rotary positions of q and k, in one call; the results are new tensors.

    q `[B, T, H, D]`, k `[B, T, Hk, D]`, cos and sin `[P, R / 2]` with P ≥ offset + T and R ≤ D: the first R
    values of each head are rotated. Positions come before heads: a `[B, H, T, D]` has to be transposed
    (`q.transpose(1, 2)`, which copies nothing). Where H = Hk and P ≥ offset + H, nothing tells it from a
    `[B, T, H, D]`, and its heads would be taken for positions.

    Pairs are values i and i + R / 2, or 2 i and 2 i + 1 if interleaved. A graph of torch.compile holds for
    one offset: in a loop of single tokens pass `cos[offset:]` and `sin[offset:]` in its place.
    """
    return _ops.rope(q, k, cos, sin, interleaved, offset)


@typed
def swiglu_mlp(
    input: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    save_activations: bool = True,
) -> Tensor:
    """`linear(silu(linear(input, w_gate)) * linear(input, w_up), w_down)`: the feed-forward part of Llama."""
    return _ops.swiglu_mlp(input, w_gate, w_up, w_down, save_activations)
