"""nan and inf are found in the step they appear in, and traced to rank, unit and parameter by a
second run of that step.
"""

import os
import random
import time
import weakref
from collections import Counter
from functools import cache
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from helpers.models import TinyLm, make, part, tokens
from helpers.parity import trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import WatchOptions
from lightning_zero3.strategies.support.random_states import seed_all

STEPS, BAD_STEP = 4, 2


class Checkpointed(TinyLm):
    def forward(self, batch):
        x = self.embed(batch) + self.position
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class Model(pl.LightningModule):
    """Spoils one thing on its last rank in one micro-batch; draws random numbers and keeps
    state.
    """

    def __init__(self, kind, rank, world_size, bad=BAD_STEP, net=TinyLm):
        super().__init__()
        self.net = make(net)
        self.kind, self.rank, self.world_size, self.bad, self.steps = kind, rank, world_size, bad, 0
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(()))
        self.teacher = nn.Parameter(torch.ones(5), requires_grad=False)
        self.draws = []

    def hooks(self, again):
        """Forward hooks of layers in the bad micro-batch."""
        first = self.net.blocks[1]
        if self.kind in ("output", "raises"):
            yield first.down, lambda m, a, out: out * torch.nan
        elif self.kind == "gradient" or self.kind == "gradient once" and not again:
            # The root of zero: 0 in forward, infinite slope in backward.
            yield first.up, lambda m, a, out: out + (0 * out).sqrt()

    def training_step(self, batch, batch_idx):
        self.draws.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        self.written += 1
        self.assigned = self.assigned + 1
        with torch.no_grad():
            self.teacher.mul_(0.5)
        again = self.draws.count(self.draws[-1]) > 1
        if again and self.kind == "raises":
            raise ValueError("no more")
        spoil = batch_idx == self.bad and self.rank == self.world_size - 1
        handles = [layer.register_forward_hook(hook) for layer, hook in self.hooks(again) if spoil]
        loss = self.net.loss(batch)
        for handle in handles:
            handle.remove()
        self.log("loss", loss)
        torch.rand(())  # a second run that ends before it leaves other random states
        if self.kind == "sum" and batch_idx == self.bad:
            return loss + 2e38 * self.net.norm.weight[0]
        if spoil and (self.kind == "loss" or self.kind == "once" and not again):
            return loss * torch.inf
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        if self.kind == "weight" and batch_idx == self.bad:
            with torch.no_grad(), self.trainer.strategy.gathered(self.net.blocks[2], modify=True):
                self.net.blocks[2].up.weight[3, 1] = torch.nan

    def on_before_backward(self, loss):
        self.states = states()

    def on_before_zero_grad(self, optimizer):
        self.steps += 1

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p is not self.teacher], lr=0.1)

    def train_dataloader(self):
        return DataLoader(
            [part(b, self.rank, self.world_size) for b in tokens(STEPS)], batch_size=None
        )


class Manual(Model):
    def __init__(self, *args):
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


