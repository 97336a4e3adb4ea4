"""Every operator of the package as Python sees it.

usage: check.py LIBRARY [NAME…]

DEVICE=cuda in the environment chooses the device, CHECKS=meta,opcheck some of the checks, and TRACEBACKS=1
shows where a check failed.

Runs torch.library.opcheck on every operator, with and without requires_grad; compares outputs and
gradients with torch's own counterparts, in eager mode and compiled; and checks what a traced program does
with autocast, second derivatives and dynamic shapes. A check that fails says what differed.
"""

import contextlib
import os
import re
import sys
import tempfile
import traceback

os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp())

import torch
import torch._dynamo.testing
import torch.nn.functional as F
import torch.utils.checkpoint

torch.ops.load_library(sys.argv[1])
ops = torch.ops.tch_extension
DEVICE = os.environ.get("DEVICE", "cpu")
torch.backends.cudnn.allow_tf32 = False


def randn(*size):
    return torch.randn(*size, device=DEVICE)


def classes(rows, count, ignored=True):
    target = torch.randint(count, (rows,), device=DEVICE)
    if ignored:
        target[1] = -100
    return target


def mlp_weights(d=6, h=10, d2=4, bias=True):
    b = (lambda n: randn(n)) if bias else (lambda n: None)
    return randn(h, d), b(h), randn(d2, h), b(d2)


def rnn_weights(gates, f=3, h=5):
    return randn(gates * h, f), randn(gates * h, h), randn(gates * h), randn(gates * h)


def constant(tensor):
    """A tensor that has no gradient."""
    tensor.is_constant = True
    return tensor


def rope_tables(positions, pairs):
    angles = torch.arange(positions, device=DEVICE)[:, None] * 0.5 ** torch.arange(pairs, device=DEVICE)[None]
    return constant(angles.cos()), constant(angles.sin())


# What torch calls the same. ---------------------------------------------------------------------


def add_norm(norm):
    def run(x, residual, shape, *rest):
        h = x + residual
        return h, norm(h, shape, *rest)

    return run


def torch_rms_norm(x, shape, weight=None, eps=None):
    return F.rms_norm(x, shape, weight, eps)


def torch_cross_entropy(x, target, weight=None, ignore_index=-100, reduction="mean", smoothing=0.0):
    return F.cross_entropy(
        x, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=smoothing
    )


def torch_linear_cross_entropy(x, w, target, b=None, ignore_index=-100, reduction="mean", smoothing=0.0):
    return torch_cross_entropy(F.linear(x, w, b), target, None, ignore_index, reduction, smoothing)


def torch_gelu_mlp(x, w1, b1, w2, b2, activation="gelu_tanh", save_activations=True):
    act = {
        "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
        "gelu": F.gelu,
        "relu_squared": lambda z: F.relu(z).square(),
        "silu": F.silu,
    }[activation]
    return F.linear(act(F.linear(x, w1, b1)), w2, b2)


def torch_swiglu_mlp(x, gate, up, down, save_activations=True):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def torch_rope(q, k, cos, sin, interleaved=False, offset=0):
    def turn(x):
        pairs = cos.shape[1]
        c = cos[offset : offset + x.shape[1], None]
        s = sin[offset : offset + x.shape[1], None]
        rest = x[..., 2 * pairs :]
        if interleaved:
            a, b = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
            y = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
        else:
            a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
            y = torch.cat((a * c - b * s, b * c + a * s), -1)
        return torch.cat((y, rest), -1)

    return turn(q), turn(k)


def torch_lltm_cell(x, w, b, h, c):
    gates = F.linear(torch.cat((h, x), 1), w, None if b is None else b.reshape(-1))
    i, o, g = gates.chunk(3, 1)
    new_c = c + F.elu(g) * i.sigmoid()
    return new_c.tanh() * o.sigmoid(), new_c


def torch_lltm(x, w, b, h, c):
    steps = []
    for step in x:
        h, c = torch_lltm_cell(step, w, b, h, c)
        steps.append(h)
    return torch.stack(steps), h, c


def torch_lstm(x, h, c, w_ih, w_hh, b_ih=None, b_hh=None):
    weights = [w for w in (w_ih, w_hh, b_ih, b_hh) if w is not None]
    with torch.backends.cudnn.flags(enabled=False):  # cuDNN's has no second derivative, and no torch.func
        y, h, c = torch._VF.lstm(x, (h[None], c[None]), weights, b_ih is not None, 1, 0.0, True, False, False)
    return y, h[0], c[0]


def torch_gru(x, h, w_ih, w_hh, b_ih=None, b_hh=None):
    weights = [w for w in (w_ih, w_hh, b_ih, b_hh) if w is not None]
    with torch.backends.cudnn.flags(enabled=False):
        y, h = torch._VF.gru(x, h[None], weights, b_ih is not None, 1, 0.0, True, False, False)
    return y, h[0]


def torch_padded(layer):
    def run(x, *rest):
        ys, states = [], []
        state_count = 2 if layer is torch_lstm else 1
        states_in, weights, lengths = rest[:state_count], rest[state_count:-1], rest[-1]
        for b, n in enumerate(lengths):
            y, *state = layer(x[:n, b : b + 1], *[s[b : b + 1] for s in states_in], *weights)
            ys.append(F.pad(y, (0, 0, 0, 0, 0, x.shape[0] - n)))
            states.append(state)
        return torch.cat(ys, 1), *[torch.cat(s, 0) for s in zip(*states)]

    return run


# What is called. --------------------------------------------------------------------------------

BF16 = torch.bfloat16
h6 = lambda: (randn(4, 5), randn(4, 5))
COS, SIN = rope_tables(16, 4)

