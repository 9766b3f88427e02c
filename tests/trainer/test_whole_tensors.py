"""Optimizers that step on whole tensors, which ranks own: their checkpoints, and the memory of
their state.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from behaviours.trainer_states import MomentaInADict
from helpers.models import Lit, Recipe
from helpers.parity import assert_tensors_close, full_state, relative, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Zero3Engine
from lightning_zero3.strategies.optimizers.param_groups import ParamGroups
from lightning_zero3.strategies.optimizers.whole_parameters import WholeParameters, assign_owners


class ByAdafactor(Lit):
    def __init__(self):
        super().__init__(Recipe(steps=3), lambda module: {})

    def configure_optimizers(self):
        # Large eps: the update stays a smooth function of the gradient where that is zero up to
        # rounding.
        matrices = [p for p in self.parameters() if p.ndim == 2]
        rest = [p for p in self.parameters() if p.ndim != 2]
        groups = [{"params": matrices}, {"params": rest, "lr": 0.01}]
        optimizer = torch.optim.Adafactor(groups, lr=0.02, eps=(1e-3, 1e-2))

        def add(optimizer, *_):
            for state in optimizer.state.values():
                if state:
                    state["pair"] = (1, 2)  # no shape and dtype

        optimizer.register_step_post_hook(add)
        return optimizer


def fit(rank, world_size, strategy, folder, read=None):
    """Losses, final weights, and elements of optimizer state on this rank."""
    module = ByAdafactor()
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    kind = strategy.removeprefix("zero3-")
    plugged = strategy
    if kind == "replicas":
        plugged = zero3(shard_size=2, checkpoint=CheckpointOptions(kind="file"))
    elif strategy != "auto":
        background = kind == "sharded"
        plugged = zero3(checkpoint=CheckpointOptions(kind=kind, background=background))
    runner = trainer(
        plugged, world_size, max_epochs=2, callbacks=[saver], enable_checkpointing=True
    )
    runner.fit(module, ckpt_path=read)
    optimizer = runner.optimizers[0]
    state = optimizer.state if strategy == "auto" else runner.strategy.engine.steps[optimizer].state
    elements = sum(
        v.numel()
        for values in state.values()
        for v in values.values()
        if isinstance(v, torch.Tensor)
    )
    return module.losses, {k: v.clone() for k, v in full_state(runner).items()}, elements


def assert_same(ranks, expected):
    losses = [
        sum(step) / len(ranks) for step in zip(*(losses for losses, *_ in ranks), strict=True)
    ]
    assert relative(losses, expected[0][-len(losses) :]) < 1e-5
    assert_tensors_close(ranks[0][1], expected[1], rtol=1e-5)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return folder, *run_ranks(fit, 1, "auto", folder)


@pytest.mark.parametrize("kind", ["sharded", "file"])
def test_resumed_on_other_ranks_as_in_one_process(kind, one, tmp_path):
    folder, expected = one
    two = run_ranks(fit, 2, f"zero3-{kind}", tmp_path / "two")
    assert_same(two, expected)
    assert sum(elements for *_, elements in two) == expected[2], "state is lost, or is there twice"
    assert max(elements for *_, elements in two) < 0.6 * expected[2]
    for world_size, source in [(3, tmp_path / "two"), (2, folder)]:
        assert_same(
            run_ranks(fit, world_size, f"zero3-{kind}", tmp_path / "rest", source / "epoch=0.ckpt"),
            expected,
        )
    if kind == "file":
        assert_same(
            run_ranks(fit, 1, "auto", tmp_path / "rest", tmp_path / "two" / "epoch=0.ckpt"),
            expected,
        )


def test_replicas_own_the_same(one, tmp_path):
    _, expected = one
    four = run_ranks(fit, 4, "zero3-replicas", tmp_path / "four", timeout=100)
    assert_same(four, expected)
    for *_, elements in four:
        assert elements < 0.6 * expected[2]
    rest = run_ranks(
        fit, 4, "zero3-replicas", tmp_path / "rest", tmp_path / "four" / "epoch=0.ckpt", timeout=100
    )
    assert_same(rest, expected)


class ByLbfgs(Lit):
    def __init__(self):
        super().__init__(Recipe(steps=2), lambda module: {})

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


def save_lbfgs(rank, world_size, folder):
    runner = trainer(zero3(), world_size)
    runner.fit(ByLbfgs())
    runner.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    with pytest.raises(ValueError, match="The state of LBFGS cannot be saved.*weights_only=True"):
        runner.save_checkpoint(folder / "all.ckpt")


def test_lbfgs_saves_weights_only(tmp_path):
    run_ranks(save_lbfgs, 2, tmp_path)
    assert (tmp_path / "weights.ckpt").exists()


def train_beside_lbfgs(rank, world_size):
    """Weights; in the middle the other optimizer gets a layer that none had."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    long = torch.optim.LBFGS(model[2].parameters(), lr=0.1, max_iter=2)
    other = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    cpu, engine, batch = torch.device("cpu"), None, torch.randn(8, 8)
    optimizers, mine = [long, other], batch.chunk(world_size)[rank]
    if world_size > 1:
        collectives = make_collectives(torch.distributed.group.WORLD, cpu)
        shard = partial(Zero3Engine, model, optimizers, device=cpu, collectives=collectives)
        engine, groups = shard(), ParamGroups(optimizers, shard, cpu)
        groups.start(engine)

    def evaluate():
        model.zero_grad()
        with nullcontext() if engine is None else engine.step():
            loss = model(mine).square().mean()
        with nullcontext() if engine is None else engine.backward():
            loss.backward()
        return loss

    for step in range(6):
        if step == 3:
            model.zero_grad()
            other.add_param_group({"params": model[0].parameters()})
        if engine is not None:
            engine = groups.apply_edits(engine)
        long.step(evaluate)
        other.step()
    return [p.detach().clone() for p in model.parameters()]


