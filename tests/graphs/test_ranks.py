"""Two ranks take every decision together, and replay what they exchange."""

import contextlib
import os
import re
import signal
import subprocess
import sys
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

from graphs.test_recapture import NeverTheSame
from helpers.parity import trainer
from helpers.ranks import free_port, run_ranks
from helpers.recorded import Net, assert_same, assert_same_run, fit
from lightning_zero3 import Zero3Strategy
from lightning_zero3.callbacks import AllocatorConfig, CUDAGraphStep, CUDAMemoryTracker
from lightning_zero3.callbacks.graphs.runner import GraphCaptureError
from lightning_zero3.callbacks.graphs.software_graph import SoftwareGraph
from lightning_zero3.callbacks.memory.figures import GIB
from lightning_zero3.strategies.collectives import DivergenceError
from trainer.test_ends import Model

ROOT = Path(__file__).resolve().parents[2]


class Counting(CUDAGraphStep):
    def on_train_end(self, trainer, pl_module):
        parts = self._runner.parts
        self.counts = [part.replays for part in parts]
        self.replays = min(self.counts, default=0)
        self.recaptures = sum(getattr(part, "recaptures", 0) for part in parts)
        super().on_train_end(trainer, pl_module)


class Changes(Callback):
    """On rank 1 a dropout rate changes."""

    def on_train_batch_start(self, trainer, pl_module: pl.LightningModule, batch, batch_idx):
        if trainer.global_step == 12 and trainer.global_rank == 1:
            pl_module.net[3].p = 0.05


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


class HasLooks(AllUsed):
    def __init__(self):
        super().__init__()
        self.net[2] = LooksOnRankOne()


class Compresses(Callback):
    """As `ddp_comm_hook`, which Lightning knows on CUDA only."""

    def on_train_start(self, trainer, pl_module):
        trainer.strategy.model.register_comm_hook(None, fp16_compress_hook)


class Uneven(AllUsed):
    """Ranks get batches of other shapes, each at another time."""

    def training_step(self, batch, batch_idx):
        rows = (
            3 if self.global_rank and batch_idx % 3 or self.global_step > 8 and batch_idx % 2 else 4
        )
        return super().training_step({k: v[:rows] for k, v in batch.items()}, batch_idx)


class Fused(Net):
    """Its optimizer can be captured."""

    def rate(self):
        return torch.tensor(0.01, dtype=torch.float64)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.rate(), weight_decay=0.1, fused=True
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class OtherRateOnRankOne(Fused):
    """Another tensor in each step: a graph of the update would read the first."""

    def on_train_batch_start(self, batch, batch_idx):
        super().on_train_batch_start(batch, batch_idx)
        if self.global_rank == 1:
            (group,) = self.trainer.optimizers[0].param_groups
            group["lr"] = group["lr"].clone()


class NeverTheSameOnRankOne(NeverTheSame):
    def on_train_batch_start(self, trainer, *arguments):
        if trainer.global_rank == 1:
            super().on_train_batch_start(trainer, *arguments)


class ExpandableOnRankOne(Callback):
    """As if it had been set where that rank was started."""

    def setup(self, trainer, pl_module, stage):
        if trainer.global_rank == 1:
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

    def on_train_batch_start(self, *_):
        os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)

    on_exception = on_train_batch_start


def compare(module, callbacks, captured=None, **options):
    """An eager and a captured run of the same; how often the latter replayed and recaptured."""
    callback = Counting(software=True, strict=True, max_graphs=6, **(captured or {}))
    runs = []
    for extra in ([], [callback]):
        runs.append(fit(module(), *(c() for c in callbacks), *extra, **options))
    assert_same_run(runs[1], runs[0])
    return callback.replays, callback.recaptures


