"""The functions of TVM FFI on the CPU, as numpy and others call them.

usage: open.py LIBRARY [SEED]

tch-extension-open/tests/on_cuda.py runs the comparisons with DEVICE=cuda in the environment.

Compares outputs and gradients with torch's own functions in float64, at random shapes and in all kinds; passes everything that
is wrong, and what only C can pass; and calls from several threads at once.
"""

import ctypes
import math
import os
import random
import sys
import threading
import traceback
import unittest.mock
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
import tvm_ffi

ops = tvm_ffi.load_module(sys.argv[1])
library = ctypes.CDLL(sys.argv[1])
SEED = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1 << 30)
DEVICE = os.environ.get("DEVICE", "cpu")
ON_CUDA = DEVICE != "cpu"
HERE = tvm_ffi.device("cuda:0" if ON_CUDA else "cpu")
CPU = tvm_ffi.device("cpu")
KINDS = {
    torch.float64: 1e-11,
    torch.float32: 2e-5,
    torch.float16: 3e-3,
    torch.bfloat16: 2.5e-2,
}
HALVES = (torch.float16, torch.bfloat16)
CHECKS = []
COMPARISONS = []


def check(function):
    CHECKS.append(function)
    return function


def comparison(function):
    """A check of values, which may run on CUDA, too."""
    COMPARISONS.append(function)
    return check(function)


def name_of(kind):
    return str(kind).removeprefix("torch.")


def wide(kind):
    return torch.float32 if kind in HALVES else kind


def array(tensor):
    """What the caller passes: numpy's array of the same memory. numpy has no bfloat16."""
    if tensor is None or tensor.is_cuda or tensor.dtype == torch.bfloat16:
        return tensor
    return tensor.numpy()


def call(function, *arguments):
    is_tensor = lambda value: isinstance(value, torch.Tensor)
    return getattr(ops, function)(*(array(it) if is_tensor(it) else it for it in arguments))


def place(tensor, aligned):
    """The tensor on the device, where its elements may begin at any address."""
    if aligned or random.random() < 0.4:
        return tensor.to(DEVICE)
    start = random.randrange(8)
    memory = torch.zeros(tensor.numel() + start, dtype=tensor.dtype, device=DEVICE)
    return memory[start:].view(tensor.shape).copy_(tensor)


def empty(*size, kind, aligned=False):
    """Memory that would show what is not written."""
    return place(torch.full(size, math.nan, dtype=kind, device=DEVICE), aligned)


def scratch(size):
    """So many bytes, at an odd address."""
    return torch.zeros(size + 1, dtype=torch.uint8, device=DEVICE)[1:]


def compare(what, found, expected, kind):
    limit = KINDS[kind] * max(1.0, expected.abs().max().item() if expected.numel() else 1.0)
    difference = (found.detach().double() - expected.detach().double()).abs().max().item() if expected.numel() else 0.0
    assert difference <= limit, f"{what}: {difference} from torch's, more than {limit}"


def doubles(*tensors):
    """Copies in float64 that have gradients."""
    return [None if it is None else it.detach().double().requires_grad_() for it in tensors]


def some(kind, *size, aligned=False):
    return place(torch.randn(size, dtype=torch.float64, device=DEVICE).to(kind), aligned)


