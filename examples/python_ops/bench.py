"""What a call from Python costs: muladd and swish in Rust, the same in C++, and `aten::mul`.

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
    rust, cpp, mul = torch.ops.python_ops, torch.ops.python_ops_cpp, torch.ops.aten.mul
    a, b = torch.randn(8), torch.randn(8)
    x, y = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    ones = torch.ones(8)

    def calls(op, plain, recorded):
        wanted = [it for it in recorded if isinstance(it, torch.Tensor)]
        yield lambda: op(*plain)
        yield lambda: op(*recorded)
        yield lambda: torch.autograd.grad(op(*recorded), wanted, ones)

    titles = "without gradients", "forward, recorded", "forward and backward"
    multiply = list(calls(mul, (a, b), (x, y)))
    for name, plain, recorded in (("muladd", (a, b, 2.0), (x, y, 2.0)), ("swish", (a, 1.5), (x, 1.5))):
        ours, theirs = (calls(getattr(it, name), plain, recorded) for it in (rust, cpp))
        for title, *three in zip(titles, ours, theirs, multiply):
            yield f"{name}, {title}", dict(zip(("rust", "cpp", "mul"), three))


def main():
    torch.set_num_threads(1)
    load_cpp()
    print(f"torch {torch.__version__}, microseconds of a call")
    print(f"{'':30}{'Rust':>8}{'C++':>8}{'mul':>8}{'Rust / C++':>12}{'Rust - mul':>12}")
    for title, calls in cases():
        rust, cpp, mul = medians(calls).values()
        print(f"{title:30}{rust:8.2f}{cpp:8.2f}{mul:8.2f}{rust / cpp:12.2f}{rust - mul:12.2f}")


if __name__ == "__main__":
    main()
