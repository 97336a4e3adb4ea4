"""The functions of TVM FFI on a GPU, from torch, CuPy and JAX.

usage: on_cuda.py LIBRARY [NAME…]

LIBRARY is libtch_extension_open.so, or the library of the wheel. Words choose checks whose names contain one of them. SEED in the
environment repeats a run. A check whose package cannot be imported is skipped, and the output says so. The times of rms_norm are
lines of JSON.
"""

import functools
import importlib.util
import json
import math
import os
import random
import sys
import time
from pathlib import Path

os.environ["DEVICE"] = "cuda"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
LIBRARY, WORDS = sys.argv[1], sys.argv[2:]
SEED = int(os.environ.get("SEED", random.randrange(1 << 30)))
sys.argv = [sys.argv[0], LIBRARY, str(SEED)]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

torch.cuda.init()
torch.zeros(1, device="cuda")  # loads the CUDA runtime, which the library needs

import tvm_ffi  # noqa: E402

# The comparisons with torch, which are those of the CPU.
PATH = Path(__file__).resolve().parents[2] / "tch-extension-python/tests/open.py"
spec = importlib.util.spec_from_file_location("open_functions", PATH)
of_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(of_cpu)
ops, CUDA = of_cpu.ops, of_cpu.HERE
CHECKS = list(of_cpu.COMPARISONS)


def check(function):
    CHECKS.append(function)
    return function



def needs(package):
    """Makes a check that is skipped where the package cannot be imported."""

    def of(function):
        @functools.wraps(function)
        def run():
            try:
                module = __import__(package)
            except ImportError as error:
                print(f"SKIPPED {function.__name__}: {error}", flush=True)
                return
            function(module)

        return check(run)

    return of


def size_of_workspace(name, rows, columns, dtype):
    return getattr(ops, f"{name}_backward_workspace")(rows, columns, dtype, CUDA)


def close(what, found, expected, limit):
    found, expected = found.double(), expected.double()
    limit *= max(1.0, expected.abs().max().item())
    difference = (found - expected).abs().max().item()
    assert difference <= limit, f"{what}: {difference}, more than {limit}"


def expected_of(x, w, dy, eps=1e-6):
    """The norm and its gradients in float64."""
    x, w = (it.detach().double().requires_grad_() for it in (x, w))
    y = F.rms_norm(x, (x.shape[-1],), w, eps)
    y.backward(dy.double())
    return y.detach(), x.grad, w.grad


# --- torch ----------------------------------------------------------------------------------------


@check
def the_work_is_on_torchs_current_stream():
    side = torch.cuda.Stream()
    x, w = torch.randn(4096, 1000, device="cuda"), torch.randn(1000, device="cuda")
    source, y = torch.randn_like(x), torch.empty_like(x)
    expected = F.rms_norm(source.double(), (1000,), w.double(), 1e-6)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        # On another stream the function would read x before it is written.
        torch.cuda._sleep(200_000_000)
        x.copy_(source)
        ops.rms_norm(y, None, x, w, 1e-6)
    assert torch.cuda.current_stream() != side
    side.synchronize()
    close("on a side stream", y, expected, 1e-5)


