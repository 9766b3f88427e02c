"""Model state and activations in host memory: tokens a second, and the most memory.

    python benchmarks/offload.py gpu               # zero3's kinds and peers, each in a process
    python benchmarks/offload.py cpu --sizes tiny  # the same without a GPU, to try it
    python benchmarks/offload.py simulate          # the schedule, with this machine's host

All train the same GPT with an activation checkpoint around each block, in bf16-mixed, with AdamW
and clipping, in micro-batches of at most 8k tokens. `simulate` needs no GPU: the host's rates are
measured here, for a core; the others are arguments. Results are appended to
benchmarks/results/offload-{gpu,simulated}.txt.
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from about import in_a_line
from entries import Block
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

HERE = Path(__file__).parent
VOCABULARY, LENGTH, WARMUP, STEPS = 32_000, 4096, 2, 4
SIZES = {"tiny": (128, 4), "1.5b": (2048, 28), "3b": (2560, 37), "7b": (4096, 33)}  # width, blocks
TOKENS = (4096, 8192, 32768)
ZERO3 = {
    "zero3": {},
    "zero3 optimizer": {"offload": "optimizer"},
    "zero3 parameters": {"offload": "parameters"},
    "zero3 parameters, activations": {"offload": "parameters", "activations": "host"},
}
PEERS = ["fsdp_cpu_offload", "FSDP2 CPUOffloadPolicy", "deepspeed_stage_3_offload"]


class Model(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.roll(-1, 1).flatten())


class Lit(pl.LightningModule):
    def __init__(self, entry, size):
        super().__init__()
        self.entry, self.size, self.net = entry, size, None
        self.losses, self.marks = [], []

    def configure_model(self):
        if self.net is None:
            with torch.device("meta" if self.entry in ZERO3 else "cpu"):
                self.net = Model(*SIZES[self.size])

    def configure_optimizers(self):
        if self.entry.startswith("deepspeed"):
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam(self.parameters(), lr=1e-4)
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=self.entry in ZERO3)

    def training_step(self, batch):
        loss = self.net(batch)
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, *args):
        if not self.trainer.fit_loop._should_accumulate():
            mark(self.marks, self.device)


def mark(marks, device):
    if device.type == "cuda":
        torch.cuda.synchronize()
        if len(marks) == WARMUP - 1:
            torch.cuda.reset_peak_memory_stats()
    marks.append(time.perf_counter())


def micro_batches(tokens, length):
    """Their number in a step, and all of a run."""
    size = max(1, min(tokens, 8192) // length)
    number = max(1, tokens // (size * length))
    generator = torch.Generator().manual_seed(0)
    shape = (WARMUP + STEPS) * number, size, length
    return number, list(torch.randint(0, VOCABULARY, shape, generator=generator))


def through_lightning(job, device):
    if job["entry"] in ZERO3:
        from lightning_zero3 import Zero3Strategy

        strategy = Zero3Strategy(unit_policy=["Block"], **ZERO3[job["entry"]])
    elif job["entry"] == "fsdp_cpu_offload":
        from lightning.pytorch.strategies import FSDPStrategy

        strategy = FSDPStrategy(cpu_offload=True, auto_wrap_policy={Block})
    else:
        strategy = job["entry"]
    number, batches = micro_batches(job["tokens"], job["length"])
    trainer = pl.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        strategy=strategy,
        precision="bf16-mixed",
        max_epochs=1,
        accumulate_grad_batches=number,
        # FSDP's is that of one rank, which is wrong and costs the same
        gradient_clip_val=None if job["entry"] == "fsdp_cpu_offload" else 1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Lit(job["entry"], job["size"])
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return module.marks, module.losses


def by_fsdp2(job, device):
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl")  # gloo clips
    options = {
        "offload_policy": CPUOffloadPolicy(),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    model = Model(*SIZES[job["size"]])
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    number, batches = micro_batches(job["tokens"], job["length"])
    marks, losses = [], []
    for index, batch in enumerate(batches):
        loss = model(batch.to(device))
        (loss / number).backward()
        losses.append(loss.detach())
        if (index + 1) % number == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            mark(marks, torch.device(device))
    return marks, losses


def run(job):
    """In a process of its own."""
    device = "cuda" if job["kind"] == "gpu" else "cpu"
    pl.seed_everything(1, verbose=False)
    way = by_fsdp2 if job["entry"].startswith("FSDP2") else through_lightning
    marks, losses = way(job, device)
    seconds = (marks[-1] - marks[WARMUP - 1]) / (len(marks) - WARMUP)
    return {
        "tokens/s": job["tokens"] / seconds,
        "device GiB": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0,
        "host GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "loss": losses[-1].item(),
    }


def launch(job):
    """Its result, or the last line of its error."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rank = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": 0}
    rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "benchmark"}
    with tempfile.NamedTemporaryFile("r") as file:
        command = [sys.executable, __file__, "run", json.dumps(job), file.name]
        environ = os.environ | {key: str(value) for key, value in rank.items()}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return json.loads(file.read())
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:90]