# name, torch's counterpart, arguments, whether second derivatives are checked
CASES = [
    ("linear", F.linear, lambda: (randn(2, 7, 6), randn(5, 6), randn(5))),
    ("linear", F.linear, lambda: (randn(7, 6), randn(5, 6))),
    ("linear", F.linear, lambda: (randn(6), randn(5, 6), randn(5))),
    ("matmul_add_relu", lambda a, b, c: F.relu(a @ b + c), lambda: (randn(3, 7, 6), randn(6, 5), randn(5))),
    ("matmul_add_relu", lambda a, b, c: F.relu(a @ b + c), lambda: (randn(2, 1, 7, 6), randn(3, 6, 5), randn(3, 7, 1))),
    ("matmul_add_relu", lambda a, b, c: F.relu(a @ b + c), lambda: (randn(6), randn(6), randn(2, 3) + 5.0)),
    ("layer_norm", F.layer_norm, lambda: (randn(3, 4, 6), [6], randn(6), randn(6))),
    ("layer_norm", F.layer_norm, lambda: (randn(3, 4, 6), [4, 6], None, None, 1e-3)),
    ("layer_norm", F.layer_norm, lambda: (randn(6, 3).t(), [6], randn(6))),
    ("rms_norm", torch_rms_norm, lambda: (randn(3, 4, 6), [6], randn(6))),
    ("rms_norm", torch_rms_norm, lambda: (randn(3, 6), [6], None, 1e-3)),
    ("add_layer_norm", add_norm(F.layer_norm), lambda: (randn(3, 4, 6), randn(3, 4, 6), [6], randn(6), randn(6))),
    ("add_layer_norm", add_norm(F.layer_norm), lambda: (randn(3, 6), randn(3, 6), [6])),
    ("add_rms_norm", add_norm(torch_rms_norm), lambda: (randn(3, 4, 6), randn(3, 4, 6), [6], randn(6))),
    ("cross_entropy", torch_cross_entropy, lambda: (randn(5, 7), classes(5, 7))),
    ("cross_entropy", torch_cross_entropy, lambda: (randn(5, 7), classes(5, 7, ignored=False), constant(randn(7).abs()), 3, "sum", 0.1)),
    ("cross_entropy", torch_cross_entropy, lambda: (randn(5, 7), classes(5, 7), None, -100, "none")),
    ("linear_cross_entropy", torch_linear_cross_entropy, lambda: (randn(5, 6), randn(7, 6), classes(5, 7), randn(7))),
    ("linear_cross_entropy", torch_linear_cross_entropy,
     lambda: (randn(5, 6), randn(7, 6), classes(5, 7), None, -100, "sum", 0.1)),
    ("linear_cross_entropy", torch_linear_cross_entropy,
     lambda: (randn(5, 6), randn(7, 6), classes(5, 7), randn(7), -100, "none")),
    ("gelu_mlp", torch_gelu_mlp, lambda: (randn(2, 3, 6), *mlp_weights())),
    ("gelu_mlp", torch_gelu_mlp, lambda: (randn(3, 6), *mlp_weights(bias=False), "silu", False)),
    ("swiglu_mlp", torch_swiglu_mlp, lambda: (randn(2, 3, 6), randn(10, 6), randn(10, 6), randn(4, 10))),
    ("swiglu_mlp", torch_swiglu_mlp, lambda: (randn(3, 6), randn(10, 6), randn(10, 6), randn(4, 10), False)),
    ("rope", torch_rope, lambda: (randn(2, 5, 3, 8), randn(2, 5, 1, 8), COS, SIN)),
    ("rope", torch_rope, lambda: (randn(2, 5, 3, 10), randn(2, 5, 1, 10), COS, SIN, True, 3)),
    ("rope", torch_rope, lambda: (randn(2, 3, 5, 8).transpose(1, 2), randn(2, 5, 8, 1).transpose(2, 3), COS, SIN)),
    ("lltm_cell", torch_lltm_cell, lambda: (randn(4, 3), randn(15, 8), randn(15), *h6())),
    ("lltm_cell", torch_lltm_cell, lambda: (randn(4, 3), randn(15, 8), None, *h6())),
    ("lltm", torch_lltm, lambda: (randn(6, 4, 3), randn(15, 8), randn(1, 15), *h6())),
    ("lltm", torch_lltm, lambda: (randn(1, 4, 3), randn(15, 8), None, *h6())),
    ("lstm", torch_lstm, lambda: (randn(6, 4, 3), *h6(), *rnn_weights(4))),
    ("lstm", torch_lstm, lambda: (randn(6, 4, 3), *h6(), *rnn_weights(4)[:2])),
    ("gru", torch_gru, lambda: (randn(6, 4, 3), randn(4, 5), *rnn_weights(3))),
    ("gru", torch_gru, lambda: (randn(6, 4, 3), randn(4, 5), *rnn_weights(3)[:2])),
    ("lstm", torch_padded(torch_lstm), lambda: (randn(6, 4, 3), *h6(), *rnn_weights(4), [2, 5, 1, 5])),
    ("gru", torch_padded(torch_gru), lambda: (randn(6, 4, 3), randn(4, 5), *rnn_weights(3), [6, 5, 1, 2])),
]

# Operators that autocast casts, to which kind on the CPU, and those that it leaves as they are.
LOWERED = {"linear", "matmul_add_relu", "linear_cross_entropy", "gelu_mlp", "swiglu_mlp", "lltm_cell", "lltm", "lstm", "gru"}


