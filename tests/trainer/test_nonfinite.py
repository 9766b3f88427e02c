"""nan and inf are found in the step they appear in, and traced to rank, unit and parameter."""

from collections import Counter
from functools import cache

import lightning.pytorch as pl
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from helpers.models import TinyLm, make, part, tokens
from helpers.parity import trainer, zero3
from helpers.ranks import run_ranks

STEPS, BAD_STEP = 4, 2


class Model(pl.LightningModule):
    """Spoils one thing on its last rank in one step."""

    def __init__(self, kind, rank, world_size):
        super().__init__()
        self.net = make(TinyLm)
        self.kind, self.rank, self.world_size, self.steps = kind, rank, world_size, 0

    def training_step(self, batch, batch_idx):
        spoil = batch_idx == BAD_STEP and self.rank == self.world_size - 1
        handles = []
        if spoil and self.kind == "output":
            handles.append(self.net.blocks[1].down.register_forward_hook(lambda m, a, out: out * torch.nan))
        if spoil and self.kind == "mask":
            handles.append(self.net.blocks[1].register_forward_hook(lambda m, a, out: out.masked_fill(out > 0, -torch.inf)))
            handles.append(self.net.blocks[2].register_forward_pre_hook(lambda m, a: a[0].masked_fill(a[0].isinf(), 0.0)))
        if spoil and self.kind == "gradient":
            # The root of zero: 0 in forward, infinite slope in backward.
            handles.append(self.net.blocks[1].up.register_forward_hook(lambda m, a, out: out + (0 * out).sqrt()))
        loss = self.net.loss(batch)
        for handle in handles:
            handle.remove()
        return loss * torch.inf if spoil and self.kind == "loss" else loss

    def on_train_batch_start(self, batch, batch_idx):
        if self.kind == "weight" and batch_idx == BAD_STEP:
            with torch.no_grad(), self.trainer.strategy.gathered(self.net.blocks[2], modify=True):
                self.net.blocks[2].up.weight[3, 1] = torch.nan

    def on_before_zero_grad(self, optimizer):
        self.steps += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader([part(b, self.rank, self.world_size) for b in tokens(STEPS)], batch_size=None)


KINDS = ("output", "gradient", "loss", "weight", "mask", "nothing")


class Counted(Model):
    """Counts the operations of its last step, from the batch to the optimizer."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == STEPS - 1:
            self.counter = Operations()
            self.counter.__enter__()

    def on_after_backward(self):
        if self.trainer.global_step == STEPS - 1:
            self.counter.__exit__(None, None, None)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found[str(function)] += 1
        return function(*args, **(kwargs or {}))


def fit_all(rank, world_size):
    said = {}
    for kind in KINDS:
        try:
            trainer(zero3(stop_on_nonfinite=True), world_size).fit(module := Model(kind, rank, world_size))
        except FloatingPointError as error:
            said[kind] = str(error)
        else:
            said[kind] = f"trained {module.trainer.global_step} steps"
    try:
        rounded = zero3(stop_on_nonfinite=True, reduce_dtype="bf16")
        trainer(rounded, world_size).fit(Model("gradient", rank, world_size))
    except FloatingPointError as error:
        said["gradient in bf16"] = str(error)
    counts = []
    for watched in (False, True):
        trainer(zero3(stop_on_nonfinite=watched), world_size).fit(module := Counted("nothing", rank, world_size))
        counts.append(module.counter.found)
    engine = module.trainer.strategy.engine
    with Operations() as agreement:
        int(engine.collectives.agree(torch.tensor([0])))
    assert not counts[0] - counts[1]
    said["added"] = counts[1] - counts[0] - agreement.found
    said["units"] = [unit.name for unit in engine.units], len(engine.groups)
    return said


@cache
def results(world_size):
    return run_ranks(fit_all, world_size, timeout=100)


FIRST = f"In step {BAD_STEP} the first value that is not finite, "


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_names_the_first_place(world_size):
    everyone = results(world_size)
    assert all(said == everyone[0] for said in everyone)
    said, rank = everyone[0], world_size - 1
    assert said["output"].startswith(FIRST + f"nan, is in the output of unit net.blocks.1 in forward, on rank {rank}.")
    assert said["loss"].startswith(FIRST + f"inf, is in the loss; all outputs of units are finite, on rank {rank}.")
    everywhere = ", ".join(map(str, range(world_size)))
    assert said["weight"].startswith(FIRST + f"nan, is in the output of unit net.blocks.2 in forward, on rank {everywhere}.")
    assert "Weights that are not finite: net.blocks.2.up.weight." in said["weight"]
    assert said["mask"] == said["nothing"] == f"trained {STEPS} steps"


@pytest.mark.parametrize("world_size", [3])
@pytest.mark.parametrize("kind", ["gradient", "gradient in bf16"])
def test_gradients_alone_are_traced_to_the_unit_that_made_them(world_size, kind):
    said = results(world_size)[0][kind]
    assert said.startswith(FIRST + f"nan, is in the gradients of unit net.blocks.1 in backward, on rank {world_size - 1}."), (
        said
    )
    assert "net.blocks.1.up." in said or "net.blocks.1.norm." in said


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_place_costs_one_operation(world_size):
    for said in results(world_size):
        units, groups = said["units"]
        assert groups == 1 and len(units) == 7
        # Outputs of six units (nobody calls the root), the loss, gradients of seven units where they travel, and of the group.
        kernels = 6 + 1 + (7 if world_size > 1 else 0) + 1
        assert said["added"] == {"aten.aminmax.out": kernels, "aten.stack.default": 1}
