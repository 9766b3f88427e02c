"""Tiny models and the data to train them: plain torch and plain Lightning, nothing of the package
under test.

One code trains on any number of processes: the batch of a step is fixed, and process r of n takes
part r of n parts. One process therefore takes the whole, "joined" batch, which is what the sharded
run is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric

VOCAB, WIDTH, LENGTH = 13, 10, 5  # sizes that no number of ranks divides
JOINED = 12  # samples of a step over all processes: divisible by 1, 2, 3 and 4


class Block(nn.Module):
    """Pre-norm residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TinyLm(nn.Module):
    """Embedding, a position parameter of its own, residual blocks, norm, head (tied to the
    embedding or not).
    """

    def __init__(self, depth: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, LENGTH] -> [batch, LENGTH, VOCAB]
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        scores = self(tokens).flatten(0, 1)
        return F.cross_entropy(
            scores.to(torch.promote_types(scores.dtype, torch.float32)), targets.flatten()
        )


class NormNet(nn.Module):
    """BatchNorm straight on the input, so that its statistics are those of the data; then a
    convolution with another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.input_norm = nn.BatchNorm1d(3)
        self.conv = nn.Conv1d(3, 5, 2, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:  # [batch, 3, 7] -> [batch, 1]
        return self.head(torch.tanh(self.norm(self.conv(torch.tanh(self.input_norm(x))))).mean(2))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)


def make(build: Callable[[], nn.Module], seed: int = 0) -> Any:
    """The same values whenever and wherever it is called."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def tokens(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Joined batches of tokens and next tokens, which follow a rule that can be learned up to one
    random bit.
    """
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(steps):
        columns = [torch.randint(VOCAB, (JOINED,), generator=generator)]
        for _ in range(LENGTH):
            columns.append(
                (2 * columns[-1] + torch.randint(2, (JOINED,), generator=generator)) % VOCAB
            )
        rows = torch.stack(columns, 1)
        batches.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    return batches


def signals(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Joined batches for :class:`NormNet`."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(JOINED, 3, 7, generator=generator) * 2 + 1,
            torch.randn(JOINED, 1, generator=generator),
        )
        for _ in range(steps)
    ]


def part(batch: tuple[Tensor, ...], rank: int, world_size: int) -> tuple[Tensor, ...]:
    """What process ``rank`` of ``world_size`` takes of a joined batch."""
    return tuple(t.chunk(world_size)[rank] for t in batch)


@dataclass
class Recipe:
    """How :class:`Lit` trains; every field is picklable, so that a test can send it to its
    ranks.
    """

    tied: bool = False
    net: str = "lm"
    optimizer: str = "sgd"
    decay_matrices: bool = False
    schedule: str | None = None
    frozen: tuple[str, ...] = ()  # prefixes of names
    pass_frozen: bool = True  # whether the optimizer gets them too
    steps: int = 5
    seed: int = 0


class Lit(pl.LightningModule):
    """An ordinary LightningModule that notes what happens to it: losses, gradients as they reach
    the optimizer.
    """

    def __init__(
        self, recipe: Recipe, full_gradients: Callable[[pl.LightningModule], dict[str, Tensor]]
    ) -> None:
        super().__init__()
        self.recipe = recipe
        self.net = make(
            (lambda: TinyLm(tied=recipe.tied)) if recipe.net == "lm" else NormNet, recipe.seed
        )
        self.full_gradients = full_gradients
        for name, p in self.net.named_parameters():
            if name.startswith(recipe.frozen) and recipe.frozen:
                p.requires_grad_(False)
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        self.gradients.append(self.full_gradients(self))
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        r = self.recipe
        chosen = [p for p in self.net.parameters() if p.requires_grad or r.pass_frozen]
        groups: Any = chosen
        if r.decay_matrices:
            groups = [
                {"params": [p for p in chosen if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in chosen if p.ndim < 2], "weight_decay": 0.0},
            ]
        if r.optimizer == "sgd":
            optimizer: Any = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        elif r.optimizer == "adam":
            optimizer = torch.optim.Adam(groups, lr=0.01)
        else:
            # The large eps keeps the update a smooth function of the gradient: with 1e-8, elements
            # whose gradient is zero up to rounding move by lr * (+-1), and two correct runs would
            # differ by that.
            optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-2)
        if r.schedule == "step":
            scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        elif r.schedule == "one_cycle":  # changes momentum too
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=r.steps + 1)
        elif r.schedule == "epoch":
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]
        else:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _loader(self) -> DataLoader:
        batches = (tokens if self.recipe.net == "lm" else signals)(self.recipe.steps)
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        return DataLoader([part(b, rank, world_size) for b in batches], batch_size=None)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


class ForceField(pl.LightningModule):
    """Its forces are derivatives, in evaluation too; batches are of shape [samples, 6]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.mean, self.all = MeanMetric(), CatMetric()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            energy = self.net(x).square().sum(1)
            (force,) = torch.autograd.grad(energy.sum(), x)
        return energy.detach(), force.norm(dim=1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Log in every way: four values of each loader, one of the first, and one of the epoch."""
        if isinstance(batch, list):  # of a combined loader
            batch = batch[0]
        energy, force = self(batch)
        self.mean.update(force)
        self.all.update(energy)
        log = {"sync_dist": True, "batch_size": len(batch), "add_dataloader_idx": True}
        self.log("force", force.mean(), **log)
        self.log("double", energy.double().mean(), **log)
        self.log("sum", energy.sum(), reduce_fx="sum", **log)
        self.log("max", energy.max(), reduce_fx="max", **log)
        if dataloader_idx == 0:
            self.log("metric", self.mean)
        return energy

    def on_validation_epoch_end(self) -> None:
        self.log("epoch", self.all.compute().sum(), sync_dist=True)
        self.all.reset()

    test_step, on_test_epoch_end = validation_step, on_validation_epoch_end

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch)[1]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)