def warned(module, *callbacks, **options):
    """What a run that is refused on a rank says on this one; and the run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = fit(module, *callbacks, **options)
    return [str(w.message) for w in caught if "CUDAGraphStep" in str(w.message)], run


# Batches of 4, 4, 4, 4, 4 and 2 rows in each epoch; the last shape comes once an epoch. Three are
# watched before a capture, three after it are verified, and the first of each epoch is.
EACH = (1 + 3 + 3 * 4, 0)
VIEWS = "gradients that are views of buckets, compressed"
DDP = {
    "accumulation": EACH,
    # In each epoch; the change comes before the first batch of the third.
    "a change on one rank": (1 + 3 + 1 + 3 + 4, 1),
    VIEWS: EACH,
    "modules": EACH,
    "parameters that are not used": EACH,
}


def ddp_both_ways(rank, world_size):
    options = {"strategy": "ddp", "devices": world_size, "max_epochs": 5, "num_sanity_val_steps": 0}
    views = {**options, "strategy": lambda: DDPStrategy(gradient_as_bucket_view=True)}
    unused = {**options, "strategy": lambda: DDPStrategy(find_unused_parameters=True)}
    counts = {
        "accumulation": compare(
            AllUsed, [], **options, accumulate_grad_batches=2, gradient_clip_val=0.1
        ),
        "a change on one rank": compare(AllUsed, [Changes], **options),
        VIEWS: compare(AllUsed, [Compresses], **views),
        "modules": compare(AllUsed, [], {"modules": ["net.0", "head"]}, **options),
        "parameters that are not used": compare(Net, [], **unused),
    }
    uneven = compare(Uneven, [], {"modules": ["net.0", "net.1", "head"]}, **options)
    with pytest.raises(GraphCaptureError, match="It exchanges something with other ranks"):
        fit(HasSums(), CUDAGraphStep(software=True, strict=True, modules=["net.2"]), **options)
    graphs = partial(CUDAGraphStep, software=True)
    said = {
        "step": warned(WaitsOnRankOne(), graphs(), **{**options, "max_epochs": 2})[0],
        "environment": warned(
            AllUsed(), ExpandableOnRankOne(), graphs(), **{**options, "max_epochs": 1}
        )[0],
    }
    return counts, uneven, said


def test_ranks_of_ddp_decide_together():
    (first, uneven, said), (second, other, said_second) = run_ranks(ddp_both_ways, 2, timeout=250)
    assert first == second == DDP
    reasons = {
        "step": ["_local_scalar_dense needs a value", "test_ranks.py:"],
        "environment": ["Set NCCL_GRAPH_REGISTER=0"],
    }
    assert said_second == dict.fromkeys(reasons, [])
    for name, words in reasons.items():
        [text] = said[name]
        assert text.startswith("CUDAGraphStep: the training step cannot be captured on rank 1:\n")
        assert all(word in text for word in words)
    # Each rank's inputs decide. Rank 0: 4 rows are captured in the first epoch, and replayed twice in
    # each of four; 3 rows are captured in the fourth. Rank 1: 3 rows are captured in the second
    # epoch, and replayed three times in each of three.
    assert (uneven, other) == ((1 + 2 * 4 + 1, 0), (1 + 3 * 3, 0))


def half():
    # Its first steps overflow, and are skipped.
    return [
        MixedPrecision(
            "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
        )
    ]


def nested(model):
    return [model.net, model.net[4], model.frozen, model.head, model.unused]


class Sums(nn.Module):
    def forward(self, x):
        total = x.detach().clone()
        dist.all_reduce(total)
        return x + total


class HasSums(AllUsed):
    def __init__(self):
        super().__init__()
        self.net[2] = Sums()


class OwnLayers(Net):
    """The loss of each rank depends on layers of its own."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.before, self.first, self.second = nn.Linear(16, 16), *(nn.Linear(16, 5) for _ in "ab")

    def forward(self, x):
        hidden = self.frozen(self.net(x))
        scores = self.first(self.before(hidden)), self.second(hidden)
        return self.head(hidden) + scores[self.global_rank]


