"""Sharded checkpoints: any number of ranks to any other, to the bit, and what torch's own tools
make of them.
"""

from functools import cache

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checkpoints import elastic
from checkpoints.runs import Whole, train
from helpers.models import Recipe
from helpers.parity import assert_same_tensors, assert_tensors_close, relative, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions

RECIPES = {
    "adamw": Recipe(tied=True, optimizer="adamw", frozen=("blocks.1",), steps=4),
    "momentum": Recipe(optimizer="sgd", steps=4),
}


def sharded(**options):
    return zero3(checkpoint=CheckpointOptions(kind="sharded"), **options)


def save(rank, world_size, folder):
    """An uninterrupted run of two epochs, and one that is saved after the first."""
    whole = {name: train(world_size, Whole(recipe), 2) for name, recipe in RECIPES.items()}
    saved = {
        name: train(world_size, Whole(recipe), 1, write=f"{folder}/{name}.ckpt", strategy=sharded())
        for name, recipe in RECIPES.items()
    }
    return whole, saved, elastic.save(world_size, folder)


class SaveAgain(Callback):
    """What was loaded, before the first step."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_start(self, trainer, *_):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def resume(rank, world_size, folder):
    runs = {}
    for name, recipe in RECIPES.items():
        again = SaveAgain(f"{folder}/{name} on {world_size}.ckpt")
        runs[name] = train(
            world_size,
            Whole(recipe),
            2,
            read=f"{folder}/{name}.ckpt",
            callbacks=[again],
            strategy=sharded(),
        )
    return runs, elastic.resume(world_size, folder)


PLAN = {1: 0.5, "b": {}}  # an option of a param group
EXTRAS = [{1: 2, (0, 1): "x"}, {"a": {}, "b": 1}, {}, {"a": torch.ones(2)}, [torch.zeros(3)]]


class Extra(Whole):
    """With modules that have more in the state dict than tensors."""

    def __init__(self, recipe, extras=(None,) * 5):
        super().__init__(recipe)
        self.more = nn.ModuleList(map(HasExtra, extras))
        self.plan = PLAN if extras[0] else None

    def configure_optimizers(self):
        found = super().configure_optimizers()
        self.groups = found["optimizer"].param_groups
        self.groups[0]["plan"] = self.plan
        return found


class HasExtra(nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def extra(rank, world_size, folder, kind):
    strategy = zero3(checkpoint=CheckpointOptions(kind=kind))
    runner = trainer(strategy, world_size, max_steps=1)
    runner.fit(Extra(RECIPES["adamw"], EXTRAS))
    runner.save_checkpoint(f"{folder}/x.ckpt")
    module = Extra(RECIPES["adamw"])
    trainer(zero3(), world_size, max_steps=2).fit(module, ckpt_path=f"{folder}/x.ckpt")
    return [part.extra for part in module.more], module.groups[0]["plan"]


@pytest.mark.parametrize("kind", ["sharded", "file"])
def test_extra_states_and_options_come_back_as_they_were(kind, tmp_path):
    for found, plan in run_ranks(extra, 2, str(tmp_path), kind, timeout=60):
        assert str(found) == str(EXTRAS) and plan == PLAN


def load_again(rank, world_size, folder):
    return {
        k: train(world_size, Whole(RECIPES["adamw"]), 2, read=f"{folder}/adamw on {k}.ckpt")
        for k in (1, 3, 4)
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def on_two_ranks(folder):
    return run_ranks(save, 2, str(folder), timeout=150)


@pytest.fixture(scope="module")
def on_ranks(folder, on_two_ranks):
    """What each rank of a run that resumes on so many ranks returns."""
    return cache(lambda world_size: run_ranks(resume, world_size, str(folder), timeout=150))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_what_was_saved_is_loaded_to_the_bit_and_the_run_goes_on(
    world_size, on_ranks, on_two_ranks
):
    ranks = on_ranks(world_size)
    compare_elastic([rank[1] for rank in ranks], [rank[2] for rank in on_two_ranks])
    resumed = [rank[0] for rank in ranks]
    for name in RECIPES:
        whole, saved = on_two_ranks[0][0][name], on_two_ranks[0][1][name]
        first = resumed[0][name]
        assert_same_tensors(first.start["weights"], saved.weights)
        compare_states(first.start["optimizers"], saved.optimizers)
        losses = [
            sum(step) / world_size
            for step in zip(*(rank[name].losses for rank in resumed), strict=True)
        ]
        expected = [
            sum(step) / 2
            for step in zip(*(rank[0][name].losses for rank in on_two_ranks), strict=True)
        ]
        expected = expected[len(expected) // 2 :]
        if world_size == 2:
            assert losses == expected
            assert_same_tensors(first.weights, whole.weights)
            for again, before in zip(resumed, on_two_ranks, strict=True):
                assert torch.equal(again[name].start["random"], before[1][name].random)
        assert relative(losses, expected) <= 1e-6
        assert_tensors_close(first.weights, whole.weights, 5e-6)


def test_on_another_number_of_ranks_and_back_nothing_has_changed(folder, on_ranks, on_two_ranks):
    for world_size in (1, 3, 4):
        on_ranks(world_size)
    for again, before in zip(
        run_ranks(load_again, 2, str(folder), timeout=90), on_two_ranks, strict=True
    ):
        saved = before[1]["adamw"]
        for result in again.values():
            if saved.weights:  # on rank 0
                assert_same_tensors(result.start["weights"], saved.weights)
                compare_states(result.start["optimizers"], saved.optimizers)
            assert torch.equal(result.start["random"], saved.random)
            assert result.losses[0] == before[0]["adamw"].losses[len(saved.losses)]


def compare_elastic(resumed, whole):
    for case in elastic.CASES:
        expected = [
            sum(step) / len(whole) for step in zip(*(rank[case][0] for rank in whole), strict=True)
        ][elastic.SAVED :]
        losses = [
            sum(step) / len(resumed)
            for step in zip(*(rank[case][0] for rank in resumed), strict=True)
        ]
        assert relative(losses, expected) <= (0 if len(resumed) == 2 else 1e-6), case
        _, weights, _, scaler = resumed[0][case]
        assert_tensors_close(weights, whole[0][case][1], 0.0 if len(resumed) == 2 else 5e-6, case)
        assert scaler == whole[0][case][3]
        assert scaler is None or scaler["scale"] < elastic.SCALE, "no step was skipped"


def compare_states(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert a["param_groups"] == b["param_groups"]
        assert a["state"].keys() == b["state"].keys()
        for k in a["state"]:
            assert a["state"][k].keys() == b["state"][k].keys()
            for key, value in a["state"][k].items():
                assert torch.equal(value, b["state"][k][key]), (k, key)


def test_torch_makes_one_file_of_it(folder, on_two_ranks, tmp_path):
    for name in RECIPES:
        saved = on_two_ranks[0][1][name]
        dcp_to_torch_save(folder / f"{name}.ckpt", tmp_path / "one.pt")
        read = torch.load(tmp_path / "one.pt", weights_only=True)
        assert_same_tensors(read["state_dict"], saved.weights)


def save_replicated(rank, world_size, folder):
    """Two groups of ranks that hold the same shards."""
    strategy = sharded(shard_size=2)
    return train(
        world_size, Whole(RECIPES["adamw"]), 1, write=f"{folder}/replicated.ckpt", strategy=strategy
    )


def load_replicated(rank, world_size, folder):
    return train(
        world_size,
        Whole(RECIPES["adamw"]),
        2,
        read=f"{folder}/replicated.ckpt",
        strategy=zero3(shard_size=None),
    )


def test_shards_that_several_ranks_hold_are_saved_once(tmp_path):
    saved = run_ranks(save_replicated, 4, str(tmp_path), timeout=100)[0]
    loaded = run_ranks(load_replicated, 2, str(tmp_path), timeout=100)[0]
    assert_same_tensors(loaded.start["weights"], saved.weights)
    compare_states(loaded.start["optimizers"], saved.optimizers)
    index = FileSystemReader(tmp_path / "replicated.ckpt").read_metadata()
    assert len(index.storage_data) == len({(key.fqn, key.offset) for key in index.storage_data})
    owners = {
        entry.relative_path
        for key, entry in index.storage_data.items()
        if key.fqn.startswith("state_dict.net")
    }
    assert owners == {"__0_0.distcp", "__1_0.distcp"}, (
        "the second group writes nothing that the first one has"
    )
