"""What a call from Python costs: muladd in Rust, the same in C++, and `aten::mul`.

    PYTHONPATH=FOLDER_WITH_python_ops python3 bench.py

It prints microseconds of a call: the median over many rounds, in each of which all take turns, so that
a busy machine slows down all alike. The tensors have 8 elements, so the time is that of the call.
"""

import os
import statistics
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path

import python_ops
import torch
from torch.utils.cpp_extension import include_paths

ROUNDS, CALLS = 201, 200


def load_cpp():
    """Compiles bench.cpp and loads it."""
    source = Path(__file__).with_suffix(".cpp")
    libraries = Path(torch.__file__).parent / "lib"
    includes = [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "libbench.so")
        command = ["g++", "-std=c++17", "-O3", "-shared", "-fPIC", *includes, str(source), "-o", library]
        subprocess.run([*command, f"-L{libraries}", "-ltorch_cpu", "-lc10"], check=True)
        torch.ops.load_library(library)


def batch(call):
    """The microseconds of a call, over a number of calls."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) * 1e6 / CALLS


def medians(calls):
    """The median of each call's time. They take turns in each round."""
    times = {name: [] for name in calls}
    for call in calls.values():
        batch(call)
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(batch(call))
    return {name: statistics.median(found) for name, found in times.items()}


def cases():
    rust, cpp, mul = torch.ops.python_ops.muladd, torch.ops.python_ops_cpp.muladd, torch.ops.aten.mul
    a, b = torch.randn(8), torch.randn(8)
    x, y = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    ones = torch.ones(8)

    def both(op, *more):
        return lambda: torch.autograd.grad(op(x, y, *more), (x, y), ones)

    yield "without gradients", lambda: rust(a, b, 2.0), lambda: cpp(a, b, 2.0), lambda: mul(a, b)
    yield "forward, recorded", lambda: rust(x, y, 2.0), lambda: cpp(x, y, 2.0), lambda: mul(x, y)
    yield "and backward", both(rust, 2.0), both(cpp, 2.0), both(mul)


def main():
    torch.set_num_threads(1)
    load_cpp()
    print(f"torch {torch.__version__}, microseconds of a call")
    print(f"{'':20}{'Rust':>8}{'C++':>8}{'mul':>8}{'Rust / C++':>12}{'Rust - mul':>12}")
    for title, rust, cpp, mul in cases():
        found = medians({"rust": rust, "cpp": cpp, "mul": mul})
        rust, cpp, mul = found["rust"], found["cpp"], found["mul"]
        print(f"{title:20}{rust:8.2f}{cpp:8.2f}{mul:8.2f}{rust / cpp:12.2f}{rust - mul:12.2f}")


if __name__ == "__main__":
    main()
