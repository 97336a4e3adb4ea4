"""Writes the packages and modules that tests/package loads, into the folder that it is given.

    packages.py FOLDER DEVICE

All numbers are small multiples of 1/8, so that results are exact in any order of additions.
"""

import json
import sys
import zipfile
from pathlib import Path

import torch

folder, device = Path(sys.argv[1]), sys.argv[2]


def describe(program):
    """What Rust checks the inputs against. The same is in the docs of library::Package."""

    def size(value):
        return value if isinstance(value, int) else str(value)

    nodes = {node.name: node for node in program.graph.nodes}
    values = [(name, nodes[name].meta["val"]) for name in program.graph_signature.user_inputs]
    inputs = [
        {
            "name": name,
            "kind": str(value.dtype).removeprefix("torch."),
            "device": value.device.type,
            "sizes": [size(n) for n in value.shape],
            "strides": [size(n) for n in value.stride()],
        }
        for name, value in values
        if isinstance(value, torch.Tensor)
    ]
    ranges = {
        str(symbol): [int(r.lower), int(r.upper) if r.upper.is_Integer else None]
        for symbol, r in program.range_constraints.items()
    }
    return json.dumps({"inputs": inputs, "ranges": ranges})


def eighths(*shape, dtype=torch.float32):
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 5 % 17 - 8) / 8).reshape(shape).to(dtype)


class Model(torch.nn.Module):
    """Several inputs of several kinds, one of them a list, and several outputs in a dict."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.linear.weight.data = eighths(3, 4)
        self.linear.bias.data = eighths(3)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 4.0]))

    def forward(self, x, others, k):
        h = torch.relu(self.linear(x)) * self.scale
        return h + others[0], {"sum": (h * k).sum(0), "twice": others[1] * 2, "scale": self.scale}


class Fixed(torch.nn.Module):
    """Sizes that are all fixed, and constants that are computed from others."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(eighths(4, 4))

    def forward(self, x):
        return x @ (self.weight + self.weight.t())


class Custom(torch.nn.Module):
    """Calls two operators that are written in Rust; one of them returns nothing."""

    def forward(self, x, y):
        z = x + 1
        torch.ops.tch_package_test.limit_(z, 100.0)
        return torch.ops.tch_package_test.muladd(z, y, 2.0) + 1


class Scripted(torch.nn.Module):
    def forward(self, x, y):
        return torch.ops.tch_package_test.muladd(x, y, 0.5)


def muladd(a, b, c):
    return a * b + c


torch.library.define("tch_package_test::limit_", "(Tensor(a!) x, float most) -> ()")
torch.library.impl("tch_package_test::limit_", "CompositeExplicitAutograd", lambda x, most: None)
torch.library.register_fake("tch_package_test::limit_", lambda x, most: None)
torch.library.define("tch_package_test::muladd", "(Tensor a, Tensor b, float c) -> Tensor")
torch.library.impl("tch_package_test::muladd", "CompositeExplicitAutograd", muladd)
torch.library.register_fake("tch_package_test::muladd", lambda a, b, c: torch.empty_like(a))


def package(name, model, inputs, shapes, metadata=True, **configs):
    to_device = lambda value: value.to(device)
    model = model.to(device)
    inputs = torch.utils._pytree.tree_map_only(torch.Tensor, to_device, inputs)
    program = torch.export.export(model, inputs, dynamic_shapes=shapes)
    values = {"author": "tests"}
    if metadata:
        values["tch_extension.inputs"] = describe(program)
    torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(folder / f"{name}.pt2"),
        inductor_configs={"aot_inductor.metadata": values, **configs},
    )


def rewrite(source, name, change):
    """A copy of a package, with the files that `change` returns instead of some."""
    with zipfile.ZipFile(folder / f"{source}.pt2") as old:
        with zipfile.ZipFile(folder / f"{name}.pt2", "w") as new:
            for file in old.namelist():
                data = change(file, old.read(file))
                if data is not None:
                    new.writestr(file, data)


def with_metadata(**changes):
    def change(file, data):
        if not file.endswith("metadata.json"):
            return data
        values = json.loads(data)
        for key, value in changes.items():
            values[key.replace("__", ".")] = value
        return json.dumps({key: value for key, value in values.items() if value is not None})

    return change


def other_libtorch(file, data):
    """The library needs a function that this libtorch lacks."""
    if not file.endswith(".so"):
        return data
    assert b"aoti_torch_empty_strided\0" in data
    return data.replace(b"aoti_torch_empty_strided\0", b"aoti_torch_empty_stridxx\0")


with torch.no_grad():
    batch = torch.export.Dim("batch", min=1, max=64)
    example = (eighths(5, 4), [eighths(5, 3), eighths(5, 2, dtype=torch.float64)], torch.tensor([2]))
    shapes = {"x": {0: batch}, "others": [{0: batch}, {0: 2 * batch}], "k": None}
    example[1][1] = eighths(10, 2, dtype=torch.float64)
    package("model", Model(), example, shapes, always_keep_tensor_constants=True)
    folding = {"aot_inductor.use_runtime_constant_folding": True}
    package("fixed", Fixed(), (eighths(2, 4),), None, metadata=False, **folding)
    # The same model, with its constants in a file of their own.
    blob = {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.package_constants_on_disk_format": "binary_blob",
    }
    package("weights", Fixed(), (eighths(2, 4),), None, metadata=False, **blob)
    rows = torch.export.Dim("rows")
    package("custom", Custom(), (eighths(2, 3), eighths(2, 3)), ({0: rows}, {0: rows}))

rewrite("model", "bare", with_metadata(tch_extension__inputs=None))
rewrite("fixed", "elsewhere", with_metadata(AOTI_DEVICE_KEY="xpu"))
rewrite("fixed", "nowhere", with_metadata(AOTI_DEVICE_KEY=None))
rewrite("fixed", "cuda", with_metadata(AOTI_DEVICE_KEY="cuda"))
rewrite("fixed", "other_libtorch", other_libtorch)
rewrite("fixed", "no_library", lambda file, data: None if file.endswith(".so") else data)
rewrite("fixed", "no_library_at_all", lambda file, data: b"text" if file.endswith(".so") else data)
rewrite("weights", "no_weights", lambda file, data: None if file.endswith(".blob") else data)
rewrite("fixed", "no_source", lambda file, data: None if file.endswith(".cpp") else data)
torch.jit.script(Scripted()).save(str(folder / "script.pt"))
print("written")
