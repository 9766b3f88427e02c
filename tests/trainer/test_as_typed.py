"""Options as people type them, and what libraries are told of a sharded model."""

import inspect
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)
from torch import nn
from torch.utils.data import DataLoader

from helpers.parity import trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions, DataOptions, WatchOptions, Zero3Strategy
from lightning_zero3.callbacks import CUDABackendConfig


@pytest.mark.parametrize(
    "typed, attribute, meant",
    [
        ({"timeout": 30}, "_timeout", timedelta(seconds=30)),
        ({"start_timeout": 1.5}, "_start_timeout", timedelta(seconds=1.5)),
        ({"start_timeout": timedelta(minutes=1)}, "_start_timeout", timedelta(minutes=1)),
        ({"watch": False}, "_watch_options", None),
        ({"watch": True}, "_watch_options", WatchOptions()),
        ({}, "_watch_options", WatchOptions()),
        ({"watch": {"slow": 3}}, "_watch_options", WatchOptions(slow=3)),
        ({"checkpoint": {"kind": "sharded"}}, "_checkpoints", CheckpointOptions(kind="sharded")),
        ({"keep_in_fp32": "*.router"}, "_keep_in_fp32", ("*.router",)),
    ],
)
def test_options_take_what_people_type(typed, attribute, meant):
    assert getattr(Zero3Strategy(**typed), attribute) == meant


def test_a_dict_of_data_options():
    strategy = Zero3Strategy(data={"distinct_rank_rng": False})
    assert strategy._data.options == DataOptions(distinct_rank_rng=False)


@pytest.mark.parametrize(
    "typed, told",
    [
        ({"checkpoint": "full"}, r"CheckpointOptions.* must be a mapping, not str"),
        ({"data": 3}, r"DataOptions.* must be a mapping, not int"),
        ({"watch": 5}, r"WatchOptions.* must be a mapping, not int"),
    ],
)
def test_another_type_is_told_at_once(typed, told):
    with pytest.raises(TypeError, match=told):
        Zero3Strategy(**typed)


@pytest.mark.parametrize(
    "option, told",
    [
        ({"cpu_offload": True}, r"no option 'cpu_offload'\.\nWrite `offload=.parameters"),
        (
            {"offload_optimizer": True},
            r"no option 'offload_optimizer'\.\nWrite `offload=.optimizer",
        ),
        ({"sharding_strategy": "HYBRID_SHARD"}, r"no option.*\n.*`shard_size=8`.*HYBRID_SHARD"),
        ({"stage": 3}, r"no option 'stage'\.\nIt is stage 3"),
        ({"auto_wrap_policy": {nn.Linear}}, r"no option.*\n.*`unit_policy="),
        ({"state_dict_type": "sharded"}, r"no option.*\n.*CheckpointOptions\(kind=.sharded"),
        ({"mixed_precision": None}, r"no option.*\n.*Trainer\(precision="),
        ({"find_unused_parameters": True}, r"no option.*\nTake it out"),
        ({"unit_polcy": None}, r"no option 'unit_polcy'\.\nDid you mean `unit_policy`\?"),
        ({"sheep": None}, r"no option 'sheep'\.\nThe docstring of `Zero3Strategy`"),
        (
            {"auto_wrap_policy": {nn.Linear}, "cpu_offload": True, "offlaod": None},
            r"no options 'auto_wrap_policy', 'cpu_offload', 'offlaod'\.\nauto_wrap_policy: Take it"
            r" out.*\ncpu_offload: Write `offload=.parameters.`\.\nofflaod: Did you mean `offload`\?",
        ),
    ],
)
def test_options_of_other_strategies_say_what_to_write(option, told):
    with pytest.raises(TypeError, match=told):
        Zero3Strategy(**option)


OPTIONS_OF_LIGHTNING = {
    FSDPStrategy: "cpu_offload mixed_precision auto_wrap_policy activation_checkpointing"
    " activation_checkpointing_policy sharding_strategy state_dict_type device_mesh",
    ModelParallelStrategy: "data_parallel_size tensor_parallel_size save_distributed_checkpoint",
    DeepSpeedStrategy: "stage zero_optimization offload_optimizer offload_parameters config"
    " allgather_bucket_size load_full_weights exclude_frozen_parameters",
    DDPStrategy: "ddp_comm_hook",
}


@pytest.mark.parametrize("strategy", OPTIONS_OF_LIGHTNING)
def test_every_own_option_of_lightnings_strategies_is_answered(strategy):
    names = OPTIONS_OF_LIGHTNING[strategy].split()
    assert set(names) <= set(inspect.signature(strategy).parameters)
    for name in names:
        with pytest.raises(TypeError) as error:
            Zero3Strategy(**{name: None})
        assert "docstring" not in str(error.value), name


@pytest.mark.parametrize("typed, meant", [(True, "on"), (False, "off"), ("warn", "warn")])
def test_deterministic_as_the_trainer_takes_it(typed, meant):
    assert CUDABackendConfig(deterministic=typed).arguments["deterministic"] == meant


class Layers(nn.Module):
    """As layers of transformers are run, some of which LayerDrop leaves out by chance."""

    __module__ = "transformers.models.own"

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, left_out):
        for k, layer in enumerate(self.layers):
            if k != left_out or getattr(self, "_is_fsdp_managed_module", False):
                output = layer(x)
            if k != left_out:
                x = output
        return x