def measure(options):
    """A line for each run, as soon as it is there."""
    names = f"{'tokens/s':>10}{'device GiB':>12}{'host GiB':>10}  loss"
    yield f"{'size':6}{'tokens':>8}  {'':30}{names}"
    for size in options.sizes:
        for tokens in options.tokens:
            for entry in options.entries:
                job = {"kind": options.kind, "entry": entry, "size": size, "tokens": tokens}
                found = launch(job | {"length": min(LENGTH, tokens)})
                line = f"{size:6}{tokens:8}  {entry:30}"
                if isinstance(found, str):
                    yield line + found
                else:
                    line += f"{found['tokens/s']:10.0f}{found['device GiB']:12.2f}"
                    yield line + f"{found['host GiB']:10.2f}  {found['loss']:.6f}"


# ------------------------------------------------------------------------------------- simulation


def core_rate(numel=1 << 23):
    """Parameters that a core of this host steps on in a second of its time, by a fused AdamW."""
    torch.set_num_threads(1)
    p = nn.Parameter(torch.randn(numel))
    p.grad = torch.randn(numel)
    optimizer = torch.optim.AdamW([p], fused=True)

    times = []
    for _ in range(20):
        start = time.thread_time()  # what other programs take does not count
        optimizer.step()
        times.append(time.thread_time() - start)
    return numel / min(times)


