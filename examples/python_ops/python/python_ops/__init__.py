"""Five operators that are written in Rust: ``torch.ops.python_ops``."""

import ctypes
from pathlib import Path

import torch

# libtorch's C++ interface changes with each version, so a build fits the one that it was made with.
_TORCH = "2.11."
if not torch.__version__.startswith(_TORCH):
    raise ImportError(f"python_ops is built for torch {_TORCH}*, and this is torch {torch.__version__}")

LIBRARY = Path(__file__).with_name("libpython_ops.so")
torch.ops.load_library(LIBRARY)

_error = ctypes.CDLL(str(LIBRARY)).tch_extension_registration_error
_error.restype = ctypes.c_char_p
if _error() is not None:
    raise ImportError(_error().decode())

muladd = torch.ops.python_ops.muladd
swish = torch.ops.python_ops.swish
geglu = torch.ops.python_ops.geglu
ema_ = torch.ops.python_ops.ema_
weighted_sum = torch.ops.python_ops.weighted_sum