@check
def a_graph_captures_forward_and_backward():
    rows, columns = 3000, 1024
    x, dy = (torch.randn(rows, columns, device="cuda") for _ in range(2))
    w = torch.randn(columns, device="cuda")
    y, dx, rstd, dw = torch.empty_like(x), torch.empty_like(x), torch.empty(rows, device="cuda"), torch.empty_like(w)
    logits, target = torch.randn(64, 5000, device="cuda"), torch.randint(5000, (64,), device="cuda")
    loss, dz = torch.empty((), device="cuda"), torch.empty_like(logits)
    workspace = torch.empty(size_of_workspace("rms_norm", rows, columns, "float32"), dtype=torch.uint8, device="cuda")
    of_loss = torch.empty(ops.cross_entropy_workspace(64, "float32"), dtype=torch.uint8, device="cuda")

    def work():
        ops.rms_norm(y, rstd, x, w, 1e-6)
        ops.rms_norm_backward(dx, dw, workspace, dy, x, w, rstd)
        ops.cross_entropy(loss, dz, of_loss, logits, target, None, -100, "mean", 0.1)

    work()  # CUDA loads kernels when they are called first
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with tvm_ffi.use_torch_stream(torch.cuda.graph(graph)):
        work()
    for _ in range(3):
        for tensor in (x, dy, w, logits):
            tensor.normal_()
        for tensor in (y, dx, dw, rstd, loss, dz):
            tensor.fill_(math.nan)
        graph.replay()
        expected = expected_of(x, w, dy)
        for name, found, wanted in zip(("y", "dx", "dw"), (y, dx, dw), expected):
            close(f"replay: {name}", found, wanted, 3e-5)
        z = logits.double().requires_grad_()
        of_torch = F.cross_entropy(z, target, label_smoothing=0.1)
        of_torch.backward()
        close("replay: loss", loss, of_torch.detach(), 1e-5)
        close("replay: dz", dz, z.grad, 1e-5)


@check
def the_same_arrays_give_the_same_bits():
    for rows, columns in ((1, 70000), (17, 4097), (3000, 1024), (300, 5000)):
        x, dy, w = torch.randn(rows, columns, device="cuda"), torch.randn(rows, columns, device="cuda"), torch.randn(columns, device="cuda")
        rstd = torch.empty(rows, device="cuda")
        workspace = torch.empty(size_of_workspace("rms_norm", rows, columns, "float32"), dtype=torch.uint8, device="cuda")
        results = []
        for _ in range(3):
            y, dx, dw = torch.empty_like(x), torch.empty_like(x), torch.empty_like(w)
            ops.rms_norm(y, rstd, x, w, 1e-6)
            ops.rms_norm_backward(dx, dw, workspace, dy, x, w, rstd)
            results.append((y, dx, dw))
        for other in results[1:]:
            assert all(one.equal(two) for one, two in zip(results[0], other)), (rows, columns)


