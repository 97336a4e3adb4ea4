# One rank of tests/distributed/ddp_python.rs: Python's DistributedDataParallel.
# Arguments: rank, port, way (plain, unused, static or bf16).
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

rank, port, way = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group(
    "gloo",
    init_method=f"tcp://127.0.0.1:{port}",
    rank=rank,
    world_size=2,
    timeout=timedelta(seconds=120),
)


def numbers(size, seed):
    count = torch.Size(size).numel()
    phases = torch.arange(count, dtype=torch.float64) * 12.9898 + seed * 78.233
    return (phases.sin() * 43758.5453).fmod(1.0).reshape(size).float()


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(4)])
        self.register_buffer("offset", torch.full([16], float(rank)))
        with torch.no_grad():
            for place, parameter in enumerate(self.parameters()):
                parameter.copy_(numbers(parameter.shape, 10 * rank + place) * 0.3)

    def forward(self, x, left_out):
        h = x + self.offset
        for place, layer in enumerate(self.layers):
            if place != left_out:
                h = torch.tanh(layer(h))
        return h.pow(2).mean()


ddp = torch.nn.parallel.DistributedDataParallel(
    Network(),
    bucket_cap_mb=1200 / 1048576,
    find_unused_parameters=way == "unused",
    static_graph=way == "static",
    gradient_as_bucket_view=rank == 1,
)
if way == "bf16":
    ddp.register_comm_hook(None, bf16_compress_hook)
for step in range(4):
    for parameter in ddp.parameters():
        parameter.grad = None
    # This rank leaves out a layer in step 1, and both leave out one of a static graph.
    left_out = 2 if way == "static" or (way == "unused" and step == 1) else -1
    ddp(numbers([4, 16], 1000 + 100 * step + rank), left_out).backward()
    with torch.no_grad():
        for parameter in ddp.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad * 0.5)
flat = torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])
both = torch.empty(2 * flat.numel())
dist.all_gather_into_tensor(both, flat)
print("equal" if torch.equal(both[: flat.numel()], both[flat.numel() :]) else "different")
dist.barrier()
dist.destroy_process_group()
# A thread of Gloo may still let go of the hook's Python callback. CPython ends a thread that asks
# for the GIL while the interpreter is finalized, and that ends the process (`terminate called
# without an active exception`), so the interpreter is not finalized.
sys.stdout.flush()
os._exit(0)
