"""`python3 -m tch_extension kernels` prints the path of the kernel library.

With that path in TCH_EXTENSION_KERNELS, a crate that depends on tch-extension links the library instead of compiling its kernels.
"""

import sys
from pathlib import Path

from ._build import KERNELS

if sys.argv[1:] != ["kernels"]:
    sys.exit("usage: python3 -m tch_extension kernels")
if KERNELS is None:
    sys.exit("this tch_extension was built without CUDA and has no kernels")
print(Path(__file__).resolve().with_name(KERNELS))
