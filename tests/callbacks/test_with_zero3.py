"""The callbacks beside the strategy they were made for, on two ranks."""

import torch
from torch import nn

from helpers.ranks import run_ranks


def fit_with_all_callbacks(rank, world_size, report):
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    import lightning_zero3  # noqa: F401
    from lightning_zero3.callbacks import AllocatorConfig, CUDABackendConfig, CUDAMemoryTracker, StepTimer

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])

        def training_step(self, batch, batch_idx):
            return self.layers(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    def fit(callbacks):
        pl.seed_everything(3, verbose=False)
        data = TensorDataset(torch.randn(24, 32, generator=torch.Generator().manual_seed(0)))
        trainer = pl.Trainer(
            strategy="zero3",
            accelerator="cpu",
            devices=world_size,
            max_steps=5,
            logger=False,
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
        )
        model = Model()
        trainer.fit(model, DataLoader(data, 2))
        with trainer.strategy.gathered():
            weights = [p.detach().clone() for p in model.parameters()]
        return weights, trainer

    callbacks = [AllocatorConfig(expandable_segments=True), CUDABackendConfig(), CUDAMemoryTracker(report=report), StepTimer()]
    watched, trainer = fit(callbacks)
    plain, _ = fit([])
    return all(map(torch.equal, watched, plain)), trainer.strategy.memory_ledger(per_unit=True)


def test_callbacks_change_no_number_and_know_the_ledger(tmp_path):
    report = tmp_path / "memory.html"
    parameters = 4 * (32 * 32 + 32)
    for same, ledger in run_ranks(fit_with_all_callbacks, 2, str(report)):
        assert same
        # Half of everything, in fp32, and 16 bytes that keep a rank's share from being empty; Adam counts its steps in 4.
        assert ledger["parameters"] == ledger["gradients"] == 4 * parameters // 2 + 16
        assert ledger["optimizer_state"] == 2 * ledger["parameters"] + 4
        assert sum(ledger["units"].values()) == 4 * parameters
    assert "slots" in report.read_text(encoding="utf-8")
