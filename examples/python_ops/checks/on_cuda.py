"""The same on a GPU: values, opcheck, and CUDA graphs by `torch.compile(mode="reduce-overhead")`."""

import torch
from harness import Skipped, check, same
from samples import DIFFERENTIABLE, SAMPLES, copies, gradients, ops
from torch.library import opcheck

# Those that consist of tch operations. The kernels of muladd are plain Rust, for the CPU alone.
ON_CUDA = [sample for sample in SAMPLES if "muladd" not in sample.name]


def need_gpu():
    if not torch.cuda.is_available():
        raise Skipped("no GPU")


@check
def values_and_gradients_on_cuda():
    need_gpu()
    for sample in ON_CUDA:
        arguments = sample.arguments(False, "cuda")
        same(sample.call(*copies(arguments)), sample.reference(*arguments), sample.name)
        if sample in DIFFERENTIABLE:
            arguments = sample.arguments(True, "cuda")
            same(gradients(sample.op, arguments), gradients(sample.reference, arguments), sample.name)


@check
def opcheck_on_cuda():
    need_gpu()
    for sample in ON_CUDA:
        opcheck(sample.op, sample.arguments(sample in DIFFERENTIABLE, "cuda"))


def layers(x, y, weights):
    return ops.geglu(ops.weighted_sum([ops.swish(x, 1.5), y], weights))


@check
def reduce_overhead():
    need_gpu()
    compiled = torch.compile(layers, fullgraph=True, mode="reduce-overhead")
    weights = torch.randn(2, device="cuda", requires_grad=True)
    # The first calls warm up and record, the others replay.
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        x, y = (torch.randn(64, 128, device="cuda", requires_grad=True) for _ in range(2))
        found = gradients(compiled, (x, y, weights))
        expected = gradients(layers, (x, y, weights))
        same(found, expected, "a replay", rtol=1e-4, atol=1e-4)


@check
def another_stream():
    need_gpu()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.randn(1 << 20, device="cuda")
        torch.cuda._sleep(10_000_000)
        x.fill_(2.0)
        found = ops.swish(x, 1.5)
    stream.synchronize()
    same(found, torch.sigmoid(torch.full_like(x, 3.0)) * 2.0, "after the other work of the stream")
