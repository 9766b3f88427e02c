"""Modules that Lightning's Trainer trains, under several strategies: what they see and become,
against a reference.

The reference is one process, which trains on the joined batches. What it sees is the mean of what
the ranks see, each of its own batches; norms, clipped gradients, masks and the like are the same on
every rank. For some it is ddp.
"""

import re
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from behaviours import trainer_modules
from behaviours.harness import Outcome, kebab
from behaviours.trainer_optimizers import OPTIMIZERS
from behaviours.trainer_states import STATES
from helpers.parity import full_state, trainer
from helpers.ranks import run_ranks

MODULES = {**trainer_modules.MODULES, **OPTIMIZERS, **STATES}
SHARING = {
    "Summarized",
    "NormOfState",
    "StateOfAParameter",
    "StateOfAParameterOfASubclass",
    "StateOfAParameterLoaded",
    "GradientNorms",
    "ClippedByNorm",
    "ManualAccumulation",
    "PrunedAfterValidation",
    "MetricOfANetwork",
}


def strategy_of(engine, world_size):
    """What the Trainer is given."""
    if engine != "fsdp2":
        return {"one": "auto", "ddp": "ddp_find_unused_parameters_true"}.get(engine, engine)
    return ModelParallelStrategy(
        data_parallel_size=world_size, tensor_parallel_size=1, save_distributed_checkpoint=False
    )


def module_of(name, engine):
    """The module; for FSDP2 with the method in which its user shards it."""
    if engine != "fsdp2":
        return MODULES[name]()

    class Sharded(MODULES[name]):
        def configure_model(self):
            for part in (*self.net.blocks, self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    return Sharded()


def fit(module, engine, world_size, accelerator="cpu"):
    if accelerator == "gpu" and dist.is_initialized():
        dist.destroy_process_group()  # gloo's
    validated = {"limit_val_batches": 1.0, "num_sanity_val_steps": 2, "accelerator": accelerator}
    options = {
        "max_epochs": 3,
        "callbacks": module.callbacks(),
        **validated,
        **getattr(module, "options", {}),
    }
    fitter = trainer(strategy_of(engine, world_size), world_size, **options)
    fitter.fit(module)
    return fitter


def run_all(rank, world_size, names, engine, accelerator="cpu"):
    """By name: what the module saw, and the weights that came out."""
    from lightning_zero3.strategies.engine import partition

    # every block and every other layer is a unit of its own: units are given up and gathered again
    partition.SMALL_NUMEL = 0
    found = {}
    for name in names:
        module = module_of(name, engine)
        fitter = fit(module, engine, world_size, accelerator)
        assert engine != "zero3" or len(fitter.strategy.engine.units) > 4, name
        state = full_state(fitter)
        found[name] = (
            module.seen,
            module.shared,
            {k: v.to("cpu", copy=True) for k, v in state.items()},
        )
    return found


def refusal(rank, world_size, name):
    """What this rank is told."""
    try:
        fit(module_of(name, "zero3"), "zero3", world_size)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def check(name, ranks, reference):
    """What every rank found of module ``name``, against every rank of the reference."""
    if MODULES[name].reference == "ddp":
        for (seen, *_), (expected, *_) in zip(ranks, reference, strict=True):
            torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected))
    else:
        mean = sum(torch.tensor(seen) for seen, *_ in ranks) / len(ranks)
        torch.testing.assert_close(mean, torch.tensor(reference[0][0]))
    assert len(reference[0][0]) >= 9
    for _, shared, _ in ranks:
        assert bool(shared) == (name in SHARING)
        torch.testing.assert_close(torch.tensor(shared), torch.tensor(reference[0][1]))
    torch.testing.assert_close(ranks[0][2], reference[0][2])


class Feature:
    """A row of the table: a feature of Lightning's."""

    timeout = 60.0

    def __init__(self, name: str, module: type[trainer_modules.Module]) -> None:
        self.name, self.refused = name, module.refused
        self.__doc__ = " ".join(module.__doc__.split())  # a row of the table

    def expected(self, world_size: int) -> str:
        """Kind of zero3's outcome."""
        return "refused" if self.refused else "right"


FEATURES = {kebab(name): Feature(name, module) for name, module in trainer_modules.MODULES.items()}


def run_feature(engine: str, name: str) -> Outcome:
    """Under a strategy on two ranks."""
    feature = FEATURES[name]

    def run(engine: str, world_size: int) -> Any:
        return [
            found[feature.name]
            for found in run_ranks(
                run_all, world_size, [feature.name], engine, timeout=feature.timeout
            )
        ]

    try:
        found = run(engine, 2)
    except AssertionError as failure:
        text = str(failure)
        own = "MisconfigurationException: .*"  # of Lightning
        if said := re.search(rf"^\S*?((\w+: .*{feature.refused})|{own})", text, re.MULTILINE):
            return Outcome("refused", re.search(r"(\w+): .*", text[said.start(1) :])[0])
        return Outcome("hang" if "not finished after" in text else "error", text)
    reference = run(*(("ddp", 2) if MODULES[feature.name].reference == "ddp" else ("one", 1)))
    try:
        check(feature.name, found, reference)
    except AssertionError as difference:
        return Outcome("wrong", str(difference))
    return Outcome("right")
