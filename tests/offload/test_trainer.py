"""Offload under the Trainer: every number as without it, on the same kernels."""

import io
from contextlib import redirect_stderr
from pathlib import Path
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader

from checkpoints.runs import full_weights
from helpers.models import TinyLm, make, tokens
from helpers.parity import trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import Zero3Strategy
from lightning_zero3.callbacks import CUDAGraphStep
from lightning_zero3.strategies import activations


class Lit(pl.LightningModule):
    def __init__(self, optimizer="adamw", overflows=()):
        super().__init__()
        self.net, self.optimizer, self.losses = make(TinyLm), optimizer, []
        self.backbone, self.overflows = self.net.blocks, overflows
        self.net.position.requires_grad_(False)
        self.automatic_optimization = optimizer != "several"

    def on_train_batch_start(self, batch, batch_idx):
        if self.optimizer == "added" and batch_idx == 2:
            self.net.position.requires_grad_(True)
            self.optimizers().add_param_group({"params": [self.net.position], "lr": 0.05})

    def training_step(self, batch, batch_idx):
        loss = self.net.loss(batch)
        self.losses.append(loss.item())
        if batch_idx in self.overflows:
            loss = loss + 1e36 * self.net.head.weight[0, 0]
        if not self.automatic_optimization:
            first, second = self.optimizers()
            self.manual_backward(loss)
            first.step()
            first.zero_grad()
            if batch_idx % 2:  # of two backwards
                self.clip_gradients(second, 0.1, "norm")
                second.step()
                second.zero_grad()
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
        if self.optimizer == "several":
            inside = list(self.net.blocks.parameters())
            outside = [p for p in weights if all(p is not each for each in inside)]
            return [
                torch.optim.SGD(outside, lr=0.1, momentum=0.9, fused=True),
                torch.optim.Adam(inside, lr=0.01, fused=True),
            ]
        groups = [
            {"params": [p for p in weights if p.dim() == 2], "weight_decay": 0.2},
            {"params": [p for p in weights if p.dim() == 1], "betas": (0.8, 0.9)},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, fused=self.optimizer != "unfused")
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def scaled():
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**16))


EPOCHS = {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 2}
SETTINGS = {
    "clipped": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "scaled": {"plugins": lambda: [scaled()], "overflows": (1,)},
    "several": {"optimizer": "several", "max_steps": 6},
    "added": {"optimizer": "added", "gradient_clip_val": 0.1},
    "hybrid": {"shard_size": 2, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
    "weights averaged": EPOCHS
    | {"callbacks": lambda: [StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1)]},
    "finetuned": EPOCHS | {"callbacks": lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1)]},
    "activations": {"activations": "host", "accumulate_grad_batches": 2},
    "some activations": {"activations": "1 MB", "precision": "bf16-mixed"},
    "pruned": EPOCHS | {"callbacks": lambda: [ModelPruning("l1_unstructured", amount=0.3)]},
    "accumulated": {"accumulate_grad_batches": 3},
    "averaged": {"callbacks": lambda: [EMAWeightAveraging(decay=0.7)]},
    "bfloat16": {"precision": "bf16-mixed", "gradient_clip_val": 0.1},
    "true bfloat16": {"precision": "bf16-true"},
    "whole parameters": {"optimizer": "muon"},
    "debug": {"debug": True, "stop_on_nonfinite": True},
    "sharded files": {"checkpoint": {"kind": "sharded"}},
    "rounded on the wire": {"reduce_dtype": "bf16"},
    "double": {"precision": "64-true", "gradient_clip_val": 0.1},
    "once": {"accumulate_grad_batches": 3, "reduce_once": True},
}


OF_STRATEGY = {
    "reduce_once",
    "shard_size",
    "debug",
    "stop_on_nonfinite",
    "checkpoint",
    "reduce_dtype",
}


class Save(pl.Callback):
    def __init__(self, path):
        self.path, self.position = path, None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        is_between = trainer.global_step >= 2 and not trainer.fit_loop._should_accumulate()
        if is_between and self.position is None:
            trainer.save_checkpoint(self.path)
            self.position = len(module.losses)


def fit(world_size, name, offload, save=None, ckpt_path=None):
    options = {k: v() if callable(v) else v for k, v in SETTINGS[name].items()}
    module = Lit(options.pop("optimizer", "adamw"), options.pop("overflows", ()))
    saved = options.pop("activations", None)
    of_strategy = {name: options.pop(name) for name in OF_STRATEGY & options.keys()}
    strategy = zero3(offload=offload, activations=saved if offload else None, **of_strategy)
    options = {"max_steps": 4, "max_epochs": -1, "use_distributed_sampler": True} | options
    options["callbacks"] = [*options.get("callbacks", []), *([save] if save else [])]
    runner = trainer(strategy, world_size, **options)
    runner.fit(module, ckpt_path=ckpt_path)
    return module.losses, full_weights(runner)


@patch.object(activations, "SMALLEST", 1)
def train(rank, world_size, folder, name):
    """Losses and weights of the run without offload; of one with it, and resumed in the middle."""
    save = Save(f"{folder}/{name}.ckpt")
    expected = again = fit(world_size, name, None, save)
    if (
        "limit_train_batches" in SETTINGS[name]
    ):  # in the middle is the end of an epoch, before hooks
        after, weights = fit(world_size, name, None, ckpt_path=save.path)
        again = expected[0][: save.position] + after, weights
    found = {}
    for offload in ("optimizer", "parameters", "2000B"):
        save = Save(f"{folder}/{name} {offload}.ckpt")
        losses, weights = fit(world_size, name, offload, save)
        found[offload] = losses, weights
        # what one kind saves another loads
        other = {"optimizer": "parameters", "parameters": None, "2000B": "optimizer"}[offload]
        after, resumed = fit(world_size, name, other, ckpt_path=save.path)
        found[f"{offload} resumed"] = losses[: save.position] + after, resumed
    return expected, again, found