UNVALIDATED = {"limit_val_batches": 0}  # a validation gathers units, and makes buffers equal
ZERO3 = {
    "accumulation, clipping, validation in the middle": {
        "accumulate_grad_batches": 4,
        "val_check_interval": 3,
    },
    "ragged last batch": {"batch_size": 8, "accumulate_grad_batches": 2, "max_epochs": 9},
    "a change on one rank": {"max_epochs": 6, "callbacks": [Changes]},
    "bf16-mixed, expandable segments": {"precision": "bf16-mixed", "callbacks": [Expandable]},
    "bf16 on the wire": {"reduce_dtype": "bf16"},
    "16-mixed, activation checkpointing": {"plugins": half, "checkpointed": True},
    "units inside others, accumulation, no validation": {
        "unit_policy": nested,
        "accumulate_grad_batches": 2,
        **UNVALIDATED,
    },
    "a loss of other units on each rank": {"module": OwnLayers},
    "optimizer": {
        "module": Fused,
        "captured": {"optimizer": True},
        "accumulate_grad_batches": 2,
        "max_epochs": 6,
    },
}
# Six batches in an epoch: 3 are watched, the fourth is captured, two are verified, and the first of
# each later epoch is; with batches of 8 rows there are three.
REPLAYED = dict.fromkeys(ZERO3, 1 + 3 * 5) | {
    "ragged last batch": 1 + 1 + 6 * 2,  # which zero3's loader fills up
    "a change on one rank": 1 + 5 + 1 + 3 * 5,
    "optimizer": 18 - 1,  # steps of two micro-batches, of which the first is eager
    "resumed": 1 + 4 + 5,  # from the second batch of the second epoch on
}
OF_THE_STRATEGY = ("reduce_dtype", "unit_policy")


def zero3_both_ways(rank, world_size, folder):
    results = {}
    for name, case in ZERO3.items():
        options = {"devices": world_size, "max_epochs": 4, "gradient_clip_val": 0.1, **case}
        mine = {
            "unit_policy": [nn.Linear],
            **{k: options.pop(k) for k in OF_THE_STRATEGY if k in options},
        }
        options["strategy"] = lambda mine=mine: Zero3Strategy(**mine)
        arguments = {
            "scheduled": True,
            **{k: options.pop(k) for k in ("batch_size", "checkpointed") if k in options},
        }
        module = options.pop("module", Net)
        results[name] = compare(
            lambda m=module, a=arguments: m(**a), options.pop("callbacks", []), **options
        )
    save = ModelCheckpoint(folder, every_n_train_steps=7, save_top_k=-1, filename="{step}")
    zero3 = {"devices": world_size, "strategy": lambda: Zero3Strategy(unit_policy=[nn.Linear])}
    fit(Net(), save, CUDAGraphStep(software=True, strict=True), **zero3, enable_checkpointing=True)
    results["resumed"] = compare(Net, [], **zero3, max_epochs=4, ckpt_path=f"{folder}/step=7.ckpt")
    return results


def test_two_ranks_of_zero3_replay_their_exchanges(tmp_path):
    first, second = run_ranks(zero3_both_ways, 2, str(tmp_path), timeout=400)
    assert first == second
    assert first == {
        name: (replays, int(name == "a change on one rank")) for name, replays in REPLAYED.items()
    }


class NoLossOnRankOne(Net):
    """Which has no gradients then, as a rank whose loss depends on no layer."""

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        if self.global_rank == 1:
            output["loss"] = output["loss"].detach()
        return output

    def backward(self, loss):
        if loss.requires_grad:
            loss.backward()


def train_without_a_loss_on_rank_one(rank, world_size):
    options = {"devices": world_size, "strategy": Zero3Strategy, **UNVALIDATED}
    graphs = Counting(software=True)
    said, mine = warned(NoLossOnRankOne(), graphs, **options)
    assert_same_run(mine, fit(NoLossOnRankOne(), **options))
    return said, graphs.replays


def test_a_rank_without_a_loss_leaves_all_eager():
    (said, replays), (nothing, others) = run_ranks(train_without_a_loss_on_rank_one, 2)
    assert "cannot be captured on rank 1:\n  - `training_step` returned no loss" in said[0]
    assert (len(said), nothing, replays, others) == (1, [], 0, 0)


class Reductions(Callback):
    """Counts those of each micro-batch."""

    def on_train_start(self, trainer, pl_module):
        communicator, self.counts = trainer.strategy.engine.collectives, []
        for name in ("reduce_scatter", "reduce_scatter_in"):
            setattr(communicator, name, partial(self.count, getattr(communicator, name)))

    def on_train_batch_start(self, *_):
        self.counts.append(0)

    def count(self, exchange, *arguments):
        self.counts[-1] += 1
        return exchange(*arguments)


