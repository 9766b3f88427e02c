"""Interrupted in the middle of an epoch, resumed with or without changes."""

import warnings

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from checkpoints.runs import Shuffled, Watch, full_weights, optimizer_states, train
from helpers.parity import assert_same_tensors, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3.strategies.checkpoints import CheckpointOptions
from lightning_zero3.strategies.checkpoints.storage import damage
from lightning_zero3.strategies.state_dicts.collective_errors import CheckpointError

STOP = 4  # steps, of 6 in an epoch


def fit(world_size, folder=None, read=None):
    module, callbacks = Shuffled(), []
    if folder is not None:
        callbacks = [ModelCheckpoint(folder, "{step}", every_n_train_steps=STOP, save_top_k=-1)]
    options = {
        "enable_checkpointing": bool(callbacks),
        "use_distributed_sampler": True,
        "callbacks": callbacks,
    }
    runner = trainer(zero3(unit_policy=None), world_size, max_epochs=3, **options)
    runner.fit(module, ckpt_path=read)
    return module.losses, full_weights(runner), torch.get_rng_state()


def both(rank, world_size, folder):
    """An uninterrupted run that leaves checkpoints, and one that starts from the first of them."""
    return fit(world_size, folder), fit(world_size, read=f"{folder}/step={STOP}.ckpt")


class Stop(Callback):
    """An error on all ranks, and a checkpoint then."""

    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, *_):
        trainer.save_checkpoint(self.path)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 3:
            raise KeyError("mine")


def too_late(rank, world_size, folder):
    runner = trainer(
        zero3(unit_policy=None), world_size, callbacks=[Stop(f"{folder}/in_time.ckpt")]
    )
    with pytest.raises(KeyError, match="mine"):
        runner.fit(Shuffled())
    dist.destroy_process_group()  # as zero3 does then with a group that it has made
    refuses_to_save(runner, f"{folder}/too_late.ckpt")
    # Another run's group is not the engine's.
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}.store", world_size),
        rank=rank,
        world_size=world_size,
    )
    refuses_to_save(runner, f"{folder}/too_late.ckpt")


def refuses_to_save(runner, path):
    for save in (runner.save_checkpoint, runner.strategy.save_weights):
        with pytest.raises(CheckpointError, match="process group has ended.*OnExceptionCheckpoint"):
            save(path)


