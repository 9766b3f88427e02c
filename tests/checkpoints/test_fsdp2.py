"""Files to and from Lightning's FSDP2 strategy: one goes on where the other stopped."""

import pytest
from checkpoints.runs import no_gradients, train
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from helpers.models import Lit, Recipe
from helpers.parity import assert_tensors_close, relative, trainer
from helpers.ranks import run_ranks

# Everything has a gradient: FSDP2 wants state of every parameter that it trains.
RECIPE = Recipe(optimizer="adamw", decay_matrices=True, schedule="step", frozen=("blocks.1",), steps=4)


class Fsdp2(Lit):
    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def fsdp2(world_size, until, read=None, write=None):
    module = Fsdp2(RECIPE, no_gradients)
    strategy = ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    runner = trainer(strategy, world_size, max_epochs=until)
    runner.fit(module, ckpt_path=read)
    if write:
        runner.save_checkpoint(write)
    weights = {name: value.full_tensor() for name, value in module.state_dict().items()}
    return module.losses, weights


def ours(world_size, until, **paths):
    result = train(world_size, Lit(RECIPE, no_gradients), until, **paths)
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
