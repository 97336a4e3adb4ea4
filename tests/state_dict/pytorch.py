"""Exchanges weights with tests/state_dict, in the format of safetensors, without that package.

python3 pytorch.py write FILE   writes GPT-2's attention with Hugging Face's names, an input and its output
python3 pytorch.py read FILE    prints what the file holds: a line for each tensor, in the order of names
"""

import json
import math
import struct
import sys

import torch

KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {kind: name for name, kind in KINDS.items()}


def write(path, tensors):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def read(path):
    with open(path, "rb") as file:
        whole = file.read()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    data = whole[8 + length :]
    metadata = header.pop("__metadata__")
    assert metadata == {"format": "pt"}, metadata
    assert (8 + length) % 8 == 0
    ends = sorted(info["data_offsets"] for info in header.values())
    assert ends[0][0] == 0 and ends[-1][1] == len(data)
    assert all(a[1] == b[0] for a, b in zip(ends, ends[1:]))
    for name, info in header.items():
        raw = bytearray(data[slice(*info["data_offsets"])])
        kind = KINDS[info["dtype"]]
        tensor = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
        yield name, tensor.view(info["shape"])


def gpt2_attention():
    """The computation of transformers' GPT2Attention, whose Conv1D computes x @ weight + bias."""
    torch.manual_seed(1)
    embed, heads = 8, 2
    weights = {
        "h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool).tril(),
        "h.0.attn.c_attn.bias": torch.randn(3 * embed, dtype=torch.float64),
        "h.0.attn.c_attn.weight": torch.randn(embed, 3 * embed, dtype=torch.float64),
        "h.0.attn.c_proj.bias": torch.randn(embed, dtype=torch.float64),
        "h.0.attn.c_proj.weight": torch.randn(embed, embed, dtype=torch.float64),
    }
    x = torch.randn(2, 4, embed, dtype=torch.float64)
    qkv = x @ weights["h.0.attn.c_attn.weight"] + weights["h.0.attn.c_attn.bias"]
    q, k, v = (part.view(2, 4, heads, -1).transpose(1, 2) for part in qkv.split(embed, dim=2))
    scores = q @ k.transpose(-1, -2) / math.sqrt(embed // heads)
    scores = scores.masked_fill(~weights["h.0.attn.bias"], float("-inf"))
    y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 4, embed)
    y = y @ weights["h.0.attn.c_proj.weight"] + weights["h.0.attn.c_proj.bias"]
    return {**weights, "input": x, "output": y}


if __name__ == "__main__":
    command, path = sys.argv[1:]
    if command == "write":
        write(path, gpt2_attention())
    else:
        for name, tensor in sorted(read(path)):
            total = tensor.to(torch.float64).sum().item()
            print(name, NAMES[tensor.dtype], list(tensor.shape), repr(total))
