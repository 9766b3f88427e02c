"""What the benchmark runs on every rank: one entry (a strategy, or a bare loop) on one case,
measured from inside.

An entry is `L:<strategy>` (through Lightning's Trainer; `L:zero3+debug` switches an option on,
`L:zero3+unit_policy=Block` gives it a list; `L:zero3_sockets` exchanges through gloo, not in shared
memory) or `B:<wrapper>` (a loop of six lines). All train the same GPT on the same batches with the
same fused AdamW.
"""

import ctypes
import json
import os
import re
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

VOCABULARY, LENGTH, BATCH, WARMUP = 8192, 128, 4, 3
# width, blocks
SIZES = {
    "tiny": (256, 6),
    "small": (512, 8),
    "medium": (768, 12),
    "thin8": (16, 8),
    "thin48": (16, 48),
}


@dataclass(frozen=True)
class Job:
    """One run."""

    entry: str
    size: str
    # plain, acc4 (four micro-batches a step), frozen (only the attention's output projections
    # train)
    case: str
    steps: int
    measure: str  # "time", "heap" (bytes) or "operators" (torch.profiler)
    started: float  # time.time() before the processes were started
    device: str


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, max(1, d // 64), -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        vocabulary = VOCABULARY if width > 16 else 64
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.roll(-1, 1).flatten())


def build(job):
    torch.manual_seed(0)
    model = GPT(*SIZES[job.size])
    if job.case == "frozen":
        model.requires_grad_(False)
        for block in model.blocks:
            block.out.requires_grad_(True)
    return model


def optimizer_of(model):
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True
    )


def batches(job, rank):
    generator = torch.Generator().manual_seed(rank)
    vocabulary, shape = (VOCABULARY, (BATCH, LENGTH)) if job.size[:4] != "thin" else (64, (1, 8))
    return [
        torch.randint(0, vocabulary, shape, generator=generator)
        for _ in range((WARMUP + job.steps) * accumulation(job))
    ]


def accumulation(job):
    return 4 if job.case == "acc4" else 1


class Meter:
    """Marks the end of every optimizer step; the first ones are warm-up."""

    def __init__(self, job):
        self.job, self.marks, self.losses, self.wire = job, [], [], 0
        self.first = 0.0  # seconds from the start of the processes to the end of the first step
        # to when torch and Lightning were there, the first batch
        self.imported, self.ready = (
            time.time() - job.started,
            0.0,
        )
        self.mark_memory = lambda: (0, 0)
        self.memory = (0, 0)  # bytes at the end of the last step, and the most within it

    def step(self):
        if self.job.device == "cuda":
            torch.cuda.synchronize()
        self.marks.append((time.perf_counter(), time.process_time()))
        self.memory = self.mark_memory()
        if len(self.marks) == 1:
            self.first = time.time() - self.job.started
        if len(self.marks) == WARMUP:
            self.wire = loopback_bytes()
            if self.job.device == "cuda":
                torch.cuda.empty_cache()  # of the whole model, in set-up
                torch.cuda.reset_peak_memory_stats()

    def result(self):
        measured = self.marks[WARMUP - 1 :]
        pairs = list(zip(measured, measured[1:], strict=False))
        return {
            "wall": [b[0] - a[0] for a, b in pairs],
            "cpu": [b[1] - a[1] for a, b in pairs],
            "imported": self.imported,
            "ready": self.ready,
            "first": self.first,
            "losses": [float(loss) for loss in self.losses],
            "wire": (loopback_bytes() - self.wire)
            / len(pairs)
            / max(1, int(os.environ["WORLD_SIZE"])),
        }


def loopback_bytes():
    line = re.search(r"lo:\s*(\d+)", Path("/proc/net/dev").read_text())
    return int(line[1]) if line else 0


class Lit(pl.LightningModule):
    def __init__(self, job, meter):
        super().__init__()
        self.job, self.meter = job, meter
        if job.entry != "L:fsdp2":
            self.net = build(job)

    def configure_model(self):
        if self.job.entry == "L:fsdp2":
            self.net = build(self.job)
            shard_by_fsdp2(self.net, self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        return optimizer_of(self)

    def on_train_start(self):
        self.meter.ready = time.time() - self.job.started

    def training_step(self, tokens):
        loss = self.net(tokens)
        self.meter.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, outputs, batch, batch_index):
        if (batch_index + 1) % accumulation(self.job) == 0:
            self.meter.step()


def shard_by_fsdp2(net, mesh):
    from torch.distributed.fsdp import fully_shard

    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)


