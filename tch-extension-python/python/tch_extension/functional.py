"""The operators as functions.

Each takes tensors of kind float64, float32, float16 or bfloat16 with any strides, on the CPU or (if this package was built with
CUDA) on a GPU, has first and second derivatives, and obeys autocast. Wrong arguments raise what torch raises: a RuntimeError for
tensors that do not fit, a ValueError for a number or a word that means nothing, a TypeError for another type, and an IndexError for
a class that does not exist. Where torch has a function of the same name, the arguments have the same names, order and defaults
(cross_entropy has no size_average and reduce).
"""

from typing import Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from . import _functions
from ._functions import *  # noqa: F403
from ._functions import __all__ as __all__


def cross_entropy(  # type: ignore[no-redef]
    input: Tensor,
    target: Tensor,
    weight: Optional[Tensor] = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    are_tensors = isinstance(input, Tensor) and isinstance(target, Tensor)
    is_ours = not are_tensors or (input.dim() == 2 and target.dim() == 1 and target.dtype == torch.int64)
    function = _functions.cross_entropy if is_ours else torch.nn.functional.cross_entropy
    return function(
        input,
        target,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def _call(name: str, *arguments: Optional[Tensor], lengths: Union[Sequence[int], Tensor, None]):
    function = getattr(_functions, name)
    if not isinstance(lengths, Tensor):
        return function(*arguments, lengths)
    if lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise TypeError(f"{name}: lengths: expected integers, got dtype {lengths.dtype}")

    def run():
        return function(*arguments, lengths.tolist())

    # A trace would be made again for each set of lengths.
    return torch.compiler.disable(run)() if torch.compiler.is_compiling() else run()


def lstm(  # type: ignore[no-redef]
    input: Tensor,
    h: Tensor,
    c: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Optional[Tensor] = None,
    b_hh: Optional[Tensor] = None,
    lengths: Union[Sequence[int], Tensor, None] = None,
) -> Tuple[Tensor, Tensor, Tensor]:
    return _call("lstm", input, h, c, w_ih, w_hh, b_ih, b_hh, lengths=lengths)


def gru(  # type: ignore[no-redef]
    input: Tensor,
    h: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Optional[Tensor] = None,
    b_hh: Optional[Tensor] = None,
    lengths: Union[Sequence[int], Tensor, None] = None,
) -> Tuple[Tensor, Tensor]:
    return _call("gru", input, h, w_ih, w_hh, b_ih, b_hh, lengths=lengths)


cross_entropy.__doc__ = f"""{_functions.cross_entropy.__doc__}
    Other shapes, and probabilities of classes, are torch's own.
    """
lstm.__doc__, gru.__doc__ = _functions.lstm.__doc__, _functions.gru.__doc__
