"""Time of a training step, eager and as a CUDA graph.

    python benchmarks/graph_step.py   # needs a GPU; prints a table in Markdown, with versions

Every way trains the same GPT in the same process, turn by turn, so that a busy machine slows all
alike: the median and the spread of the turns are printed. Ways: Lightning on one device and `zero3`
on one rank, eager and with `CUDAGraphStep`; `torch.compile(mode="reduce-overhead")`; and FSDP2,
captured in a bare loop by hand. The last column is what looking for changes costs the host before
each replay, a part of the step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from about import in_a_line
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_zero3 import Zero3Strategy
from lightning_zero3.callbacks import CUDAGraphStep
from lightning_zero3.callbacks.graphs.fingerprint import Fingerprint

SIZES = {"small": (12, 256, 128, 4), "large": (16, 2048, 1024, 8)}  # layers, width, tokens, batch
VOCABULARY, WARMUP = 8192, 20


class Gpt(LightningModule):
    """Blocks of torch's own transformer layer over an embedding."""

    def __init__(self, layers: int, width: int, compiled: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)
        self.compiled = compiled

    def loss(self, tokens: Tensor) -> Tensor:  # [batch, length] -> []
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_model(self) -> None:
        if self.compiled and not hasattr(self, "_done"):
            self.loss, self._done = torch.compile(self.loss, mode="reduce-overhead"), True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Stopwatch(Callback):
    """Seconds of each step after the warm-up, from the device's own clock."""

    def __init__(self) -> None:
        self.marks: list[torch.cuda.Event] = []

    def on_train_batch_end(self, *_: object) -> None:
        self.marks.append(torch.cuda.Event(enable_timing=True))
        self.marks[-1].record()

    def milliseconds(self) -> float:
        """Median of a step."""
        torch.cuda.synchronize()
        marks = self.marks[WARMUP:]
        return statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False))


class Figures(Callback):
    """Of a captured run: memory of the graphs, and how long the host looks for changes before each
    replay.
    """

    def __init__(self, graphs: CUDAGraphStep) -> None:
        self.graphs, self.pool, self.looks = graphs, "", list[int]()
        self.real = Fingerprint.changes

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def changes(fingerprint: Fingerprint) -> list[str]:
            start = time.perf_counter_ns()
            found = self.real(fingerprint)
            self.looks.append(time.perf_counter_ns() - start)
            return found

        Fingerprint.changes = changes  # type: ignore[method-assign]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Fingerprint.changes = self.real  # type: ignore[method-assign]
        pools = self.graphs._runner.graphs.pools
        segments = [each for pool in pools for each in torch.cuda.memory_snapshot(pool)]
        self.pool = f"{sum(each['total_size'] for each in segments) / 2**20:.0f} MiB"

    def texts(self) -> tuple[str, str]:
        """Memory, and microseconds in the median."""
        return self.pool, f"{statistics.median(self.looks) / 1000:.0f}" if self.looks else ""


# ms of a step; of captured runs the pool, and microseconds of a look for changes
Found = tuple[float, str, str]


def lightning_way(
    strategy: str, captured: bool, compiled: bool = False
) -> Callable[[str, int], Found]:
    def run(size: str, steps: int) -> Found:
        layers, width, length, batch = SIZES[size]
        module, watch, graphs = (
            Gpt(layers, width, compiled),
            Stopwatch(),
            CUDAGraphStep(strict=True),
        )
        figures = Figures(graphs)
        tokens = list(torch.randint(VOCABULARY, (steps + WARMUP, batch, length)).pin_memory())
        trainer = Trainer(
            accelerator="gpu",
            devices=1,
            strategy=Zero3Strategy() if strategy == "zero3" else "auto",
            precision="bf16-mixed",
            max_epochs=1,
            callbacks=[watch, *([graphs, figures] if captured else [])],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(tokens, batch_size=None))
        return watch.milliseconds(), *figures.texts()

    return run


def fsdp2_way(size: str, steps: int) -> Found:
    """FSDP2's forward and backward in one graph, without Lightning."""
    layers, width, length, batch = SIZES[size]
    model = Gpt(layers, width).cuda()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(VOCABULARY, (batch, length), device="cuda")
    stream, graph, marks = torch.cuda.Stream(), torch.cuda.CUDAGraph(), []
    with torch.cuda.stream(stream):
        for step in range(WARMUP + steps):
            if step == WARMUP // 2:
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    _bf16_step(model, tokens)
            _bf16_step(model, tokens) if step < WARMUP // 2 else graph.replay()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
    torch.cuda.synchronize()
    return (
        statistics.median(
            a.elapsed_time(b) for a, b in zip(marks[WARMUP:], marks[WARMUP + 1 :], strict=False)
        ),
        "",
        "",
    )


def _bf16_step(model: nn.Module, tokens: Tensor) -> None:
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        loss = model(tokens)
    loss.backward()


WAYS: dict[str, Callable[[str, int], Found]] = {
    "one device, eager": lightning_way("auto", captured=False),
    "one device, captured": lightning_way("auto", captured=True),
    "one device, compiled (reduce-overhead)": lightning_way("auto", captured=False, compiled=True),
    "zero3, eager": lightning_way("zero3", captured=False),
    "zero3, captured": lightning_way("zero3", captured=True),
    "FSDP2, captured, bare loop": fsdp2_way,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    arguments = parser.parse_args()
    Gpt.forward = Gpt.loss  # type: ignore[method-assign]  # FSDP2 hooks the call of a module
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29533",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }.items():
        os.environ.setdefault(name, value)
    print(f"{in_a_line()}; ms of a step, bf16\n")
    print(
        "| model | way | median | turns | graph pool | `Fingerprint.changes()`, µs"
        " |\n|---|---|---|---|---|---|"
    )
    for size in arguments.sizes:
        results: dict[str, list[Found]] = {name: [] for name in WAYS}
        for _ in range(arguments.turns):
            for name, way in WAYS.items():
                if way is fsdp2_way and not dist.is_initialized():
                    dist.init_process_group("nccl")
                torch.manual_seed(0)
                results[name].append(way(size, arguments.steps))
                if dist.is_initialized():
                    dist.destroy_process_group()
                torch.cuda.empty_cache()
                time.sleep(1)
        for name, found in results.items():
            times = [t for t, *_ in found]
            turns = " ".join(f"{t:.2f}" for t in times)
            print(
                f"| {size} | {name} | {statistics.median(times):.2f} | {turns} |"
                f" {' | '.join(found[-1][1:])} |"
            )


if __name__ == "__main__":
    main()
