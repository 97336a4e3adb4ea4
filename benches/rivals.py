"""Measures what a Python user would call instead of our operators: GPU times, as in `benches/table.rs`.

    python3 rivals.py [WORD…]   writes rivals.json into $OUT (or the current folder)

The words select rows by title. torch.compile is always measured; Liger and Quack are measured if
they can be imported. A call is captured as a CUDA graph and replayed. If the data are 32 MiB or
more, the L2 cache is flushed before each replay; otherwise a graph has 20 calls. The figures are
medians over 9 interleaved rounds of 5 replays. A backward is captured alone, on the stream of its
forward.
"""

import json
import os
import sys
import warnings
from functools import partial

import torch
import torch.nn.functional as F
from torch._functorch import config as functorch_config

warnings.filterwarnings("ignore")
# Without this, a compiled backward frees its inputs' buffers and can run only once.
functorch_config.donated_buffer = False

SMALL, FLUSH = 32 << 20, 256 << 20
CALLS, REPLAYS, ROUNDS = 20, 5, 9
EPS = 1e-5
POINTS = [(256, 1024), (65536, 256), (32768, 1024), (16384, 4096), (8192, 8192), (4096, 16384)]
KINDS = {"Float": torch.float32, "BFloat16": torch.bfloat16}


def libtorch(x, w, b):
    return F.layer_norm(x, w.shape, w, b, EPS)


def through_autograd(call, x, w, b, dy):
    """A backward that can be called again and again, through the graph of one forward."""
    inputs = [tensor.detach().requires_grad_() for tensor in (x, w, b)]
    y = call(*inputs)
    return lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True)


def providers():
    """Yields name, forward, a function that makes a backward, and the parameters' kind if it is fixed."""
    torch._dynamo.reset()
    yield "libtorch", libtorch, partial(through_autograd, libtorch), None
    compiled = torch.compile(libtorch, dynamic=False)
    yield "torch.compile", compiled, partial(through_autograd, compiled), None
    try:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        def liger(x, w, b):
            return LigerLayerNormFunction.apply(x, w, b, EPS)

        yield "Liger", liger, partial(through_autograd, liger), None
    except ImportError:
        pass
    try:
        from quack.rmsnorm import layernorm_bwd, layernorm_fwd

        def quack(x, w, b):
            return layernorm_fwd(x, w, b, eps=EPS)

        def quack_backward(x, w, b, dy):
            _, rstd, mean = layernorm_fwd(x, w, b, eps=EPS, return_rstd=True, return_mean=True)
            return lambda: layernorm_bwd(x, w, dy, rstd, mean)

        yield "Quack", quack, quack_backward, torch.float32
    except ImportError:
        pass


class Graph:
    """One provider's call in one direction."""

    def __init__(self, prepare, nbytes):
        self.calls = CALLS if nbytes < SMALL else 1
        self.flush = torch.empty(FLUSH, dtype=torch.int8, device="cuda") if nbytes >= SMALL else None
        # The events are part of the graph, so that its launch is not in the time.
        self.start, self.end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # The closure keeps the tensors that the graph reads.
            self.run = prepare()
            for _ in range(3):
                self.run()
            stream.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.start.record()
                for _ in range(self.calls):
                    self.run()
                self.end.record()

    def time(self):
        times = []
        for _ in range(REPLAYS):
            self.graph.replay() if self.flush is None else self.flush.zero_()
            self.graph.replay()
            self.end.synchronize()
            times.append(self.start.elapsed_time(self.end) * 1e3 / self.calls)
        return median(times)


def median(times):
    return sorted(times)[len(times) // 2]


def prepared(direction, forward, backward, tensors):
    if direction == "backward":
        return backward(*tensors, torch.randn_like(tensors[0]))

    def run():
        with torch.no_grad():
            forward(*tensors)

    return run


def rows(point, kind, direction):
    (m, n), dtype = point, KINDS[kind]
    torch.manual_seed(0)
    x, w, b = (torch.randn(size, device="cuda", dtype=dtype) for size in [(m, n), (n,), (n,)])
    arrays = 2 if direction == "forward" else 3
    graphs, expected = {}, libtorch(x, w, b)
    for name, forward, backward, parameters in providers():
        tensors = [x] + [tensor.to(parameters or dtype) for tensor in (w, b)]
        try:
            torch.testing.assert_close(forward(*tensors), expected, rtol=5e-2, atol=5e-2)
            graphs[name] = Graph(partial(prepared, direction, forward, backward, tensors), arrays * x.nbytes)
        except Exception as error:  # A rival that cannot compute a case is left out, with a message.
            print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
    times = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            times[name].append(graph.time())
    common = {"operator": "layer_norm", "direction": direction, "point": str(point), "kind": kind, "device": "cuda"}
    return [{**common, "provider": name, "gpu_us": round(median(each), 3)} for name, each in times.items()]


def main(words):
    machine = {"gpu": torch.cuda.get_device_name(), "libtorch": torch.__version__}
    found = []
    for kind in KINDS:
        for point in POINTS:
            for direction in ("forward", "backward"):
                title = f"layer_norm {direction} {point} {kind} cuda"
                if all(word in title for word in words):
                    of_point = rows(point, kind, direction)
                    print(title, *(f"{row['provider']} {row['gpu_us']:.2f}" for row in of_point), sep="   ", flush=True)
                    found += of_point
    path = os.path.join(os.environ.get("OUT", "."), "rivals.json")
    with open(path, "w") as file:
        json.dump({**machine, "rows": found}, file, indent=1)
    print(f"written to {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
