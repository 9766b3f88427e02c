"""Two ranks take every decision together, and replay what they exchange."""

import os
import re
import time
import warnings
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from helpers.ranks import run_ranks
from helpers.recorded import Net, assert_same_run, fit
from lightning_zero3 import Zero3Strategy
from lightning_zero3.callbacks import AllocatorConfig, CUDAGraphStep
from lightning_zero3.callbacks.graph_check import GraphCaptureError


class Counting(CUDAGraphStep):
    def on_train_end(self, trainer, pl_module):
        parts = [self._runner] if self.modules is None else self._runner.captured.values()
        parts = [*parts, *getattr(self._runner, "_optimizers", [])]
        self.replays = min(part.replays for part in parts)
        self.recaptures = sum(getattr(part, "recaptures", 0) for part in parts)
        super().on_train_end(trainer, pl_module)


class Changes(Callback):
    """On rank 1 a dropout rate changes."""

    def on_train_batch_start(self, trainer, pl_module: pl.LightningModule, batch, batch_idx):
        if trainer.global_step == 12 and trainer.global_rank == 1:
            pl_module.net[3].p = 0.05


class LooksInside(Callback):
    """Runs a captured layer with weights that are its own for once."""

    def on_train_batch_start(self, trainer, pl_module: pl.LightningModule, batch, batch_idx):
        if batch_idx == 4:
            with trainer.strategy.gathered(pl_module.head):
                pl_module.head(torch.ones(1, 16))


class Expandable(AllocatorConfig):
    """NCCL and the graphs of several ranks need more for it, which it sees to."""

    def __init__(self):
        super().__init__(expandable_segments=True)


class AllUsed(Net):
    """DDP asks on the host which parameters were used, where some may not be."""

    def __init__(self):
        super().__init__()
        self.unused.requires_grad_(False)


class WaitsOnRankOne(AllUsed):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        if self.global_rank == 1:
            output["loss"].item()
        return output


class LooksOnRankOne(nn.Module):
    def forward(self, x):
        return x * (3 if dist.get_rank() == 1 and x.sum().item() > 1e9 else 2)


class HasLooks(Net):
    def __init__(self):
        super().__init__()
        self.net[2] = LooksOnRankOne()


class Compresses(Callback):
    """As `ddp_comm_hook`, which Lightning knows on CUDA only."""

    def on_train_start(self, trainer, pl_module):
        trainer.strategy.model.register_comm_hook(None, fp16_compress_hook)


class Timed(Callback):
    """Which forward's time DDP took last."""

    def on_train_end(self, trainer, pl_module):
        self.forward = trainer.strategy.model._get_ddp_logging_data()["iteration"]


class Uneven(Net):
    """Ranks get batches of other shapes, each at another time; some losses know layers in the middle only."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.net[1].register_forward_hook(lambda module, args, output: self.middle.append(output))
        self.middle = []

    def training_step(self, batch, batch_idx):
        rows = 3 if self.global_rank and batch_idx % 3 or self.global_step > 8 and batch_idx % 2 else 4
        output = super().training_step({k: v[:rows] for k, v in batch.items()}, batch_idx)
        if batch_idx % 3 == 2:  # its backward finds weights where no unit's hook has brought them
            output["loss"] = self.middle[-1].square().mean()
        return output

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.middle.clear()


class Fused(Net):
    """Its optimizer can be captured."""

    def configure_optimizers(self):
        rate = torch.tensor(0.01, dtype=torch.float64)
        optimizer = torch.optim.AdamW(self.parameters(), lr=rate, weight_decay=0.1, fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def compare(module, callbacks, captured=None, **options):
    """An eager and a captured run of the same; how often the latter replayed and recaptured."""
    callback = Counting(software=True, strict=True, max_graphs=6, **(captured or {}))
    runs = []
    for extra in ([], [callback]):
        runs.append(fit(module(), *(c() for c in callbacks), *extra, **options))
    assert_same_run(runs[1], runs[0])
    return callback.replays, callback.recaptures


def warned(module, *callbacks, modules=None, **options):
    """What a run that is refused on a rank says on this one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, CUDAGraphStep(software=True, modules=modules), *callbacks, **options)
    return [str(w.message) for w in caught if "CUDAGraphStep" in str(w.message)]


# Batches of 4, 4, 4, 4, 4 and 2 rows in each epoch; the last shape comes once an epoch, and so does a forward that broadcasts
# no buffers, the first after a validation. Of each kind four are watched before a capture, and then the first of each epoch.
VIEWS = "modules, gradients that are views of buckets"
DDP = {
    # Micro-batches 2 and 4 (and 0 of the first epoch) reduce nothing: 3 + 1 are watched, then 1 of each epoch from the second
    # on is replayed. 1 and 3 reduce: 2 + 2 are watched, then 1 of each epoch from the third on is replayed.
    "accumulation": (4 + 3, 0),
    # In each epoch; the change comes before the first batch of the third.
    "a change on one rank": (1 + 3 + 0 + 3 + 3, 1),
    # Modules do not know what DDP does, so 3 are watched: 2 + 4 * 4.
    VIEWS: (18, 0),
}
REFUSED = {
    "`DDPStrategy(gradient_as_bucket_view=True)` makes DDP replace the gradients": ({"gradient_as_bucket_view": True}, []),
    "`DDPStrategy(ddp_comm_hook=...)`, fp16_compress_hook, is Python": ({}, [Compresses()]),
}


