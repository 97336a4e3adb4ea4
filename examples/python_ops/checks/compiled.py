"""torch.compile: one graph without breaks, the same values and gradients, one graph for all sizes."""

import torch
from harness import check, equal, same
from samples import DIFFERENTIABLE, SAMPLES, copies, gradients, ops, tensor
from torch._dynamo.testing import CompileCounterWithBackend


def everything(x, y, weights):
    """A function of all operators, with torch's own in between."""
    average = x.detach().sin()
    ops.ema_(average, y.detach(), 0.5)
    joined = ops.weighted_sum([ops.muladd(x.sin(), y, 2.0), ops.swish(y, 1.5), average], weights)
    return ops.geglu(joined).relu() + joined.sum()


def inputs(rows=5):
    # No size is that of another dimension: Dynamo takes dimensions that are equal at first for one.
    return tensor(rows, 8, grad=True), tensor(rows, 8, grad=True), tensor(3, grad=True)


def compare(backend, **tolerances):
    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True, backend=backend)
    arguments = inputs()
    same(gradients(compiled, arguments), gradients(everything, arguments), backend, **tolerances)


def graphs(counter):
    """How many graphs were compiled. Dynamo also counts an empty one when it starts again, with numbers as constants."""
    return sum(any(node.op == "call_function" for node in it.graph.nodes) for it in counter.graphs)


@check
def each_operator_compiles_to_one_graph():
    for sample in SAMPLES:
        torch._dynamo.reset()
        compiled = torch.compile(lambda *arguments: sample.call(*arguments), fullgraph=True, backend="aot_eager")
        arguments = sample.arguments(False, "cpu")
        same(compiled(*copies(arguments)), sample.call(*copies(arguments)), sample.name)


@check
def dynamo_alone():
    compare("eager")


@check
def with_autograd_traced():
    compare("aot_eager")


@check
def with_inductor():
    # It adds up in another order.
    compare("inductor", rtol=1e-5, atol=1e-5)


@check
def many_sizes_are_one_graph():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(everything, fullgraph=True, backend=counter, dynamic=True)
    for rows in (5, 7, 9, 13):
        arguments = inputs(rows)
        same(gradients(compiled, arguments), gradients(everything, arguments), f"{rows} rows")
    equal(graphs(counter), 1, "graphs for four sizes")


@check
def each_operator_alone_is_one_graph_for_all_sizes():
    def resized(arguments, rows):
        def larger(it):
            if not isinstance(it, torch.Tensor) or it.dim() < 2:
                return it
            return tensor(rows, it.shape[1], grad=it.requires_grad)

        return torch.utils._pytree.tree_map(larger, arguments)

    for sample in DIFFERENTIABLE:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        # A function of the sample's own, because Dynamo keeps what it compiled with the function's code.
        compiled = torch.compile(lambda *them: sample.op(*them), fullgraph=True, backend=counter, dynamic=True)
        for rows in (5, 7, 9):
            arguments = resized(sample.arguments(True, "cpu"), rows)
            same(gradients(compiled, arguments), gradients(sample.op, arguments), f"{sample.name}, {rows} rows")
        equal(graphs(counter), 1, f"graphs of {sample.name} for three sizes")


@check
def the_graph_has_the_kernels_and_the_composites_parts():
    found = []

    def keep(graph, _):
        found.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return graph.forward

    torch._dynamo.reset()
    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=keep, bw_compiler=keep)
    gradients(torch.compile(everything, fullgraph=True, backend=backend), inputs())
    forward, backward = found
    equal("python_ops.muladd.default" in forward, True, f"muladd is in {forward}")
    equal("python_ops.muladd_backward.default" in backward, True, f"its backward is in {backward}")
    equal(any("geglu" in name for name in forward), False, f"geglu is decomposed in {forward}")
