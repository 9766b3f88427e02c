"""All callbacks together, from YAML, on one device, with DDP, FSDP2 and zero3: they see everything
and change nothing.
"""

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero3  # noqa: F401  (registers the strategy)
from helpers.ranks import run_ranks
from lightning_zero3.callbacks import CUDAMemoryTracker

STATE = 4 * (32 * 32 + 32)  # parameters
YAML = """
seed_everything: 3
trainer:
  accelerator: cpu
  devices: {devices}
  strategy: {strategy}
  max_steps: 5
  log_every_n_steps: 1
  logger: {{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {{save_dir: {folder}, flush_logs_every_n_steps: 1}}}}
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks: {callbacks}
"""
CALLBACKS = """
    - class_path: lightning_zero3.callbacks.AllocatorConfig
      init_args: {{expandable_segments: true}}
    - class_path: lightning_zero3.callbacks.CUDABackendConfig
      init_args: {{launch_blocking: false}}
    - class_path: lightning_zero3.callbacks.CUDAMemoryTracker
      init_args: {{report: {folder}/memory.html, report_png: true}}
    - class_path: lightning_zero3.callbacks.StepTimer
"""
FSDP2 = (
    "{class_path: ModelParallelStrategy, init_args: {data_parallel_size: 2,"
    " tensor_parallel_size: 1}}"
)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])

    def configure_model(self):
        if (
            self.trainer is not None
            and type(self.trainer.strategy).__name__ == "ModelParallelStrategy"
        ):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Weights(Callback):
    """The weights that this rank holds at the end, whole ones with zero3."""

    def on_train_end(self, trainer, pl_module):
        whole = getattr(trainer.strategy, "gathered", None)
        if whole is not None:
            with whole():
                self.seen = [parameter.detach().clone() for parameter in pl_module.parameters()]
        else:
            local = [
                getattr(parameter, "_local_tensor", parameter)
                for parameter in pl_module.parameters()
            ]
            self.seen = [parameter.detach().clone() for parameter in local]


def fit(folder, strategy, devices, callbacks):
    config = folder / "config.yaml"
    config.write_text(
        YAML.format(
            folder=folder,
            strategy=strategy,
            devices=devices,
            callbacks=callbacks.format(folder=folder),
        )
    )
    weights = Weights()
    trainer_defaults = {"callbacks": [weights]}
    cli = LightningCLI(
        Model,
        run=False,
        args=["--config", str(config)],
        trainer_defaults=trainer_defaults,
        save_config_callback=None,
    )
    data = TensorDataset(torch.randn(24, 32, generator=torch.Generator().manual_seed(0)))
    cli.trainer.fit(cli.model, DataLoader(data, 2))
    return weights.seen, cli.trainer


def case(rank, world_size, strategies, folder):
    results = []
    for number, strategy in enumerate(strategies):
        mine = folder / f"{number}-{rank}"
        mine.mkdir()
        watched, trainer = fit(mine, strategy, world_size, CALLBACKS)
        tracker = next(
            callback for callback in trainer.callbacks if isinstance(callback, CUDAMemoryTracker)
        )
        ledger = trainer.strategy.memory_ledger(per_unit=True) if strategy == "zero3" else None
        plain, _ = fit(mine, strategy, world_size, "[]")
        metrics = set(trainer.logger.experiment.metrics_keys) if rank == 0 else set()
        results.append(
            (
                [torch.equal(*pair) for pair in zip(watched, plain, strict=True)],
                metrics,
                tracker.run_spreads,
                ledger,
            )
        )
    return results


def check(results, folder, world_size):
    for rank, per_strategy in enumerate(results):
        for number, (same, metrics, figures, _) in enumerate(per_strategy):
            assert same and all(same)
            assert figures["memory/peak_gib"].high >= figures["memory/peak_gib"].low > 0
            if rank == 0:
                assert {
                    "memory/peak_gib",
                    "memory/parameters_gib",
                    "time/step_ms",
                    "time/forward_ms",
                } <= metrics
                assert ("memory/peak_gib/max_rank" in metrics) == (world_size > 1)
                page = (folder / f"{number}-0" / "memory.html").read_text(encoding="utf-8")
                assert page.count(">rank ") == world_size
                assert (folder / f"{number}-0" / "memory.png").stat().st_size > 10_000


def test_a_single_device(tmp_path):
    check([case(0, 1, ["auto"], tmp_path)], tmp_path, 1)


def test_ddp_fsdp2_and_zero3(tmp_path):
    results = run_ranks(case, 2, ["ddp", FSDP2, "zero3"], tmp_path)
    check(results, tmp_path, 2)
    for rank, (ddp, fsdp2, zero3) in enumerate(results):
        parameters = [
            figures["memory/parameters_gib"].high * 2**30
            for _, _, figures, _ in (ddp, fsdp2, zero3)
        ]
        ledger = zero3[3]
        # Half of everything, in fp32; Adam counts the steps of each of eight parameters in 4 bytes.
        assert ledger["parameters"] == ledger["gradients"] == 4 * STATE // 2
        assert ledger["optimizer_state"] == 2 * ledger["parameters"] + 8 * 4
        assert sum(ledger["units"].values()) == 4 * (4 * STATE // 2) + 8 * 4
        assert parameters == [
            pytest.approx(4 * STATE),
            pytest.approx(2 * STATE),
            ledger["parameters"],
        ], rank