def ddp_both_ways(rank, world_size):
    options = {"strategy": "ddp", "devices": world_size, "max_epochs": 5, "num_sanity_val_steps": 0}
    views = {**options, "strategy": lambda: DDPStrategy(gradient_as_bucket_view=True)}
    counts = {
        "accumulation": compare(AllUsed, [], **options, accumulate_grad_batches=2, gradient_clip_val=0.1),
        "a change on one rank": compare(AllUsed, [Changes], **options),
        VIEWS: compare(AllUsed, [], {"modules": ["net.0", "head"]}, **views),
    }
    timed = Timed()
    said = {"step": warned(WaitsOnRankOne(), timed, **{**options, "max_epochs": 17})}
    if rank == 1:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    said["environment"] = warned(AllUsed(), **{**options, "max_epochs": 1})
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    for message, (arguments, callbacks) in REFUSED.items():
        strict = [*callbacks, CUDAGraphStep(software=True, strict=True)]
        with pytest.raises(GraphCaptureError) as error:
            fit(AllUsed(), *strict, **{**options, "strategy": DDPStrategy(**arguments)})
        assert message in str(error.value)
    return counts, said, timed.forward


def test_ranks_of_ddp_decide_together():
    (first, said, timed), (second, said_second, _) = run_ranks(ddp_both_ways, 2, timeout=250)
    assert first == second == DDP
    reasons = {"step": ["_local_scalar_dense needs a value", "test_ranks.py:"], "environment": ["Set NCCL_GRAPH_REGISTER=0"]}
    for name, words in reasons.items():
        assert len(said[name]) == len(said_second[name]) == 1
        assert "On rank 1 the step cannot be captured; that rank says why" in said[name][0]
        assert all(word in said_second[name][0] for word in words)
    assert timed == 10  # not the hundredth of 102 forwards, whose events a capture might hold


def half():
    # Its first steps overflow, and are skipped.
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3))]


def nested(model):
    return [model.net, model.net[4], model.frozen, model.head, model.unused]


class Sums(nn.Module):
    def forward(self, x):
        total = x.detach().clone()
        dist.all_reduce(total)
        return x + total


class HasSums(Net):
    def __init__(self):
        super().__init__()
        self.net[2] = Sums()


UNVALIDATED = {"limit_val_batches": 0}  # a validation gathers units, and makes buffers equal
ZERO3 = {
    "accumulation, clipping, validation in the middle": {"accumulate_grad_batches": 4, "val_check_interval": 3},
    "ragged last batch": {"batch_size": 8, "accumulate_grad_batches": 2, "max_epochs": 9},
    "a change on one rank": {"max_epochs": 6, "callbacks": [Changes]},
    "bf16-mixed, expandable segments": {"precision": "bf16-mixed", "callbacks": [Expandable]},
    "bf16 on the wire": {"gather_dtype": "bf16", "reduce_dtype": "bf16"},
    "16-mixed, activation checkpointing": {"plugins": half, "checkpointed": True},
    "units inside others, accumulation, no validation": {"unit_policy": nested, "accumulate_grad_batches": 2, **UNVALIDATED},
    "optimizer": {"module": Fused, "captured": {"optimizer": True}, "accumulate_grad_batches": 2, "max_epochs": 6},
    "optimizer, 16-mixed": {
        "module": Fused,
        "captured": {"optimizer": True},
        "plugins": half,
        "gradient_clip_val": None,
        "max_epochs": 6,
    },
    "modules that are units": {"captured": {"modules": ["net.[04]", "head"]}, "batch_size": 8, "accumulate_grad_batches": 2},
    "modules inside of units": {"captured": {"modules": ["net.0", "net.1"]}, "unit_policy": nested, "precision": "bf16-mixed"},
}
# Six batches in an epoch: 3 are watched, and the first of each later epoch; with batches of 8 rows there are three.
REPLAYED = dict.fromkeys(ZERO3, 24 - 3 - 3) | {
    "ragged last batch": 27 - 3 - 8,  # which zero3's loader fills up
    "a change on one rank": 3 + 5 + 3 + 3 * 5,
    "optimizer": 18 - 1,  # steps of two micro-batches, of which the first is eager
    "optimizer, 16-mixed": 36 - 3 - 5,
    "modules that are units": 12 - 3 - 3,
    "resumed": 17 - 3 - 2,  # from the second batch of the second epoch on
}
UNEVEN = "modules, other shapes on each rank"
ZERO3[UNEVEN] = {
    "module": Uneven,
    "captured": {"modules": ["net.0", "net.1", "head"]},
    "callbacks": [LooksInside],
    "unit_policy": nested,
    "accumulate_grad_batches": 2,
    "max_epochs": 8,
    **UNVALIDATED,
}
OF_THE_STRATEGY = ("gather_dtype", "reduce_dtype", "unit_policy")