def is_float(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def leaves(args, dtype=None, requires_grad=True):
    """Copies of the arguments; those that can have a gradient require it."""

    def leaf(value):
        if not is_float(value):
            return value
        copy = value.detach().to(dtype or value.dtype, copy=True)
        return copy.requires_grad_(requires_grad and not hasattr(value, "is_constant"))

    return [leaf(value) for value in args]


def tuple_of(outputs):
    return outputs if isinstance(outputs, (tuple, list)) else (outputs,)


def loss_of(outputs):
    """A number that depends on each element of each output in another way."""
    total = 0.0
    for index, output in enumerate(tuple_of(outputs)):
        weights = torch.linspace(0.5, 1.5 + index, output.numel(), dtype=torch.float64, device=output.device)
        weights = weights.to(output.dtype)
        total = total + (output * weights.view(output.shape)).sin().sum()
    return total


def gradients(function, args):
    wanted = [value for value in args if is_float(value) and value.requires_grad]
    outputs = function(*args)
    grads = torch.autograd.grad(loss_of(outputs), wanted, allow_unused=True)
    return [output.detach() for output in tuple_of(outputs)], grads


def close(found, expected, what, **tolerances):
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a is None and b is not None:
            a = torch.zeros_like(b)
        if b is None and a is not None:
            b = torch.zeros_like(a)
        torch.testing.assert_close(a, b, msg=lambda text, i=index: f"{what} {i}: {text}", **tolerances)


# The checks. ------------------------------------------------------------------------------------


def check_equals_torch(name, reference, args):
    for dtype in (torch.float32, torch.float64):
        args_ = leaves(args, dtype)
        found, expected = gradients(getattr(ops, name), args_), gradients(reference, args_)
        close(found[0], expected[0], f"{dtype} output")
        # In float32 the order of sums shows; float64 is compared closely.
        rounded = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {}
        close(found[1], expected[1], f"{dtype} gradient", **rounded)
        with torch.no_grad():
            close(tuple_of(getattr(ops, name)(*args_)), expected[0], "output without a graph")
        with torch.inference_mode():
            close(tuple_of(getattr(ops, name)(*args_)), expected[0], "output in inference mode")


def check_opcheck(name, reference, args):
    op = getattr(ops, name).default
    for requires_grad in (False, True):
        torch.library.opcheck(op, tuple(leaves(args, requires_grad=requires_grad)))


def check_compiled(name, reference, args):
    op = getattr(ops, name)
    torch._dynamo.reset()

    def function(*args):
        return op(*args)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    args = leaves(args, torch.float64)
    found, expected = gradients(compiled, args), gradients(reference, args)
    close(found[0], expected[0], "output")
    close(found[1], expected[1], "gradient")


def check_second_derivatives(name, reference, args):
    args = leaves(args, torch.float64)
    wanted = [value for value in args if is_float(value) and value.requires_grad]

    def second(function):
        first = torch.autograd.grad(loss_of(function(*args)), wanted, create_graph=True, allow_unused=True)
        norm = sum(grad.square().sum() for grad in first if grad is not None)
        return torch.autograd.grad(norm, wanted, allow_unused=True)

    # torch's own LSTM and GRU have none on the CPU either, but their cells do.
    expected = second(reference)
    close(second(getattr(ops, name)), expected, "second derivative")
    # Where a mode traces the program, the operators of the two directions are called.
    with Traced():
        close(second(getattr(ops, name)), expected, "second derivative, traced")


def check_directions(name, reference, args):
    """opcheck of the operators of both directions, with the arguments that a traced program gives them."""
    with Traced() as traced:
        gradients(getattr(ops, name), leaves(args))
    assert any("backward" in str(func) or "rotate" in str(func) for func, _ in traced.calls), traced.calls
    for func, args in traced.calls:
        args = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in args]
        torch.library.opcheck(func, tuple(args))


