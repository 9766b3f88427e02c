"""Runs to compare, and the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from helpers.models import Lit, Recipe
from helpers.ranks import run_ranks

# Rounding of fp32 sums in another order, relative to the largest element of the tensor. Measured:
# at most 5e-7.
RTOL = 2e-6


@dataclass
class Run:
    """What a training run did."""

    losses: list[float]  # mean over ranks of each step's loss
    gradients: list[dict[str, Tensor]]  # full, as the optimizer saw them; a missing name had none
    rates: list[float]
    norms: list[float]  # of the whole gradient, before it was clipped
    state: dict[str, Tensor]  # of the model, at the end
    metrics: dict[str, float] = field(default_factory=dict)


def local_gradients(module: pl.LightningModule) -> dict[str, Tensor]:
    """Gradients of an unsharded model."""
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def sharded_gradients(module: pl.LightningModule) -> dict[str, Tensor]:
    """The same of a model trained with zero3, put together from all ranks' flat shards."""
    found = {}
    for unit in module.trainer.strategy.engine.units:
        if unit.trained:
            found.update(unit.gradients())
    return found


def trainer(strategy: str | Any = "auto", devices: int = 1, **options: Any) -> pl.Trainer:
    """A quiet Trainer, on the CPU unless options say otherwise."""
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "max_epochs": 1,
    }
    return pl.Trainer(devices=devices, strategy=strategy, **{**quiet, **options})


def zero3(**options: Any) -> Any:
    """The strategy with a unit for each block: left to itself it would put a tiny model into one
    unit.
    """
    from lightning_zero3 import Zero3Strategy

    return Zero3Strategy(**{"unit_policy": ["Block"], **options})


def full_state(runner: pl.Trainer) -> dict[str, Tensor]:
    """The model's full state dict: with zero3 on rank 0, with other strategies on every rank."""
    strategy = runner.strategy
    return getattr(strategy, "full_state_dict", strategy.lightning_module_state_dict)()


class WithNorms(Lit):
    """Logs the norm of the whole gradient, before it is clipped."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if hasattr(self.trainer.strategy, "gradient_norm"):
            norm = self.trainer.strategy.gradient_norm()
        else:
            norm = get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        self.norms.append(norm.item())
        self.log("grad_norm", norm)


def fit_here(recipe: Recipe, strategy: Any, devices: int, options: Mapping[str, Any]) -> Run:
    """Train in this process, which may be a rank."""
    sharded = not isinstance(strategy, str)
    module = WithNorms(recipe, sharded_gradients if sharded else local_gradients)
    fitter = trainer(strategy, devices, **options)
    fitter.fit(module)
    state = full_state(fitter)
    state = {name.removeprefix("net."): value.clone() for name, value in state.items()}
    gradients = [{n.removeprefix("net."): g for n, g in step.items()} for step in module.gradients]
    return Run(
        module.losses,
        gradients,
        module.rates,
        module.norms,
        state,
        {k: v.item() for k, v in fitter.callback_metrics.items()},
    )


# What to train, the strategy's name or the options of zero3's, options of the Trainer.
Case = tuple[Recipe, str | dict[str, Any], dict[str, Any]]


def _rank(rank: int, world_size: int, cases: Mapping[str, Case]) -> dict[str, Run]:
    runs = {}
    for name, (recipe, kind, options) in cases.items():
        print(f"--- {name}", flush=True)
        recipe = replace(recipe, seed=recipe.seed + rank)  # rank 0's weights count
        policy = {"unit_policy": None} if recipe.net != "lm" else {}
        own = {} if kind == "zero3" else kind
        runs[name] = fit_here(
            recipe, kind if isinstance(own, str) else zero3(**policy, **own), world_size, options
        )
    return runs


def fit_all_on(world_size: int, cases: Mapping[str, Case]) -> dict[str, Run]:
    """Train every case on the same ``world_size`` ranks; losses are the mean over them, the rest is
    rank 0's.
    """
    everyone = run_ranks(_rank, world_size, cases, timeout=100)
    for name, first in everyone[0].items():
        for runs in everyone[1:]:
            assert_same_tensors(first.gradients, runs[name].gradients)
            assert runs[name].rates == first.rates
        losses = zip(*(runs[name].losses for runs in everyone), strict=True)
        first.losses = [sum(step) / world_size for step in losses]
    return everyone[0]


def fit_on(world_size: int, recipe: Recipe, kind: str = "zero3", **options: Any) -> Run:
    """One case of :func:`fit_all_on`."""
    return fit_all_on(world_size, {"it": (recipe, kind, options)})["it"]


def assert_same_tensors(a: Any, b: Any) -> None:
    """Bitwise."""
    assert assert_tensors_close(a, b, rtol=0.0) == 0.0


def assert_tensors_close(mine: Any, reference: Any, rtol: float = RTOL, where: str = "") -> float:
    """Compare tensors in nested dicts and sequences; return the largest difference, relative to a
    tensor's largest.
    """
    if isinstance(reference, Tensor):
        assert mine.shape == reference.shape and mine.dtype == reference.dtype, (
            f"{where}: {mine.shape} {reference.shape}"
        )
        assert torch.isfinite(mine).all(), f"{where} is not finite"
        if not reference.numel():
            return 0.0
        scale = reference.double().abs().max().clamp_min(1e-30)
        difference = ((mine.double() - reference.double()).abs().max() / scale).item()
        assert difference <= rtol, (
            f"{where}: relative difference {difference:.3g} is above {rtol:.3g}"
        )
        return difference
    if isinstance(reference, Mapping):
        assert mine.keys() == reference.keys(), (
            f"{where}: {sorted(mine.keys() ^ reference.keys())} on one side only"
        )
        return max(
            (assert_tensors_close(mine[k], v, rtol, f"{where}.{k}") for k, v in reference.items()),
            default=0.0,
        )
    assert isinstance(reference, Sequence) and len(mine) == len(reference), (
        f"{where}: {len(mine)} against {len(reference)}"
    )
    pairs = enumerate(zip(mine, reference, strict=True))
    return max(
        (assert_tensors_close(a, b, rtol, f"{where}[{k}]") for k, (a, b) in pairs), default=0.0
    )


def relative(mine: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference of two series."""
    assert len(mine) == len(reference) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(mine, reference, strict=True))


def assert_same_run(mine: Run, reference: Run, rtol: float = 1e-6, gradients: float = 1e-6) -> None:
    """Losses, gradients, learning rates, metrics and final weights, relative to the largest element
    of each tensor.
    """
    assert relative(mine.losses, reference.losses) <= rtol
    assert len(reference.gradients) > 1, "one step shows no effect of the optimizer on the next"
    grads = [
        {**{n: torch.zeros_like(g) for n, g in m.items()}, **r}
        for m, r in zip(mine.gradients, reference.gradients, strict=True)
    ]
    assert_tensors_close(mine.gradients, grads, gradients, "gradients")
    assert mine.rates == reference.rates
    assert relative(mine.norms, reference.norms) <= gradients
    assert_tensors_close(mine.state, reference.state, rtol, "state")
    assert mine.metrics.keys() == reference.metrics.keys()
    for name, value in reference.metrics.items():
        assert abs(mine.metrics[name] - value) <= rtol * abs(value)
