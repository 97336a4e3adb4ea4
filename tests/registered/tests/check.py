"""Checks the operators of libregistered.so; see python.rs."""

import ctypes
import os
import shutil
import sys
import tempfile
import traceback

import torch
import torch.testing._internal.optests

library, *checks = sys.argv[1:]
torch.ops.load_library(library)
ops = torch.ops.registered


def error_of(path):
    function = ctypes.CDLL(path).tch_extension_registration_error
    function.restype = ctypes.c_char_p
    text = function()
    return text and text.decode()


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def refused(run, says):
    try:
        run()
    except RuntimeError as error:
        assert says in str(error), error
    else:
        raise AssertionError("not refused: " + says)


def eager():
    assert error_of(library) is None
    a, b = leaf(2, 3), leaf(2, 3)
    for op, result in (ops.muladd, a * b + 1), (ops.product, a * b * 2):
        assert torch.equal(op(a, b), result), op
        ours = torch.autograd.grad(op(a, b).sum(), (a, b))
        theirs = torch.autograd.grad(result.sum(), (a, b))
        assert all(map(torch.equal, ours, theirs)), op
    (first,) = torch.autograd.grad(ops.product(a, b).sum(), a, create_graph=True)
    assert torch.equal(torch.autograd.grad(first.sum(), b)[0], torch.full((2, 3), 2.0))
    exp, _ = ops.exp(a)
    (first,) = torch.autograd.grad(exp.sum(), a, create_graph=True)
    refused(lambda: first.sum().backward(), "exp")
    grads = torch.autograd.grad(ops.sum_all([a, b]).sum(), (a, b))
    assert all(torch.equal(grad, torch.ones(2, 3)) for grad in grads)
    x = a * 1
    version = x._version
    ops.scale_(x, 3.0)
    assert x._version > version
    assert torch.equal(torch.autograd.grad(x.sum(), a)[0], torch.full((2, 3), 3.0))
    refused(lambda: ops.scale_(a, 2.0), "registered::scale_: x: a leaf Variable")
    refused(lambda: ops.rows(a, 3).sum().backward(), "rows: it has no gradient")
    refused(lambda: ops.fails(0), "registered::fails: it is meant to fail")
    refused(lambda: ops.fails(1), "registered::fails: its kernel panicked: it is meant to panic")
    refused(lambda: ops.fails(2), "registered::fails: shape '[2, 2]' is invalid")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a.detach(), b.detach())
        refused(lambda: ops.product(dual, dual), "forward-mode AD")
    rows = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight, mask = torch.rand(4, dtype=torch.float64, requires_grad=True), torch.rand(3).double()
    for check in torch.autograd.gradcheck, torch.autograd.gradgradcheck:
        assert check(lambda x, w: ops.unit_rows(x, w, mask, 2.0), (rows, weight))
        assert check(lambda x: ops.unit_rows(x, None, mask)[0], (rows,))
    refused(lambda: ops.unit_rows(rows, weight, weight), "unit_rows: mask: expected shape [N] = [3], got [4]")
    refused(lambda: ops.unit_rows(rows[0], weight, mask), "unit_rows: x: expected 2 dimensions [N, D]")
    tensors, _, absent, integer, real, flag = ops.every_type([a.detach()], [None], None, eps=2.0)
    assert torch.equal(tensors, a + 1)
    assert (absent, integer, real, flag) == (None, -7, 2.0, True)


def opcheck():
    a, b, plain = leaf(2, 3), leaf(2, 3), torch.randn(2, 3)
    for name, arguments in [
        ("muladd", (a, b)),
        ("muladd", (plain, plain, 0.5)),
        ("muladd_backward", (plain, plain, plain)),
        ("product", (a, b)),
        ("product", (plain, plain, 0.5)),
        ("exp", (a,)),
        ("sum_all", ([a, b],)),
        ("scale_", (plain, 2.0)),
        ("square", (a,)),
        ("unit_rows", (a, leaf(3), torch.rand(2))),
        ("unit_rows", (plain, None, torch.rand(2), 0.5)),
        ("unit_rows", (plain.t(), None, torch.rand(3), 0.5)),
        ("unit_rows_forward", (plain, torch.rand(3), torch.rand(2), 0.5, 0)),
        ("unit_rows_forward", (plain.double(), None, torch.rand(2).double(), 0.5, 0)),
        ("unit_rows_forward", (plain, torch.rand(3), torch.rand(2), 0.5, 0b11)),
        ("unit_rows_backward", (plain, plain[:, 0], plain[:, 1] + 3, plain, plain, None, torch.rand(2), 0.5, 1)),
        ("rows", (plain, 2)),
        ("rows", (plain, 2, torch.float16)),
    ]:
        found = torch.library.opcheck(getattr(ops, name).default, arguments)
        assert set(found.values()) == {"SUCCESS"} and len(found) == 4, (name, found)
    wrong = ops.wrong_fake.default
    try:
        torch.library.opcheck(wrong, (torch.randn(3),), test_utils="test_faketensor")
    except torch.testing._internal.optests.OpCheckError:
        pass
    else:
        raise AssertionError("the wrong fake passes")