def test_a_rank_without_a_group_does_not_save_its_part_as_the_whole(tmp_path):
    run_ranks(too_late, 2, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["in_time.ckpt"]
    assert damage(tmp_path / "in_time.ckpt") is None


def test_the_rest_of_the_run_is_the_same_to_the_bit(tmp_path):
    ranks = run_ranks(both, 2, str(tmp_path), timeout=100)
    for whole, resumed in ranks:
        assert len(resumed[0]) == 18 - STOP and resumed[0] == whole[0][STOP:]
        assert_same_tensors(resumed[1], whole[1])
        assert torch.equal(resumed[2], whole[2])


# ---- changes between save and load
# ---------------------------------------------------------------------------------------


class Changed(Shuffled):
    """The same model, with other groups and another frozen part."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        if change == "frozen now":
            self.net[0].requires_grad_(False)

    def configure_optimizers(self):
        first, rest = (
            [*self.net[0].parameters()],
            [*self.net[3].parameters(), *self.net[5].parameters()],
        )
        if self.change == "other groups":  # one became two, of which one lies across
            return torch.optim.AdamW(
                [{"params": rest[1:]}, {"params": [*first, rest[0]], "lr": 0.5}], lr=0.5
            )
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def change(rank, world_size, folder):
    saved = train(
        world_size, Changed(None), 1, write=f"{folder}/a.ckpt", strategy=zero3(unit_policy=None)
    )
    train(
        world_size,
        Changed("frozen now"),
        1,
        write=f"{folder}/frozen.ckpt",
        strategy=zero3(unit_policy=None),
    )
    runs = {
        "trained now": dict(module=Changed(None), path=f"{folder}/frozen.ckpt"),
        "other groups": dict(module=Changed("other groups")),
        "frozen now": dict(module=Changed("frozen now")),
        "other units": dict(
            module=Changed(None),
            strategy=zero3(unit_policy=lambda m: [m.net[0], [m.net[3], m.net[5]]]),
        ),
        "other precision": dict(module=Changed(None), precision="bf16-true"),
    }
    results = {}
    for name, options in runs.items():
        watch, module = Watch(), options.pop("module")
        strategy = options.pop("strategy", None) or zero3(unit_policy=None)
        path = options.pop("path", f"{folder}/a.ckpt")
        runner = trainer(strategy, world_size, max_epochs=2, callbacks=[watch], **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runner.fit(module, ckpt_path=path)
        results[name] = watch.weights, watch.optimizers, [str(w.message) for w in caught]
        if name == "trained now":
            trained_now = *results.pop(name), full_weights(runner), optimizer_states(runner)
    return saved.weights, saved.optimizers, results, trained_now


@pytest.fixture(scope="module")
def changes(tmp_path_factory):
    return run_ranks(change, 2, str(tmp_path_factory.mktemp("change")), timeout=100)[0]


def test_state_follows_the_names_of_parameters(changes):
    weights, (before,), results, _ = changes
    assert len(before["state"]) == 6
    for name, (loaded, (after,), _) in results.items():
        assert_same_tensors(
            loaded,
            {k: v.bfloat16() if name == "other precision" else v for k, v in weights.items()},
        )
        expected = {
            k: v
            for k, v in before["state"].items()
            if name != "frozen now" or not k.startswith("net.0.")
        }
        assert after["state"].keys() == expected.keys()
        for parameter, state in expected.items():
            for key, value in state.items():
                mine = after["state"][parameter][key]
                assert torch.equal(mine, value.to(mine.dtype)), (name, parameter, key)


def test_groups_take_the_options_of_those_that_their_parameters_came_from(changes):
    _, _, results, _ = changes
    for name, (_, (after,), _) in results.items():
        assert [group["lr"] for group in after["param_groups"]] == [0.01] * len(
            after["param_groups"]
        ), name


def test_what_is_not_used_is_said(changes):
    _, _, results, _ = changes
    [told] = [text for text in results["frozen now"][2] if "saved state" in text]
    assert "'net.0.bias' (and 1 more) is not used: optimizer 0 does not train them" in told
    assert not [
        text
        for name in ("other groups", "other units")
        for text in results[name][2]
        if "optimizer 0" in text.lower()
    ]


def test_what_is_trained_from_now_on_starts_without_state(changes):
    loaded, (start,), told, weights, (end,) = changes[3]
    assert start["state"].keys() == {"net.3.weight", "net.3.bias", "net.5.weight", "net.5.bias"}
    assert end["state"].keys() == start["state"].keys() | {"net.0.weight", "net.0.bias"}
    for name, state in end["state"].items():
        steps = state["step"] - (start["state"][name]["step"] if name in start["state"] else 0)
        assert steps == 12 and not torch.equal(weights[name], loaded[name])
    [remark] = [text for text in told if "starts without state" in text]
    assert remark.startswith("Optimizer 0 starts without state for 'net.0.bias' (and 1 more)")


# ---- state of no parameter
# -----------------------------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """Counts its steps for all parameters together, from 3 on, and falls with them."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr, momentum=0.9)
        self.state["all"] = {"steps": 3, "halves": torch.ones(2)}

    def step(self, closure=None):
        loss = super().step(closure)
        self.state["all"]["steps"] += 1
        self.state["all"]["halves"] += 0.5
        for group in self.param_groups:
            group["lr"] = 1 / (
                self.state["all"]["steps"] + self.state["all"]["halves"].sum().item()
            )
        return loss


class Counted(Shuffled):
    def configure_optimizers(self):
        return Counting(self.parameters(), 0.1)


def count(rank, world_size, folder, kind):
    found = []
    for read in (None, f"{folder}/epoch=0.ckpt"):
        module, saver = Counted(), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        strategy = zero3(unit_policy=None, checkpoint=CheckpointOptions(kind=kind))
        options = {
            "enable_checkpointing": True,
            "use_distributed_sampler": True,
            "callbacks": [] if read else [saver],
        }
        runner = trainer(strategy, world_size, max_epochs=3, **options)
        runner.fit(module, ckpt_path=read)
        found.append((runner.optimizers[0].state["all"], module.losses, full_weights(runner)))
    return found


@pytest.mark.parametrize("kind", ["sharded", "file"])
def test_state_of_no_parameter_goes_on(kind, tmp_path):
    for whole, rest in run_ranks(count, 2, str(tmp_path), kind, timeout=60):
        steps = len(whole[1])
        assert len(rest[1]) == steps * 2 / 3 and rest[1] == whole[1][steps // 3 :]
        for counted, _, _ in (whole, rest):
            assert counted["steps"] == 3 + steps and torch.equal(
                counted["halves"], torch.ones(2) + steps / 2
            )
        assert_same_tensors(rest[2], whole[2])