class Counted(Model):
    """Counts the operations of its last step, from the batch to the optimizer."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == STEPS - 1:
            self.counter = Operations()
            self.counter.__enter__()

    def on_after_backward(self):
        if self.trainer.global_step == STEPS - 1:
            self.counter.__exit__(None, None, None)

    def configure_optimizers(self):
        vectors = [p for p in self.net.parameters() if p.dim() < 2]
        matrices = [p for p in self.net.parameters() if p.dim() > 1]
        return torch.optim.SGD(
            [{"params": vectors}, {"params": matrices, "weight_decay": 0.1}], lr=0.1
        )


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found[str(function)] += 1
        return function(*args, **(kwargs or {}))


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def half():
    return {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))}


# The strategy's options, the Trainer's, the micro-batch to spoil.
WINDOW = {"accumulate_grad_batches": 2}
CASES = {
    **{
        name: (name, Model, {}, {}, BAD_STEP)
        for name in ("output", "gradient", "loss", "weight", "nothing")
    },
    **{name: (name, Model, {}, {}, BAD_STEP) for name in ("once", "gradient once", "raises")},
    "sum": ("sum", Model, {}, {}, STEPS - 1),
    "gradient in bf16": ("gradient", Model, {"reduce_dtype": "bf16"}, {}, BAD_STEP),
    "gradient, second of a window": ("gradient", Model, {}, WINDOW, 3),
    "gradient, held": ("gradient", Model, {"reduce_once": True}, WINDOW, 2),
    "gradient, manual": ("gradient", Manual, {}, {}, BAD_STEP),
    "output, manual": ("output", Manual, {}, {}, BAD_STEP),
    "loss, 16-mixed": ("loss", Model, {}, half, BAD_STEP),
    "gradient, 16-mixed": ("gradient", Model, {}, half, BAD_STEP),
}


def fit(module, strategy, **options):
    """What it says, and how often the step that failed ran."""
    try:
        trainer(strategy, module.world_size, **options).fit(module)
    except FloatingPointError as error:
        return str(error), len(module.draws) - module.bad
    return f"trained {module.trainer.global_step} steps", len(module.draws) - module.bad


def fit_all(rank, world_size):
    said = {}
    for name, (kind, cls, own, options, bad) in CASES.items():
        options = options() if callable(options) else options
        said[name] = fit(
            cls(kind, rank, world_size, bad), zero3(stop_on_nonfinite=True, **own), **options
        )
    said["weight, checkpointed"] = fit(
        Model("weight", rank, world_size, BAD_STEP, Checkpointed), zero3(stop_on_nonfinite=True)
    )
    for block in (compiled := Model("weight", rank, world_size)).net.blocks:
        block.compile(backend="eager")
    said["weight, compiled"] = fit(compiled, zero3(stop_on_nonfinite=True))
    return said


@cache
def results(world_size):
    return run_ranks(fit_all, world_size, timeout=200)


FIRST = f"In step {BAD_STEP} the first value that is not finite, "
AGAIN = (
    " The place was found by running the micro-batch once more. This step has changed no weight."
)
BLOCK = ("norm.weight", "norm.bias", "up.weight")  # what it names of a whole block


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_names_the_first_place(world_size):
    everyone = results(world_size)
    for name in CASES:
        assert all(said[name][0] == everyone[0][name][0] for said in everyone), name
    said, rank = everyone[0], world_size - 1
    text, runs = said["output"]
    assert text.startswith(
        FIRST
        + f"nan, is in the output of unit net.blocks.1 in forward, on rank {rank}. Gradients that"
    )
    assert text.endswith(AGAIN) and runs == 2
    text, runs = said["loss"]
    assert text.startswith(FIRST + f"inf, is in the loss, on rank {rank}.") and runs == 2
    everywhere = ", ".join(map(str, range(world_size)))
    for name in ("weight", "weight, checkpointed", "weight, compiled"):
        text, runs = said[name]
        assert text.startswith(
            FIRST + f"nan, is in the output of unit net.blocks.2 in forward, on rank {everywhere}."
        ), text
        assert (
            "Weights that are not finite: net.blocks.2.up.weight." in text
            and text.endswith(AGAIN)
            and runs == 2
        )
    assert said["nothing"] == (f"trained {STEPS} steps", 2)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("case", "runs"),
    [("", 2), (" in bf16", 2), (", second of a window", 2), (", held", 2), (", manual", 1)],
)
def test_gradients_alone_are_traced_to_the_unit_that_made_them(world_size, case, runs):
    text, count = results(world_size)[0]["gradient" + case]
    step = 1 if "window" in case or "held" in case else BAD_STEP
    where = f"nan, is in the gradients of unit net.blocks.1 in backward, on rank {world_size - 1}."
    names = ", ".join(f"net.blocks.1.{name}" for name in BLOCK)
    assert text.startswith(
        FIRST.replace(str(BAD_STEP), str(step), 1)
        + f"{where} Gradients that are not finite: {names} ..."
    ), text
    assert count == runs and ("once more" in text) == (
        "manual" not in case and (world_size == 1 or "held" not in case)
    )


def test_a_sum_over_ranks_may_be_the_first_that_is_not_finite():
    assert results(1)[0]["sum"] == (f"trained {STEPS} steps", 1)
    text, runs = results(3)[0]["sum"]
    where = "inf, is in the sum of gradients over ranks, on rank "
    assert (
        text.startswith(f"In step {STEPS - 1} the first value that is not finite, {where}")
        and runs == 2
    )
    assert "Gradients that are not finite: net.norm.weight. The place was found" in text


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_cannot_be_run_again_is_looked_at_in_every_step(world_size):
    text, runs = results(world_size)[0]["output, manual"]
    assert text.startswith(
        FIRST + f"nan, is in the output of unit net.blocks.1 in forward, on rank {world_size - 1}."
    )
    assert "once more" not in text and runs == 1


@pytest.mark.parametrize("world_size", [1, 3])
def test_with_a_loss_scaler_the_loss_alone_must_be_finite(world_size):
    said, rank = results(world_size)[0], world_size - 1
    text, runs = said["loss, 16-mixed"]
    assert text.startswith(FIRST + f"inf, is in the loss, on rank {rank}.") and runs == 2
    # one of which the scaler skipped
    assert said["gradient, 16-mixed"] == (
        f"trained {STEPS} steps",
        2,
    )


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_second_run_that_is_not_like_the_first_says_so(world_size):
    everyone, rank = results(world_size), world_size - 1
    said = everyone[0]
    text, runs = said["once"]
    assert text.startswith(
        FIRST + f"inf, is in the loss, on rank {rank}. Gradients that are not finite: net."
    )
    assert (
        "It did not come again when the micro-batch was run once more, eagerly, from the same"
        " weights"
        in text
        and runs == 2
    )
    text, runs = said["gradient once"]
    assert (
        text.startswith(FIRST + "nan, is in the sum of gradients over ranks, on rank ")
        and "Gradients that are not finite: net." in text
        and runs == 2
    )
    assert "It did not come again" in text
    text, runs = said["raises"]
    assert text.startswith(FIRST + f"nan, is in the loss, on rank {rank}.") and runs == 2
    ended = (
        "The micro-batch was run once more, to find where that begins, and ended with ValueError:"
        " no more."
    )
    assert text.endswith(f"{ended} This step has changed no weight.")


# ---- what is left of the second run
# ---------------------------------------------------------------------------------------


class Stop(Exception):
    pass


class Stopped(Model):
    """Ends where the other finds that something is not finite."""

    def on_after_backward(self):
        if len(self.draws) == self.bad + 1:
            raise Stop


def left(module, engine):
    chunks = [
        (c.values.clone(), c.gradients.clone() if c.has_sums else None)
        for unit in engine.units
        for c in unit.chunks
    ]
    logged = {name: metric._update_count for name, metric in module.trainer._results.items()}
    return chunks, [module.written.item(), module.assigned.item()], logged


class Leaves(pl.Callback):
    """Looks where an exception checkpoint would be written."""

    def on_exception(self, trainer, module, exception):
        self.left = left(module, trainer.strategy.engine)
        self.states = states()


def leave_both(rank, world_size):
    found = []
    for kind in ("output", "gradient", "raises"):
        for options in ({}, WINDOW):
            pair = []
            for cls, stop, error in ((Stopped, False, Stop), (Model, True, FloatingPointError)):
                seed_all(3)
                module, keeps = cls(kind, rank, world_size, 3), Leaves()
                with pytest.raises(error):
                    trainer(
                        zero3(stop_on_nonfinite=stop), world_size, callbacks=[keeps], **options
                    ).fit(module)
                pair.append((keeps.left, keeps.states == module.states))
            # all generators'
            assert (
                len(module.draws) == 5
                and module.draws[4] == module.draws[3] not in module.draws[:3]
            )
            found.append(pair)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_second_run_leaves_nothing_behind(world_size):
    for found in run_ranks(leave_both, world_size, timeout=100):
        for (expected, same_states), (mine, same_states_after) in found:
            assert same_states and same_states_after
            (groups, *rest), (groups_after, *rest_after) = expected, mine
            assert rest == rest_after and rest[0] == [4.0, 4.0]
            for before, after in zip(groups, groups_after, strict=True):
                for a, b in zip(before, after, strict=True):
                    assert a is b is None or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
            assert any(g is not None and not g.isfinite().all() for _, g in groups_after)


def copied(batch):
    return [tensor.clone() for tensor in batch]


class Kept(Model):
    """Looks whether the batch of the step before is still in memory when the next one begins."""

    before, kept = staticmethod(lambda: None), ()

    def on_train_batch_start(self, batch, batch_idx):
        self.kept = (*self.kept, self.before() is not None)
        self.before = weakref.ref(batch[0])

    def train_dataloader(self):
        return DataLoader(super().train_dataloader().dataset, batch_size=None, collate_fn=copied)


def keep_batches(rank, world_size):
    modules = []
    for options in ({}, {"accumulate_grad_batches": 2}):
        trainer(zero3(stop_on_nonfinite=True), world_size, **options).fit(
            module := Kept("nothing", rank, world_size)
        )
        modules.append(module)
    return [module.kept for module in modules]


def test_a_batch_is_not_kept_longer_than_its_step():
    assert run_ranks(keep_batches, 2) == [[(False,) * STEPS] * 2] * 2


class RaisesAlone(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.rank == 0 and self.draws.count(self.draws[-1]) > 1:
            raise ValueError("alone")
        return loss


def raise_alone(rank, world_size, folder):
    said = os.open(Path(folder, str(rank)), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):  # the watch speaks there when it ends a process
        os.dup2(said, stream)
    try:
        strategy = zero3(stop_on_nonfinite=True, watch=WatchOptions(grace=1))
        trainer(strategy, world_size).fit(RaisesAlone("gradient", rank, world_size))
    except FloatingPointError as error:
        print(error, flush=True)
        time.sleep(60)  # until the other has ended by itself, and `run_ranks` ends this one
        raise


def test_a_rank_that_fails_in_the_second_run_alone_ends_the_others(tmp_path):
    with pytest.raises(AssertionError, match="rank 1 of 2 failed first"):
        run_ranks(raise_alone, 2, str(tmp_path), timeout=50)
    assert (
        "run once more, to find where that begins, and ended with ValueError: alone."
        in (tmp_path / "0").read_text()
    )
    assert f"Rank 0 raised 'NonFiniteError: {FIRST}" in (tmp_path / "1").read_text()


# ---- cost
# --------------------------------------------------------------------------------------------------


def count_both(rank, world_size):
    counts = []
    for watched in (False, True):
        trainer(zero3(stop_on_nonfinite=watched), world_size).fit(
            module := Counted("nothing", rank, world_size)
        )
        counts.append(module.counter.found)
    engine = module.trainer.strategy.engine
    with Operations() as agreement:
        int(engine.collectives.agree(torch.tensor([0])))
    assert not counts[0] - counts[1]
    return counts[1] - counts[0] - agreement.found, len(engine.gradients.chunks)


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_loss_and_each_chunk_cost_one_operation(world_size):
    for added, chunks in run_ranks(count_both, world_size, timeout=100):
        assert chunks == 7
        assert added == {"aten.aminmax.default": chunks + 1, "aten.stack.default": 1}
