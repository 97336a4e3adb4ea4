"""Modules that take the place of torch.nn's: the same arguments, parameters, state_dict and results, by the operators of this package.

    model.norm = tch_extension.nn.LayerNorm(1024)
    model.norm.load_state_dict(torch_norm.state_dict())

torch.compile takes them into its graph, LSTM and GRU too, before which it breaks the graph for torch.nn's.
"""

import sys
from typing import List, Optional, Tuple, Union, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from . import functional

__all__ = ["CrossEntropyLoss", "GRU", "LSTM", "LayerNorm", "LinearCrossEntropy", "RMSNorm"]


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm by :func:`tch_extension.layer_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm by :func:`tch_extension.rms_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss by :func:`tch_extension.cross_entropy`.

    Logits `[M, V]` and classes `[M]` are this package's; other shapes and probabilities of classes are torch's own.
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(
            input, target, self.weight, self.ignore_index, self.reduction, self.label_smoothing
        )


class LinearCrossEntropy(torch.nn.Linear):
    """torch.nn.Linear and torch.nn.CrossEntropyLoss in one, whose logits are never in memory as a whole.

    The parameters are those of torch.nn.Linear(in_features, out_features, bias), where out_features is the number of classes. What
    follows them is torch.nn.CrossEntropyLoss's; softcap, z_loss, memory and accumulate_in_float are those of
    :func:`tch_extension.linear_cross_entropy`.

    Shapes: input `[..., in_features]` and target `[...]` (int64) give a scalar, or the target's shape if reduction is "none".
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        softcap: Optional[float] = None,
        z_loss: float = 0.0,
        memory: Optional[int] = None,
        accumulate_in_float: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.softcap = softcap
        self.z_loss = z_loss
        self.memory = memory
        self.accumulate_in_float = accumulate_in_float

    def logits(self, input: Tensor) -> Tensor:
        """The outputs of the linear layer, and of the softcap if there is one, as a model without targets needs them."""
        logits = functional.linear(input, self.weight, self.bias)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        if input.shape[:-1] != target.shape:
            # As torch's cross_entropy does.
            kind = RuntimeError if input.shape[:1] == target.shape[:1] else ValueError
            raise kind(
                f"LinearCrossEntropy: target has the shape {tuple(target.shape)}, and the input {tuple(input.shape)}; "
                "they must be equal but for the input's last dimension"
            )
        loss = functional.linear_cross_entropy(
            input.reshape(-1, input.shape[-1]),
            self.weight,
            target.reshape(-1),
            self.bias,
            self.ignore_index,
            self.reduction,
            self.label_smoothing,
            self.softcap,
            self.z_loss,
            self.memory,
            self.accumulate_in_float,
        )
        return loss.reshape(target.shape) if self.reduction == "none" else loss

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, reduction={self.reduction!r}"


class _Recurrent(torch.nn.RNNBase):
    """Layers and directions around an operator for one of each, as torch.nn's RNNs have them.

    A subclass of torch.nn.LSTM would be refused by torch.compile, so the parent is the class above it.
    """

    def _name(self) -> str:
        return f"tch_extension.nn.{type(self).__name__}"

    def _check_target(self) -> None:
        if "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export():
            name = type(self).__name__
            raise RuntimeError(
                f"{self._name()}: ONNX has none of this package's operators: load the state_dict into a torch.nn.{name}, "
                "and export that"
            )

    def _one(
        self, input: Tensor, lengths: Optional[List[int]], state: List[Tensor], weights: List[Tensor]
    ) -> Tuple[Tensor, ...]:
        """One layer in one direction: h of all steps, and the state."""
        raise NotImplementedError

    def _layers(
        self, x: Tensor, lengths: Optional[List[int]], first: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        """All layers for an input `[T, B, F]` and first states `[layers * directions, B, H]`."""
        last: List[List[Tensor]] = [[] for _ in first]
        directions = 2 if self.bidirectional else 1
        backwards = _reversed_steps(x, lengths) if self.bidirectional else None
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(directions):
                place = layer * directions + direction
                weights = [getattr(self, name) for name in self._all_weights[place]]
                before = [state[place] for state in first]
                steps = _turn(x, backwards) if direction else x
                output, *after = self._one(steps, lengths, before, weights)
                outputs.append(_turn(output, backwards) if direction else output)
                for states, state in zip(last, after):
                    states.append(state)
            x = torch.cat(outputs, -1) if self.bidirectional else outputs[0]
            if self.dropout and layer + 1 < self.num_layers:
                x = torch.nn.functional.dropout(x, self.dropout, self.training)
        # Also of one state, whose view could not be detached in place, as truncated backpropagation does.
        return x, [torch.stack(after) for after in last]

    def _check(self, x: Tensor, states: List[Tensor]) -> None:
        dtype = self.weight_ih_l0.dtype
        if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(
                f"{self._name()}: the input is of dtype {x.dtype} and the weights of {dtype}: "
                f"convert the input with .to({dtype}), or the module with .to({x.dtype})"
            )
        if x.shape[-1] != self.input_size:
            raise RuntimeError(
                f"{self._name()}: the input's last dimension must be {self.input_size} (input_size), got {x.shape[-1]}"
            )
        directions = 2 if self.bidirectional else 1
        expected = (self.num_layers * directions, x.shape[1], self.hidden_size)
        for name, state in zip("hc", states):
            if tuple(state.shape) != expected:
                raise RuntimeError(f"{self._name()}: {name} must have the shape {expected}, got {tuple(state.shape)}")

    def _zeros(self, x: Tensor, count: int) -> List[Tensor]:
        directions = 2 if self.bidirectional else 1
        shape = (self.num_layers * directions, x.shape[1], self.hidden_size)
        return [x.new_zeros(shape) for _ in range(count)]

    def _packed(
        self, packed: PackedSequence, states: Optional[List[Tensor]], count: int
    ) -> Tuple[PackedSequence, List[Tensor]]:
        # The sequences are left in the order of the packed data, longest first.
        x, lengths = pad_packed_sequence(PackedSequence(packed.data, packed.batch_sizes))
        if states is None:
            states = self._zeros(x, count)
        self._check(x, states)
        states = _permuted(states, packed.sorted_indices)
        output, states = self._layers(x, lengths.tolist(), states)
        data = pack_padded_sequence(output, lengths).data
        outputs = PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
        return outputs, _permuted(states, packed.unsorted_indices)

    def _tensor(
        self, input: Tensor, states: Optional[List[Tensor]], count: int
    ) -> Tuple[Tensor, List[Tensor]]:
        if input.dim() not in (2, 3):
            raise ValueError(f"{self._name()}: the input must have 2 or 3 dimensions, got {input.dim()}")
        batched = input.dim() == 3
        if states is not None:
            for name, state in zip("hc", states):
                if state.dim() != input.dim():
                    raise RuntimeError(
                        f"{self._name()}: {name} must have {input.dim()} dimensions, as the input has, got {state.dim()}"
                    )
        if not batched:
            x = input.unsqueeze(1)
            states = states and [state.unsqueeze(1) for state in states]
        else:
            x = input.transpose(0, 1) if self.batch_first else input
        if states is None:
            states = self._zeros(x, count)
        self._check(x, states)
        output, states = self._layers(x, None, states)
        if not batched:
            return output.squeeze(1), [state.squeeze(1) for state in states]
        return output.transpose(0, 1) if self.batch_first else output, states

    def _run(
        self, input: Union[Tensor, PackedSequence], states: Optional[List[Tensor]], count: int
    ) -> Tuple[Union[Tensor, PackedSequence], List[Tensor]]:
        if not isinstance(input, PackedSequence):
            return self._tensor(input, states, count)
        run = self._packed
        if torch.compiler.is_compiling():
            # torch.compile cannot trace how sequences are packed and padded, and breaks its graph here, as it does for torch.nn's.
            run = torch.compiler.disable(run)
        return run(input, states, count)


def _permuted(states: List[Tensor], order: Optional[Tensor]) -> List[Tensor]:
    return states if order is None else [state.index_select(1, order) for state in states]


def _reversed_steps(x: Tensor, lengths: Optional[List[int]]) -> Optional[Tensor]:
    """For sequences of different lengths, which row of the flattened input takes the place of each when they are turned round."""
    if lengths is None:
        return None
    steps = torch.arange(x.shape[0]).unsqueeze(1)
    ends = torch.tensor(lengths)
    # Padding stays where it is.
    steps = torch.where(steps < ends, ends - 1 - steps, steps)
    return (steps * x.shape[1] + torch.arange(x.shape[1])).flatten().to(x.device)


def _turn(x: Tensor, order: Optional[Tensor]) -> Tensor:
    """The sequences with their steps in reverse."""
    if order is None:
        return x.flip(0)
    return x.flatten(0, 1).index_select(0, order).view_as(x)


class LSTM(_Recurrent):
    """torch.nn.LSTM by :func:`tch_extension.lstm`.

    Any number of layers, both directions, unbatched input and PackedSequence are supported, and with a proj_size all is torch's own.
    Second derivatives exist on the GPU, too. torch.jit.trace takes it; for torch.jit.script and ONNX, load the state_dict into a
    torch.nn.LSTM.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(
            "LSTM",
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            proj_size,
            device,
            dtype,
        )

    # What torch.nn.LSTM.forward calls, for a proj_size.
    get_expected_cell_size = torch.nn.LSTM.get_expected_cell_size
    check_forward_args = torch.nn.LSTM.check_forward_args  # type: ignore[assignment]
    permute_hidden = torch.nn.LSTM.permute_hidden  # type: ignore[assignment]

    @overload
    def forward(
        self, input: Tensor, hx: Optional[Tuple[Tensor, Tensor]] = None
    ) -> Tuple[Tensor, Tuple[Tensor, Tensor]]: ...

    @overload
    def forward(
        self, input: PackedSequence, hx: Optional[Tuple[Tensor, Tensor]] = None
    ) -> Tuple[PackedSequence, Tuple[Tensor, Tensor]]: ...

    def forward(self, input, hx=None):
        if self.proj_size:
            return torch.nn.LSTM.forward(self, input, hx)  # type: ignore[arg-type]
        self._check_target()
        if hx is not None and len(hx) != 2:
            raise RuntimeError(f"{self._name()}: hx must be (h, c), got {len(hx)} states")
        output, (h, c) = self._run(input, None if hx is None else list(hx), 2)
        return output, (h, c)

    def _one(self, input, lengths, state, weights):
        return functional.lstm(input, *state, *weights, lengths=lengths)


class GRU(_Recurrent):
    """torch.nn.GRU by :func:`tch_extension.gru`. What :class:`LSTM` says of torch.nn.LSTM holds here, too."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(
            "GRU",
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device=device,
            dtype=dtype,
        )

    @overload
    def forward(self, input: Tensor, hx: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]: ...

    @overload
    def forward(self, input: PackedSequence, hx: Optional[Tensor] = None) -> Tuple[PackedSequence, Tensor]: ...

    def forward(self, input, hx=None):
        self._check_target()
        output, (h,) = self._run(input, None if hx is None else [hx], 1)
        return output, h

    def _one(self, input, lengths, state, weights):
        return functional.gru(input, *state, *weights, lengths=lengths)
