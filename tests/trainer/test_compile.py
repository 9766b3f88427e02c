"""Modules that are compiled as a whole, or in part, in the Trainer: as without, or refused."""

import pytest
import torch

from helpers.models import Lit, Recipe
from helpers.parity import assert_tensors_close, full_state, trainer, zero3
from helpers.ranks import run_ranks

COMPILE = {
    "nothing": lambda module: None,
    "blocks": lambda module: [block.compile(backend="aot_eager") for block in module.net.blocks],
    "net": lambda module: module.net.compile(backend="aot_eager"),
}


def fit_all(rank, world_size):
    found, stats = {}, torch._dynamo.utils.counters["stats"]
    for what, compile_it in COMPILE.items():
        module = Lit(Recipe(steps=3), lambda module: {})
        compile_it(module)
        torch._dynamo.reset()
        runner, before = trainer(zero3(), world_size), stats["unique_graphs"]
        runner.fit(module)
        assert (stats["unique_graphs"] > before) == (what != "nothing"), what
        found[what] = {name: value.clone() for name, value in full_state(runner).items()}
    return found


def test_compiled_modules_train_as_others_do():
    found, _ = run_ranks(fit_all, 2, timeout=100)
    for what in COMPILE:
        assert_tensors_close(found[what], found["nothing"], where=what)


def fit_compiled(rank, world_size):
    with pytest.raises(
        RuntimeError, match="compiled model is incompatible with the current strategy"
    ):
        trainer(zero3(), world_size).fit(torch.compile(Lit(Recipe(), lambda module: {})))


def test_lightning_refuses_a_compiled_module_for_strategies_of_others():
    run_ranks(fit_compiled, 2, timeout=60)
