"""How far Muon's iteration is from the one in Double when it is rounded to fp16, emulated on a CPU, relative to torch's in bf16.

    python3 docs/lab/muon_in_half.py

Each matrix has one column that is 10^3 to 10^6 times as large as the others. The segments are those of src/optim/plan.rs.
"""

import torch

A, B, C = 3.4445, -4.7750, 2.0315
SCALE = 16.0  # of X, as in src/optim/orthogonal.rs


def rounded(x, kind):
    return x.to(kind).float()


def exact(x):
    x = x.double() / x.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x


def torchs(x):
    def bf16(x):
        return rounded(x, torch.bfloat16)

    x = bf16(bf16(x) / bf16(bf16(x).norm()))
    for _ in range(5):
        gram = bf16(x @ x.T)
        x = bf16(A * x + bf16(B * gram + C * (gram @ gram)) @ x)
    return x


def in_half(x, segments):
    def half(x):
        return rounded(x, torch.half)

    def polynomial(gram, factor):
        return half(factor * (A * torch.eye(len(gram)) + B / SCALE**2 * gram + C / SCALE**4 * (gram @ gram)))

    x = rounded(x, torch.bfloat16)
    x = half(SCALE * (x / rounded(x.norm(), torch.bfloat16)))
    for index, steps in enumerate(segments):
        factor = 1 / SCALE if index + 1 == len(segments) else 1.0
        gram = half(x @ x.T)
        z = together = polynomial(gram, factor if steps == 1 else 1.0)
        for step in range(1, steps):
            gram = half(z @ half(z @ gram))
            z = polynomial(gram, 1.0)
            together = half((factor if step + 1 == steps else 1.0) * (z @ together))
        x = half(together @ x)
    return x


torch.manual_seed(1)
for shape in [(256, 1024), (512, 2048)]:
    for digits in [3, 4, 5, 6]:
        x = torch.randn(shape)
        x[:, 1:] *= 10.0**-digits
        wanted = exact(x)
        of_torch = (torchs(x) - wanted).norm()
        ratios = {str(s): (in_half(x, s) - wanted).norm() / of_torch for s in ([2, 3], [2, 1, 2], [1] * 5)}
        print(shape, f"10^{digits}", ", ".join(f"{s}: {ratio:.2f}" for s, ratio in ratios.items()))
