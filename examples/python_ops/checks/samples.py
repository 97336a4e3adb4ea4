"""One call of each operator, and the same in PyTorch's operations."""

from dataclasses import dataclass
from typing import Callable

import python_ops  # noqa: F401: loads the library
import torch
import torch.nn.functional as F

ops = torch.ops.python_ops


@dataclass
class Sample:
    """One call of an operator, and what it computes."""

    name: str
    # Makes the arguments. The tensors require grad or not, and are on this device.
    arguments: Callable
    # The same by PyTorch's operations.
    reference: Callable
    differentiable: bool = True

    @property
    def op(self):
        return getattr(ops, self.name).default

    def call(self, *arguments):
        """Calls the operator. What it writes is returned, too."""
        result = self.op(*arguments)
        return arguments[0] if result is None else result


def tensor(*shape, grad=False, device="cpu"):
    return torch.randn(*shape, device=device, requires_grad=grad)


def ema_reference(average, value, decay):
    return average * decay + value * (1 - decay)


def geglu_reference(x):
    gate, value = x.chunk(2, -1)
    return F.gelu(gate) * value


def weighted_sum_reference(tensors, weights=None):
    if weights is None:
        return sum(tensors)
    return sum(weight * tensor for weight, tensor in zip(weights, tensors))


SAMPLES = [
    Sample(
        "muladd",
        lambda grad, device: (tensor(3, 4, grad=grad, device=device), tensor(3, 4, grad=grad, device=device), 2.0),
        lambda a, b, c: a * b + c,
    ),
    Sample(
        "muladd_backward",
        lambda _, device: tuple(tensor(3, 4, device=device) for _ in range(3)),
        lambda grad, a, b: (grad * b, grad * a),
        differentiable=False,
    ),
    Sample(
        "swish",
        lambda grad, device: (tensor(3, 4, grad=grad, device=device), 1.5),
        lambda x, beta: x * torch.sigmoid(beta * x),
    ),
    Sample(
        "geglu",
        lambda grad, device: (tensor(3, 8, grad=grad, device=device),),
        geglu_reference,
    ),
    Sample(
        "ema_",
        lambda _, device: (tensor(3, 4, device=device), tensor(3, 4, device=device), 0.9),
        ema_reference,
        differentiable=False,
    ),
    Sample(
        "weighted_sum",
        lambda grad, device: ([tensor(3, 4, grad=grad, device=device) for _ in range(3)], tensor(3, grad=grad, device=device)),
        weighted_sum_reference,
    ),
    Sample(
        "weighted_sum",
        lambda grad, device: ([tensor(3, 4, grad=grad, device=device) for _ in range(2)],),
        weighted_sum_reference,
    ),
]

DIFFERENTIABLE = [sample for sample in SAMPLES if sample.differentiable]


def leaves(arguments):
    """All tensors among the arguments, also those in lists."""
    flat, _ = torch.utils._pytree.tree_flatten(arguments)
    return [it for it in flat if isinstance(it, torch.Tensor)]


def copies(arguments):
    """The same arguments with memory of their own."""

    def copy(it):
        return it.detach().clone().requires_grad_(it.requires_grad) if isinstance(it, torch.Tensor) else it

    return torch.utils._pytree.tree_map(copy, arguments)


def gradients(function, arguments):
    """The result of a function, and the gradients of its sum of squares."""
    result = function(*arguments)
    # Squares, so that the gradient that arrives is not the same everywhere.
    total = sum(it.square().sum() for it in leaves(result))
    return result, torch.autograd.grad(total, [it for it in leaves(arguments) if it.requires_grad])
