"""One rank reads what is sharded while the others do something else, or writes what they do not: an
error on each.
"""

import os
import re

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import nn

from helpers.parity import trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3.strategies.collectives import DivergenceError

READS = {
    "gradient": lambda module: module.net[0].weight.grad.sum(),
    "gathered": lambda module: module.trainer.strategy.gathered(module).__enter__(),
    "forward": lambda module: module.net(torch.ones(1, 4)),
    "values": lambda module: module.trainer.strategy.engine.units[-1].values(),
}
TOLD = {
    "gradient": "read gradients of unit net",
    "gathered": "enter `strategy.gathered`, which is for all ranks",
    "forward": "unshard unit net",
    "values": "read or save weights of unit net",
}
ELSEWHERE = {
    "wait for the others at a barrier": lambda module: module.trainer.strategy.barrier(),
    "reduce a value over the ranks": lambda module: module.trainer.strategy.reduce(torch.ones(1)),
    "broadcast or collect Python objects": lambda module: module.trainer.strategy.broadcast(
        "a path"
    ),
    "broadcast or all-gather values": lambda module: module.all_gather(torch.ones(1)),
}


class Asymmetric(pl.LightningModule):
    def __init__(self, read, other):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
        self.read, self.other, self.message = READS[read], ELSEWHERE[other], ""

    def training_step(self, batch):
        return self.net(batch).sum()

    def on_before_optimizer_step(self, optimizer):
        with pytest.raises(DivergenceError) as caught:
            (self.read if self.global_rank == 0 else self.other)(self)
        self.message = str(caught.value)
        raise KeyError("seen")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=1)


class Table(nn.Module):
    """Its forward changes its parameters in place."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(16, 4), requires_grad=False)
        self.b = nn.Parameter(torch.ones(16, 4), requires_grad=False)

    @torch.no_grad()
    def forward(self, name, rows):
        getattr(self, name)[rows] = 0


def _copy(module, name, value):
    with torch.no_grad():
        getattr(module.table, name).copy_(torch.tensor(float(value)))


def _scale(module, name):
    """Of what is gathered of all ranks' parts."""
    with torch.no_grad():
        getattr(module.table, name).mul_(2)


# What rank 0 does in `training_step`, and rank 1. The values of both have the same bits, in other
# places.
WRITES = {
    "another row": lambda module, rank: module.table("a", rank),
    "rows with the same sum": lambda module, rank: module.table("a", [[0, 3], [1, 2]][rank]),
    "another parameter": lambda module, rank: module.table("ab"[rank], 0),
    "resting": lambda module, rank: _copy(module, "a", rank),
    "own values, then alike": lambda module, rank: [_copy(module, "a", rank), _scale(module, "a")],
}


def _step_with_another_rate(module, rank, optimizer, closure):
    closure()
    (group,) = optimizer.param_groups
    group["lr"] = 0.1 + rank
    optimizer.step()
    group["lr"] = 0.1


def _step_twice(module, rank, optimizer, closure):
    closure()
    for _ in range(2 - rank):
        optimizer.step()


def _step_without_a_gradient(module, rank, optimizer, closure):
    closure()
    if rank == 0:
        module.net[0].bias.grad = None
    optimizer.step()


def _step_without_gradients_of_its_own(module, rank, optimizer, closure):
    """As many on each."""
    closure()
    module.net[rank].bias.grad = None
    optimizer.step()


def _step_with_the_same_gradient_elsewhere(module, rank, optimizer, closure):
    closure()
    module.net[rank].bias.grad = torch.ones(4)
    optimizer.step()


def _step_with_an_own_gradient(module, rank, optimizer, closure):
    closure()
    module.net[1].bias.grad = module.net[1].bias.grad + rank
    optimizer.step()


def _step_with_a_changed_gradient(module, rank, optimizer, closure):
    closure()
    module.net[1].bias.grad.mul_(1 + rank)
    optimizer.step()


def _assign_own(module, rank, closure):
    closure()
    parameters = list(module.net.parameters())
    for p in parameters:
        p.grad = torch.full(p.shape, 1.0 + rank)
    return parameters


def _step_with_own_gradients_that_are_reduced(module, rank, optimizer, closure):
    """What is gathered of each rank's own is a mixture, and so is its mean, which is alike on all
    ranks.
    """
    for p in _assign_own(module, rank, closure):
        torch.distributed.all_reduce(p.grad)
        p.grad /= module.trainer.world_size
    optimizer.step()


def _step_with_own_gradients_that_are_clipped(module, rank, optimizer, closure):
    nn.utils.clip_grad_norm_(_assign_own(module, rank, closure), 0.1)
    optimizer.step()


def _step_with_what_was_mixed_before_it_was_cleared(module, rank, optimizer, closure):
    parameters = _assign_own(module, rank, closure)
    sums = [p.grad.clone() for p in parameters]
    optimizer.zero_grad()
    for p, total in zip(parameters, sums, strict=True):
        torch.distributed.all_reduce(total)
        p.grad = total / module.trainer.world_size
    optimizer.step()


# What ranks do in `optimizer_step`, and what of it is told in the next backward.
STEPS = {
    _step_with_another_rate: "rank 0 came to 'lr' = 0.1 in param group 0 of SGD, rank 1 to 'lr' = 1.1 in",
    _step_twice: "rank 0 came to 10 gradients in param group 0 of SGD, rank 1 to ",
    _step_without_a_gradient: "no gradients of ['net.0.bias'] in param group 0 of SGD",
    _step_without_gradients_of_its_own: "no gradients of ['net.0.bias'] in param group 0 of SGD",
    _step_with_the_same_gradient_elsewhere: "a value assigned as gradient to parameter 'net.0.",
    _step_with_an_own_gradient: "a value assigned as gradient to parameter 'net.1.bias'",
    _step_with_a_changed_gradient: "a value assigned as gradient to parameter 'net.1.bias'",
    _step_with_own_gradients_that_are_reduced: "a value assigned as gradient to parameter 'net.",
    _step_with_own_gradients_that_are_clipped: "a value assigned as gradient to parameter 'net.",
    _step_with_what_was_mixed_before_it_was_cleared: (
        "a value assigned as gradient to parameter 'net.0.bias'"
    ),
}


