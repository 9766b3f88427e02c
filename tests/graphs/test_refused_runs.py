"""Runs and options of which no step can be captured: each reason, with the message that a user
reads.
"""

import logging
import warnings
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from helpers.one_line import Small, train
from helpers.recorded import assert_same
from lightning_zero3 import Zero3Strategy
from lightning_zero3.callbacks import AllocatorConfig, CUDAGraphStep
from lightning_zero3.callbacks.graphs import program
from lightning_zero3.callbacks.graphs.runner import GraphCaptureError, check_run


def same(self, batch, batch_idx, loss):
    return loss


def prints(self, batch, batch_idx, loss):
    print("loss", loss.shape)
    return loss


class Manual(Small):
    def __init__(self):
        super().__init__(None)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(batch).sum())
        optimizer.step()


def zero3(**options):
    return partial(Zero3Strategy, **options)


class Fetches(Small):
    def __init__(self):
        super().__init__(None)

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.layer(batch).square().mean()


class Hides:
    """Moved to a device by itself, as Lightning allows; nobody sees the number in it."""

    def __init__(self, value):
        self.value = torch.tensor(value)

    def to(self, *args, **kwargs):
        return self

    def __repr__(self):
        return "Hides()"


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (
            Manual(),
            {},
            "The module optimizes manually",
        ),
        (
            Small(same),
            {"detect_anomaly": True},
            "detect_anomaly=True.* looks at values on the host",
        ),
        (
            Small(same),
            {"strategy": zero3(debug=True)},
            r"`Zero3Strategy\(debug=\.\.\.\)` waits for the host, .*Leave it out",
        ),
        (
            Small(same),
            {"strategy": zero3(stop_on_nonfinite=True)},
            r"`Zero3Strategy\(stop_on_nonfinite=\.\.\.\)` waits for the host, .*Leave it out",
        ),
        (
            Small(same),
            {"strategy": zero3(reduce_once=True)},
            r"`Zero3Strategy\(reduce_once=\.\.\.\)` .* does something else .*Leave it out",
        ),
        (
            Small(same, [{"x": torch.ones(4, 3), "s": torch.eye(3).to_sparse()}] * 4),
            {},
            r"A tensor of the inputs has layout torch\.sparse_coo\. Pass dense ones",
        ),
    ],
    ids=["manual", "anomaly", "debug", "nonfinite", "once", "sparse"],
)
def test_runs_that_cannot_be_captured_at_all(module, options, message):
    options = {name: value() if callable(value) else value for name, value in options.items()}
    with pytest.raises(GraphCaptureError, match=message):
        train(module, CUDAGraphStep(software=True, strict=True), **options)


def hidden(self, batch, batch_idx, loss):
    return loss * batch["h"].value


@pytest.mark.usefixtures("device")
def test_what_a_batch_hides_is_found_by_the_comparison():
    batches = [{"x": torch.ones(4, 3), "h": Hides(float(k))} for k in range(8)]
    mine, reference = Small(hidden, batches), Small(hidden, batches)
    message = "An eager run and its replay are not the same: the output is"
    with pytest.warns(UserWarning, match=message):
        train(mine, CUDAGraphStep(software=True))
    train(reference)
    assert_same(mine.state_dict(), reference.state_dict())


@pytest.mark.usefixtures("device")
def test_a_step_that_fetches_its_batches_is_found_by_the_comparison():
    mine, reference = Fetches(), Fetches()
    with pytest.warns(
        UserWarning, match="An eager run and its replay are not the same: the output is"
    ):
        train(mine, CUDAGraphStep(software=True))
    train(reference)
    assert_same(mine.state_dict(), reference.state_dict())


@pytest.mark.usefixtures("device")
def test_batches_that_differ_each_time_are_refused(monkeypatch):
    monkeypatch.setattr(program, "MOST_SIGNATURES", 3)
    batches = [{"x": torch.ones(4, 3), "name": str(k)} for k in range(5)]
    with pytest.raises(
        GraphCaptureError, match="kinds of inputs came, and none of them often.*leave out ids"
    ):
        train(Small(same, batches), CUDAGraphStep(software=True, strict=True))


def of(strategy, world_size=1):
    """A trainer, as far as a run of modules is looked at."""
    return SimpleNamespace(strategy=strategy, world_size=world_size, lightning_module=None)


def test_other_strategies_are_refused_by_name():
    [found] = check_run(of(SimpleNamespace(strategy_name="odd")), is_step=False)
    assert found == (
        "The strategy SimpleNamespace is not known to work. Use one device, `ddp` or `zero3`."
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup": 1}, "warmup: .* got 1"),
        ({"verify": 0}, "verify: .* got 0"),
        ({"max_graphs": 0}, "max_graphs: .* got 0"),
        ({"modules": []}, "modules: expected names of modules"),
        ({"modules": ["net"], "optimizer": True}, "modules: .* no `optimizer=True` beside them"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        CUDAGraphStep(**options)


@pytest.mark.parametrize(
    ("settings", "world_size", "register", "refused"),
    [
        ("expandable_segments:True", 1, None, False),
        ("expandable_segments:True", 2, None, True),
        ("expandable_segments:True", 2, "0", False),
        ("expandable_segments:False,max_split_size_mb:64", 2, None, False),
    ],
)
def test_settings_of_the_allocator_that_do_not_go_with_graphs(
    settings, world_size, register, refused, monkeypatch
):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    if register is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", register)
    found = check_run(of(DDPStrategy(), world_size), is_step=False)
    assert len(found) == refused and all("Set NCCL_GRAPH_REGISTER=0" in text for text in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_split_size_mb": 64}, None),
        ({"expandable_segments": True}, None),
    ],
)
def test_beside_the_allocators_own_callback(options, message, monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    config = AllocatorConfig(**options)
    try:
        with pytest.raises(GraphCaptureError, match=message) if message else nullcontext():
            train(Small(same), config, CUDAGraphStep(software=True, strict=True))
    finally:
        config.restore_now()


def test_without_cuda_nothing_is_captured(caplog):
    with warnings.catch_warnings(), caplog.at_level(logging.INFO):
        warnings.filterwarnings("error", message="CUDAGraphStep")
        train(Small(prints), CUDAGraphStep(strict=True))
    assert (
        "CUDAGraphStep: no CUDA graphs on cpu: steps run eagerly (or `software=True`)"
        in caplog.text
    )
