"""What others.rs compares with: calls of FlashInfer's and quack's rmsnorm from Python, by TVM FFI and by
FlashInfer's own function, and Triton's cubin of an addition. The argument is the folder of the modules."""

import json
import sys
import time

import torch
import tvm_ffi

CALLS = 200


def times(call):
    """The time on the GPU and the time of a call, in µs, as others.rs measures them."""
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    host = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        host = min(host, time.perf_counter() - start)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), tvm_ffi.use_torch_stream():
        for _ in range(CALLS):
            call()
    graph.replay()
    gpu = float("inf")
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        gpu = min(gpu, start.elapsed_time(end) * 1e-3)
    return {"gpu_us": round(gpu * 1e6 / CALLS, 3), "host_us": round(host * 1e6 / CALLS, 3)}


def measure(folder):
    flashinfer = tvm_ffi.load_module(f"{folder}/libflashinfer_norm.so").rmsnorm
    quack = tvm_ffi.load_module(f"{folder}/libquack_rmsnorm.so").quack_rmsnorm_bf16_1024
    try:
        from flashinfer.norm import rmsnorm as packaged
    except ImportError as error:
        print(f"no package of FlashInfer: {error}")
        packaged = None
    for rows, columns in [(1, 1024), (64, 1024), (4096, 1024), (16384, 1024), (4096, 4096)]:
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        x, weight = torch.randn(rows, columns, **options), torch.randn(columns, **options)
        y = torch.empty_like(x)
        calls = {"flashinfer": lambda: flashinfer(y, x, weight, 1e-6, False)}
        if columns == 1024:
            rstd = torch.empty(rows, device="cuda")
            calls["quack"] = lambda: quack(x, weight, None, None, y, None, rstd, None, 1e-6)
        if packaged is not None:
            calls["flashinfer.norm.rmsnorm"] = lambda: packaged(x, weight, 1e-6, out=y)
        for name, call in calls.items():
            size = {"function": name, "rows": rows, "columns": columns}
            print(json.dumps({"from": "python", **size, **times(call)}), flush=True)


def write_cubin(folder):
    import triton
    import triton.language as tl

    @triton.jit
    def add_kernel(x, y, z, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        tl.store(z + at, tl.load(x + at, inside) + tl.load(y + at, inside), inside)

    x, y, z = (torch.ones(100_003, device="cuda") for _ in range(3))
    compiled = add_kernel[(98,)](x, y, z, x.numel(), BLOCK=1024)
    with open(f"{folder}/triton_add.cubin", "wb") as file:
        file.write(compiled.asm["cubin"])
    metadata = compiled.metadata
    print("triton", triton.__version__, metadata.name, metadata.num_warps, metadata.shared)


if __name__ == "__main__":
    write_cubin(sys.argv[1])
    if "--cubin" not in sys.argv:
        measure(sys.argv[1])