@check
def what_is_wrong_is_refused_and_the_gpu_goes_on():
    x, w = torch.randn(700, 64, device="cuda"), torch.randn(64, device="cuda")
    y, rstd, dw = torch.empty_like(x), torch.empty(700, device="cuda"), torch.empty_like(w)

    def message(function, *arguments):
        try:
            function(*arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            return str(error)
        raise AssertionError("no error")

    assert "as input" in message(ops.rms_norm, y, rstd, x, w.cpu(), 1e-6)
    assert "memory of its own" in message(ops.rms_norm, x, rstd, x, w, 1e-6)
    assert "contiguous" in message(ops.rms_norm, y, rstd, x.t(), w, 1e-6)
    assert "expected float32" in message(ops.rms_norm, y, rstd, x, w.half(), 1e-6)
    small = torch.empty(100, dtype=torch.uint8, device="cuda")
    assert "rms_norm_backward_workspace" in message(ops.rms_norm_backward, y, dw, small, x, x, w, rstd)
    odd = torch.randn(3, 7, device="cuda")
    of_odd = (torch.empty_like(odd), torch.empty_like(odd), None, odd, odd, None, 1e-6)
    assert "call rms_norm" in message(ops.add_rms_norm, *of_odd)
    other = tvm_ffi.device(f"cuda:{torch.cuda.device_count()}")
    text = message(ops.rms_norm_backward_workspace, 3, 4, "float32", other)
    assert text.startswith("rms_norm_backward_workspace: "), text
    ops.rms_norm(y, rstd, x, w, 1e-6)
    close("after errors", y, F.rms_norm(x.double(), (64,), w.double(), 1e-6), 1e-5)
    torch.cuda.synchronize()


@check
def another_device_is_used_and_the_current_one_stays():
    if torch.cuda.device_count() < 2:
        print("SKIPPED another_device_is_used_and_the_current_one_stays: there is one device", flush=True)
        return
    x, w = torch.randn(700, 640, device="cuda:1"), torch.randn(640, device="cuda:1")
    y = torch.empty_like(x)
    ops.rms_norm(y, None, x, w, 1e-6)
    assert torch.cuda.current_device() == 0
    close("on another device", y, F.rms_norm(x.double(), (640,), w.double(), 1e-6), 1e-5)


# --- CuPy -----------------------------------------------------------------------------------------


def of_cupy(cupy, stream, function, *arguments):
    """Calls with CuPy's arrays on a stream of CuPy's."""
    with tvm_ffi.use_raw_stream(CUDA, stream.ptr):
        function(*arguments)


@needs("cupy")
def cupy_calls_every_function(cupy):
    stream = cupy.cuda.Stream(non_blocking=True)
    for dtype, limit in (("float64", 1e-11), ("float32", 3e-5), ("float16", 3e-3)):
        wide = "float64" if dtype == "float64" else "float32"
        for rows, columns in ((1, 1), (5, 33), (1000, 1024), (7, 20001), (300, 4096)):
            with stream:
                x, dy, residual = (cupy.random.standard_normal((rows, columns)).astype(dtype) for _ in range(3))
                w, b = (cupy.random.standard_normal(columns).astype(dtype) for _ in range(2))
                y, dx, dw, db, h = cupy.empty_like(x), cupy.empty_like(x), cupy.empty_like(w), cupy.empty_like(w), cupy.empty_like(x)
                rstd, mean = cupy.empty(rows, wide), cupy.empty(rows, wide)
                size = max(size_of_workspace(name, rows, columns, dtype) for name in ("rms_norm", "layer_norm", "add_rms_norm"))
                workspace = cupy.empty(size, cupy.uint8)
                of_torch = lambda *arrays: [torch.from_dlpack(it).double().requires_grad_() for it in arrays]
                run = functools.partial(of_cupy, cupy, stream)
                stream.synchronize()
                run(ops.rms_norm, y, rstd, x, w, 1e-3)
                run(ops.rms_norm_backward, dx, dw, workspace, dy, x, w, rstd)
                stream.synchronize()
                tx, tw, tb = of_torch(x, w, b)
                expected = F.rms_norm(tx, (columns,), tw, 1e-3)
                expected.backward(torch.from_dlpack(dy).double())
                for name, found, wanted in (("y", y, expected.detach()), ("dx", dx, tx.grad), ("dw", dw, tw.grad)):
                    close(f"CuPy, rms_norm [{rows}, {columns}], {dtype}: {name}", torch.from_dlpack(found), wanted, limit)
                run(ops.layer_norm, y, mean, rstd, x, w, b, 0.1)
                run(ops.layer_norm_backward, dx, dw, db, workspace, dy, x, w, mean, rstd)
                stream.synchronize()
                tx.grad = tw.grad = None
                expected = F.layer_norm(tx, (columns,), tw, tb, 0.1)
                expected.backward(torch.from_dlpack(dy).double())
                for name, found, wanted in (("y", y, expected.detach()), ("dx", dx, tx.grad), ("dw", dw, tw.grad), ("db", db, tb.grad)):
                    close(f"CuPy, layer_norm [{rows}, {columns}], {dtype}: {name}", torch.from_dlpack(found), wanted, limit)
                if columns % 8 == 0:
                    run(ops.add_rms_norm, y, h, rstd, x, residual, w, 1e-3)
                    stream.synchronize()
                    sum = (torch.from_dlpack(x).double() + torch.from_dlpack(residual).double()).detach()
                    close("CuPy, add_rms_norm", torch.from_dlpack(y), F.rms_norm(sum, (columns,), tw.detach(), 1e-3), limit)
                    close("CuPy, the sum", torch.from_dlpack(h), sum, limit)


@needs("cupy")
def cupys_graph_captures(cupy):
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, w = cupy.random.standard_normal((4096, 768)).astype("float32"), cupy.random.standard_normal(768).astype("float32")
        y = cupy.empty_like(x)
        # Converted once: an array's conversion may make the stream wait for others.
        arrays = [tvm_ffi.from_dlpack(it) for it in (y, x, w)]
        call = functools.partial(of_cupy, cupy, stream, ops.rms_norm, arrays[0], None, arrays[1], arrays[2], 1e-6)
        call()  # CUDA loads kernels when they are called first
        stream.synchronize()
        stream.begin_capture()
        call()
        graph = stream.end_capture()
        for _ in range(3):
            x[...] = cupy.random.standard_normal(x.shape).astype("float32")
            y.fill(math.nan)
            graph.launch(stream)
            stream.synchronize()
            wanted = F.rms_norm(torch.from_dlpack(x).double(), (768,), torch.from_dlpack(w).double(), 1e-6)
            close("CuPy's graph", torch.from_dlpack(y), wanted, 1e-5)


# --- JAX ------------------------------------------------------------------------------------------


@functools.cache
def functions_for_jax():
    """rms_norm, rope and cross_entropy for JAX, with gradients."""
    import jax
    import jax.numpy as jnp
    import jax_tvm_ffi
    import numpy as np

    def register(name, *attributes):
        spec = ["rets", "args", *(f"attrs.{attribute}" for attribute in attributes)]
        function = ops.get_function(name)
        jax_tvm_ffi.register_ffi_target(f"tch.{name}", function, spec, platform="gpu", allow_cuda_graph=True)

    register("rms_norm", "eps")
    register("rms_norm_backward")
    register("rope", "offset", "interleaved", "inverse")
    register("cross_entropy", "ignore_index", "reduction", "label_smoothing")

    def like(x, shape=None, dtype=None):
        return jax.ShapeDtypeStruct(x.shape if shape is None else shape, dtype or x.dtype)

    def scratch(size):
        return jax.ShapeDtypeStruct((size,), jnp.uint8)

    def norm(x, w, eps):
        outputs = (like(x), like(x, x.shape[:-1], jnp.float32))
        return jax.ffi.ffi_call("tch.rms_norm", outputs)(x, w, eps=np.float32(eps))

    @functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
    def rms_norm(x, w, eps=1e-6):
        return norm(x, w, eps)[0]

    def forward(x, w, eps):
        y, rstd = norm(x, w, eps)
        return y, (x, w, rstd)

    def backward(eps, saved, dy):
        x, w, rstd = saved
        rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
        size = size_of_workspace("rms_norm", rows, columns, str(x.dtype))
        outputs = (like(x), like(w), scratch(size))
        return jax.ffi.ffi_call("tch.rms_norm_backward", outputs)(dy, x, w, rstd)[:2]

    rms_norm.defvjp(forward, backward)

    def rotate(q, k, cos, sin, inverse):
        attributes = dict(offset=np.int64(0), interleaved=np.int32(0), inverse=np.int32(inverse))
        return jax.ffi.ffi_call("tch.rope", (like(q), like(k)))(q, k, cos, sin, **attributes)

    @jax.custom_vjp
    def rope(q, k, cos, sin):
        return tuple(rotate(q, k, cos, sin, False))

    rope.defvjp(
        lambda q, k, cos, sin: (tuple(rotate(q, k, cos, sin, False)), (cos, sin)),
        lambda saved, grads: (*rotate(*grads, *saved, True), None, None),
    )

    def losses(logits, target):
        # JAX has no 64-bit integers by default: the low and the high 32 bits.
        halves = jnp.stack([target, target >> 31], -1)
        rows = logits.shape[0]
        outputs = (like(logits, ()), like(logits), scratch(ops.cross_entropy_workspace(rows, str(logits.dtype))))
        attributes = dict(ignore_index=np.int64(-100), reduction="mean", label_smoothing=np.float32(0.1))
        weight = jnp.ones(logits.shape[1], jnp.float32)
        return jax.ffi.ffi_call("tch.cross_entropy", outputs)(logits, halves, weight, **attributes)[:2]

    @jax.custom_vjp
    def cross_entropy(logits, target):
        return losses(logits, target)[0]

    cross_entropy.defvjp(losses, lambda gradient, grad: (gradient * grad, None))
    return rms_norm, rope, cross_entropy


def of_jax(array):
    return torch.from_dlpack(array)


@needs("jax_tvm_ffi")
def jax_calls_rms_norm_in_jit_with_its_gradient(_):
    import jax
    import jax.numpy as jnp

    rms_norm, _, _ = functions_for_jax()
    step = jax.jit(jax.value_and_grad(lambda x, w, dy: (rms_norm(x, w, 1e-3) * dy).astype(jnp.float32).sum(), (0, 1)))
    for dtype, limit in ((jnp.float32, 3e-5), (jnp.bfloat16, 2.5e-2), (jnp.float16, 3e-3)):
        for shape in ((1, 1), (3, 5, 33), (2, 500, 1024), (7, 20001), (300, 4096)):
            keys = jax.random.split(jax.random.key(SEED % 1000), 3)
            x, dy = (jax.random.normal(key, shape, jnp.float32).astype(dtype) for key in keys[:2])
            w = jax.random.normal(keys[2], shape[-1:], jnp.float32).astype(dtype)
            _, (dx, dw) = step(x, w, dy)
            y = jax.jit(rms_norm, static_argnums=2)(x, w, 1e-3)
            jax.block_until_ready((y, dx, dw))
            columns = shape[-1]
            tx, tw, tdy = (of_jax(it).reshape(-1, it.shape[-1]) if it.ndim > 1 else of_jax(it) for it in (x, w, dy))
            wanted = expected_of(tx, tw, tdy, 1e-3)
            for name, found, of in zip(("y", "dx", "dw"), (y, dx, dw), wanted):
                found = of_jax(found).reshape(of.shape)
                close(f"JAX, {shape}, {dtype.__name__}: {name}", found, of, limit)


@needs("jax_tvm_ffi")
def jax_calls_rope_and_cross_entropy_with_their_gradients(_):
    import jax
    import jax.numpy as jnp

    _, rope, cross_entropy = functions_for_jax()
    keys = jax.random.split(jax.random.key(3), 6)
    q, dq = (jax.random.normal(key, (2, 33, 5, 64)) for key in keys[:2])
    k, dk = (jax.random.normal(key, (2, 33, 1, 64)) for key in keys[2:4])
    angles = jnp.arange(40.0)[:, None] * 0.7 ** jnp.arange(24.0)[None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    def plain(x):
        a, b, rest = x[..., :24], x[..., 24:48], x[..., 48:]
        c, s = cos[:33, None], sin[:33, None]
        return jnp.concatenate((a * c - b * s, b * c + a * s, rest), -1)

    def ours(q, k):
        q, k = rope(q, k, cos, sin)
        return (q * dq).sum() + (k * dk).sum()

    found = jax.jit(jax.value_and_grad(ours, (0, 1)))(q, k)
    wanted = jax.value_and_grad(lambda q, k: (plain(q) * dq).sum() + (plain(k) * dk).sum(), (0, 1))(q, k)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        close("JAX, rope", of_jax(one), of_jax(other), 1e-4)
    for y, x in zip(jax.jit(rope)(q, k, cos, sin), (q, k)):
        close("JAX, rope", of_jax(y), of_jax(plain(x)), 1e-5)

    logits = jax.random.normal(keys[4], (130, 1001))
    target = jax.random.randint(keys[5], (130,), 0, 1001).at[3].set(-100)
    loss, gradient = jax.jit(jax.value_and_grad(lambda z: 3.0 * cross_entropy(z, target)))(logits)
    z = of_jax(logits).double().requires_grad_()
    of_torch = 3 * F.cross_entropy(z, of_jax(target).long(), label_smoothing=0.1)
    of_torch.backward()
    close("JAX, loss", of_jax(loss), of_torch.detach(), 1e-5)
    close("JAX, gradient of the loss", of_jax(gradient), z.grad, 1e-5)


@needs("cupy")
def the_example_of_cupy_is_right(_):
    of_cpu.run_of_page("cupy", **{'"libtch_extension_open.so"': repr(LIBRARY)})


@needs("jax_tvm_ffi")
def the_example_of_jax_is_right(_):
    of_cpu.run_of_page("jax_tvm_ffi", **{'"libtch_extension_open.so"': repr(LIBRARY)})


# --- times ----------------------------------------------------------------------------------------

SIZES = ((1024, 1024), (4096, 4096), (16384, 4096), (65536, 1024), (4096, 16384))
CALLS = 20


def report(caller, rows, columns, dtype, seconds):
    moved = 2 * rows * columns * (2 if dtype in ("bfloat16", "float16") else 4)
    line = dict(what="rms_norm", caller=caller, rows=rows, columns=columns, dtype=dtype)
    line.update(microseconds=round(seconds * 1e6, 2), terabytes_per_second=round(moved / seconds / 1e12, 3))
    print(json.dumps(line), flush=True)


def median(values):
    return sorted(values)[len(values) // 2]


@needs("cupy")
def times_from_cupy(cupy):
    stream = cupy.cuda.Stream(non_blocking=True)
    for rows, columns in SIZES:
        with stream:
            x, w = cupy.random.standard_normal((rows, columns), dtype="float32").astype("float16"), cupy.ones(columns, "float16")
            # So many results that a call does not find the last one's in the cache.
            outputs = [cupy.empty_like(x) for _ in range(4)]
            arrays = [tvm_ffi.from_dlpack(it) for it in (x, w, *outputs)]

            def calls():
                with tvm_ffi.use_raw_stream(CUDA, stream.ptr):
                    for at in range(CALLS):
                        ops.rms_norm(arrays[2 + at % 4], None, arrays[0], arrays[1], 1e-6)

            calls()
            stream.synchronize()
            stream.begin_capture()
            calls()
            graph = stream.end_capture()
            times = []
            for _ in range(12):
                begin, end = cupy.cuda.Event(), cupy.cuda.Event()
                begin.record(stream)
                graph.launch(stream)
                end.record(stream)
                end.synchronize()
                times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3 / CALLS)
        report("CuPy, in a graph", rows, columns, "float16", median(times[2:]))


@needs("jax_tvm_ffi")
def times_from_jax(_):
    import jax
    import jax.numpy as jnp

    ours, _, _ = functions_for_jax()

    def composite(x, w):
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * w

    for rows, columns in SIZES:
        x, w = jax.random.normal(jax.random.key(0), (rows, columns)).astype(jnp.bfloat16), jnp.ones(columns, jnp.bfloat16)
        for caller, norm in (("JAX", lambda x, w: ours(x, w, 1e-6)), ("JAX's own operations", composite)):

            def chain(x, w):
                for _ in range(CALLS):
                    # XLA must not join one call with the next.
                    x = jax.lax.optimization_barrier(norm(x, w))
                return x

            run, times = jax.jit(chain), []
            for _ in range(12):
                begin = time.perf_counter()
                run(x, w).block_until_ready()
                times.append((time.perf_counter() - begin) / CALLS)
            report(caller, rows, columns, "bfloat16", median(times[2:]))


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, seed {SEED}", flush=True)
    of_cpu.run([check for check in CHECKS if not WORDS or any(word in check.__name__ for word in WORDS)])