class Traced(torch.utils._python_dispatch.TorchDispatchMode):
    """Programs that run in it are traced. It keeps the calls of the package's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tch_extension":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def check_meta(name, reference, args):
    on_meta = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in args]
    found, expected = getattr(ops, name)(*on_meta), reference(*args)
    for a, b in zip(tuple_of(found), tuple_of(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.device.type == "meta", (a.shape, b.shape)


def check_mixed_devices(name, reference, args):
    """A tensor of the meta device among others is an error, and so is one of another among those, as for torch."""
    tensors = [index for index, value in enumerate(args) if isinstance(value, torch.Tensor)]
    for place in tensors:
        for is_chosen in (lambda index: index == place, lambda index: index != place) if len(tensors) > 1 else ():
            mixed = [v.to("meta") if index in tensors and is_chosen(index) else v for index, v in enumerate(args)]
            for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
                try:
                    with mode():
                        found = getattr(ops, name)(*mixed)
                except RuntimeError as error:
                    assert name in str(error) and "meta device" in str(error), error
                else:
                    raise AssertionError(f"argument {place}, {mode.__name__}: {found}")


def check_wrong_shapes(name, reference, args):
    """What a kernel refuses is refused in a trace, too, where tensors have sizes and no values."""
    op = getattr(ops, name)
    changes = {
        "wider": lambda tensor: torch.cat([tensor, tensor.narrow(-1, 0, 1)], -1),
        "longer": lambda tensor: torch.cat([tensor, tensor[:1]]),
        "one dimension more": lambda tensor: tensor.unsqueeze(0),
        "one dimension less": lambda tensor: tensor[0],
    }
    places = [index for index, value in enumerate(args) if isinstance(value, torch.Tensor) and value.dim() > 0]

    constants = [index for index, value in enumerate(args) if hasattr(value, "is_constant")]

    def outcome(changed, device, needs_grad):
        def moved(index, value):
            if not isinstance(value, torch.Tensor):
                return value
            needs = needs_grad and is_float(value) and index not in constants
            return value.detach().to(device).requires_grad_(needs)

        try:
            op(*(moved(index, value) for index, value in enumerate(changed)))
        except (RuntimeError, ValueError) as error:
            assert name in str(error), error
            return type(error)
        return None

    for place in places:
        for what, change in changes.items():
            changed = [*args[:place], change(args[place]), *args[place + 1 :]]
            expected = outcome(changed, DEVICE, False)
            for needs_grad in (False, True):
                found = outcome(changed, "meta", needs_grad)
                assert found == expected, (place, what, needs_grad, expected)
    integers = [value.int() if is_float(value) else value for value in args]
    found = [outcome(integers, device, False) for device in (DEVICE, "meta")]
    assert found == [RuntimeError] * 2, ("integers", found)


def check_autocast(name, reference, args):
    op = getattr(ops, name)
    torch._dynamo.reset()

    def function(*args):
        with torch.autocast(DEVICE, dtype=BF16):
            return op(*args)

    args = leaves(args)
    expected = gradients(function, args)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    found = gradients(compiled, args)
    for a, b in zip(found[0] + list(found[1]), expected[0] + list(expected[1]), strict=True):
        assert (a is None) == (b is None) and (a is None or a.dtype == b.dtype), (a, b)
    close(found[0], expected[0], "output", atol=5e-2, rtol=5e-2)
    close(found[1], expected[1], "gradient", atol=1e-1, rtol=1e-1)
    if name in LOWERED:
        plain = tuple_of(op(*args))
        assert any(not torch.equal(a, b.to(a.dtype)) for a, b in zip(expected[0], plain)), "nothing was cast"
    with torch.inference_mode():
        close(tuple_of(function(*args)), expected[0], "in inference mode", atol=5e-2, rtol=5e-2)


def check_autocast_regions(name, reference, args):
    """A backward pass computes the same bits inside a region as outside, and autocast that is off changes nothing."""
    op = getattr(ops, name)
    args = leaves(args)
    wanted = [value for value in args if is_float(value) and value.requires_grad]
    bf16 = lambda: torch.autocast(DEVICE, dtype=BF16)
    off = lambda: torch.autocast(DEVICE, enabled=False)

    def vectors(tensors):
        """Gradients for these tensors, all different."""
        ramp = lambda tensor: torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float32, device=tensor.device)
        return [ramp(tensor).view(tensor.shape).to(tensor.dtype) for tensor in tensors]

    def outcome(forward, backward, create_graph):
        with forward():
            outputs = tuple_of(op(*args))
        with backward():
            first = torch.autograd.grad(
                outputs, wanted, vectors(outputs), create_graph=create_graph, allow_unused=True
            )
        graph = [grad for grad in first if grad is not None and grad.requires_grad]
        # The graph consists of torch's operations, whose backward passes autocast casts.
        with off():
            second = torch.autograd.grad(graph, wanted, vectors(graph), allow_unused=True) if graph else ()
        return [*outputs, *first, *second]

    def same(found, expected, what):
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert (a is None) == (b is None) and (a is None or a.dtype == b.dtype), (what, index)
            assert a is None or torch.equal(a, b), (what, index, (a - b).abs().max())

    nothing = contextlib.nullcontext
    for mode in (nothing, Traced):
        for create_graph in (False, True):
            with mode():
                for forward in (off, bf16):
                    expected = outcome(forward, off, create_graph)
                    for backward in (bf16, lambda: torch.autocast(DEVICE, dtype=torch.float16)):
                        found = outcome(forward, backward, create_graph)
                        same(found, expected, (mode, "forward", forward is bf16, "create_graph", create_graph))
                    with torch.autocast(DEVICE, dtype=torch.float16):
                        same(outcome(forward, off, create_graph), expected, (mode, "nested", create_graph))
    # A transform of torch.func runs both passes in the region.
    place = next(index for index, value in enumerate(args) if is_float(value) and value.requires_grad)

    def total(value):
        outputs = tuple_of(op(*args[:place], value, *args[place + 1 :]))
        return sum((output * vector).sum() for output, vector in zip(outputs, vectors(outputs)))

    with bf16():
        expected = torch.autograd.grad(total(args[place]), args[place])
        found = torch.func.grad(total)(args[place].detach())
        assert torch.is_autocast_enabled(DEVICE) and torch.get_autocast_dtype(DEVICE) == BF16
    close([found], expected, "torch.func.grad", atol=1e-1, rtol=1e-1)


def check_export(name, reference, args):
    """torch.export keeps the operator as one call."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)]

    class Model(torch.nn.Module):
        def forward(self, *tensors):
            given = iter(tensors)
            return getattr(ops, name)(*[next(given) if isinstance(v, torch.Tensor) else v for v in args])

    exported = torch.export.export(Model(), tuple(tensors))
    targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert f"tch_extension.{name}.default" in targets, targets
    close(tuple_of(exported.module()(*tensors)), tuple_of(reference(*args)), "exported", atol=1e-4, rtol=1e-4)


def check_func(name, reference, args):
    """torch.func.grad, alone, within itself and within a graph, and vmap."""
    op = getattr(ops, name)
    places = [index for index, value in enumerate(args) if is_float(value) and not hasattr(value, "is_constant")]
    args = leaves(args, torch.float64, requires_grad=False)
    first = places[0]

    def replaced(args, place, value):
        return [*args[:place], value, *args[place + 1 :]]

    def grad(function, args, place):
        """The gradient of one argument."""
        return torch.func.grad(lambda value: loss_of(function(*replaced(args, place, value))))(args[place])

    def within_a_graph(function, place):
        """All arguments' gradients of a function of one argument's."""
        given = [value.detach().clone().requires_grad_() if i in places else value for i, value in enumerate(args)]
        wanted = [given[index] for index in places]
        return torch.autograd.grad(grad(function, given, place).sin().sum(), wanted, allow_unused=True)

    def within_itself(function, place):
        """One argument's gradient of a function of the first one's."""
        outer = lambda value: grad(function, replaced(args, place, value), first).sin().sum()
        return torch.func.grad(outer)(args[place])

    for place in places:
        close([grad(op, args, place)], [grad(reference, args, place)], f"func.grad of {place}")
        found, expected = within_a_graph(op, place), within_a_graph(reference, place)
        close(found, expected, f"gradients of func.grad of {place}")
        found, expected = within_itself(op, place), within_itself(reference, place)
        close([found], [expected], f"func.grad of {place} of func.grad")
    batch = torch.stack([args[first], args[first] * 2])
    total = lambda value: loss_of(op(*replaced(args, first, value)))
    expected = torch.stack([loss_of(reference(*replaced(args, first, value))) for value in batch])
    close([torch.vmap(total)(batch)], [expected], "vmap")
    expected = torch.stack([grad(reference, replaced(args, first, value), first) for value in batch])
    close([torch.vmap(torch.func.grad(total))(batch)], [expected], "vmap of func.grad")


