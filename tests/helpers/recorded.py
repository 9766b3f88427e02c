"""A training run that writes down everything Lightning promises about it."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.profilers import Profiler
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_zero3.callbacks import CUDAGraphStep

DEVICE = "cpu"  # where `fit` trains; the fixture `device` of tests/graphs sets it
SAMPLES, WIDTH, CLASSES = 44, 12, 5  # eleven batches of 4; ragged with batches of 8


class Net(pl.LightningModule):
    """Dropout, running statistics, a frozen and an unused layer, a metric, and logging of all
    kinds.
    """

    def __init__(
        self,
        batch_size: int = 4,
        scheduled: bool = False,
        optimizer: str = "adamw",
        checkpointed: bool = False,
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.batch_size, self.scheduled, self.optimizer = batch_size, scheduled, optimizer
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(16, 16),
            nn.GELU(),
        )
        self.frozen, self.unused = nn.Linear(16, 16).requires_grad_(False), nn.Linear(3, 3)
        self.head = nn.Linear(16, CLASSES)
        self.mean = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:  # [batch, WIDTH] -> [batch, CLASSES]
        if self.checkpointed:  # dropout in both
            hidden = checkpoint(
                self.net, nn.functional.dropout(x, 0.1, self.training), use_reentrant=False
            )
            return checkpoint(
                lambda h: self.head(self.net[3](self.frozen(h))), hidden, use_reentrant=False
            )
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

    def on_train_batch_end(
        self, outputs: dict[str, Tensor], batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        self.mean(outputs["loss"])
        self.log("mean", self.mean, on_step=True, on_epoch=True)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("validation", nn.functional.cross_entropy(self(batch["x"]), batch["y"]))

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            optimizer: Any = torch.optim.SGD(
                self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1
            )
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
        return DataLoader(
            data, batch_size=self.batch_size, shuffle=shuffle, generator=order, collate_fn=_as_dict
        )

    def train_dataloader(self) -> DataLoader:
        return self._loader(1, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(2, shuffle=False)


def _as_dict(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}


def half() -> list[MixedPrecision]:
    """Plugins of a run whose first steps overflow, and are skipped; later ones are again when the
    scale has grown.
    """
    return [
        MixedPrecision(
            "16-mixed", DEVICE, torch.amp.GradScaler(DEVICE, init_scale=2.0**20, growth_interval=3)
        )
    ]


class Calls(Profiler):
    """Counts the calls of hooks, of the strategy, and of callbacks, other than those
    ``without``.
    """

    def __init__(self, without: list[Callback]) -> None:
        super().__init__()
        self._without = tuple(f"[Callback]{callback.state_key}." for callback in without)
        self.counts: Counter[str] = Counter()

    def start(self, action_name: str) -> None:
        if not action_name.startswith(self._without):
            self.counts[action_name] += 1

    def stop(self, action_name: str) -> None:
        pass


class Counting(CUDAGraphStep):
    """Keeps the figures of its last run."""

    def on_train_end(self, trainer, pl_module):
        step = self._runner.step
        for name in ("steps", "verified", "replays", "recaptures"):
            setattr(self, name, getattr(step, name, 0))  # 0 where nothing may be captured
        self.captured = 0 if step is None else len(step.graphs)
        super().on_train_end(trainer, pl_module)


class Frees(Callback):
    """Other work on the device between replays, which may not touch their memory."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        torch.cuda.empty_cache()
        torch.full((1 << 20,), float("nan"), device=pl_module.device)


class Recorder(Callback):
    """Sees the run as any callback does."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def _note(self, what: str, value: Any) -> None:
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
        if module.device.type == "cuda":  # where dropout draws
            self._note("random state of the device", torch.cuda.get_rng_state(module.device))
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
        self.seen, self.calls, self.trainer, self.module = (
            recorder.seen,
            trainer.profiler.counts,
            trainer,
            module,
        )
        self._keep_state()

    def go_on(self, max_epochs: int) -> None:
        """Fit the same module with the same trainer once more."""
        self.trainer.fit_loop.max_epochs = max_epochs
        self.trainer.fit(self.module)
        self._keep_state()

    def _keep_state(self) -> None:
        strategy = self.trainer.strategy
        with strategy.gathered() if hasattr(strategy, "gathered") else nullcontext():
            self.state = _copy(self.module.state_dict())


def fit(
    module: pl.LightningModule | None = None,
    *callbacks: Callback,
    ckpt_path: str | None = None,
    **options: Any,
) -> Run:
    """Train, always from the same seed; an option that is a function is called for its value."""
    options = {name: value() if callable(value) else value for name, value in options.items()}
    torch.manual_seed(11)
    module = Net() if module is None else module
    torch.manual_seed(12)
    for layer in module.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    recorder = Recorder()
    quiet = {
        "accelerator": DEVICE,
        "devices": 1,
        "max_epochs": 2,
        "profiler": Calls(
            [callback for callback in callbacks if isinstance(callback, CUDAGraphStep)]
        ),
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
    assert len(reference.seen) > 20 and len(reference.calls) > 40
    assert mine.calls == reference.calls
    assert_same(mine.seen, reference.seen, "seen")
    assert_same(mine.state, reference.state, "state")