class Stepper(Asymmetric):
    def __init__(self, act):
        super().__init__("gradient", "wait for the others at a barrier")
        self.act = act

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        self.act(self, self.global_rank, optimizer.optimizer, closure)

    def on_before_optimizer_step(self, optimizer):
        pass


class Writer(Asymmetric):
    def __init__(self, write):
        super().__init__("gradient", "wait for the others at a barrier")
        self.table, self.write = Table(), write

    def training_step(self, batch):
        self.write(self, self.global_rank)
        return self.net(batch).sum()

    def on_before_optimizer_step(self, optimizer):
        pass


class StoresBeforeItEvaluates(Asymmetric):
    """Where no backward comes, ranks compare when an evaluation begins."""

    def __init__(self):
        super().__init__("gradient", "wait for the others at a barrier")
        self.table = Table()

    def on_validation_start(self):
        if self.global_rank == 0:
            self.table.load_state_dict({"a": torch.zeros(16, 4), "b": torch.ones(16, 4)})

    def validation_step(self, batch):
        self.message = "evaluated"


class WritesWhenEvaluated(Asymmetric):
    """Each rank another value; or the same, of which a rank that has fewer batches writes fewer."""

    def __init__(self, differently):
        super().__init__("gradient", "wait for the others at a barrier")
        self.table, self.differently = Table(), differently

    def validation_step(self, batch):
        self.net(batch)
        _copy(self, "a", self.global_rank if self.differently else 2)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(2 - self.global_rank, 4), batch_size=1)

    def on_before_optimizer_step(self, optimizer):
        self.message = "trained"


class GeneratesAlone(Asymmetric):
    """Forwards of rank 0, whose gathers are those of the other's next batch."""

    def __init__(self):
        super().__init__("gradient", "wait for the others at a barrier")

    def validation_step(self, batch):
        for _ in range(1 if self.global_rank else 4):
            self.net(batch)


def _fit_all(rank, world_size, folder):
    options = {"num_sanity_val_steps": 2, "limit_val_batches": 2}
    evaluated = WritesWhenEvaluated(differently=False)
    trainer(zero3(unit_policy=["Linear", "Table"]), world_size, **options).fit(evaluated)
    assert evaluated.message == "trained"
    for run in (pl.Trainer.fit, pl.Trainer.validate):
        evaluated = WritesWhenEvaluated(differently=True)
        evaluator = trainer(zero3(unit_policy=["Linear", "Table"]), world_size, **options)
        with pytest.raises(
            DivergenceError,
            match="a value written to parameter 'table.a'",
        ):
            run(evaluator, evaluated)
        assert not evaluated.message
    stored = StoresBeforeItEvaluates()
    with pytest.raises(DivergenceError, match="a value stored to parameter 'table.a'"):
        tester = trainer(zero3(unit_policy=["Linear", "Table"]), world_size, limit_val_batches=2)
        tester.validate(stored, stored.train_dataloader())
    assert not stored.message
    alone = GeneratesAlone()
    with pytest.raises(DivergenceError, match="end a batch"):
        trainer(zero3(unit_policy=["Linear"]), world_size, limit_val_batches=4).validate(
            alone, alone.train_dataloader()
        )
    for act, text in STEPS.items():
        with pytest.raises(DivergenceError, match=re.escape(text)):
            trainer(zero3(unit_policy=["Linear"]), world_size).fit(Stepper(act))
        with pytest.raises(DivergenceError, match=re.escape(text)):  # where no other backward comes
            trainer(zero3(unit_policy=["Linear"]), world_size, max_steps=1).fit(Stepper(act))
    told, written = [], {}  # from here on messages that nobody takes stay in the group
    for read, other in zip(READS, ELSEWHERE, strict=True):
        module = Asymmetric(read, other)
        with pytest.raises(KeyError, match="seen"):
            trainer(zero3(unit_policy=["Linear"]), world_size).fit(module)
        told.append((read, other, module.message))
    for name, write in WRITES.items():
        saver = OnExceptionCheckpoint(folder, name)  # of values that no rank has had
        options = {"callbacks": [saver], "enable_checkpointing": None}
        with (
            pytest.raises(DivergenceError) as caught,
            pytest.warns(UserWarning, match="saves nothing"),
        ):
            trainer(zero3(unit_policy=["Linear", "Table"]), world_size, **options).fit(
                Writer(write)
            )
        assert not os.path.exists(saver.ckpt_path)
        written[name] = str(caught.value)
    # The same values in another order are the same.
    alike = Writer(lambda module, rank: [_copy(module, name, 2) for name in ["ab", "ba"][rank]])
    trainer(zero3(unit_policy=["Linear", "Table"]), world_size).fit(alike)
    return told, written


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(_fit_all, 2, str(tmp_path_factory.mktemp("saved")), timeout=120)


def test_both_ranks_are_told(ranks):
    for rank, (told, _) in enumerate(ranks):
        for read, other, message in told:
            assert f"rank {rank} is about to" in message and other in message
            assert TOLD[read] in message


def test_writes_of_other_values_are_told(ranks):
    for _, written in ranks:
        for name, message in written.items():
            assert "a value written to parameter 'table.a'" in message, name
