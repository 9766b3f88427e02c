"""Offload under the Trainer: every number as without it, on the same kernels."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader

from checkpoints.runs import full_weights
from helpers.models import TinyLm, make, tokens
from helpers.parity import trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions, Zero3Strategy
from lightning_zero3.callbacks import CUDAGraphStep


class Lit(pl.LightningModule):
    def __init__(self, optimizer="adamw"):
        super().__init__()
        self.net, self.optimizer, self.losses = make(TinyLm), optimizer, []
        self.net.position.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        loss = self.net.loss(batch)
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self):
        pairs = [(x, y) for xs, ys in tokens(6) for x, y in zip(xs, ys, strict=True)]
        return DataLoader(pairs, batch_size=2)

    def configure_optimizers(self):
        weights = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer == "lbfgs":
            return torch.optim.LBFGS(weights)
        if self.optimizer == "muon":  # steps on whole parameters
            return torch.optim.Muon([p for p in weights if p.dim() == 2], lr=0.01)
        optimizer = torch.optim.AdamW(weights, lr=0.01, fused=True)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


SETTINGS = {
    "clipped": {"gradient_clip_val": 0.1},
    "accumulated": {"accumulate_grad_batches": 3},
    "averaged": {"callbacks": lambda: [EMAWeightAveraging(decay=0.7)]},
    "bfloat16": {"precision": "bf16-mixed", "gradient_clip_val": 0.1},
    "true bfloat16": {"precision": "bf16-true"},
    "whole parameters": {"optimizer": "muon"},
    "once": {"accumulate_grad_batches": 3, "reduce_once": True},
}


class Save(pl.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 2 and not trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(self.path)
            self.position = len(module.losses)


def fit(world_size, name, offload, save=None, ckpt_path=None):
    options = {k: v() if callable(v) else v for k, v in SETTINGS[name].items()}
    module = Lit(options.pop("optimizer", "adamw"))
    strategy = zero3(
        offload=offload,
        reduce_once=options.pop("reduce_once", False),
        checkpoint=CheckpointOptions(),
    )
    options |= {"max_steps": 4, "max_epochs": -1, "use_distributed_sampler": True}
    options["callbacks"] = [*options.get("callbacks", []), *([save] if save else [])]
    runner = trainer(strategy, world_size, **options)
    runner.fit(module, ckpt_path=ckpt_path)
    return module.losses, full_weights(runner)


def train(rank, world_size, folder, name):
    """Losses and weights of the run without offload; of one with it, and resumed in the middle."""
    expected = fit(world_size, name, None)
    found = {}
    for offload in ("optimizer", "parameters", "2000"):
        save = Save(f"{folder}/{name} {offload}.ckpt")
        losses, weights = fit(world_size, name, offload, save)
        found[offload] = losses, weights
        # what one kind saves another loads
        other = {"optimizer": "parameters", "parameters": None, "2000": "optimizer"}[offload]
        after, resumed = fit(world_size, name, other, ckpt_path=save.path)
        found[f"{offload} resumed"] = losses[: save.position] + after, resumed
    return expected, found


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.variant), 2])
def test_every_number_as_without(world_size, name, tmp_path):
    if world_size == 1 and name == "once":
        pytest.skip("one rank reduces nothing")
    for (losses, weights), found in run_ranks(train, world_size, str(tmp_path), name, timeout=150):
        assert losses[0] != losses[-1]
        for case, (its, there) in found.items():
            assert its == losses, case
            assert there.keys() == weights.keys()
            for key, value in weights.items():
                assert torch.equal(there[key], value), (case, key)


@pytest.mark.parametrize("value", ["cpu", "20 elephants", True, -1, ""])
def test_what_is_no_kind_and_no_size(value):
    with pytest.raises(ValueError, match="is none of None, 'optimizer', 'parameters'"):
        Zero3Strategy(offload=value)


def refused(rank, world_size):
    with pytest.raises(ValueError, match="LBFGS .* works without `offload`"):
        trainer(zero3(offload="optimizer"), world_size).fit(Lit("lbfgs"))
    graphs = CUDAGraphStep(software=True)
    with pytest.raises(ValueError, match="a captured step cannot wait for the host"):
        trainer(zero3(offload="optimizer"), world_size, callbacks=[graphs]).fit(Lit())


def test_what_needs_the_device_is_refused():
    run_ranks(refused, 1, timeout=60)