def zero3_both_ways(rank, world_size, folder):
    results = {}
    for name, case in ZERO3.items():
        options = {"devices": world_size, "max_epochs": 4, "gradient_clip_val": 0.1, **case}
        mine = {"unit_policy": [nn.Linear], **{k: options.pop(k) for k in OF_THE_STRATEGY if k in options}}
        options["strategy"] = lambda mine=mine: Zero3Strategy(**mine)
        arguments = {"scheduled": True, **{k: options.pop(k) for k in ("batch_size", "checkpointed") if k in options}}
        module = options.pop("module", Net)
        results[name] = compare(lambda m=module, a=arguments: m(**a), options.pop("callbacks", []), **options)
    save = ModelCheckpoint(folder, every_n_train_steps=7, save_top_k=-1, filename="{step}")
    zero3 = {"devices": world_size, "strategy": lambda: Zero3Strategy(unit_policy=[nn.Linear])}
    fit(Net(), save, CUDAGraphStep(software=True, strict=True), **zero3, enable_checkpointing=True)
    with pytest.raises(GraphCaptureError, match=r"Module 'net': its weights are gathered unit by unit \(net\.0, net\.1"):
        fit(Net(), CUDAGraphStep(software=True, strict=True, modules=["net"]), **zero3, num_sanity_val_steps=0)
    with pytest.raises(
        GraphCaptureError, match=r"(?s)Module 'net\.2': It exchanges something with other ranks.*all_reduce\(total"
    ):
        fit(HasSums(), CUDAGraphStep(software=True, strict=True, modules=["net.2"]), **zero3, num_sanity_val_steps=0)
    results["said"] = warned(HasLooks(), modules=["net.2"], **zero3, num_sanity_val_steps=0, max_epochs=1)
    results["resumed"] = compare(Net, [], **zero3, max_epochs=4, ckpt_path=f"{folder}/step=7.ckpt")
    return results


def test_two_ranks_of_zero3_replay_their_exchanges(tmp_path):
    first, second = run_ranks(zero3_both_ways, 2, str(tmp_path), timeout=400)
    uneven = first.pop(UNEVEN), second.pop(UNEVEN)
    # Rank 0, its head: 4 rows, in the first epoch 2 (it is watched once more, after a step that needs nothing of it), then 5
    # and 5, in five epochs 2; there 3 rows, after 3 watched ones, 2 in each of four epochs. Rank 1: 3 rows 1, 3, 3, and 4 in
    # each of five epochs; 4 rows 1 in the second and in the third epoch, then they come once an epoch.
    assert uneven == ((2 + 5 + 5 + 5 * 2 + 4 * 2, 0), (1 + 3 + 3 + 5 * 4 + 1 + 1, 0))  # each rank decided for itself
    assert first.pop("said") == []
    [said] = second.pop("said")
    assert "Module 'net.2': aten._local_scalar_dense needs a value" in said and "return x * (3 if" in said
    assert first == second
    assert first == {name: (replays, int(name == "a change on one rank")) for name, replays in REPLAYED.items()}


def strict_on_rank_one(rank, world_size, folder):
    said = os.open(Path(folder, str(rank)), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):  # the watch speaks there when it ends a process
        os.dup2(said, stream)
    zero3 = {"devices": world_size, "strategy": Zero3Strategy(unit_policy=[nn.Linear]), "num_sanity_val_steps": 0}
    try:
        fit(HasLooks(), CUDAGraphStep(software=True, strict=True, modules=["net.2"]), **zero3)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        if rank == 1:
            time.sleep(60)  # until rank 0 has ended, and `run_ranks` ends this one
        raise


def test_a_module_that_is_refused_on_one_rank_ends_the_run_on_all(tmp_path):
    with pytest.raises(AssertionError, match="rank 0 of 2 failed first") as ended:
        run_ranks(strict_on_rank_one, 2, str(tmp_path), timeout=50)
    assert re.search(r"(?s)GraphCaptureError: .*Module 'net\.2': .*test_ranks\.py:\d+: `return x", (tmp_path / "1").read_text())
    assert "Rank 1 raised 'GraphCaptureError: " in (tmp_path / "0").read_text(), ended.value


def hybrid_both_ways(rank, world_size):
    strategy = partial(Zero3Strategy, unit_policy=[nn.Linear], shard_size=2)
    return compare(
        Net, [], strategy=strategy, devices=world_size, max_epochs=6, accumulate_grad_batches=2, gradient_clip_val=0.1
    )


def test_shards_over_two_of_four_ranks():
    results = run_ranks(hybrid_both_ways, 4, timeout=250)
    assert results == [(18 - 3 - 5, 0)] * 4  # three micro-batches in each of six epochs
