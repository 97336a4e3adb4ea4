"""Steps of torch.optim.Muon, whose weights tests/optim/muon.rs compares with ours.

python3 muon.py ROWS COLUMNS STEPS NESTEROV ADJUST_LR_FN   prints the weights after the last step
"""

import sys

import torch

rows, columns, steps = map(int, sys.argv[1:4])
state = 1


def values():
    """The next matrix of a sequence that the test computes, too."""
    global state
    numbers = []
    for _ in range(rows * columns):
        state = (state * 1103515245 + 12345) % 2**31
        numbers.append((state >> 16) % 1024 / 512 - 1)
    return torch.tensor(numbers).view(rows, columns)


weight = torch.nn.Parameter(values())
optimizer = torch.optim.Muon(
    [weight], lr=0.1, weight_decay=0.5, nesterov=sys.argv[4] == "true", adjust_lr_fn=sys.argv[5]
)
for _ in range(steps):
    weight.grad = values()
    optimizer.step()
print(*weight.detach().flatten().tolist())