def count_reductions(rank, world_size):
    counts = []
    for extra in ([], [CUDAGraphStep(software=True, strict=True)]):
        strategy, reductions = Zero3Strategy(unit_policy=nested), Reductions()
        fit(Net(), reductions, *extra, strategy=strategy, devices=world_size, **UNVALIDATED)
        counts.append(reductions.counts)
    return counts


def test_a_replay_reduces_units_with_others_inside_once():
    eager, captured = run_ranks(count_reductions, 2)[0]
    # Of six micro-batches the last three are compared: from the second epoch on they are replayed.
    assert captured[7:] == eager[7:] and len(eager) == 12 and max(eager) < 6


# What rank 1 alone cannot capture: the module, a callback that brings it about, options of the
# graphs, what is said of it, and how often each part is replayed on the ranks.
SCALAR = r".*test_ranks\.py:\d+: `return x \* \(3 if .*: aten\._local_scalar_dense needs a value"
IN_VAIN = "went out of date 6 times, each time before they had paid"
ON_RANK_ONE = {
    # Rank 1 says so when rank 0 has captured it.
    "module": (
        HasLooks,
        Callback,
        {"modules": ["net.2"]},
        rf"module 'net\.2' .*\n  - {SCALAR}",
        [[1], [0]],
    ),
    "modules": (
        AllUsed,
        ExpandableOnRankOne,
        {"modules": ["net.0"]},
        r"a module .*\n  - NCCL registers",
        [[], []],
    ),
    # The step, and its update, which rank 0 replays until rank 1 knows that its own keeps changing.
    "optimizer": (
        OtherRateOnRankOne,
        Callback,
        {"optimizer": True},
        "the optimizer's step .*out of date 6 times.*`lr` of param group 0 changed",
        [[6, 6], [6, 0]],
    ),
    # Captured in each third step, and out of date in the next. Rank 0 hears of a module, which is
    # once an epoch, in the fifth step of the sixth.
    "recaptured": (
        Net,
        NeverTheSameOnRankOne,
        {"warmup": 2},
        f"the training step .*{IN_VAIN}.*`net.3.p` changed",
        [[6], [6]],
    ),
    "module recaptured": (
        AllUsed,
        NeverTheSameOnRankOne,
        {"warmup": 2, "modules": ["net.3"]},
        rf"module 'net\.3' .*\n  - Its graphs {IN_VAIN}",
        [[1 + 4 * 4 + 3], [6]],
    ),
}


def refused_on_rank_one(rank, world_size):
    strategy = partial(Zero3Strategy, unit_policy=[nn.Linear])
    options = {"devices": world_size, "num_sanity_val_steps": 0}
    found = {}
    for name, (module, callback, captured, _, _) in ON_RANK_ONE.items():
        options["strategy"] = "ddp" if "modules" in captured else strategy
        options["max_epochs"] = 7 if name == "module recaptured" else 4 if "recapt" in name else 2
        graphs = Counting(software=True, **captured)
        said, mine = warned(module(), callback(), graphs, **options)
        assert_same_run(mine, fit(module(), callback(), **options))
        with pytest.raises(GraphCaptureError) as error:
            fit(
                module(),
                callback(),
                CUDAGraphStep(software=True, strict=True, **captured),
                **options,
            )
        found[name] = graphs.counts, said, str(error.value)
    return found


def test_what_one_rank_cannot_capture_runs_eagerly_on_all_and_is_an_error_of_all_with_strict():
    first, second = run_ranks(refused_on_rank_one, 2, timeout=250)
    for name, (*_, message, counts) in ON_RANK_ONE.items():
        (count, [said], error), (other_count, nothing, other_error) = first[name], second[name]
        assert [count, other_count] == counts and nothing == []
        assert (
            re.match(f"(?s)CUDAGraphStep: {message}", error)
            and " cannot be captured on rank 1:\n" in error
        ), error
        assert error == other_error == said.partition("\nIt runs without a graph on all ranks.")[0]


class Plain(Model):
    """Counts nothing."""

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()


def end_apart(rank, world_size):
    told = []
    for samples in (8, 0):  # of rank 1; the other has twelve
        graphs = CUDAGraphStep(software=True, strict=True, warmup=2)
        with pytest.raises(DivergenceError) as caught:
            trainer(Zero3Strategy(watch=None), world_size, callbacks=[graphs]).fit(
                Plain(samples if rank == 1 else 12)
            )
        told.append(str(caught.value))
    return told


