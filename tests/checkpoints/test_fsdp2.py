"""Files to and from Lightning's FSDP2 strategy: one goes on where the other stopped."""

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard

from checkpoints.runs import no_gradients, train
from helpers.models import Lit, Recipe
from helpers.parity import assert_tensors_close, relative, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions

# Everything has a gradient: FSDP2 wants state of every parameter that it trains.
RECIPE = Recipe(
    optimizer="adamw", decay_matrices=True, schedule="step", frozen=("blocks.1",), steps=4
)


class Spare(Lit):
    """A layer that gets its first gradient in the second epoch: until then it has no optimizer
    state.
    """

    def __init__(self, recipe, full_gradients):
        super().__init__(recipe, full_gradients)
        self.net.spare = nn.Linear(5, 3)
        with torch.no_grad():
            self.net.spare.weight.fill_(0.5)
            self.net.spare.bias.zero_()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch == 1:
            spare = self.net.spare(torch.ones(2, 5)).square().mean()
            self.losses[-1] += spare.item()
            loss = loss + spare
        return loss


class Sharded:
    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        if hasattr(self.net, "spare"):
            fully_shard(self.net.spare, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class Fsdp2(Sharded, Lit):
    pass


class Fsdp2Spare(Sharded, Spare):
    pass


def fsdp2(world_size, until, read=None, write=None, build=Fsdp2):
    module = build(RECIPE, no_gradients)
    strategy = ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    runner = trainer(strategy, world_size, max_epochs=until)
    runner.fit(module, ckpt_path=read)
    if write:
        runner.save_checkpoint(write)
    weights = {name: value.full_tensor() for name, value in module.state_dict().items()}
    return module.losses, weights


def ours(world_size, until, build=Lit, **paths):
    strategy = zero3(checkpoint=CheckpointOptions(kind="sharded"))
    result = train(world_size, build(RECIPE, no_gradients), until, strategy=strategy, **paths)
    return result.losses, result.weights


def run(rank, world_size, folder):
    fsdp2(world_size, 1, write=f"{folder}/fsdp2.ckpt")
    ours(world_size, 1, write=f"{folder}/zero3.ckpt")
    return {
        "fsdp2": fsdp2(world_size, 2),
        "zero3": ours(world_size, 2),
        "fsdp2 from zero3": fsdp2(world_size, 2, read=f"{folder}/zero3.ckpt"),
        "zero3 from fsdp2": ours(world_size, 2, read=f"{folder}/fsdp2.ckpt"),
    }


def run_spare(rank, world_size, folder):
    fsdp2(world_size, 1, write=f"{folder}/fsdp2.ckpt", build=Fsdp2Spare)
    ours(world_size, 1, write=f"{folder}/zero3.ckpt", build=Spare)
    errors = {}
    for name in ("fsdp2", "zero3"):
        with pytest.raises(CheckpointException) as error:
            fsdp2(world_size, 2, read=f"{folder}/{name}.ckpt", build=Fsdp2Spare)
        errors[name] = str(error.value)
    whole = fsdp2(world_size, 2, build=Fsdp2Spare)
    return whole, ours(world_size, 2, read=f"{folder}/fsdp2.ckpt", build=Spare), errors


def resume_ours(rank, world_size, folder):
    return ours(world_size, 2, read=f"{folder}/fsdp2.ckpt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp2")


@pytest.fixture(scope="module")
def runs(folder):
    return run_ranks(run, 2, str(folder), timeout=100)


def mean(ranks):
    return [sum(step) / len(ranks) for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize("name", ["fsdp2 from zero3", "zero3 from fsdp2"])
def test_one_goes_on_where_the_other_stopped(name, runs):
    whole = mean([rank["fsdp2"][0] for rank in runs])
    assert relative(mean([rank[name][0] for rank in runs]), whole[4:]) <= 2e-6
    assert_tensors_close(runs[0][name][1], runs[0]["fsdp2"][1], 5e-6)


def test_on_another_number_of_ranks(folder, runs):
    ranks = run_ranks(resume_ours, 3, str(folder), timeout=60)
    whole = mean([rank["fsdp2"][0] for rank in runs])
    assert relative(mean([losses for losses, _ in ranks]), whole[4:]) <= 2e-6


def test_a_layer_without_state(tmp_path):
    ranks = run_ranks(run_spare, 2, str(tmp_path), timeout=100)
    whole, resumed, errors = ranks[0]
    losses = [mean([rank[k][0] for rank in ranks]) for k in (0, 1)]
    assert relative(losses[1], losses[0][4:]) <= 2e-6
    assert_tensors_close(resumed[1], whole[1], 5e-6)
    # FSDP2 wants state of every parameter that it trains, in files of its own too
    for error in errors.values():
        assert "Missing key in checkpoint state_dict: optimizer_0.state.net.spare." in error
