"""Training runs that save and resume, for any strategy."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from helpers.models import Lit, Recipe
from helpers.parity import full_state, trainer, zero3
from lightning_zero3.strategies.state_dicts.gather import gather_on_rank_zero


def no_gradients(module):
    return {}


class Whole(Lit):
    """With what makes checkpoints hard: a scalar parameter, a transposed and an empty one, a
    buffer, one without gradients.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe, no_gradients)
        generator = torch.Generator().manual_seed(5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        # [13, 7], not contiguous
        self.across = nn.Parameter(torch.randn(7, 13, generator=generator).t() / 4)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.spare = nn.Linear(5, 3)
        with torch.no_grad():
            self.spare.weight.fill_(0.5)
            self.spare.bias.zero_()
        self.register_buffer("seen", torch.zeros(2))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen += torch.tensor([1.0, batch_idx])
        extra = (self.scale * self.across).square().mean()
        if self.current_epoch == 1:  # the spare layer has no optimizer state until then
            extra = extra + self.spare(torch.ones(2, 5)).square().mean()
        self.losses[-1] += extra.item()
        return loss + extra

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        if self.recipe.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Watch(Callback):
    """Notes weights, optimizer state and torch's random state when training starts."""

    weights = None

    def on_train_epoch_start(self, trainer, module):
        if self.weights is not None:
            return
        self.weights, self.optimizers, self.random = (
            full_weights(trainer),
            optimizer_states(trainer),
            torch.get_rng_state(),
        )


def full_weights(runner) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in full_state(runner).items()}


def optimizer_states(runner) -> list[dict[str, Any]]:
    states = [runner.strategy.optimizer_state(optimizer) for optimizer in runner.optimizers]
    return gather_on_rank_zero(states, runner.global_rank)


@dataclass
class Result:
    losses: list[float]
    weights: dict[str, Tensor]  # at the end, full
    optimizers: list[Any]
    random: Tensor  # at the end
    steps: int
    start: dict[str, Any] = field(default_factory=dict)


def train(world_size, module, until, read=None, write=None, strategy=None, **options) -> Result:
    """Until the end of epoch ``until``, from a checkpoint or not, and into one or not."""
    watch = Watch()
    callbacks = [watch, *options.pop("callbacks", [])]
    runner = trainer(
        zero3() if strategy is None else strategy,
        world_size,
        max_epochs=until,
        callbacks=callbacks,
        **options,
    )
    runner.fit(module, ckpt_path=read)
    for path in [write] if isinstance(write, str) else write or []:
        runner.save_checkpoint(path)
    start = {"weights": watch.weights, "optimizers": watch.optimizers, "random": watch.random}
    return Result(
        module.losses,
        full_weights(runner),
        optimizer_states(runner),
        torch.get_rng_state(),
        runner.global_step,
        start,
    )


class Shuffled(LightningModule):
    """Shuffled data, dropout, gradients that do not vanish: only an exact resume repeats what an
    uninterrupted run does.
    """

    def __init__(self, samples: int = 48) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(
            nn.Linear(6, 16),
            nn.Tanh(),
            nn.Dropout(0.2),
            nn.Linear(16, 16),
            nn.Tanh(),
            nn.Linear(16, 1),
        )
        self.samples, self.losses = samples, []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(4)
        x = torch.randn(self.samples, 6, generator=generator)
        return DataLoader(
            TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=4, shuffle=True
        )

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def flip(file: Path, position: int | None = None) -> None:
    """Change a bit."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1
    file.write_bytes(content)
