"""A run of PyTorch that trains some steps when it is told to, as `llm bench --by-line` does."""

import json
import os
import sys
import time

import torch
from models import make_model, read_safetensors, settings_of

RANK = 16  # of adapters
# Each trains the batches in turns with Rust, but for one, whose order of the batches says how far curves are apart by chance.
OTHER_ORDER = "torch.compile, other order"
COMPILED_MUON = "torch.compile, Muon's step, too"
RIVALS = {
    "train": ["torch.compile", "torch.compile, reduce-overhead", "PyTorch eager", OTHER_ORDER],
    "bf16": ["torch.compile", "torch.compile, reduce-overhead", "PyTorch eager", OTHER_ORDER],
    "lora": ["torch.compile", "PyTorch eager", OTHER_ORDER],
    "muon": ["torch.compile", COMPILED_MUON, "PyTorch eager", OTHER_ORDER],
}


class Run:
    """A model in training, as one of RIVALS."""

    def __init__(self, mode, name, inputs, device, begun):
        self.device, self.mode, self.step_count, self.first_step = device, mode, 0, None
        self.is_cuda = device.startswith("cuda")
        self.settings = settings_of(inputs)
        if self.is_cuda:
            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats()
        self.model = self.make_model(inputs)
        self.batches = self.read_batches(inputs, name == OTHER_ORDER)
        self.optimizers = self.make_optimizers(name == COMPILED_MUON)
        self.forward = self.model
        if "compile" in name:
            mode = "reduce-overhead" if "reduce-overhead" in name else None
            self.forward = torch.compile(self.model, mode=mode)
        self.ready = time.perf_counter() - begun

    def make_model(self, inputs):
        with torch.device(self.device):
            model = make_model(self.settings)
        model.load_state_dict(read_safetensors(os.path.join(inputs, "weights.safetensors")))
        if self.mode == "bf16":
            model.to(torch.bfloat16)
        if self.mode == "lora":
            # A frozen base in BFloat16 on a GPU, as in Rust, and adapters in Float, which are Rust's master weights.
            model.to(torch.bfloat16 if self.is_cuda else torch.float32)
            with torch.device(self.device):
                model.adapt(RANK)
            adapters = read_safetensors(os.path.join(inputs, "adapters.safetensors"))
            assert not model.load_state_dict(adapters, strict=False).unexpected_keys
        return model

    def read_batches(self, inputs, is_shuffled):
        batches = read_safetensors(os.path.join(inputs, "batches.safetensors"))["batches"].long()
        if is_shuffled:
            order = torch.randperm(batches.shape[1], generator=torch.Generator().manual_seed(2))
            batches = batches[:, order]
        return batches.pin_memory() if self.is_cuda else batches

    def make_optimizers(self, compiles_muon):
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        of_blocks = [p for name, p in trained.items() if p.dim() == 2 and name.startswith("layers.") and self.mode == "muon"]
        decay, known = float(self.settings["weight_decay"]), {id(p) for p in of_blocks}
        groups = [
            {"params": [p for p in trained.values() if p.dim() >= 2 and id(p) not in known], "weight_decay": decay},
            {"params": [p for p in trained.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizers = [torch.optim.AdamW([g for g in groups if g["params"]], lr=1.0, betas=(0.9, 0.95), fused=True)]
        if of_blocks:
            # A number would be a constant of a compiled step.
            lr = torch.tensor(1.0) if compiles_muon else 1.0
            muon = torch.optim.Muon(of_blocks, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            if compiles_muon:
                muon.step = torch.compile(muon.step)
            optimizers.append(muon)
        return optimizers

    def step(self):
        rate = self.settings["rates"][self.step_count]
        inputs, targets = (part[self.step_count].to(self.device, non_blocking=True) for part in self.batches)
        torch.compiler.cudagraph_mark_step_begin()
        # Float on the CPU, as in Rust, unless the weights are BFloat16 already.
        autocasts = self.is_cuda and self.mode not in ("bf16", "lora")
        with torch.autocast(self.device.split(":")[0], dtype=torch.bfloat16, enabled=autocasts):
            loss = self.forward(inputs, targets)
        loss.backward()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        torch.nn.utils.clip_grad_norm_(trained, float(self.settings["clip"]), foreach=True)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"].fill_(rate) if torch.is_tensor(group["lr"]) else rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step_count += 1
        # A clone, because a CUDA graph writes the next loss to the same place.
        return loss.detach().clone()

    def round(self, steps):
        begun = time.perf_counter()
        losses = []
        for _ in range(steps):
            losses.append(self.step())
            if self.first_step is None:
                losses[0].item()
                # Without the time in which it waited for the others.
                self.first_step = self.ready + time.perf_counter() - begun
        losses = torch.stack(losses).double().tolist()
        return {"steps": steps, "seconds": time.perf_counter() - begun, "losses": losses}

    def summary(self):
        cuda = torch.cuda
        return {
            "device": cuda.get_device_name() if self.is_cuda else "cpu",
            "version": torch.__version__,
            "steps": self.step_count,
            "first_step_s": self.first_step,
            "peak_MiB": cuda.max_memory_allocated() / 2**20 if self.is_cuda else None,
            "reserved_MiB": cuda.max_memory_reserved() / 2**20 if self.is_cuda else None,
        }


def work(mode, name, inputs, device, begun):
    run = Run(mode, name, inputs, device, begun)
    print(json.dumps({"ready": run.ready}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run.round(int(line))), flush=True)
    print(json.dumps(run.summary()), flush=True)