def test_groups_are_edited_beside_lbfgs():
    alone = train_beside_lbfgs(0, 1)
    for weights in run_ranks(train_beside_lbfgs, 2):
        assert_tensors_close(dict(enumerate(weights)), dict(enumerate(alone)))


def counted(sent, original, buffer, label=0):
    sent.append(buffer.nbytes)
    return original(buffer, label)


def count_exchanges(rank, world_size):
    """Bytes that an optimizer's step hands to the collectives, and bytes of the parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
    cpu = torch.device("cpu")
    collectives = make_collectives(torch.distributed.group.WORLD, cpu)
    engine = Zero3Engine(model, [optimizer], device=cpu, collectives=collectives)
    engine.steps[optimizer].stand_ins = WholeParameters(engine, optimizer)
    with engine.step():
        loss = model(torch.ones(2, 16)).sum()
    with engine.backward():
        loss.backward()
    sent = []
    for name in ("all_gather", "reduce_scatter"):
        original = getattr(collectives, name)
        setattr(collectives, name, partial(counted, sent, original))
    optimizer.step()
    return sum(sent), sum(chunk.nbytes for unit in engine.units for chunk in unit.chunks)


def test_a_step_moves_each_element_three_times():
    for sent, parameters in run_ranks(count_exchanges, 2):
        assert sent == 3 * parameters


def train_with_moves(rank, world_size):
    """Weights after steps before which parameters go from one optimizer to the other, and back."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    halves = [[*model[:2].parameters()], [*model[2].parameters()]]
    optimizers = [
        torch.optim.Adafactor(half, lr=0.1 / k, eps=(1e-3, 1e-2))
        for k, half in enumerate(halves, 1)
    ]
    cpu, engine = torch.device("cpu"), None
    if world_size > 1:
        collectives = make_collectives(torch.distributed.group.WORLD, cpu)
        engine = Zero3Engine(model, optimizers, device=cpu, collectives=collectives)
        for optimizer in optimizers:
            engine.steps[optimizer].stand_ins = WholeParameters(engine, optimizer)
    batch = torch.randn(8, 8)
    mine = batch.chunk(world_size)[rank]
    first, second = (optimizer.param_groups[0]["params"] for optimizer in optimizers)
    for step in range(5):
        with nullcontext() if engine is None else engine.step():
            loss = model(mine).square().mean()
        with nullcontext() if engine is None else engine.backward():
            loss.backward()
        if step == 1:
            second.append(first.pop(0))  # a matrix; its state stays where it was
        if step == 3:
            first.append(second.pop(0))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_parameters_move_between_optimizers_right_before_a_step():
    alone = train_with_moves(0, 1)
    for weights in run_ranks(train_with_moves, 2):
        assert_tensors_close(dict(enumerate(weights)), dict(enumerate(alone)))


@pytest.mark.parametrize("world_size", range(1, 17))
def test_owners_have_about_the_same(world_size):
    numels = {str(k): k * k for k in range(1, 30)}
    load = [0] * world_size
    for name, owner in assign_owners(numels, [0] * world_size).items():
        load[owner] += numels[name]
    assert sum(load) == sum(numels.values())
    assert max(load) - min(load) <= max(numels.values())


def _save_what_is_in_dicts(rank, world_size, path):
    module = Lit(Recipe(steps=1), lambda module: {})
    module.configure_optimizers = lambda: MomentaInADict.configure_optimizers(module)
    runner = trainer("zero3", world_size, max_epochs=1)
    runner.fit(module)
    with pytest.raises(
        ValueError,
        match=r"Aggregated keeps 'momenta' of .* as a dict of tensors.*save_weights_only",
    ):
        runner.save_checkpoint(path)
    runner.save_checkpoint(path, weights_only=True)


def test_state_that_is_no_tensor_is_not_saved_as_something_else(tmp_path):
    run_ranks(_save_what_is_in_dicts, 2, tmp_path / "saved.ckpt")
