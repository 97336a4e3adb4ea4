"""What each operator computes, and what PyTorch's own checks say about it."""

import torch
from harness import check, equal, raises, same
from samples import DIFFERENTIABLE, SAMPLES, copies, gradients, ops, tensor
from torch.library import opcheck


@check
def values_are_those_of_torchs_operations():
    for sample in SAMPLES:
        arguments = sample.arguments(False, "cpu")
        expected = sample.reference(*arguments)
        same(sample.call(*copies(arguments)), expected, sample.name)


@check
def gradients_are_those_of_torchs_operations():
    for sample in DIFFERENTIABLE:
        arguments = sample.arguments(True, "cpu")
        found = gradients(sample.call, arguments)
        same(found, gradients(sample.reference, arguments), sample.name)


@check
def opcheck_without_gradients():
    for sample in SAMPLES:
        opcheck(sample.op, sample.arguments(False, "cpu"))


@check
def opcheck_with_gradients():
    for sample in DIFFERENTIABLE:
        opcheck(sample.op, sample.arguments(True, "cpu"))


@check
def opcheck_of_transposed_and_empty_tensors():
    for grad in (False, True):
        turned = [tensor(4, 3, grad=grad).t() for _ in range(2)]
        empty = [tensor(0, 4, grad=grad) for _ in range(2)]
        for a, b in (turned, empty):
            opcheck(ops.muladd.default, (a, b), {"c": -1.0})


def doubles(sample):
    """The sample's arguments in double precision, as a flat list of leaves, and how they belong together."""
    flat, spec = torch.utils._pytree.tree_flatten(sample.arguments(True, "cpu"))
    flat = [it.detach().double().requires_grad_() if isinstance(it, torch.Tensor) else it for it in flat]

    def call(*values):
        return sample.op(*torch.utils._pytree.tree_unflatten(values, spec))

    return call, flat


@check
def gradcheck_in_double():
    for sample in DIFFERENTIABLE:
        torch.autograd.gradcheck(*doubles(sample))


@check
def second_derivatives_are_right():
    for sample in DIFFERENTIABLE:
        if sample.name != "weighted_sum":
            torch.autograd.gradgradcheck(*doubles(sample))


@check
def a_second_derivative_that_is_not_defined_is_refused():
    sample = next(it for it in SAMPLES if it.name == "weighted_sum")
    call, flat = doubles(sample)
    first = torch.autograd.grad(call(*flat).square().sum(), flat[0], create_graph=True)[0]
    raises(RuntimeError, ["weighted_sum"], lambda: torch.autograd.grad(first.sum(), flat[1]))


@check
def a_backward_operator_alone_is_no_silent_constant():
    arguments = [tensor(2, 3, grad=True) for _ in range(3)]

    def differentiate():
        return torch.autograd.grad(ops.muladd_backward(*arguments)[0].sum(), arguments[0])

    raises(RuntimeError, ["muladd_backward"], differentiate)


@check
def an_in_place_operator_counts_as_one():
    x, value = tensor(3), tensor(3)
    version = x._version
    ops.ema_(x, value, 0.5)
    equal(x._version > version, True, "the version counter was raised")
    leaf = tensor(3, grad=True)
    raises(RuntimeError, ["ema_"], lambda: ops.ema_(leaf, value, 0.5))


@check
def an_error_of_a_kernel_is_a_runtime_error():
    wrong = [
        (ops.muladd, (tensor(2), tensor(3)), ["muladd: b: expected shape", "got [3]"]),
        (ops.muladd, (tensor(2), tensor(2).long()), ["muladd: b: expected dtype", "torch.int64"]),
        (ops.weighted_sum, ([tensor(2), tensor(3)],), ["weighted_sum: tensors"]),
        (ops.ema_, (tensor(2), tensor(3), 0.5), ["ema_: value"]),
    ]
    for op, arguments, words in wrong:
        text = raises(RuntimeError, words, lambda: op(*arguments))
        name = words[0].split(":")[0]
        equal(text.count(f"{name}:"), 1, f"how often {text!r} names the operator")


@check
def arguments_have_defaults_and_names():
    a, b = tensor(2), tensor(2)
    same(ops.muladd(a, b), a * b + 1, "c = 1.0")
    same(ops.muladd(b=b, a=a, c=3.0), a * b + 3, "names")
    schema = str(ops.muladd.default._schema)
    equal(schema, "python_ops::muladd(Tensor a, Tensor b, float c=1.) -> Tensor", "the schema")


@check
def meta_tensors_have_the_shapes_of_real_ones():
    for sample in SAMPLES:
        real = sample.arguments(False, "cpu")
        meta = torch.utils._pytree.tree_map_only(torch.Tensor, lambda it: it.to("meta"), real)
        shapes = [
            [(it.shape, it.dtype, it.stride()) for it in torch.utils._pytree.tree_leaves(sample.call(*arguments))]
            for arguments in (meta, copies(real))
        ]
        equal(shapes[0], shapes[1], f"shapes, kinds and strides of {sample.name}")
