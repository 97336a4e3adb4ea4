"""Fused operators and layers for PyTorch, written in Rust, C++ and CUDA.

    import torch, tch_extension

    y = tch_extension.layer_norm(x, (1024,), weight, bias)
    rnn = tch_extension.nn.LSTM(256, 512, num_layers=2)  # torch.nn.LSTM's arguments, parameters and results

Importing this package registers its operators as `torch.ops.tch_extension.*`. They have gradients, work under autocast and are
operators like any other for torch.compile, torch.export and TorchScript. The functions of this module are those operators with
names, defaults and documentation; `tch_extension.nn` has modules.
"""

from ._build import CUDA as _CUDA, TORCH as _TORCH, VERSION as __version__
from ._library import load as _load, open_library

_load(__version__, _TORCH, _CUDA)

from . import functional, nn  # noqa: E402
from .functional import *  # noqa: E402, F403

__all__ = ["__version__", "nn", "open_library"]
__all__ += functional.__all__