def check_batched_gradients(name, reference, args):
    """vmap over a backward pass: the gradients are those of one pass for each element of the batch."""
    op = getattr(ops, name)
    args = leaves(args, torch.float64)
    wanted = [value for value in args if is_float(value) and value.requires_grad]
    outputs = tuple_of(op(*args))

    def once(grads, **options):
        return torch.autograd.grad(outputs, wanted, grads, retain_graph=True, allow_unused=True, **options)

    def one_by_one(batches, **options):
        each = [once([batch[index] for batch in batches], **options) for index in range(len(batches[0]))]
        return [None if parts[0] is None else torch.stack(parts) for parts in zip(*each)]

    batches = [torch.randn(3, *output.shape, dtype=torch.float64, device=DEVICE) for output in outputs]
    expected = one_by_one(batches)
    close(once(batches, is_grads_batched=True), expected, "is_grads_batched")
    used = [place for place, value in enumerate(expected) if value is not None]
    func = lambda *grads: [once(grads)[place] for place in used]
    close(torch.vmap(func)(*batches), [expected[place] for place in used], "vmap")
    twice = [torch.stack([batch, -batch]).movedim(0, -1) for batch in batches]
    found = torch.vmap(torch.vmap(func), in_dims=-1)(*twice)
    close(found, [torch.stack([expected[place], -expected[place]]) for place in used], "vmap of vmap")

    def second(first):
        total = sum(grad.sin().sum() for grad in first if grad is not None)
        return torch.autograd.grad(total, (*wanted, *batches), retain_graph=True, allow_unused=True)

    for batch in batches:
        batch.requires_grad_()
    expected = second(one_by_one(batches, create_graph=True))
    close(second(once(batches, is_grads_batched=True, create_graph=True)), expected, "second derivative")
    first = next(index for index, value in enumerate(args) if value is wanted[0])
    of_first = lambda function: lambda value: tuple_of(function(*args[:first], value, *args[first + 1 :]))[0]
    jacobian = torch.autograd.functional.jacobian
    value = args[first].detach()
    close([jacobian(of_first(op), value, vectorize=True)], [jacobian(of_first(reference), value)], "jacobian")
    places = [index for index, value in enumerate(args) if any(value is one for one in wanted)]

    def of_wanted(*values):
        given = dict(zip(places, values))
        return op(*(given.get(index, value) for index, value in enumerate(args)))

    assert torch.autograd.gradcheck(of_wanted, wanted, fast_mode=True, check_batched_grad=True)


def check_dynamic(name, reference, args):
    """One graph for all numbers of rows."""
    has_lengths = name in ("lstm", "gru") and isinstance(args[-1], list)
    if has_lengths or args[0].dim() < 2:
        return
    op = getattr(ops, name)
    torch._dynamo.reset()
    # Sizes that happen to be equal stay different symbols.
    torch.fx.experimental._config.use_duck_shape = False
    # Otherwise a graph with a float is compiled twice.
    torch._dynamo.config.specialize_float = True
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *args: op(*args), backend=counter, fullgraph=True, dynamic=True)
    rows_of = {"rope": (0, (0, 1)), "lltm": (0, (0,)), "lstm": (0, (0,)), "gru": (0, (0,))}
    dim, places = rows_of.get(name, (0, tuple(i for i, v in enumerate(args) if i == 0 or shares_rows(name, i))))
    for count in (1, 3):
        grown = [
            torch.cat([value] * (count + 1), dim) if index in places and isinstance(value, torch.Tensor) else value
            for index, value in enumerate(args)
        ]
        grown = leaves(grown, torch.float64)
        found, expected = gradients(compiled, grown), gradients(reference, grown)
        close(found[0], expected[0], f"output {count}")
        close(found[1], expected[1], f"gradient {count}")
    assert counter.frame_count == 1, f"{counter.frame_count} graphs"


def shares_rows(name, index):
    """Whether this argument has a row for each of the first argument's."""
    return {
        "add_layer_norm": index == 1,
        "add_rms_norm": index == 1,
        "cross_entropy": index == 1,
        "linear_cross_entropy": index == 2,
        "lltm_cell": index in (3, 4),
    }.get(name, False)


CHECKS = [
    check_equals_torch,
    check_meta,
    check_mixed_devices,
    check_wrong_shapes,
    check_opcheck,
    check_directions,
    check_compiled,
    check_second_derivatives,
    check_autocast,
    check_autocast_regions,
    check_export,
    check_func,
    check_batched_gradients,
    check_dynamic,
]


def model_and_arguments():
    """A model of several operators, whose loss is a number."""
    target = classes(8, 6)

    def model(x, w, b, w1, b1, w2, b2):
        h, y = ops.add_layer_norm(ops.gelu_mlp(x, w1, b1, w2, b2), x, [6], b)
        y = ops.linear(y.sin(), w, b).relu() + h
        return ops.linear_cross_entropy(y, w, target)

    return model, leaves((randn(8, 6), randn(6, 6), randn(6), *mlp_weights(d2=6)))


