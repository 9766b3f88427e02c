"""Layers that the model runs where autocast is off compute with their full weights, bitwise as
under ddp.
"""

import re
import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.parity import assert_same_tensors, full_state, trainer, zero3
from helpers.ranks import run_ranks


class Block(nn.Module):
    """A mixture of two experts, whose router wants fp32."""

    def __init__(self, recompute):
        super().__init__()
        self.recompute = recompute
        self.router, self.experts = (
            nn.Linear(16, 2),
            nn.ModuleList(nn.Linear(16, 16) for _ in range(2)),
        )

    def route(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.router(x.float()).softmax(-1)

    def forward(self, x):
        weights = (
            checkpoint(self.route, x, use_reentrant=False) if self.recompute else self.route(x)
        )
        return x + sum(w * e(x) for w, e in zip(weights.split(1, -1), self.experts, strict=True))


class Routed(pl.LightningModule):
    def __init__(self, seed, recompute=False):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(*(Block(recompute) for _ in range(3)))
        self.head, self.tail = nn.Linear(16, 4), nn.Linear(4, 4)
        self.losses, self.outside = [], []

    def forward(self, x):
        x = self.body(x)
        with torch.autocast("cpu", enabled=False):
            x = self.head(x.float())
        # of weights that were not rounded to bfloat16 before
        with torch.autocast("cpu", dtype=torch.float16):
            return self.tail(x).float()

    def training_step(self, batch):
        loss = self(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def on_train_epoch_end(self):
        with torch.no_grad():
            self.outside.append(self(torch.ones(2, 16)))  # no autocast at all

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(
            torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), batch_size=2
        )


def _fit(rank, world_size, cases):
    results = {}
    for name, (kind, recompute, options) in cases.items():
        module = Routed(seed=3, recompute=recompute)
        fitter = trainer(
            zero3(**options) if kind == "zero3" else kind,
            world_size,
            precision="bf16-mixed",
            max_epochs=2,
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fitter.fit(module)
        said = {str(w.message) for w in caught if "autocast is off" in str(w.message)}
        state = {k: v.clone() for k, v in full_state(fitter).items()}
        results[name] = module.losses, module.outside, state, said
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_as_ddp(world_size):
    cases = {
        f"{kind} {recompute} {options}": (kind, recompute, options)
        for recompute in (False, True)
        for kind, options in [
            ("ddp", {}),
            ("zero3", {}),
            ("zero3", {"keep_in_fp32": ["*.router", "head.weight"]}),
        ]
    }
    for rank, results in enumerate(run_ranks(_fit, world_size, cases)):
        for name, (losses, outside, state, said) in results.items():
            reference = results[f"ddp {name.split()[1]} {{}}"]
            assert losses == reference[0]
            assert_same_tensors(outside, reference[1])
            if rank == 0:  # who has the whole
                assert_same_tensors(state, reference[2])
            if world_size > 1 and name.startswith("zero3"):
                assert ("'body.*.router'" in str(said)) is name.endswith("{}"), said


class Compiled(Routed):
    def configure_model(self):
        for block in self.body:
            block.compile(backend="aot_eager")


def _fit_compiled(rank, world_size):
    reference, module = Routed(seed=3), Compiled(seed=3)
    trainer("ddp", world_size, precision="bf16-mixed", max_epochs=2).fit(reference)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(zero3(), world_size, precision="bf16-mixed", max_epochs=2).fit(module)
    said = {
        re.search("Module '(.*?)'", text)[1]
        for w in caught
        if "autocast is off" in (text := str(w.message))
    }
    return module.losses, reference.losses, said


def test_of_compiled_layers_only_those_are_gathered_again():
    """Dynamo can tell that autocast is on, and that no `vmap` runs: else the experts would be, too,
    in each step.
    """
    for losses, expected, said in run_ranks(_fit_compiled, 2):
        # a rounding to bfloat16: graphs may round elsewhere
        assert losses == pytest.approx(expected, rel=2**-8)
        assert said == {"body.*.router", "head", "tail"}


def _unknown(rank, world_size):
    with pytest.raises(ValueError, match=r"keep_in_fp32=\['rooter'\]\) matches no module"):
        trainer(zero3(keep_in_fp32=["rooter"]), world_size, precision="bf16-mixed").fit(Routed(0))


def test_a_pattern_that_matches_nothing_is_an_error():
    run_ranks(_unknown, 1)


class SteppedTwice(pl.LightningModule):
    """Steps twice in a `training_step`; the weight of `head` itself is in use meanwhile, as it has
    a child that is a unit.
    """

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.head = nn.Linear(8, 8)
        self.head.adapter = nn.Linear(8, 8)
        self.losses = []

    def training_step(self, batch):
        optimizer = self.optimizers()
        for _ in range(2):
            with torch.autocast("cpu", enabled=False):
                loss = (self.head(batch) + self.head.adapter(batch)).square().mean()
            self.losses.append(loss.item())
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 8), batch_size=1)


def _step_twice(rank, world_size):
    found = []
    for strategy in ("ddp", zero3(unit_policy=None)):
        module = SteppedTwice()
        trainer(strategy, world_size, precision="bf16-mixed", max_epochs=1).fit(module)
        found.append(module.losses)
    return found


def test_a_step_between_two_uses_of_full_weights_is_seen():
    for expected, losses in run_ranks(_step_twice, 2, timeout=60):
        assert losses == expected and len(set(losses)) == len(losses)
