"""Writes choices.txt: which variants of a kernel the Python package `kernels` takes, in which order.

python3 -m pip install kernels; python3 choices.py > choices.txt
"""

import itertools
import random
from importlib.metadata import version

from kernels.backends import CPU, CUDA
from kernels.variants import ArchVariant, _resolve_variant_for_system, parse_variant
from packaging.version import Version

TORCH = ["29", "210", "211", "212", "213", "30"]
FRAMEWORKS = [
    *(f"torch{number}{abi}" for number in TORCH for abi in ["", "-cxx11"]),
    "torch211-cxx98",
    *(f"torch-stable-abi{number}" for number in TORCH),
    *(f"tvm-ffi{number}" for number in ["01", "02", "010", "10"]),
]
OWN = ["cpu", "cu118", "cu126", "cu128", "cu130", "cu132"]
OTHERS = ["rocm71", "xpu20253", "cann83", "metal", "neuron", "tpu"]
ELSEWHERE = ["aarch64-linux", "aarch64-darwin", "x86_64-windows", "x86_64-linux-gnu"]
PYTHON_ONLY = "torch-cpu torch-cuda torch-rocm torch-universal torch torch- torch-211-cu130-x86_64-linux".split()
# Names that are not those of variants.
WRONG = """torch2-cpu-x86_64-linux torch211 torch211-cxx11 torch211-x86_64-linux torch211-cpu-linux
torch211-cu-x86_64-linux torch211-cu1-x86_64-linux torch211-cu13.0-x86_64-linux
torch211-cxx20-cu130-x86_64-linux torch-stable-abi2-cpu-x86_64-linux torch-stable-abi-cpu-x86_64-linux
tvm-ffi0-cpu-x86_64-linux tvm-ffi-cpu-x86_64-linux tvm01-cpu-x86_64-linux torch+11-cpu-x86_64-linux
torch2.11-cpu-x86_64-linux Torch211-cpu-x86_64-linux torch211--cpu-x86_64-linux torch211-cpu-x86_64
torch211-gpu-x86_64-linux torch211-cu130-cpu-x86_64-linux jax-cpu-x86_64-linux relu __pycache__""".split()


def parsed(name):
    try:
        return parse_variant(name)
    except ValueError:
        return None


def taken(folders, torch, tvm_ffi, cuda):
    """The folders that the package takes, the first choice first."""
    variants = {parsed(name): name for name in sorted(folders) if parsed(name)}
    accepted, _ = _resolve_variant_for_system(
        variants=list(variants),
        selected_backend=CPU() if cuda == "-" else CUDA(version=Version(cuda)),
        cpu="x86_64",
        os="linux",
        torch_version=Version(torch),
        torch_cxx11_abi=True,
        tvm_ffi_version=None if tvm_ffi == "-" else Version(tvm_ffi),
    )
    # The others have no library and are of no use without Python.
    return [variants[variant] for variant in accepted if isinstance(variant, ArchVariant)]


def main():
    draw = random.Random(1)
    own = ["-".join([*parts, "x86_64-linux"]) for parts in itertools.product(FRAMEWORKS, OWN)]
    other = ["-".join([*parts, "x86_64-linux"]) for parts in itertools.product(FRAMEWORKS, OTHERS)]
    away = ["-".join(parts) for parts in itertools.product(FRAMEWORKS, OWN, ELSEWHERE)]
    rest = draw.sample(other, 24) + draw.sample(away, 24) + PYTHON_ONLY + WRONG
    names = sorted(own + rest)
    assert not any(parsed(name) for name in WRONG)

    print(f"# Made by choices.py with the Python package kernels {version('kernels')}. The names of folders:")
    print(*names, sep="\n")
    print("# libtorch, tvm-ffi and CUDA (or -); names, from 0; those that are taken, the first choice first:")
    systems = list(itertools.product(["2.10", "2.11", "2.13"], ["-", "0.1"], ["-", "12.8", "13.0", "13.2"]))
    for number in range(600):
        system = systems[number % len(systems)]
        fitting = taken(own, *system)
        folders = draw.sample(own, draw.choice([1, 4, 10])) + draw.sample(rest, draw.randrange(3))
        folders = sorted({*folders, *draw.sample(fitting, draw.randrange(min(len(fitting), 6)))})
        indices = [" ".join(str(names.index(name)) for name in of) for of in (folders, taken(folders, *system))]
        print(*system, "|", indices[0], "|", indices[1])


main()