class Dropping(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.own, self.part = nn.Linear(4, 4), Layers()

    def training_step(self, batch, batch_index):
        return self.part(self.own(batch), left_out=self.global_rank).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def drop(rank, world_size):
    module = Dropping()
    runner = trainer(zero3(unit_policy=["Linear"]), world_size, max_steps=2)
    runner.fit(module, DataLoader(torch.ones(4, 4), batch_size=1))
    return [n for n, m in module.named_modules() if hasattr(m, "_is_fsdp_managed_module")]


def test_models_of_transformers_are_told_that_they_are_sharded():
    (on_one,) = run_ranks(drop, 1)
    assert on_one == []
    for told in run_ranks(drop, 2, timeout=60):
        assert "part" in told and "part.layers.2" in told and "own" not in told


class Traces(TensorBoardLogger):
    """As ``TensorBoardLogger(log_graph=True)``, without its package."""

    name = version = "traced"
    log_dir = root_dir = save_dir = None

    def __init__(self):
        self._log_graph, self.graphs = True, []

    def log_graph(self, model):
        if self._log_graph and model.global_rank == 0:
            graph = torch.jit.trace(model, model.example_input_array)
            self.graphs.append(graph(model.example_input_array).detach())

    def log_hyperparams(self, *args, **kwargs):
        pass

    log_metrics = save = finalize = log_hyperparams


class Traced(Dropping):
    example_input_array = torch.ones(2, 4)

    def forward(self, x):
        return self.own(x)


class TracedInAStep(Traced):
    """As one calls `logger.experiment.add_graph` in a step, on rank 0 alone."""

    is_gathered = True

    def training_step(self, batch, batch_index):
        with self.trainer.strategy.gathered(self) if self.is_gathered else nullcontext():
            if self.trainer.is_global_zero:
                graph = torch.jit.trace(self, batch)
                self.is_same = torch.equal(graph(batch), self(batch))
        return super().training_step(batch, batch_index)


def trace_in_a_step(rank, world_size, is_gathered):
    module = TracedInAStep()
    module.is_gathered = is_gathered
    runner = trainer(zero3(unit_policy=["Linear"]), world_size, max_steps=2)
    runner.fit(module, DataLoader(torch.ones(4, 4), batch_size=1))
    return getattr(module, "is_same", None)


def test_a_step_that_traces_the_model():
    assert run_ranks(trace_in_a_step, 2, True, timeout=60) == [True, None]
    with pytest.raises(
        AssertionError, match=r"Linear of unit own is traced .*\nTrace it inside of"
    ):
        run_ranks(trace_in_a_step, 2, False, timeout=60)


class Watch(pl.Callback):
    """As `wandb.watch`: hooks of parameters take histograms of gradients, a hook of the module those of
    parameters when it has run.
    """

    def __init__(self, what):
        self.what, self.histograms = what, {}

    def on_train_start(self, trainer, module):
        if self.what == "gradients" and trainer.is_global_zero:
            for name, p in module.named_parameters():
                p.register_hook(partial(self.take, f"gradients/{name}"))
        if self.what == "parameters":
            module.own.register_forward_hook(self.take_parameters)

    def take_parameters(self, module, args, outputs):
        for name, p in module.named_parameters():
            self.take(f"parameters/{name}", p.data)

    def take(self, name, tensor):
        flat = tensor.detach().cpu().clone().reshape(-1)
        flat = flat[torch.isfinite(flat)]
        self.histograms[name] = torch.histc(flat, 8, flat.min().item(), flat.max().item())


class Watched(Dropping):
    def training_step(self, batch, batch_index):
        return self.part(self.own(batch), left_out=None).square().mean()


def watch(rank, world_size, log):
    callback = Watch(log)
    strategy = zero3(unit_policy=["Linear"]) if world_size > 1 else "auto"
    data = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    mine = DataLoader(data[:2] if world_size == 1 else data, batch_size=1)
    trainer(strategy, world_size, max_steps=1, callbacks=[callback]).fit(Watched(), mine)
    return callback.histograms


@pytest.mark.parametrize("log", ["gradients", "parameters"])
def test_histograms_of_a_library_that_watches_the_model(log):
    """Gradients are rank 0's own, in its hooks alone; parameters are read by all ranks."""
    (expected,) = run_ranks(watch, 1, log)
    found = run_ranks(watch, 2, log, timeout=60)
    assert len(expected) == (8 if log == "gradients" else 2)
    for histograms in found if log == "parameters" else found[:1]:
        assert histograms.keys() == expected.keys()
        for name, histogram in histograms.items():
            assert torch.equal(histogram, expected[name]), name


def trace(rank, world_size):
    module, logger = Traced(), Traces()
    expected = module(module.example_input_array).detach()
    runner = trainer(zero3(unit_policy=["Linear"]), world_size, max_steps=1, logger=logger)
    runner.fit(module, DataLoader(torch.ones(4, 4), batch_size=1))
    return expected, logger.graphs


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_logger_that_traces_the_model(ranks):
    for rank, (expected, traced) in enumerate(run_ranks(trace, ranks, timeout=60)):
        assert len(traced) == (rank == 0)
        assert all(torch.equal(value, expected) for value in traced)