def a_shape():
    leading = [random.choice((1, 2, 3, 7, 20)) for _ in range(random.randrange(3))]
    columns = random.choice((1, 2, 3, 8, 33, 64, random.randint(1, 300)))
    if ON_CUDA and random.random() < 0.7:
        # For all ways: few rows and many, short ones and some that several blocks share.
        columns = random.choice((random.randint(1, 5000), 1024, 4096, 5001, 16384, random.randint(5000, 140000)))
        leading = [random.randint(1, min(5000, (1 << 23) // columns))]
    return [*leading, columns]


def one_or_wide(kind):
    return random.choice((kind, wide(kind)))


def weight_kind(kind):
    """On CUDA the kernels take weights of the rows' kind only."""
    return kind if ON_CUDA else one_or_wide(kind)


def each_kind(times):
    # On CUDA a case is larger, and another seed makes others.
    return [(kind, at) for kind in KINDS for at in range(times // 3 if ON_CUDA else times)]


# --- values ---------------------------------------------------------------------------------------


def norm_case(centred, kind, at):
    shape = a_shape() if at else [0, 5]
    columns, leading = shape[-1], shape[:-1]
    x, dy, of_weight = some(kind, *shape), some(kind, *shape), weight_kind(kind)
    w = random.choice((None, some(of_weight, columns)))
    b = random.choice((None, some(of_weight, columns))) if centred else None
    # Few values may be equal, and their variance zero.
    eps = 0.25 if centred and columns < 8 else random.choice((1e-6, 1e-3, 0.25, 0))
    y, rstd, mean = empty(*shape, kind=kind), empty(*leading, kind=wide(kind)), empty(*leading, kind=wide(kind))
    name = "layer_norm" if centred else "rms_norm"
    what = f"{name} of {shape}, {kind}, weight {w is not None}, bias {b is not None}, eps {eps}"
    call(name, *([y, mean, rstd, x, w, b, eps] if centred else [y, rstd, x, w, eps]))
    x2, w2, b2 = doubles(x, w, b)
    one = torch.ones(columns, dtype=torch.float64, device=DEVICE, requires_grad=True)
    zero = torch.zeros(columns, dtype=torch.float64, device=DEVICE, requires_grad=True)
    w2, b2 = (one if w is None else w2), (zero if b is None else b2)
    y2 = F.layer_norm(x2, (columns,), w2, b2, eps) if centred else F.rms_norm(x2, (columns,), w2, eps)
    compare(what, y, y2, kind)
    y2.backward(dy.double())
    rows = math.prod(leading)
    size = call(f"{name}_backward_workspace", rows, columns, name_of(kind), HERE)
    dx, dw, db = empty(*shape, kind=kind), empty(columns, kind=of_weight), empty(columns, kind=of_weight)
    wanted = [random.random() < 0.8 for _ in range(3)]
    outputs = [it if is_wanted else None for it, is_wanted in zip((dx, dw, db), wanted)]
    scale = max(1.0, rstd.double().max().item()) if rows else 1.0
    if centred:
        call(f"{name}_backward", *outputs, scratch(size), dy, x, w, mean, rstd)
    else:
        call(f"{name}_backward", *outputs[:2], scratch(size), dy, x, w, rstd)
    gradients = [x2.grad, w2.grad, b2.grad] if centred else [x2.grad, w2.grad]
    for label, output, expected in zip(("dx", "dw", "db"), outputs, gradients):
        if output is not None:
            # A gradient by rows of nearly equal values is a difference of large numbers.
            compare(f"{what}: {label}", output / scale, expected / scale, kind)


@comparison
def rms_norm_is_torchs():
    for kind, at in each_kind(60):
        norm_case(False, kind, at)


@comparison
def layer_norm_is_torchs():
    for kind, at in each_kind(60):
        norm_case(True, kind, at)


@comparison
def add_rms_norm_is_torchs():
    for kind, at in each_kind(60):
        shape = a_shape()
        if ON_CUDA:
            # What the kernel takes: whole vectors, and rows that fit into a block.
            shape[-1] = min(4096, (shape[-1] + 7) // 8 * 8)
        columns, leading = shape[-1], shape[:-1]
        stream = one_or_wide(kind)
        of = dict(aligned=ON_CUDA)
        x, residual, dy = some(kind, *shape, **of), some(stream, *shape, **of), some(kind, *shape, **of)
        dh = random.choice((None, some(stream, *shape, **of)))
        w = random.choice((None, some(stream, columns, **of)))
        h, y = empty(*shape, kind=stream, **of), empty(*shape, kind=kind, **of)
        rstd = empty(*leading, kind=wide(kind))
        what = f"add_rms_norm of {shape}, {kind}, {stream}"
        call("add_rms_norm", y, h, rstd, x, residual, w, 1e-3)
        x2, w2 = doubles(x, torch.ones(columns, device=DEVICE) if w is None else w)
        h2 = x2 + residual.double()
        # The kernel normalises the sum before it is rounded.
        y2 = F.rms_norm(h2, (columns,), w2, 1e-3)
        compare(f"{what}: sum", h, h2, kind)
        compare(f"{what}: output", y, y2, kind)
        # The gradient reads the sum that was rounded.
        (h3,) = doubles(h)
        F.rms_norm(h3, (columns,), w2, 1e-3).backward(dy.double())
        expected = h3.grad + (0 if dh is None else dh.double())
        dx = empty(*shape, kind=kind, **of) if random.random() < 0.5 else None
        dr = empty(*shape, kind=stream, **of) if dx is None or random.random() < 0.5 else None
        dw = empty(columns, kind=stream)
        size = call("add_rms_norm_backward_workspace", math.prod(leading), columns, name_of(kind), HERE)
        call("add_rms_norm_backward", dx, dr, dw, scratch(size), dy, dh, h, w, rstd)
        scale = max(1.0, rstd.double().max().item())
        for label, found, of in (("input", dx, expected), ("residual", dr, expected), ("weight", dw, w2.grad)):
            if found is not None:
                compare(f"{what}: gradient of {label}", found / scale, of / scale, kind)


def rope_of(x, cos, sin, interleaved):
    pairs = cos.shape[1]
    c, s = cos[:, None], sin[:, None]
    if interleaved:
        a, b = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
        y = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
    else:
        a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
        y = torch.cat((a * c - b * s, b * c + a * s), -1)
    return torch.cat((y, x[..., 2 * pairs :]), -1)


@comparison
def rope_is_its_formula_in_any_strides():
    for kind, at in each_kind(60):
        batch, tokens, pairs = (random.randint(1, 4) for _ in range(3))
        size, offset = 2 * pairs + random.randrange(5), random.randrange(4)
        heads = [random.randint(1, 5), random.randint(1, 3)]
        packed = some(kind, batch, tokens, sum(heads), size)
        q, k = packed.split(heads, 2)
        if random.random() < 0.3:
            q, k = (some(kind, batch, count, tokens, size).transpose(1, 2) for count in heads)
        angles = torch.rand(tokens + offset + 2, pairs, dtype=torch.float64) * 6
        of_table = one_or_wide(kind)
        cos, sin = (place(it.to(of_table), False) for it in (angles.cos(), angles.sin()))
        has_k, interleaved, inverse = (random.random() < 0.5 for _ in range(3))
        outputs = [empty(*it.shape, kind=kind) for it in (q, k)]
        if not has_k:
            k, outputs[1] = None, None
        flags = (int(interleaved), inverse) if random.random() < 0.5 else (interleaved, inverse)
        call("rope", *outputs, q, k, cos, sin, offset, *flags)
        rows = slice(offset, offset + tokens)
        sign = -1 if inverse else 1
        for x, y in zip((q, k), outputs):
            if x is not None:
                of = (x.double(), cos.double()[rows], sign * sin.double()[rows], interleaved)
                compare(f"rope of {tuple(x.shape)}, {kind}", y, rope_of(*of), kind)


@comparison
def cross_entropy_is_torchs():
    for kind, at in each_kind(60):
        rows, classes = random.choice((0, 1, 2, 5, 40)) if at else 0, random.choice((1, 2, 9, 100, random.randint(1, 400)))
        if ON_CUDA and random.random() < 0.6:
            rows, classes = random.choice((1, 30, 1200, 3000)), random.choice((random.randint(1, 6000), 32000, 50257))
        reduction = random.choice(("none", "mean", "sum"))
        smoothing = random.choice((0, 0.0, 0.1, 1.0))
        ignored = random.choice((-100, 0))
        z = some(kind, rows, classes)
        target = torch.randint(classes, (rows,))
        target[torch.rand(rows) < 0.2] = ignored
        target = place(target, True)
        w = random.choice((None, place(torch.rand(classes, dtype=wide(kind)) + 0.1, False)))
        what = f"cross_entropy of [{rows}, {classes}], {kind}, {reduction}, {smoothing}"
        (z2,) = doubles(z)
        options = dict(ignore_index=ignored, reduction=reduction, label_smoothing=smoothing)
        loss2 = F.cross_entropy(z2, target, None if w is None else w.double(), **options)
        given = target
        if random.random() < 0.5:
            given = torch.stack((target.to(torch.int32), (target >> 31).to(torch.int32)), -1).contiguous()
        of_loss = one_or_wide(kind) if reduction != "none" else wide(kind)
        loss = empty(*([rows] if reduction == "none" else random.choice(([], [1]))), kind=of_loss)
        size = call("cross_entropy_workspace", rows, name_of(kind))
        dz = empty(rows, classes, kind=kind) if random.random() < 0.5 else None
        rest = (z, given, w, ignored, reduction, smoothing)
        call("cross_entropy", loss, dz, scratch(size), *rest)
        if not torch.isfinite(loss2).all():
            # The mean of no rows.
            assert torch.isnan(loss2).all() and torch.isnan(loss).all(), what
            continue
        compare(what, loss.reshape(loss2.shape), loss2, kind)
        grad = torch.ones_like(loss2)
        loss2.backward(grad, retain_graph=True)
        if dz is not None:
            compare(f"{what}: gradient", dz, z2.grad, kind)
        z2.grad = None
        grad = some(kind, *([rows] if reduction == "none" else [])).to(one_or_wide(kind))
        loss2.backward(grad.double())
        dz = empty(rows, classes, kind=kind)
        call("cross_entropy_backward", dz, scratch(size), grad, *rest)
        compare(f"{what}: gradient of {grad.dtype}", dz, z2.grad, kind)


@check
def threads_call_at_once():
    failed = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        try:
            for rows in (3, 200, 1000):
                x, w = torch.randn(rows, 96, generator=generator), torch.randn(96, generator=generator)
                y, rstd, dx, dw = torch.empty_like(x), torch.empty(rows), torch.empty_like(x), torch.empty(96)
                size = call("rms_norm_backward_workspace", rows, 96, "float32", CPU)
                for _ in range(10):
                    call("rms_norm", y, rstd, x, w, 1e-6)
                    call("rms_norm_backward", dx, dw, scratch(size), x, x, w, rstd)
                    message = refused(lambda: call("rms_norm", y, rstd, x, w[:seed], 1e-6))
                    assert f"got [{seed}]" in message, message
                compare("in a thread", y, F.rms_norm(x.double(), (96,), w.double(), 1e-6), torch.float32)
        except BaseException:
            failed.append(traceback.format_exc())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failed, failed[0]


# --- what is wrong --------------------------------------------------------------------------------


def refused(function, kinds=(TypeError, ValueError, RuntimeError)):
    try:
        function()
    except kinds as error:
        return str(error)
    raise AssertionError("no error")


def good_arguments():
    """Arguments of each function that are accepted."""
    f32 = lambda *size: np.random.randn(*size).astype(np.float32)
    x, y, dx, w, dw, rstd, mean = f32(6, 8), f32(6, 8), f32(6, 8), f32(8), f32(8), f32(6), f32(6)
    b, db, h, dh, dy, z, dz = f32(8), f32(8), f32(6, 8), f32(6, 8), f32(6, 8), f32(6, 8), f32(6, 8)
    scratch, target = np.zeros(1 << 16, np.uint8), np.zeros(6, np.int64)
    q, k, q2, k2 = f32(2, 3, 4, 6), f32(2, 3, 1, 6), f32(2, 3, 4, 6), f32(2, 3, 1, 6)
    cos, sin = f32(5, 2), f32(5, 2)
    one = np.zeros((), np.float32)
    sizes = dict(rows=6, columns=8, dtype="float32", device=CPU)
    of_loss = dict(input=z, target=target, weight=w, ignore_index=-100, reduction="mean", label_smoothing=0.1)
    return {
        "rms_norm": dict(output=y, rstd=rstd, input=x, weight=w, eps=1e-6),
        "rms_norm_backward": dict(grad_input=dx, grad_weight=dw, workspace=scratch, grad_output=dy, input=x, weight=w, rstd=rstd),
        "rms_norm_backward_workspace": sizes,
        "layer_norm": dict(output=y, mean=mean, rstd=rstd, input=x, weight=w, bias=b, eps=1e-6),
        "layer_norm_backward": dict(
            grad_input=dx, grad_weight=dw, grad_bias=db, workspace=scratch, grad_output=dy, input=x, weight=w, mean=mean, rstd=rstd
        ),
        "layer_norm_backward_workspace": sizes,
        "add_rms_norm": dict(output=y, sum=h, rstd=rstd, input=x, residual=dy, weight=w, eps=1e-6),
        "add_rms_norm_backward": dict(
            grad_input=dx, grad_residual=dh, grad_weight=dw, workspace=scratch, grad_output=dy, grad_sum=x, sum=h, weight=w, rstd=rstd
        ),
        "add_rms_norm_backward_workspace": sizes,
        "rope": dict(q_output=q2, k_output=k2, q=q, k=k, cos=cos, sin=sin, offset=1, interleaved=False, inverse=False),
        "cross_entropy": dict(loss=one, grad_input=dz, workspace=scratch, **of_loss),
        "cross_entropy_backward": dict(grad_input=dz, workspace=scratch, grad_output=one, **of_loss),
        "cross_entropy_workspace": dict(rows=6, dtype="float32"),
    }


WRITTEN = ("output", "sum", "rstd", "mean", "workspace", "loss", "q_output", "k_output")
OPTIONAL = {
    "rms_norm": ("rstd", "weight"),
    "rms_norm_backward": ("grad_input", "grad_weight", "weight"),
    "layer_norm": ("mean", "rstd", "weight", "bias"),
    "layer_norm_backward": ("grad_input", "grad_weight", "grad_bias", "weight"),
    "add_rms_norm": ("rstd", "weight"),
    "add_rms_norm_backward": ("grad_input", "grad_residual", "grad_weight", "grad_sum", "weight"),
    "rope": (),
    "cross_entropy": ("grad_input", "weight"),
    "cross_entropy_backward": ("weight",),
}


def wrong_values(name, value):
    """What may not stand in place of a value."""
    if isinstance(value, np.ndarray):
        yield "text"
        yield 3
        if name != "workspace":
            yield value.astype(np.int8)
            yield value.astype(np.complex64)
            yield value.astype(np.float16 if value.dtype != np.float16 else np.float32)
            yield value.astype(np.float64)
            if value.ndim:  # a loss may be [] or [1]
                yield value[None]
            yield np.concatenate([value[None]] * 2)
            yield np.zeros((0,) + value.shape[1:], value.dtype) if value.ndim else value[None][:0]
        else:
            yield value[:7]
            yield value[::2]
        if value.ndim and name not in ("q", "k", "cos", "sin", "workspace"):
            yield np.repeat(value, 2, -1)[..., ::2]
            yield np.lib.stride_tricks.as_strided(value, strides=(0,) * value.ndim)
            yield value[..., ::-1]
        if name in ("q", "k", "cos", "sin"):
            yield np.repeat(value, 2, -1)[..., ::2]
        return
    yield None
    yield np.zeros(3, np.float32)
    if isinstance(value, bool):
        yield from ("True", 2, -1, 1.0)
    elif name == "eps":
        yield from (math.nan, math.inf, -math.inf, -1e-6, "1e-6", torch.float32, True)
    elif name == "label_smoothing":
        yield from (math.nan, -0.1, 1.1, math.inf, "0")
    elif name == "offset":
        yield from (-1, 3, 1 << 62, (1 << 63) - 1, 1.0, "1", True)
    elif name == "ignore_index":
        yield from (-100.0, "none", True)
    elif name in ("rows", "columns"):
        yield from (-1, -(1 << 63), 1.5, "6", True, (1 << 63) - 1)
    elif name == "dtype":
        yield from ("float", "int32", "float8_e4m3fn", "", np.dtype("int64"), torch.int8, 6, CPU)
    elif name == "device":
        yield from ("cpu", 0, tvm_ffi.device("rocm:0"), torch.float32)
    elif name == "reduction":
        yield from ("", "Mean", "a text that is longer than seven bytes", 3, -1, 1.0, b"mean")


@check
def each_wrong_argument_is_named():
    count = 0
    for function, good in good_arguments().items():
        call(function, *good.values())
        before = {name: value.copy() for name, value in good.items() if isinstance(value, np.ndarray)}
        for name, value in good.items():
            for wrong in wrong_values(name, value):
                if wrong is None and name in OPTIONAL.get(function, ()):
                    continue
                arguments = {**good, name: wrong}
                of = lambda: call(function, *arguments.values())
                try:
                    message = refused(of)
                except AssertionError:
                    raise AssertionError(f"{function} accepts {name} = {wrong!r}") from None
                assert message.startswith(f"{function}: ") and "\n" not in message, message
                assert "expected" in message and ("got" in message or "workspace" in message), message
                count += 1
        for name, value in before.items():
            np.testing.assert_array_equal(good[name], value, err_msg=f"{function} has changed {name}")
        for count_of in (0, 1, len(good) - 1, len(good) + 1):
            arguments = (list(good.values()) + [None])[:count_of]
            message = refused(lambda: call(function, *arguments), TypeError)
            assert f"expected {len(good)} arguments (" in message and f"got {count_of}" in message, message
        for name in OPTIONAL.get(function, ()):
            call(function, *{**good, name: None}.values())
    assert count > 500, count


@check
def memory_that_is_written_is_nobody_elses():
    count = 0
    for function, good in good_arguments().items():
        arrays = {name: value for name, value in good.items() if isinstance(value, np.ndarray) and value.size}
        is_backward = function.endswith("_backward")
        is_written = lambda name: name.startswith("grad_") and name not in ("grad_output", "grad_sum") if is_backward else name in WRITTEN or name == "grad_input"
        for written in filter(lambda name: is_written(name) or name == "workspace", arrays):
            for other in arrays:
                mine, theirs = arrays[written], arrays[other]
                if written == other:
                    continue
                # Memory in which the last byte of the first is the first byte of the second.
                step = max(mine.itemsize, theirs.itemsize)
                shared = np.zeros(mine.nbytes + theirs.nbytes + step, np.uint8)
                shared = shared[-shared.ctypes.data % 16 :]
                start = (mine.nbytes - 1) // step * step
                first = shared[: mine.nbytes].view(mine.dtype).reshape(mine.shape)
                second = shared[start : start + theirs.nbytes].view(theirs.dtype).reshape(theirs.shape)
                message = refused(lambda: call(function, *{**good, written: first, other: second}.values()), ValueError)
                assert "memory of its own" in message, message
                count += 1
    assert count > 60, count
    # Inputs may share memory.
    good = good_arguments()["add_rms_norm"]
    call("add_rms_norm", *{**good, "residual": good["input"]}.values())


@check
def a_target_that_is_no_class_is_refused():
    good = good_arguments()["cross_entropy"]
    for wrong in (8, -1, -101, 1 << 40, -(1 << 63)):
        target = good["target"].copy()
        target[4] = wrong
        message = refused(lambda: call("cross_entropy", *{**good, "target": target}.values()), ValueError)
        assert f"got {wrong} at 4" in message, message
        assert "V - 1 = 7" in message and "-100" in message, message


@check
def a_workspace_is_as_large_as_it_says():
    rows, columns = 2000, 33
    x, w, rstd = torch.randn(rows, columns), torch.randn(columns), torch.rand(rows)
    size = call("rms_norm_backward_workspace", rows, columns, torch.float32, CPU)
    assert size == call("rms_norm_backward_workspace", rows, columns, np.dtype("float32"), CPU)
    dw = torch.empty(columns)
    call("rms_norm_backward", None, dw, scratch(size), x, x, w, rstd)
    for less in (0, 1, size - 512):
        message = refused(lambda: call("rms_norm_backward", None, dw, scratch(less), x, x, w, rstd), ValueError)
        assert f"got {less} bytes; rms_norm_backward_workspace says" in message, message
    message = refused(lambda: call("rms_norm_backward", None, dw, None, x, x, w, rstd), ValueError)
    assert "got None" in message, message
    # Without sums there is no scratch.
    call("rms_norm_backward", torch.empty_like(x), None, None, x, x, w, rstd)


def run_of_page(word, **replaced):
    """Runs the example of docs/kernels-for-others.md that imports this module."""
    page = (Path(__file__).parents[2] / "docs/kernels-for-others.md").read_text()
    examples = [text.split("```")[0] for text in page.split("```python\n")[1:]]
    (example,) = (text for text in examples if f"import {word}\n" in text or f"import {word} as" in text)
    for text, other in replaced.items():
        assert text in example, text
        example = example.replace(text, other)
    exec(compile(example, f"the example of {word}", "exec"), {"__name__": word})


@check
def the_page_is_right():
    # The package is the wheel's, which is not installed here.
    package = SimpleNamespace(open_library=lambda: sys.argv[1])
    with unittest.mock.patch.dict(sys.modules, tch_extension=package):
        run_of_page("tch_extension")


# --- what only C can pass -------------------------------------------------------------------------


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Any(ctypes.Structure):
    _fields_ = [("type_index", ctypes.c_int32), ("len", ctypes.c_uint32), ("payload", ctypes.c_uint64)]


def integers(*values):
    return (ctypes.c_int64 * max(1, len(values)))(*values)


def tensor(memory, sizes=(4, 8), **changes):
    it = Tensor(memory.ctypes.data, 1, 0, len(sizes), 2, 32, 1, integers(*sizes), None, 0)
    for name, value in changes.items():
        setattr(it, name, value)
    return it


def message_of_c():
    """The kind and the text of the error that was raised."""
    found = ctypes.c_void_p()
    move = ctypes.CDLL(None).TVMFFIErrorMoveFromRaised
    move(ctypes.byref(found))
    parts = (ctypes.c_size_t * 4).from_address(found.value + 24)
    return tuple(ctypes.string_at(parts[at], parts[at + 1]).decode() for at in (0, 2))


def raw(function, arguments, count=None):
    """The status, and the error if it is not 0."""
    values = (Any * max(1, len(arguments)))()
    for value, argument in zip(values, arguments):
        if isinstance(argument, Tensor):
            value.type_index, value.payload = 7, ctypes.addressof(argument)
        elif isinstance(argument, float):
            value.type_index, value.payload = 3, int.from_bytes(np.float64(argument).tobytes(), "little")
        elif isinstance(argument, Any):
            value.type_index, value.len, value.payload = argument.type_index, argument.len, argument.payload
    of = getattr(library, f"__tvm_ffi_{function}")
    of.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p]
    result = Any()
    status = of(None, values if arguments else None, len(arguments) if count is None else count, ctypes.byref(result))
    return None if status == 0 else message_of_c()


@check
def nothing_that_c_can_pass_reaches_a_kernel():
    memory = [np.random.randn(64).astype(np.float32) for _ in range(4)]
    before = [it.copy() for it in memory]
    y, rstd, x, w = memory

    def outcome(**changes):
        """Of rms_norm, with changes to its input."""
        arguments = [tensor(y), tensor(rstd, (4,)), tensor(x, **changes), tensor(w, (8,)), 1e-6]
        return raw("rms_norm", arguments)

    assert outcome() is None
    expected = x[:32].reshape(4, 8) / np.sqrt((x[:32].reshape(4, 8) ** 2).mean(-1, keepdims=True) + 1e-6) * w[:8]
    np.testing.assert_allclose(y[:32].reshape(4, 8), expected, rtol=1e-5)
    assert outcome(strides=integers(8, 1)) is None
    assert outcome(byte_offset=64) is None
    expected = x[16:48].reshape(4, 8) / np.sqrt((x[16:48].reshape(4, 8) ** 2).mean(-1, keepdims=True) + 1e-6) * w[:8]
    np.testing.assert_allclose(y[:32].reshape(4, 8), expected, rtol=1e-5)
    # The strides of an array without elements say nothing.
    none = tensor(x, (0, 8), strides=integers(-3, 5), data=None)
    assert raw("rms_norm", [none, tensor(rstd, (0,)), none, tensor(w, (8,)), 1e-6]) is None
    y[:], before[0][:] = 0, 0
    before[1][:] = rstd
    for changes, text in [
        (dict(data=None), "null pointer"),
        (dict(byte_offset=2), "multiple of 4 bytes"),
        (dict(byte_offset=(1 << 64) - 64), "fits into memory"),
        (dict(data=(1 << 64) - 64), "fits into memory"),
        (dict(ndim=-1), "at most 64 dimensions"),
        (dict(ndim=65), "at most 64 dimensions"),
        (dict(ndim=2, shape=None), "at most 64 dimensions"),
        (dict(ndim=0, sizes=()), "at least one dimension"),
        (dict(sizes=(4, 0)), "columns in the last one"),
        (dict(sizes=(-4, 8)), "at least 0"),
        (dict(sizes=(4, -8)), "at least 0"),
        (dict(sizes=(1 << 62, 8)), "fits into memory"),
        (dict(sizes=(1 << 40, 1 << 40)), "fits into memory"),
        (dict(sizes=(1 << 61, 1)), "fits into memory"),
        (dict(sizes=(0, 1 << 62)), "fewer rows or columns"),
        (dict(sizes=(1 << 58, 1)), "fewer rows or columns"),
        (dict(sizes=(1 << 62, 1 << 62, 0, 8)), "fewer rows or columns"),
        (dict(strides=integers(-8, 1)), "strides of at least 0"),
        (dict(strides=integers(1 << 62, 1)), "fits into memory"),
        (dict(strides=integers(0, 0)), "contiguous"),
        (dict(strides=integers(16, 1)), "contiguous"),
        (dict(lanes=2), "in vectors of 2"),
        (dict(lanes=0), "in vectors of 0"),
        (dict(bits=0), "float0"),
        (dict(bits=8), "float8"),
        (dict(code=10, bits=8), "code 10"),
        (dict(code=2, bits=255), "float255"),
        (dict(code=4, bits=32), "bfloat32"),
        (dict(device_type=10), "DLPack's type 10"),
        (dict(device_type=3), "DLPack's type 3"),
        (dict(device_type=0), "DLPack's type 0"),
        (dict(device_type=2, device_id=-1), "CUDA device -1"),
        (dict(device_type=2, device_id=63), "CUDA device 63"),
    ]:
        error = outcome(**changes)
        assert error is not None, changes
        assert text in error[1] and error[1].startswith("rms_norm: "), (changes, error)
    # A null pointer stands for None; a type that nobody knows, and numbers of arguments that cannot be.
    of = [tensor(y), tensor(rstd, (4,)), tensor(x), tensor(w, (8,))]
    assert "got None" in raw("rms_norm", [*of[:2], Any(7, 0, 0), of[3], 1e-6])[1]
    assert "type 1234" in raw("rms_norm", [*of[:2], Any(1234, 0, 0), of[3], 1e-6])[1]
    for count in (-1, -(1 << 31), 0):
        assert "expected 5 arguments" in raw("rms_norm", of, count)[1]
    assert "expected 5 arguments" in raw("rms_norm", [], 5)[1]
    for now, then in zip(memory, before):
        np.testing.assert_array_equal(now, then)


def run(checks):
    failed = []
    for function in checks:
        random.seed(SEED)
        np.random.seed(SEED)
        torch.manual_seed(SEED)
        try:
            function()
        except Exception:
            traceback.print_exc()
            failed.append(function.__name__)
        print(f"{function.__name__} ... {'FAILED' if function.__name__ in failed else 'ok'}", flush=True)
    sys.exit(f"seed {SEED}: {len(failed)} failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    run(CHECKS)
