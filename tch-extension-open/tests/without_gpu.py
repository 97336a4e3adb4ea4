"""The library in a process without torch, and without a GPU that it could use.

usage: without_gpu.py LIBRARY FOLDER, which has libcudart
"""

import ctypes
import sys
from pathlib import Path

import numpy as np
import tvm_ffi

(runtime,) = Path(sys.argv[2]).glob("libcudart.so.??")
ctypes.CDLL(str(runtime))
ops = tvm_ffi.load_module(sys.argv[1])
CPU, CUDA = tvm_ffi.device("cpu"), tvm_ffi.device("cuda:1023")
x, y, w, rstd = np.ones((2, 8), np.float32), np.zeros((2, 8), np.float32), np.ones(8, np.float32), np.ones(2, np.float32)
q, table, one = np.ones((1, 2, 3, 4), np.float32), np.ones((2, 2), np.float32), np.zeros((), np.float32)
scratch, target = np.zeros(1 << 16, np.uint8), np.zeros(2, np.int64)
of_loss = (x, target, None, -100, "mean", 0.0)
CALLS = {
    "rms_norm": (y, None, x, w, 1e-6),
    "rms_norm_backward": (y, None, scratch, x, x, w, rstd),
    "rms_norm_backward_workspace": (2, 8, "float32", CPU),
    "layer_norm": (y, None, None, x, w, None, 1e-6),
    "layer_norm_backward": (y, None, None, scratch, x, x, w, rstd, rstd),
    "layer_norm_backward_workspace": (2, 8, "float32", CPU),
    "add_rms_norm": (y, y, None, x, x, w, 1e-6),
    "add_rms_norm_backward": (y, None, None, scratch, x, None, x, w, rstd),
    "add_rms_norm_backward_workspace": (2, 8, "float32", CPU),
    "rope": (q, None, q, None, table, table, 0, False, False),
    "cross_entropy": (one, None, scratch, *of_loss),
    "cross_entropy_backward": (y, scratch, one, *of_loss),
}


def message_of(kind, name, *arguments):
    try:
        getattr(ops, name)(*arguments)
    except kind as error:
        text = str(error)
        assert text.startswith(f"{name}: ") and "\n" not in text, text
        return text
    raise AssertionError(f"{name}: no error")


for name, arguments in CALLS.items():
    text = message_of(ValueError, name, *arguments)
    assert "expected a CUDA device, got the CPU" in text and "tch_extension.open_library()" in text, text
    text = message_of(TypeError, name, *arguments[1:])
    assert f"expected {len(arguments)} arguments (" in text and f"got {len(arguments) - 1}" in text, text
    if arguments[-1] is CPU:
        # No machine has so many devices, and this one may have none: an error of CUDA.
        text = message_of(RuntimeError, name, 2, 8, "bfloat16", CUDA)
assert ops.cross_entropy_workspace(2, "float64") == 255 + 3 * 256
assert not x.sum() - x.size and not y.any()
loaded = Path("/proc/self/maps").read_text()
assert "libtch_extension_open" in loaded and "libtorch" not in loaded and "libc10" not in loaded