def compile():
    from torch._dynamo.testing import CompileCounterWithBackend

    def rows(x, columns):
        return ops.rows(x, columns) * 2 + ops.product(x, x, 0.5).sum()

    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rows, backend=count, fullgraph=True, dynamic=True)
    for n, columns in (12, 3), (20, 4), (30, 5), (14, 7):
        x = torch.randn(n)
        assert torch.allclose(compiled(x, columns), rows(x, columns))
    assert count.frame_count == 1, count.frame_count

    def several(x, y):
        x = x * 1
        ops.scale_(x, 3.0)
        return ops.product(x, y, 0.5) + ops.exp(x)[0] + ops.muladd(x, y)

    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(several, backend=count, fullgraph=True, dynamic=True)
    for n in 4, 5, 9:
        x, y = leaf(n), leaf(n)
        ours = torch.autograd.grad(compiled(x, y).sum(), (x, y))
        theirs = torch.autograd.grad(several(x, y).sum(), (x, y))
        assert all(map(torch.allclose, ours, theirs))
    assert count.frame_count == 1, count.frame_count


    def unit(x, weight, mask):
        y, norm = ops.unit_rows(x, weight, mask, 2.0)
        return (y * y.sin()).sum() + (norm * norm).sum()

    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(unit, backend=count, fullgraph=True, dynamic=True)
    for n in 4, 5, 9:
        x, weight, mask = leaf(n, n + 1), leaf(n + 1), torch.rand(n)
        ours = torch.autograd.grad(compiled(x, weight, mask), (x, weight))
        theirs = torch.autograd.grad(unit(x, weight, mask), (x, weight))
        assert all(map(torch.allclose, ours, theirs))
    assert count.frame_count == 1, count.frame_count


def transforms():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(3, 2)
    square = lambda x: ops.product(x, x).sum()
    assert torch.allclose(torch.func.grad(square)(x), 4 * x)
    assert torch.allclose(torch.vmap(torch.func.grad(square))(x), 4 * x)
    assert torch.allclose(torch.vmap(lambda x: ops.product(x, x))(x), 2 * x * x)
    rows, weight, mask = torch.randn(5, 3, 4).double(), torch.rand(4).double(), torch.rand(3).double()
    length = lambda x, w: (ops.unit_rows(x, w, mask)[0] ** 3).sum() + ops.unit_rows(x, w, mask)[1].sum()
    plain = lambda x, w: ((x / x.norm(dim=1, keepdim=True) * mask[:, None] * w) ** 3).sum() + x.norm(dim=1).sum()
    for transform in (
        lambda f: torch.vmap(torch.func.grad(f, argnums=(0, 1)), (0, None))(rows, weight),
        lambda f: torch.func.jacrev(torch.func.grad(f))(rows[0], weight),
    ):
        assert all(map(torch.allclose, transform(length), transform(plain)))
    # It would be zero without a word.
    hessian = torch.func.jacrev(torch.func.grad(length))
    refused(lambda: torch.vmap(hessian, (0, None))(rows, weight), "unit_rows: no second derivative by torch.func.vjp")
    along = lambda f: torch.vmap(torch.func.grad(lambda x: (torch.func.grad(f)(x, weight) * mask[:, None]).sum()))
    assert torch.allclose(along(length)(rows), along(plain)(rows))
    y = leaf(3)
    checkpoint(square, y, use_reentrant=False).backward()
    assert torch.allclose(y.grad, 4 * y)
    assert not ops.traced(x)
    with FakeTensorMode() as mode:
        assert ops.traced(mode.from_tensor(x))
    seen = []
    torch.func.grad(lambda x: seen.append(ops.traced(x)) or x.sum())(x)
    assert seen == [True], seen
    assert ops.traced(x.to("meta"))


def twice():
    torch.ops.load_library(library)
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copy(library, os.path.join(folder, "libcopy.so"))
        torch.ops.load_library(copy)
        text = error_of(copy)
        says = "registered::muladd is defined already, registered at tests/registered/src/lib.rs:"
        # One line for each use of a macro.
        assert says in text and "registered::unit_rows is defined already" in text, text
        assert len(text.split("\n")) == 2, text
    assert error_of(library) is None
    assert torch.equal(ops.square(torch.ones(2)), torch.ones(2))


for check in checks:
    try:
        globals()[check]()
        print("done", check)
    except Exception:
        traceback.print_exc()