def check_inductor():
    """A model, compiled to native code."""
    if not os.environ.get("TCH_EXTENSION_FULL"):
        print("skipped check_inductor, which takes long: TCH_EXTENSION_FULL is not set")
        return
    model, args = model_and_arguments()
    expected = gradients(model, args)
    torch._dynamo.reset()
    found = gradients(torch.compile(model, fullgraph=True), args)
    close(found[0], expected[0], "output")
    close(found[1], expected[1], "gradient", atol=1e-4, rtol=1e-4)


def check_cuda_graphs():
    """A model as CUDA graphs, which are captured and replayed."""
    if DEVICE != "cuda":
        print("skipped check_cuda_graphs: DEVICE is not cuda")
        return
    model, args = model_and_arguments()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for step in range(5):
        with torch.no_grad():
            for value in args:
                value.mul_(1.0 - 0.01 * step)
        torch.compiler.cudagraph_mark_step_begin()
        found = [[value.clone() for value in values] for values in gradients(compiled, args)]
        expected = gradients(model, args)
        close(found[0], expected[0], f"output {step}", atol=1e-4, rtol=1e-4)
        close(found[1], expected[1], f"gradient {step}", atol=1e-4, rtol=1e-4)


def check_rope_at_levels():
    """Derivatives of a linear operator are the operator itself, at any level; those of its tables across levels are refused."""
    q, k = randn(2, 5, 3, 8).double(), randn(2, 5, 1, 8).double()
    cos, sin = (table.double() for table in rope_tables(16, 4))

    def loss_by(rotate):
        return lambda q: rotate(q, k[:1].expand(*q.shape[:1], -1, -1, -1), cos, sin)[0].pow(3).sum()

    ours, theirs = (loss_by(rotate) for rotate in (ops.rope, torch_rope))
    grad, jacrev, vmap = torch.func.grad, torch.func.jacrev, torch.vmap
    rows = q.unsqueeze(1)
    for transform in (
        lambda f: vmap(jacrev(jacrev(f)))(rows),
        lambda f: vmap(jacrev(grad(f)))(rows),
        lambda f: grad(lambda q: grad(lambda q: grad(f)(q).pow(2).sum())(q).pow(2).sum())(q),
    ):
        close([transform(ours)], [transform(theirs)], "levels")
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: grad(lambda q: grad(ours)(q).pow(2).sum())(q), dynamic=True, backend="aot_eager")
    for count in (2, 3):
        many = torch.cat([q] * count)
        close([compiled(many)], [grad(lambda q: grad(theirs)(q).pow(2).sum())(many)], "compiled")
    outer = lambda cos: grad(lambda q: ops.rope(q, k, cos, sin)[0].pow(3).sum())(q).sum()
    assert "rope: cos: expected a table without gradient" in str(raised(lambda: grad(outer)(cos)))


def check_long_sequences():
    """Sequences that are long enough for kernels of all steps have the same gradients in a trace."""
    for name, gates, states in (("lstm", 4, 2), ("gru", 3, 1)):
        op = getattr(ops, name)
        for lengths in (None, [64, 5, 33, 1, 64, 7, 63, 60]):
            for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-3), (torch.bfloat16, 0.05)):
                state = [randn(8, 32) for _ in range(states)]
                args = leaves((randn(64, 8, 16), *state, *(0.2 * w for w in rnn_weights(gates, 16, 32)), lengths), dtype)
                torch._dynamo.reset()
                compiled = torch.compile(lambda *args: op(*args), backend="aot_eager", fullgraph=True)
                found, expected = gradients(compiled, args), gradients(op, args)
                for of, values, others in (("output", found[0], expected[0]), ("gradient", found[1], expected[1])):
                    # Relative to the largest element: gradients of weights are sums over all steps.
                    values, others = ([value / other.abs().max() for value, other in zip(all, others)] for all in (values, others))
                    close(values, others, f"{name} {dtype} {lengths is None} {of}", atol=tolerance, rtol=0)


def check_backward_operators_are_no_constants():
    """A second derivative through an operator of the backward direction is right."""
    x, w, b, grad = leaves((randn(3, 6), randn(6), randn(6), randn(3, 6)), torch.float64)

    def ours(grad, x, w, b):
        _, mean, rstd = (value.detach() for value in ops.layer_norm_forward(x.detach(), [6], w.detach(), b.detach(), 1e-5, 0b111))
        return ops.layer_norm_backward(grad, mean, rstd, x, [6], w, b, 1e-5, 0b111)

    assert torch.autograd.gradcheck(ours, (grad, x, w, b))


def check_third_derivatives():
    """An argument that is a constant at one level of torch.func is a variable of the level outside."""

    def composite(x, w):
        return x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * w

    def third(function):
        grad = torch.func.grad
        first = lambda x, w: grad(lambda v: loss_of(function(v, w)))(x).sin().sum()
        second = lambda x: grad(lambda v: first(x, v))(w).sin().sum()
        leaf = x.clone().requires_grad_()
        return grad(second)(x), *torch.autograd.grad(second(leaf), leaf)

    x, w = leaves((randn(3, 6), randn(6)), torch.float64, requires_grad=False)
    found = third(lambda x, w: ops.rms_norm(x, [6], w, 1e-3))
    close(found, third(composite), "third derivative")


def check_class_weights():
    """Weights of classes have no gradient in torch, either: wanting one is an error, also within torch.func."""
    input, target, weight = randn(5, 7), classes(5, 7), randn(7).abs()

    def refused(run):
        try:
            run()
        except RuntimeError as error:
            assert "cross_entropy: weight: expected weights of classes without gradient" in str(error), error
        else:
            raise AssertionError("it was accepted")

    wanted = weight.clone().requires_grad_()
    refused(lambda: ops.cross_entropy(input, target, wanted))
    refused(lambda: torch.func.grad(lambda v: ops.cross_entropy(input, target, v))(weight))
    of_input = lambda v: torch.func.grad(lambda x: ops.cross_entropy(x, target, v))(input).sum()
    refused(lambda: torch.func.grad(of_input)(weight))
    with torch.no_grad():
        close([ops.cross_entropy(input, target, wanted)], [F.cross_entropy(input, target, weight)], "no grad mode")


