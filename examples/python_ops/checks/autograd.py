"""Transforms, hooks, modes: everything in PyTorch that runs an operator in an unusual way."""

import torch
import torch.autograd.forward_ad as forward_ad
from harness import check, equal, raises, same
from samples import DIFFERENTIABLE, ops, tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


@check
def vmap():
    a, b = tensor(5, 3), tensor(5, 3)
    same(torch.vmap(ops.muladd)(a, b), a * b + 1, "over both")
    same(torch.vmap(ops.muladd, in_dims=(0, None))(a, b[0]), a * b[0] + 1, "over one")
    same(torch.vmap(lambda x: ops.swish(x, 1.5))(a), ops.swish(a, 1.5), "tch operations")
    x = tensor(5, 3, 8)
    same(torch.vmap(ops.geglu)(x), ops.geglu(x), "a composite")


@check
def func_grad():
    a, b = tensor(5, 3), tensor(5, 3)
    found = torch.func.grad(lambda a: ops.muladd(a, b).square().sum())(a)
    same(found, 2 * (a * b + 1) * b, "grad")
    each = torch.vmap(torch.func.grad(lambda a, b: ops.muladd(a, b).sum()))(a, b)
    same(each, b, "a gradient for each row")
    same(torch.func.vjp(ops.muladd, a, b)[1](torch.ones_like(a)), (b, a), "vjp")


@check
def forward_mode_is_refused_and_not_silently_zero():
    for sample in DIFFERENTIABLE:
        # What consists of PyTorch's operations has PyTorch's forward mode.
        if sample.name == "geglu":
            continue
        for grad in (False, True):
            arguments = sample.arguments(grad, "cpu")

            def dual(it):
                return forward_ad.make_dual(it, torch.ones_like(it))

            def call():
                with forward_ad.dual_level():
                    return sample.op(*torch.utils._pytree.tree_map_only(torch.Tensor, dual, arguments))

            raises(RuntimeError, [sample.name, "forward"], call)
    x = tensor(3, 8)
    found = torch.func.jvp(ops.geglu, (x,), (torch.ones_like(x),))[1]
    gate, value = x.chunk(2, -1)
    slope = torch.autograd.functional.jvp(torch.nn.functional.gelu, gate, torch.ones_like(gate))[1]
    same(found, slope * value + torch.nn.functional.gelu(gate), "forward mode of geglu")


@check
def compiled_autograd_is_right_or_refused_by_name():
    a, b = tensor(3, grad=True), tensor(3, grad=True)
    result = ops.muladd(a, b)

    def backward():
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            return torch.autograd.grad(result.sum(), a)

    try:
        same(backward()[0], b.detach(), "compiled autograd")
    except (RuntimeError, NotImplementedError) as error:
        equal("muladd" in str(error), True, f"the operator is named in {error}")


@check
def checkpoints_of_both_kinds():
    for reentrant in (False, True):
        a, b = tensor(3, 4, grad=True), tensor(3, 4, grad=True)
        result = checkpoint(lambda a: ops.swish(ops.muladd(a, b), 1.5), a, use_reentrant=reentrant)
        found = torch.autograd.grad(result.sum(), a) if not reentrant else (result.sum().backward(), a.grad)[1:]
        expected = torch.autograd.grad(ops.swish(a * b + 1, 1.5).sum(), a)
        same(tuple(found), expected, f"use_reentrant={reentrant}")


class Rejected(Exception):
    """An exception that nobody but this file knows."""


def reject(*_):
    raise Rejected("no")


@check
def what_a_saved_tensor_hook_raises_arrives():
    a, b = tensor(3, grad=True), tensor(3, grad=True)

    def packing():
        with torch.autograd.graph.saved_tensors_hooks(reject, lambda packed: packed):
            ops.muladd(a, b)

    def unpacking():
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, reject):
            result = ops.muladd(a, b)
        result.sum().backward()

    raises(Rejected, ["no"], packing)
    raises(Rejected, ["no"], unpacking)


@check
def saved_tensor_hooks_see_what_is_saved():
    a, b = tensor(3, grad=True), tensor(3, grad=True)
    seen = []

    def pack(saved):
        seen.append(saved)
        return saved.numpy(force=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        result = ops.muladd(a, b)
    same(torch.autograd.grad(result.sum(), (a, b)), (b.detach(), a.detach()), "gradients of unpacked tensors")
    equal(len(seen), 2, "saved tensors")


class Seen(TorchDispatchMode):
    """Notes each operator, and raises at one of them."""

    def __init__(self, forbidden=None):
        super().__init__()
        self.names, self.forbidden = [], forbidden

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        if self.forbidden is not None and self.forbidden in str(func):
            raise Rejected(str(func))
        return func(*args, **(kwargs or {}))


@check
def a_dispatch_mode_sees_both_passes():
    a, b = tensor(3, grad=True), tensor(3, grad=True)
    with Seen() as mode:
        ops.muladd(a, b).sum().backward()
    for name in ("python_ops.muladd.default", "python_ops.muladd_backward.default"):
        equal(mode.names.count(name), 1, f"{name} in {mode.names}")


@check
def what_a_dispatch_mode_raises_arrives():
    a, b = tensor(3, grad=True), tensor(3, grad=True)

    def forward():
        with Seen("muladd.default"):
            ops.muladd(a, b)

    def backward():
        with Seen("muladd_backward"):
            ops.muladd(a, b).sum().backward()

    def operation_of_a_backward():
        with Seen("sigmoid"):
            ops.swish(a, 1.0).sum().backward()

    raises(Rejected, ["muladd"], forward)
    raises(Rejected, ["muladd_backward"], backward)
    raises(Rejected, ["sigmoid"], operation_of_a_backward)


@check
def no_grad_and_inference_mode():
    a, b = tensor(3, grad=True), tensor(3)
    with torch.no_grad():
        equal(ops.muladd(a, b).requires_grad, False, "requires_grad")
    with torch.inference_mode():
        equal(ops.muladd(a, b).is_inference(), True, "is_inference")


@check
def a_subclass_stays_a_subclass():
    class Own(torch.Tensor):
        pass

    equal(type(ops.muladd(tensor(2).as_subclass(Own), tensor(2))), Own, "the result's class")
