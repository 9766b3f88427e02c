"""A training run that writes down everything Lightning promises about it."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, WIDTH, CLASSES = 44, 12, 5  # eleven batches of 4; ragged with batches of 8


class Net(pl.LightningModule):
    """Dropout, running statistics, a frozen and an unused layer, and logging of all kinds."""

    def __init__(
        self, batch_size: int = 4, scheduled: bool = False, optimizer: str = "adamw", checkpointed: bool = False
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.batch_size, self.scheduled, self.optimizer = batch_size, scheduled, optimizer
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.GELU()
        )
        self.frozen, self.unused = nn.Linear(16, 16).requires_grad_(False), nn.Linear(3, 3)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # [batch, WIDTH] -> [batch, CLASSES]
        if self.checkpointed:  # dropout in both
            hidden = checkpoint(self.net, nn.functional.dropout(x, 0.1, self.training), use_reentrant=False)
            return checkpoint(lambda h: self.head(self.net[3](self.frozen(h))), hidden, use_reentrant=True)
        return self.head(self.frozen(self.net(x)))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        scores = self(batch["x"])
        loss = nn.functional.cross_entropy(scores, batch["y"])
        accuracy = (scores.argmax(1) == batch["y"]).float().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"accuracy": accuracy, "constant": 0.5}, on_step=False, on_epoch=True)
        self.log("highest", scores.detach().max(), on_epoch=True, reduce_fx="max")
        self.log("weighted", loss.detach() * 2, on_step=False, on_epoch=True, batch_size=3)
        return {"loss": loss, "scores": scores}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("validation", nn.functional.cross_entropy(self(batch["x"]), batch["y"]))

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            optimizer: Any = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)
        if not self.scheduled:
            return optimizer
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=200)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def _loader(self, seed: int, shuffle: bool) -> DataLoader:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(SAMPLES, WIDTH, generator=generator)
        data = TensorDataset(x, torch.randint(CLASSES, (SAMPLES,), generator=generator))
        order = torch.Generator().manual_seed(3) if shuffle else None
        return DataLoader(data, batch_size=self.batch_size, shuffle=shuffle, generator=order, collate_fn=_as_dict)

    def train_dataloader(self) -> DataLoader:
        return self._loader(1, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(2, shuffle=False)


def _as_dict(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}


class Recorder(Callback):
    """Sees the run as any callback does."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.calls: Counter[str] = Counter()

    def _note(self, what: str, value: Any = None) -> None:
        self.calls[what] += 1
        if value is not None:
            self.seen.append((what, _copy(value)))

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self._note("batch", batch)

    def on_before_zero_grad(self, trainer, module, optimizer):
        self._note("gradients before zero_grad", _gradients(module))

    def on_before_backward(self, trainer, module, loss):
        self._note("loss before backward", loss)

    def on_after_backward(self, trainer, module):
        self._note("gradients after backward", _gradients(module))

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self._note("gradients before the step", _gradients(module))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self._note("outputs", outputs)
        self._note("logged", dict(trainer.logged_metrics))
        self._note("progress bar", dict(trainer.progress_bar_metrics))
        self._note("rate", [group["lr"] for group in trainer.optimizers[0].param_groups])

    def on_validation_end(self, trainer, module):
        self._note("validation", dict(trainer.callback_metrics))

    def on_train_epoch_end(self, trainer, module):
        self._note("epoch", dict(trainer.callback_metrics))

    def on_train_end(self, trainer, module):
        self._note("counters", _plain(trainer.fit_loop.state_dict()))
        self._note("global step", trainer.global_step)
        self._note("random state", torch.get_rng_state())
        self._note("optimizer", trainer.optimizers[0].state_dict())


def _gradients(module: pl.LightningModule) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


def _plain(value: Any) -> Any:
    """Counters alone: a fit loop's state also holds those of its loaders."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if not k.startswith("combined_loader")}
    return value


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(v) for v in value]
    return value


class Run:
    """What :func:`fit` gives back."""

    def __init__(self, module: pl.LightningModule, trainer: pl.Trainer, recorder: Recorder) -> None:
        self.seen, self.calls, self.trainer, self.module = recorder.seen, recorder.calls, trainer, module
        strategy = trainer.strategy
        with strategy.gathered() if hasattr(strategy, "gathered") else nullcontext():
            self.state = _copy(module.state_dict())


def fit(module: pl.LightningModule | None = None, *callbacks: Callback, ckpt_path: str | None = None, **options: Any) -> Run:
    """Train on the CPU, always from the same seed; an option that is a function is called for its value."""
    options = {name: value() if callable(value) else value for name, value in options.items()}
    torch.manual_seed(11)
    module = Net() if module is None else module
    torch.manual_seed(12)
    for layer in module.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    recorder = Recorder()
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": DummyLogger(),
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 1,
    }
    trainer = pl.Trainer(callbacks=[*callbacks, recorder], **{**quiet, **options})
    trainer.fit(module, ckpt_path=ckpt_path)
    return Run(module, trainer, recorder)


def assert_same(mine: Any, reference: Any, where: str = "") -> None:
    """Bitwise, whatever it is."""
    assert type(mine) is type(reference), f"{where}: {type(mine)} {type(reference)}"
    if isinstance(reference, Tensor):
        assert mine.dtype == reference.dtype and mine.shape == reference.shape, where
        same = (mine == reference) | ((mine != mine) & (reference != reference))  # NaN is NaN
        assert same.all(), f"{where}: {(mine.double() - reference.double()).abs().max():.3g} apart"
    elif isinstance(reference, dict):
        assert list(mine) == list(reference), f"{where}: {list(mine)} {list(reference)}"
        for key, value in reference.items():
            assert_same(mine[key], value, f"{where}.{key}")
    elif isinstance(reference, list | tuple):
        assert len(mine) == len(reference), f"{where}: {len(mine)} {len(reference)}"
        for k, value in enumerate(reference):
            assert_same(mine[k], value, f"{where}[{k}]")
    else:
        assert mine == reference, f"{where}: {mine} {reference}"


def assert_same_run(mine: Run, reference: Run) -> None:
    """Everything that was seen, in its order, how often each hook ran, and the final state."""
    assert len(reference.seen) > 20
    assert mine.calls == reference.calls
    assert_same(mine.seen, reference.seen, "seen")
    assert_same(mine.state, reference.state, "state")
