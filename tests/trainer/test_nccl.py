"""Training over NCCL on two GPUs against one process on one:
`pytest -m multi_gpu tests/trainer`.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from helpers.models import Recipe
from helpers.parity import assert_same_run, assert_same_tensors, fit_here, zero3
from helpers.ranks import run_ranks
from lightning_zero3.strategies.collectives import GroupCollectives

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

RECIPE = Recipe(
    tied=True,
    optimizer="adamw",
    decay_matrices=True,
    schedule="step",
    frozen=("blocks.0",),
    steps=6,
)
OPTIONS = {
    "accelerator": "gpu",
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.1,
    "max_epochs": 2,
    "limit_val_batches": 2,
}
STRATEGIES = {
    "each micro-batch": {},
    "once a window": {"reduce_once": True},
    "debug": {"debug": True},
}


def on_the_host(run):
    gradients = [{name: grad.cpu() for name, grad in step.items()} for step in run.gradients]
    return replace(
        run, gradients=gradients, state={name: value.cpu() for name, value in run.state.items()}
    )


def fit_all(rank, world_size):
    dist.destroy_process_group()  # gloo's
    runs = {}
    for name, options in STRATEGIES.items():
        strategy = zero3(**options)
        runs[name] = on_the_host(
            fit_here(replace(RECIPE, seed=rank), strategy, world_size, OPTIONS)
        )
        assert (
            type(strategy.engine.collectives) is GroupCollectives and dist.get_backend() == "nccl"
        )
    return runs


def test_two_gpus_are_one():
    first, second = run_ranks(fit_all, 2, timeout=200)
    alone = on_the_host(fit_here(RECIPE, "auto", 1, OPTIONS))
    for name in STRATEGIES:
        assert_same_tensors(first[name].gradients, second[name].gradients)
        losses = [
            sum(step) / 2 for step in zip(first[name].losses, second[name].losses, strict=True)
        ]
        assert_same_run(replace(first[name], losses=losses), alone)