def check_mixed_kinds_without_memory():
    """rms_norm takes a weight of any kind, also where autograd is left out and tensors have no memory."""
    x, w = torch.empty(5, 6, device="meta"), torch.empty(6, dtype=torch.float64, device="meta")
    with torch.inference_mode():
        found = ops.rms_norm(x, [6], w)
    assert (found.shape, found.dtype) == (x.shape, x.dtype), (found.shape, found.dtype)


def check_script():
    """TorchScript calls the operators, also after a round trip through a file, and differentiates them."""

    def function(x, w, b):
        # type: (Tensor, Tensor, Tensor) -> Tensor
        y = torch.ops.tch_extension.layer_norm(torch.ops.tch_extension.linear(x, w, b), [6])
        return y

    path = os.path.join(tempfile.mkdtemp(), "script.pt")
    torch.jit.script(function).save(path)
    args = leaves((randn(3, 5), randn(6, 5), randn(6)), torch.float64)
    found = gradients(torch.jit.load(path), args)
    expected = gradients(lambda x, w, b: F.layer_norm(F.linear(x, w, b), [6]), args)
    close(found[0], expected[0], "output")
    close(found[1], expected[1], "gradient")


def check_checkpoint():
    """torch.utils.checkpoint stops a recomputation by an exception, which passes through the operators."""
    args = leaves((randn(3, 6), randn(6, 6), randn(6)), torch.float64)

    def model(x, w, b):
        return ops.layer_norm(ops.linear(x, w, b).sin(), [6], b)

    found = gradients(lambda *args: torch.utils.checkpoint.checkpoint(model, *args, use_reentrant=False), args)
    expected = gradients(model, args)
    close(found[0], expected[0], "output")
    close(found[1], expected[1], "gradient")


def raised(call):
    try:
        result = call()
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError(f"no error, but {result}")


def check_dropout_within_vmap():
    """Dropout obeys vmap's randomness as torch's own does, and draws the same numbers."""
    x, residual = randn(5, 6), randn(6)
    norms = {"add_rms_norm": lambda x, p: ops.add_rms_norm(x, residual, [6], None, None, p)}
    norms["add_layer_norm"] = lambda x, p: ops.add_layer_norm(x, residual, [6], None, None, 1e-5, p)
    for name, norm in norms.items():
        assert torch.Tag.nondeterministic_seeded in getattr(ops, name).default.tags, name
        for p in (0.5, 1.0):
            for randomness in ("same", "different"):
                sums = []
                for function in (lambda x: norm(x, p)[0], lambda x: F.dropout(x, p) + residual):
                    torch.manual_seed(3)
                    sums.append(torch.vmap(function, randomness=randomness)(x))
                assert torch.equal(*sums), (name, p, randomness)
                masks = sums[0] == residual
                assert p == 1.0 or (masks == masks[:1]).all() == (randomness == "same"), (name, randomness, masks)
        assert "randomness" in str(raised(lambda: torch.vmap(lambda x: norm(x, 0.5))(x))), name
        rows = [torch.stack(parts) for parts in zip(*(norm(row, 0.0) for row in x))]
        close(torch.vmap(lambda x: norm(x, 0.0))(x), rows, "without dropout")


def check_half_losses():
    """The loss of half precision is float32, as the documentation says."""
    for kind in (torch.float16, torch.bfloat16):
        loss = ops.linear_cross_entropy(randn(5, 6).to(kind), randn(7, 6).to(kind), classes(5, 7))
        assert loss.dtype == torch.float32, loss


# Words of Rust's, and of Rust's functions.
RUST = re.compile(r"Kind\b|Device::|to_kind|to_device|Some\(|&\[|\bkinds?\b|\b(Double|Float|Half|BFloat16|Int64|Cpu)\b|"
                  r"\blogits\b|\btargets\b|\btch\b|cargo|\.rs\b")