def simulate(size, tokens, kind, rates):
    """Seconds of a steady step of one rank, by the order of work in `engine/offload.py`, and bytes
    on the device. Activations are inputs of checkpoints.
    """
    width, blocks = SIZES[size]
    block, vocabulary = 12 * width**2, VOCABULARY * width
    # embedding; blocks; head
    units = [vocabulary, *[block] * blocks, vocabulary]
    number = max(1, tokens // 8192)
    each = tokens // number
    # a forward is 2 operations a parameter and token, a backward 4; blocks are run again in it
    forward = [2 * each * (0 if u == 0 else n) / rates["flops"] for u, n in enumerate(units)]
    backward = [t * (3 if 0 < u <= blocks else 2) for u, t in enumerate(forward)]
    hosted, moves = kind != "none", kind in ("parameters", "parameters, activations")
    stored = 2 * each * width / rates["pcie"] if kind.endswith("activations") else 0.0
    step_of = [n / rates["step"] if hosted else 0.0 for n in units]
    # ends of: computing, copies to the device, to the host, reductions, the host's work
    now = up = down = reduced = worker = 0.0

    def load(unit, after, first=False):
        nonlocal up
        if moves or (hosted and first):
            up = max(up, after) + 2 * units[unit] / rates["pcie"]
            return up
        return after

    def reduce(unit, micro):
        nonlocal up, down, reduced
        if hosted:
            seconds, reduced = 4 * units[unit] / rates["pcie"], max(reduced, now)
            if micro > 0:  # earlier sums come to the device, to be added to
                up = reduced = max(up, reduced) + seconds
            down = reduced = max(down, reduced) + seconds

    begins = []
    for _ in range(4):  # the last is steady
        stepped = []
        for seconds in step_of:
            worker += seconds
            stepped.append(worker)
        begins.append(now)
        for micro in range(number):
            for unit, seconds in enumerate(forward):
                # the host issues nothing until the next unit's step is done, too
                ready = stepped[min(unit + 1, blocks + 1)] if micro == 0 else 0.0
                now = max(now, load(unit, max(ready, now - seconds), micro == 0)) + seconds
                down = max(down, now) + stored
            for unit, seconds in reversed(list(enumerate(backward))):
                up += stored
                ready = max(load(unit, now - seconds), up if stored else 0.0)
                if unit <= blocks:
                    reduce(unit + 1, micro)
                now = max(now, ready) + seconds
            reduce(0, micro)
        if hosted:  # the norm was computed on the device; as in most steps nothing is clipped
            now = worker = max(now, down)
        else:
            now += 28 * sum(units) / rates["device"]
    largest, total = max(units), sum(units)
    state = {"none": 18 * total, "optimizer": 2 * total}.get(kind, 0)  # none: autocast's, too
    state += (2 * 2 + 2 * 4) * largest
    saved = 2 * each * width * (2 if stored else blocks)
    inside = each * (34 * width + 6 * VOCABULARY)  # a block's, and scores with their gradient
    return (begins[-1] - begins[-2]), state + saved + inside


def simulation(options):
    """The lines of the table."""
    step = core_rate()
    rates = {
        "step": min(options.cores * step, options.dram * 1e9 / 28),  # bytes of a parameter's step
        "flops": options.tflops * 1e12,
        "pcie": options.pcie * 1e9,
        "device": options.device * 1e9,
    }
    yield (
        f"Measured here, a core: fused AdamW {step / 1e9:.2f} Gparam/s."
        f" Assumed: {options.cores} cores for the worker, their memory {options.dram:g} GB/s,"
        f" {options.tflops:g} TFLOP/s, PCIe {options.pcie:g} GB/s, the device's memory"
        f" {options.device:g} GB/s."
    )
    kinds = ["none", "optimizer", "parameters", "parameters, activations"]
    yield f"{'size':6}{'tokens':>8}  {'offload':26}{'tokens/s':>10}{'of none':>9}{'device GiB':>12}"
    for size in options.sizes:
        for tokens in options.tokens:
            alone, _ = simulate(size, tokens, "none", rates)
            for kind in kinds:
                seconds, nbytes = simulate(size, tokens, kind, rates)
                yield (
                    f"{size:6}{tokens:8}  {kind:26}{tokens / seconds:10.0f}"
                    f"{alone / seconds:9.2f}{nbytes / 2**30:12.1f}"
                )


def main():
    if sys.argv[1:2] == ["run"]:
        Path(sys.argv[3]).write_text(json.dumps(run(json.loads(sys.argv[2]))))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["gpu", "cpu", "simulate"])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1.5b", "3b", "7b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="in a step")
    parser.add_argument("--entries", nargs="+", default=[*ZERO3, *PEERS])
    parser.add_argument("--cores", type=int, default=8, help="that step, of the kind that is here")
    parser.add_argument("--dram", type=float, default=150.0, help="GB/s of the host's memory")
    parser.add_argument("--tflops", type=float, default=150.0)
    parser.add_argument("--pcie", type=float, default=24.0, help="GB/s each way")
    parser.add_argument("--device", type=float, default=1500.0, help="GB/s of its memory")
    options = parser.parse_args()
    name = {"gpu": "offload-gpu", "simulate": "offload-simulated"}.get(options.kind)
    with open(HERE / "results" / f"{name}.txt" if name else os.devnull, "a") as file:
        lines = simulation(options) if options.kind == "simulate" else measure(options)
        for line in chain([in_a_line()], lines, [""]):
            print(line, flush=True)
            print(line, file=file, flush=True)


if __name__ == "__main__":
    main()
