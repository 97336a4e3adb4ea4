"""What leaves Python: torch.export, AOTInductor and TorchScript."""

import os
import tempfile

import torch
from compiled import everything, inputs
from harness import check, equal, same
from samples import gradients, ops, tensor


class Everything(torch.nn.Module):
    def forward(self, x, y, weights):
        return everything(x, y, weights)


class Scripted(torch.nn.Module):
    """All operators but the one in place, whose result TorchScript would leave out."""

    def forward(self, x, y, weights):
        parts = [torch.ops.python_ops.muladd(x, y, 2.0), torch.ops.python_ops.swish(y, 1.5), y]
        joined = torch.ops.python_ops.weighted_sum(parts, weights)
        return torch.ops.python_ops.geglu(joined)


def plain(rows=5):
    return tuple(it.detach() for it in inputs(rows))


def exported():
    rows = torch.export.Dim("rows")
    return torch.export.export(Everything(), plain(), dynamic_shapes=({0: rows}, {0: rows}, None))


@check
def export_with_a_dynamic_dimension():
    program = exported()
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    equal("python_ops.muladd.default" in names, True, f"muladd is in {names}")
    for rows in (5, 6):
        arguments = plain(rows)
        same(program.module()(*arguments), everything(*arguments), f"{rows} rows")


@check
def an_exported_program_is_saved_and_loaded():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "program.pt2")
        torch.export.save(exported(), path)
        arguments = plain(4)
        same(torch.export.load(path).module()(*arguments), everything(*arguments), "the loaded program")


@check
def aot_inductor_packages_it():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.pt2")
        torch._inductor.aoti_compile_and_package(exported(), package_path=path)
        model = torch._inductor.aoti_load_package(path)
        for rows in (5, 7):
            arguments = plain(rows)
            same(model(*arguments), everything(*arguments), f"{rows} rows")


@check
def torchscript_is_saved_loaded_and_differentiated():
    arguments = inputs()
    expected = gradients(Scripted(), arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.pt")
        torch.jit.script(Scripted()).save(path)
        same(gradients(torch.jit.load(path), arguments), expected, "the loaded module")


@check
def torchscript_traces_it():
    arguments = plain()
    traced = torch.jit.trace(lambda x, y: ops.muladd(x, y, 2.0), arguments[:2])
    x, y = tensor(5, 8), tensor(5, 8)
    same(traced(x, y), ops.muladd(x, y, 2.0), "another size")