def check_errors():
    """Wrong arguments are errors of one line in Python's words, with the operator's name once; of torch's classes."""
    x, w, target = randn(5, 6), randn(7, 6), classes(5, 7)
    double = x.double()
    q, tables = randn(2, 5, 3, 8), rope_tables(16, 4)
    for call, words, torchs in [
        (lambda: ops.layer_norm(x, [5]), "layer_norm: input: expected", lambda: F.layer_norm(x, [5])),
        (lambda: ops.layer_norm(x, []), "layer_norm: normalized_shape", lambda: F.layer_norm(x, [])),
        (lambda: ops.rms_norm(x, []), "rms_norm: normalized_shape", lambda: F.rms_norm(x, [])),
        (lambda: ops.layer_norm(double, [6], x[0]), "layer_norm: weight: expected dtype torch.float64, as input, got "
         "torch.float32; cast it with .to(torch.float64), or input with .to(torch.float32)", lambda: F.layer_norm(double, [6], x[0])),
        (lambda: ops.linear(x, randn(5, 7)), "linear: weight: expected", lambda: F.linear(x, randn(5, 7))),
        (lambda: ops.linear(double, w), "linear: weight: expected dtype torch.float64", lambda: F.linear(double, w)),
        (lambda: ops.linear(x.int(), w), "linear: input: expected dtype torch.float", lambda: F.linear(x.int(), w)),
        (lambda: ops.cross_entropy(x, target, None, -100, "average"), "cross_entropy: reduction",
         lambda: F.cross_entropy(x, target, reduction="average")),
        (lambda: ops.cross_entropy(x, target, None, -100, "mean", 1.5), "cross_entropy: label_smoothing",
         lambda: F.cross_entropy(x, target, label_smoothing=1.5)),
        (lambda: ops.cross_entropy(x, target[:4]), "cross_entropy: target: expected shape",
         lambda: F.cross_entropy(x, target[:4])),
        (lambda: ops.cross_entropy(x, target.int()), "cross_entropy: target: expected dtype torch.int64",
         lambda: F.cross_entropy(x, target.int())),
        (lambda: ops.cross_entropy(x, target, double[0]), "cross_entropy: weight: expected",
         lambda: F.cross_entropy(x, target, double[0])),
        (lambda: ops.linear_cross_entropy(x, w, target[:4]), "linear_cross_entropy: target: expected shape",
         lambda: F.cross_entropy(F.linear(x, w), target[:4])),
        (lambda: ops.linear_cross_entropy(x, w, target, softcap=0.0), "linear_cross_entropy: softcap: expected a finite "
         "number above 0, got 0.0", ValueError),
        (lambda: ops.linear_cross_entropy(x, w, target, z_loss=float("inf")), "linear_cross_entropy: z_loss", ValueError),
        (lambda: ops.linear_cross_entropy(x, w, target, memory=-1), "linear_cross_entropy: memory", ValueError),
        (lambda: ops.gelu_mlp(x, *mlp_weights(), "tanh"), "gelu_mlp: activation", ValueError),
        (lambda: ops.add_rms_norm(x, x, [6], None, None, 1.5), "add_rms_norm: dropout", lambda: F.dropout(x, 1.5)),
        (lambda: ops.add_rms_norm(x, double, [6]), "add_rms_norm: residual: expected dtype", RuntimeError),
        (lambda: torch.vmap(lambda x: ops.add_rms_norm(x, x, [6], None, None, 1.5), randomness="same")(x),
         "add_rms_norm: dropout", ValueError),
        (lambda: ops.lstm(randn(6, 4, 3), *h6(), *rnn_weights(4), [1, 2, 3]), "lstm: lengths", RuntimeError),
        (lambda: ops.rope(q, q, *tables, offset=-1), "rope: offset", ValueError),
        (lambda: ops.rope(q, q, *tables, offset=12), "transpose(1, 2) makes [B, T, H, D] of [B, H, T, D]", RuntimeError),
        (lambda: ops.rope(q, q[:, :4], *tables), "transpose(1, 2) makes [B, T, H, D] of [B, H, T, D]", RuntimeError),
        (lambda: torch.func.jvp(lambda x: ops.linear(x, w), (x,), (x,)), "linear: forward-mode", RuntimeError),
        (lambda: ops.lltm(randn(3, 4, 3).to(torch.uint16), randn(15, 8), None, *h6()), "lltm: input: expected", RuntimeError),
        (lambda: ops.lltm_forward(randn(3, 4, 3), randn(15, 8), None, randn(4, 5), randn(4, 5).half(), 31),
         "lltm_forward: expected the dtypes to which lltm casts its arguments", RuntimeError),
        (lambda: ops.lltm_cell_backward(randn(4, 5), None, randn(4, 5), torch.empty([0] * 16), randn(4, 3), randn(15, 8), None,
                                        *h6(), 31), "lltm_cell: what the forward pass keeps is absent", RuntimeError),
    ] + [
        (lambda: ops.cross_entropy(x, target + 7), "cross_entropy: target: expected classes",
         lambda: F.cross_entropy(x, target + 7)),
        (lambda: ops.linear_cross_entropy(x, w, target + 7), "linear_cross_entropy: target: expected classes", IndexError),
    ] * (DEVICE == "cpu"):
        error = raised(call)
        text = str(error)
        assert words in text and text.count(words.split(":")[0] + ":") <= 1 and "\n" not in text, text
        assert not RUST.search(text), text
        expected = torchs if isinstance(torchs, type) else type(raised(torchs))
        if issubclass(expected, RuntimeError):  # NotImplementedError, in some of torch's kernels
            expected = RuntimeError
        assert type(error) is expected, (type(error), expected, text)


def run(name, function, *args):
    try:
        function(*args)
        return 0
    except Exception as error:  # noqa: BLE001
        print(f"FAILED {name}: {type(error).__name__}: {str(error)[:1500]}")
        if os.environ.get("TRACEBACKS"):
            traceback.print_exc()
        return 1


def main():
    names, checks = sys.argv[2:], os.environ.get("CHECKS", "").split(",")
    failures = count = 0
    for number, (name, reference, args) in enumerate(CASES):
        if names and name not in names:
            continue
        for check in CHECKS:
            if checks != [""] and check.__name__.removeprefix("check_") not in checks:
                continue
            torch.manual_seed(number)
            failures += run(f"{name} {number} {check.__name__}", check, name, reference, args())
            count += 1
    if not names:
        for check in (
            check_inductor,
            check_cuda_graphs,
            check_long_sequences,
            check_rope_at_levels,
            check_backward_operators_are_no_constants,
            check_third_derivatives,
            check_class_weights,
            check_mixed_kinds_without_memory,
            check_script,
            check_checkpoint,
            check_dropout_within_vmap,
            check_half_losses,
            check_errors,
        ):
            failures += run(check.__name__, check)
            count += 1
    called = {name for name, _, _ in CASES}
    if not names:
        registered = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("tch_extension::")}
        missing = {n for n in registered if not n.endswith(("_forward", "_backward", "_rotate"))} - called
        failures += run("every operator is checked", lambda: (_ for _ in ()).throw(AssertionError(missing)) if missing else None)
    print(f"{count} checks, {failures} failed")
    sys.exit(1 if failures else 0)


main()