GATE = {
    "clipped",
    "activations",
    "bfloat16",
    "whole parameters",
    "scaled",
    "several",
    "added",
}
CASES = [(2, name) for name in SETTINGS if name != "hybrid"]
CASES += [(1, name) for name in SETTINGS if name not in ("hybrid", "once")]
CASES += [(4, name) for name in ("hybrid", "clipped", "accumulated", "whole parameters")]


@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        pytest.param(n, name, marks=() if n == 2 and name in GATE else pytest.mark.variant)
        for n, name in CASES
    ],
)
def test_every_number_as_without(world_size, name, tmp_path):
    for expected, again, found in run_ranks(train, world_size, str(tmp_path), name, timeout=150):
        assert expected[0][0] != expected[0][-1]
        for case, (its, there) in found.items():
            losses, weights = again if "resumed" in case else expected
            assert its == losses, case
            assert there.keys() == weights.keys()
            for key, value in weights.items():
                assert torch.equal(there[key], value), (case, key)


ODD = ["cpu", "optimiser", "20 elephants", True, 5, 0, -1, "", "5", "-5GiB", "0GiB", "5 gib"]


@pytest.mark.parametrize("value", ODD)
def test_what_is_no_kind_and_no_size(value):
    with pytest.raises(ValueError, match=r"offload=.* is none of None, 'optimizer', 'parameters'"):
        Zero3Strategy(offload=value)
    with pytest.raises(ValueError, match=r"activations=.* is none of None, 'host' and a size"):
        Zero3Strategy(activations=value)


def step_by_lbfgs(rank, world_size):
    """Losses and weights without offload, and with each kind; its state cannot be saved."""
    found = []
    for offload in (None, "optimizer", "parameters", "2000B"):
        module = Lit("lbfgs")
        runner = trainer(zero3(offload=offload), world_size, max_steps=2)
        runner.fit(module)
        found.append((module.losses, full_weights(runner)))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_lbfgs_as_without(world_size):
    for (losses, weights), *others in run_ranks(step_by_lbfgs, world_size, timeout=100):
        assert losses[0] != losses[-1]
        for its, there in others:
            assert its == losses
            assert all(torch.equal(there[key], value) for key, value in weights.items())


def refused(rank, world_size):
    for option in ({"offload": "optimizer"}, {"activations": "host"}):
        graphs = CUDAGraphStep(software=True, strict=True)
        with pytest.raises(
            RuntimeError, match=r"\(\w+=\.\.\.\)` waits for the host, .*Leave it out"
        ):
            trainer(zero3(**option), world_size, callbacks=[graphs]).fit(Lit())


def test_what_needs_the_device_is_refused():
    run_ranks(refused, 1, timeout=60)


CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: lightning_zero3.Zero3Strategy
    init_args: {{offload: {offload}, activations: {activations}}}
"""


def fit_from_yaml(rank, world_size, folder):
    """Losses with each value in a file, and what is said of it."""
    found = {}
    for value in ("null", "optimizer", "parameters", "2000B", "1.5 GiB", "5", "optimiser"):
        saved = "2 MB" if value == "2000B" else "host" if value == "optimizer" else "null"
        file = Path(folder, "config.yaml")
        file.write_text(CONFIG.format(offload=value, activations=saved))
        args = [f"--config={file}", "--model.optimizer=adamw"]
        with redirect_stderr(io.StringIO()) as said:
            try:
                cli = LightningCLI(Lit, run=False, save_config_callback=None, args=args)
            except (SystemExit, ValueError) as error:
                found[value] = said.getvalue() + str(error)
                continue
        cli.trainer.fit(cli.model)
        found[value] = cli.model.losses
    return found


def test_from_yaml(tmp_path):
    (found,) = run_ranks(fit_from_yaml, 1, str(tmp_path), timeout=100)
    assert 'key "offload"' in found.pop("5")
    assert "offload='optimiser' is none of" in found.pop("optimiser")
    assert len(found["null"]) == 2
    assert all(losses == found["null"] for losses in found.values())


class Spoil(pl.Callback):
    """Gives the optimizer what no kernel takes."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step == 3:
            optimizer.param_groups[0]["weight_decay"] = "much"


def fail_in_the_last_step(rank, world_size):
    runner = trainer(zero3(offload="optimizer"), world_size, max_steps=4, callbacks=[Spoil()])
    with pytest.raises(RuntimeError, match=r"the host's work on .* failed \(TypeError"):
        runner.fit(Lit())


def test_a_last_step_that_fails_on_the_host_ends_the_run():
    run_ranks(fail_in_the_last_step, 1, timeout=60)


def told(rank, world_size):
    """What is warned of, by optimizer."""
    lines = {}
    for name in ("adamw", "unfused", "muon"):
        with patch("lightning_zero3.strategies.zero3.rank_zero_warn") as warn:
            runner = trainer(zero3(offload="optimizer"), world_size, max_steps=1)
            runner.fit(Lit(name))
        said = [call.args[0] for call in warn.call_args_list]
        lines[name] = [line for line in said if line.startswith("Offload")]
    return lines


def test_what_is_told():
    (lines,) = run_ranks(told, 1, timeout=60)
    assert lines["adamw"] == lines["unfused"] == []
    assert "Muon has no fused kernel for the host" in lines["muon"][0]
