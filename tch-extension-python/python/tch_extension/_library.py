"""Loads the library of operators, after it is clear that it fits the torch in use."""

import ctypes
from pathlib import Path
from typing import Iterable, Optional

import torch

LIBRARY = Path(__file__).with_name("libtch_extension_python.so")


def _major_minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def mismatch(version: str, built_for: str, cuda: Optional[str]) -> Optional[str]:
    """Why the library cannot work with the torch in use; None if it can."""
    package = f"tch_extension {version} was built for torch {built_for}"
    if _major_minor(torch.__version__) != built_for:
        return (
            f"{package}, and this is torch {torch.__version__}: C++ libraries work with one version of torch only; "
            f"install the tch_extension for this torch, or torch=={built_for}.*"
        )
    if cuda is None:
        return None
    found = torch.version.cuda
    if found is None or found.split(".")[0] != cuda.split(".")[0]:
        this = "has no CUDA" if found is None else f"has CUDA {found}"
        return (
            f"{package} with CUDA {cuda}, and this torch {torch.__version__} {this}: "
            f"install the tch_extension for this torch, or a torch with CUDA {cuda.split('.')[0]}"
        )
    return None


def other_copy(loaded: Iterable[str]) -> Optional[str]:
    """The file of a copy of the library at another path, among the libraries that torch has loaded."""
    copies = (file for file in loaded if Path(file).name == LIBRARY.name)
    return next((file for file in copies if Path(file).resolve() != LIBRARY.resolve()), None)


def load(version: str, built_for: str, cuda: Optional[str]) -> None:
    """Loads the library, which registers the operators; an ImportError says why it cannot."""
    reason = mismatch(version, built_for, cuda)
    if reason is not None:
        raise ImportError(reason)
    other = other_copy(torch.ops.loaded_libraries)
    if other is not None:
        raise ImportError(
            f"tch_extension is in this process already, from {other}, and cannot be loaded again from {LIBRARY}: "
            "import one copy only"
        )
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        # torch says only that it failed; its cause is what the dynamic loader says.
        raise ImportError(f"{LIBRARY} cannot be loaded: {error.__cause__ or error}") from error
    registration_error = ctypes.CDLL(str(LIBRARY)).tch_extension_registration_error
    registration_error.restype = ctypes.c_char_p
    text = registration_error()
    if text is not None:
        raise ImportError(text.decode(errors="replace"))


def open_library() -> str:
    """The path of this package's library, whose functions numpy, JAX, CuPy and others call by TVM FFI.

    module = tvm_ffi.load_module(tch_extension.open_library())
    module.rms_norm(output, None, input, weight, 1e-6)

    They compute on the CPU and on CUDA. The page docs/kernels-for-others.md of the repository describes them.
    """
    return str(LIBRARY)