def strategy_of(name):
    if name == "fsdp2":
        from lightning.pytorch.strategies import ModelParallelStrategy

        return ModelParallelStrategy(
            data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1
        )
    if name == "ddp":
        from lightning.pytorch.strategies import DDPStrategy

        # as Lightning's guide advises: less memory, no copies
        return DDPStrategy(gradient_as_bucket_view=True)
    if name == "fsdp":
        from lightning.pytorch.strategies import FSDPStrategy

        return FSDPStrategy(auto_wrap_policy={Block})  # else all of the model is one unit
    if name == "deepspeed3":
        from lightning.pytorch.strategies import DeepSpeedStrategy

        # Of the model's size, as its documentation advises: by default they hold 200 million
        # elements each.
        return DeepSpeedStrategy(
            stage=3, allgather_bucket_size=5_000_000, reduce_bucket_size=5_000_000
        )
    if name == "zero3_sockets":
        from lightning_zero3.strategies.communicators import SharedMemoryCollectives

        # as if each rank were on a machine of its own
        SharedMemoryCollectives.open = staticmethod(lambda group: None)
    if name.startswith("zero3"):
        from lightning_zero3 import Zero3Strategy

        options = (option.partition("=") for option in name.split("+")[1:])
        return Zero3Strategy(
            **{key: value.split(",") if value else True for key, _, value in options}
        )
    return "auto"


def through_lightning(job, meter, rank):
    trainer = pl.Trainer(
        accelerator="gpu" if job.device == "cuda" else "cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy_of(job.entry[2:]),
        max_epochs=1,
        accumulate_grad_batches=accumulation(job),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Lit(job, meter), torch.utils.data.DataLoader(batches(job, rank), batch_size=None))
    return trainer


def bare(job, meter, rank):
    if job.entry != "B:single":
        dist.init_process_group(
            "nccl" if job.device == "cuda" else "gloo", timeout=timedelta(seconds=300)
        )
    model = net = build(job).to(job.device)
    if job.entry == "B:ddp":
        net = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if job.entry == "B:fsdp2":
        shard_by_fsdp2(model, dist.init_device_mesh(job.device, (dist.get_world_size(),)))
    optimizer, every = optimizer_of(model), accumulation(job)
    for index, tokens in enumerate(batches(job, rank)):
        last = (index + 1) % every == 0
        if job.entry == "B:ddp":
            net.require_backward_grad_sync = last
        if job.entry == "B:fsdp2":
            net.set_requires_gradient_sync(last)
        loss = net(tokens.to(job.device))
        (loss / every).backward()
        meter.losses.append(loss.detach())
        if last:
            optimizer.step()
            optimizer.zero_grad()
            meter.step()
    return optimizer


def heap(job, meter, rank):
    """Bytes that the entry added to the process: live after a step, and the most within it; see
    heap.c, which is preloaded.
    """
    counter = ctypes.CDLL(None)
    counter.heap_in_use.restype = counter.heap_peak.restype = ctypes.c_long
    base = counter.heap_in_use()
    meter.mark_memory = lambda: (counter.heap_in_use(), counter.heap_peak())
    kept = run(job, meter, rank)
    shared = sum(int(high, 16) - int(low, 16) for low, high in mapped(rank)) - base
    del kept
    live, peak = meter.memory
    return {"live": live + shared, "peak": peak + shared}


def operators(job, meter, rank):
    """{operator: [calls, milliseconds without those of operators inside]} for each step, as
    torch.profiler sees them.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (
        job.device == "cuda"
    )
    profiler = torch.profiler.profile(activities=kinds)

    def mark():
        if len(meter.marks) == WARMUP:
            profiler.start()  # takes a while
            meter.marks[-1] = time.perf_counter(), time.process_time()
        if len(meter.marks) == WARMUP + job.steps:
            profiler.stop()
        return 0, 0

    meter.mark_memory = mark
    run(job, meter, rank)
    seen = {
        e.key: [e.count / job.steps, e.self_cpu_time_total / 1e3 / job.steps]
        for e in profiler.key_averages()
    }
    return {"operators": seen, **meter.result()}


def mapped(rank):
    """Memory of this rank that zero3 shares with others is mapped, not on the heap."""
    return re.findall(
        rf"([0-9a-f]+)-([0-9a-f]+) .*memfd:lightning_zero3 rank {rank} ",
        Path("/proc/self/maps").read_text(),
    )


def run(job, meter, rank):
    return (through_lightning if job.entry.startswith("L:") else bare)(job, meter, rank)


def main():
    job, folder = Job(**json.loads(sys.argv[1])), Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    meter = Meter(job)
    if job.measure == "time":
        run(job, meter, rank)
        result = meter.result()
    else:
        result = {"heap": heap, "operators": operators}[job.measure](job, meter, rank)
    if job.device == "cuda":
        result |= {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
    (folder / f"{rank}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