def test_another_number_of_batches_is_an_error_of_every_rank():
    first, second = run_ranks(end_apart, 2, timeout=60)
    for said in zip(first, second, strict=True):
        assert (
            "rank 0 is about to agree on what is captured" in said[0]
            and "rank 1 to end its training" in said[0]
        ), said
        assert (
            "rank 1 is about to end its training" in said[1]
            and "loaders of different length" in said[1]
        ), said


class Fails(Callback):
    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step == 8:
            raise ValueError("on purpose")


def fail_with_graphs(rank, world_size, port):
    dist.destroy_process_group()  # the test's own
    os.environ["MASTER_PORT"] = str(port)
    ended, reset, destroy = [], SoftwareGraph.reset, dist.destroy_process_group
    SoftwareGraph.reset = lambda graph: (ended.append("graph"), reset(graph))[1]
    dist.destroy_process_group = lambda *group: (ended.append("process group"), destroy(*group))[1]
    with pytest.raises(ValueError, match="on purpose"):
        graphs = CUDAGraphStep(software=True, optimizer=True, strict=True)
        fit(Fused(), Fails(), graphs, devices=world_size, strategy=Zero3Strategy(watch=None))
    return ended, dist.is_initialized()


def test_graphs_end_before_the_process_group():
    # Of a forward, a backward and an update: NCCL's communicators must outlive graphs that hold
    # their exchanges.
    for ended, grouped in run_ranks(fail_with_graphs, 2, free_port()):
        assert ended == ["graph"] * 3 + ["process group"] and not grouped


class DiesOnRankOne(Callback):
    """Between the replays of a forward and of its backward."""

    def __init__(self, graphs):
        self.graphs = graphs

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_rank == 1 and trainer.global_step == 10:
            Path("died").write_text(f"{time.time()} {self.graphs._runner.step.replays}")
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed():
    graphs = CUDAGraphStep(software=True, strict=True)
    fit(
        Net(),
        graphs,
        DiesOnRankOne(graphs),
        devices=2,
        strategy=Zero3Strategy(unit_policy=[nn.Linear]),
    )


def test_a_rank_that_dies_among_replays_is_named_within_seconds(tmp_path):
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text("from graphs.test_ranks import train_until_killed\n\ntrain_until_killed()\n")
    environ = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}/tests",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("w") as file:
        command = [sys.executable, str(script)]
        process = subprocess.Popen(
            command, env=environ, cwd=tmp_path, start_new_session=True, stdout=file, stderr=file
        )
    try:
        code, ended = process.wait(100), time.time()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    died, replays = (tmp_path / "died").read_text().split()
    said = log.read_text()
    assert int(replays) == 1 + 4  # of step 3, and 7 to 10
    assert code != 0 and ended - float(died) < 8, said
    assert re.search(r"Rank 1 died without a word .* in backward, .*step 10", said), said


def tracked(rank, world_size):
    runs, strategy = [], partial(Zero3Strategy, unit_policy=[nn.Linear])
    for extra in ([], [Counting(software=True, strict=True)]):
        tracker = CUDAMemoryTracker(table=False)
        runs.append((tracker, fit(Net(), tracker, *extra, devices=world_size, strategy=strategy)))
    assert_same(runs[1][1].state, runs[0][1].state)
    return extra[0].counts, [
        tracker.run_spreads["memory/graph_inputs_gib"].high * GIB for tracker, _ in runs
    ]


def test_the_memory_tracker_counts_inputs_of_graphs_beside_them():
    # A batch of 4 rows of 12 floats, and their labels.
    assert run_ranks(tracked, 2) == [([6], [0, 4 * 12 * 4 + 4 * 8])] * 2


def hybrid_both_ways(rank, world_size):
    strategy = partial(Zero3Strategy, unit_policy=[nn.Linear], shard_size=2)
    return compare(
        Net,
        [],
        strategy=strategy,
        devices=world_size,
        max_epochs=6,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
    )


def test_shards_over_two_of_four_ranks():
    results = run_ranks(hybrid_both_ways, 4, timeout=250)
    # Three micro-batches in each of six epochs.
    assert results == [(1 + 1 + 3 * 2, 0)] * 4
