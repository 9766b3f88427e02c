"""Find a leak and a fragmented heap with `CUDAMemoryTracker`.

    python examples/find_memory.py            # on a CPU or a GPU, below a minute
    python examples/find_memory.py --healthy  # the same model without the two faults

Two faults are planted. The model keeps every loss it has seen, each with a tensor of its own, in a
list called `history`: a leak. And before training it makes many small tensors and drops every
second one, so that much memory is free, in pieces too small for anything else: fragmentation. The
tracker names the first with the attribute that holds it, shows the second in one figure, and writes
a page with the rest to examples/output/find_memory/memory.html.
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero3.callbacks import AllocatorConfig, CUDAMemoryTracker

OUTPUT = Path(__file__).resolve().parent / "output" / "find_memory"
WIDTH = 256
STEPS = 400
# small enough for the heap, or for the allocator's shared segments
PIECES, PIECE_BYTES = (
    8000,
    48 * 1024,
)


class Faulty(LightningModule):
    """A small network that remembers too much."""

    def __init__(self, healthy: bool) -> None:
        super().__init__()
        self.network = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.healthy = healthy
        self.history: list[Tensor] = []
        self.pieces: list[Tensor] = []

    def on_fit_start(self) -> None:
        """Every second piece is dropped; the others keep the memory around them from being
        reused.
        """
        if not self.healthy:
            pieces = [
                torch.zeros(PIECE_BYTES, dtype=torch.uint8, device=self.device)
                for _ in range(PIECES)
            ]
            self.pieces = pieces[::2]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The mean square of the output."""
        output = self.network(batch[0])
        if not self.healthy:
            self.history.append(output.detach().repeat(8, 1))
        return output.pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters())


def find(healthy: bool, steps: int = STEPS, output: Path = OUTPUT) -> CUDAMemoryTracker:
    """Train and return the tracker, which knows what was found."""
    # A hunt may cost time: by default the tracker takes below 1% of it.
    tracker = CUDAMemoryTracker(
        report=str(output / "memory.html"), leak_window=5, leak_growth_mib=4, time_share=0.4
    )
    allocator = AllocatorConfig()
    trainer = Trainer(
        max_steps=steps,
        accelerator="auto",
        devices=1,
        callbacks=[tracker, allocator],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Faulty(healthy), DataLoader(TensorDataset(torch.randn(64 * 50, WIDTH)), batch_size=64)
    )
    print("\nLeaks:", *(tracker.leaks or ["none"]), sep="\n  ")
    fragmentation = tracker.run_spreads["memory/fragmentation"].high
    print(f"Fragmentation: {fragmentation:.0%} of the memory taken is free in pieces")
    print(
        "Allocator options that would help:", *allocator.suggest(tracker.run_figures()), sep="\n  "
    )
    print(f"Report: {output / 'memory.html'}")
    return tracker


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Find a planted leak and a planted fragmentation.")
    parser.add_argument("--healthy", action="store_true", help="leave the two faults out")
    find(parser.parse_args().healthy)
