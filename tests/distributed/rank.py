"""Rank 0 of a group whose rank 1 is in Rust; see group.rs."""

import datetime
import sys

import torch
import torch.distributed as dist

store = f"tcp://127.0.0.1:{sys.argv[1]}"
timeout = datetime.timedelta(seconds=120)
dist.init_process_group("gloo", init_method=store, rank=0, world_size=2, timeout=timeout)
x = torch.tensor([10.0, 20.0])
dist.all_reduce(x)
dist.broadcast(torch.tensor([5.0, 6.0]), 0)
gathered = [torch.empty((), dtype=torch.int64) for _ in range(2)]
dist.all_gather(gathered, torch.tensor(7))
y = torch.empty(1)
dist.recv(y, 1)
dist.barrier()
print(x.tolist(), [int(g) for g in gathered], y.tolist())
dist.destroy_process_group()
