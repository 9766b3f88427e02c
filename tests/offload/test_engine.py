"""Shards in host memory give bit for bit the numbers of shards on the device."""

import inspect
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from helpers.models import TinyLm, make, part, tokens
from helpers.ranks import run_ranks
from lightning_zero3.strategies.collectives import LocalCollectives
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import (
    Offload,
    Zero3Engine,
    gradients,
    offload,
    reduction,
    unit,
)
from lightning_zero3.strategies.engine.layout import ChunkLayout
from lightning_zero3.strategies.engine.norms import squared_norms
from lightning_zero3.strategies.engine.offload import Host, HostChunk, start_worker
from lightning_zero3.strategies.engine.streams import Stream
from lightning_zero3.strategies.numerics.precision import gather_dtypes
from lightning_zero3.strategies.optimizers import host_steps
from lightning_zero3.strategies.optimizers.param_groups import ParamGroups
from offload.late_device import LateStream, LateWorker

CPU = torch.device("cpu")
OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05, fused=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
}


def build(world_size, where, late, optimizer="adamw", bf16=False):
    model = make(lambda: TinyLm(depth=3))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 0.02},
    ]
    optimizer = OPTIMIZERS[optimizer](groups)
    low = gather_dtypes(model, "bf16-mixed" if bf16 else "32-true", ())
    if world_size > 1:
        collectives = make_collectives(dist.group.WORLD, CPU)
    else:
        collectives = LocalCollectives(alone=where is None)
    engine = Zero3Engine(
        model,
        [optimizer],
        device=CPU,
        collectives=collectives,
        unit_policy=lambda m: [m, *m.blocks],
        slot_dtype=lambda name, p: low.get(name, p.dtype),
        offload=where,
        streams=LateStream if late else Stream,
        worker=LateWorker if late else start_worker,
    )
    ParamGroups([optimizer], lambda: engine, CPU).start(engine)
    return engine, optimizer, model


def step(engine, model, batch):
    """A micro-batch, and its loss."""
    is_mixed = any(chunk.dtype == torch.bfloat16 for chunk in engine.chunks)
    with engine.step(), torch.autocast("cpu", torch.bfloat16, is_mixed):
        loss = model.loss(batch)
    with engine.backward():
        loss.backward()
    return loss.item()


def gradient_norm(engine):
    return engine.gradient_norm(engine.gradients.trained).item()


def train(
    rank, world_size, where, late, optimizer="adamw", steps=6, micro=1, bf16=False, looks=True
):
    """Losses, weights and optimizer state; ``looks``: at gradients between backward and step."""
    engine, optimizer, model = build(world_size, where, late, optimizer, bf16)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for batch in tokens(steps):
        for number in range(micro):
            its = tuple(t.chunk(micro)[number] for t in part(batch, rank, world_size))
            losses.append(step(engine, model, its))
        losses.append(gradient_norm(engine))
        if looks:
            torch._foreach_mul_(engine.steps[optimizer].parts_of_gradients(), 0.9)
            losses += [gradient_norm(engine), model.head.weight.grad.norm().item()]
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            model.norm.weight.mul_(0.9)
        optimizer.zero_grad()
    state = {
        f"{name} {key}": value.clone()
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }
    engine.unshard()
    return losses, dict(model.named_parameters()) | state


def test_norms_are_computed_on_the_device_while_gradients_are_there():
    """Also those of sums of micro-batches."""
    engine, optimizer, model = build(1, Offload("parameters"), True)
    [batch] = tokens(1)
    on_host = []
    with patch.object(
        gradients, "squared_norms", lambda parts: on_host.append(1) or squared_norms(parts)
    ):
        for micro_batches in (1, 2, 1):
            for _ in range(micro_batches):
                step(engine, model, batch)
            on_host.clear()
            norm = gradient_norm(engine)
            assert not on_host
            whole = torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm()
            assert norm == pytest.approx(whole.item(), rel=1e-6)
            optimizer.zero_grad()


def edit(model):
    """Change gradients in each way; after each a norm is asked for."""
    first, second, third, *_ = model.blocks.parameters()
    with torch.no_grad():
        yield first.grad.mul_(0.5)
        second.grad = torch.full_like(second, 0.01)
        yield
        third.grad = None
        yield
        yield model.head.weight.grad.data.mul_(3.0)
        yield model.blocks[1].zero_grad()
        yield torch.nn.utils.clip_grad_value_(model.norm.parameters(), 1e-4)
        yield torch._foreach_mul_([p.grad for p in model.head.parameters()], 2.0)


def norms_of_edited(rank, world_size, where, late, micro):
    engine, optimizer, model = build(world_size, where, late)
    found = []
    for batch in tokens(2):
        for _ in range(micro):
            step(engine, model, part(batch, rank, world_size))
        found += [gradient_norm(engine), *(gradient_norm(engine) for _ in edit(model))]
        step(engine, model, part(batch, rank, world_size))  # adds to what was changed
        found.append(gradient_norm(engine))
        optimizer.step()
        found.append(gradient_norm(engine))
        optimizer.zero_grad()
    return found


def compare_edited(rank, world_size):
    for micro in (1, 2):
        expected = norms_of_edited(rank, world_size, None, False, micro)
        assert len(set(expected)) > 12
        for kind in ("optimizer", "parameters"):
            assert norms_of_edited(rank, world_size, Offload(kind), True, micro) == expected


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.variant), 2])
def test_norms_of_gradients_that_are_changed(world_size):
    run_ranks(compare_edited, world_size, timeout=60)


class ThreeDtypes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        dtypes = (torch.float32, torch.float64, torch.bfloat16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, dtype=each) for each in dtypes)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x.float().square().mean() * 100


def train_three_dtypes(where, late):
    torch.manual_seed(0)
    model = ThreeDtypes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    engine = Zero3Engine(
        model,
        [optimizer],
        device=CPU,
        collectives=LocalCollectives(alone=False),
        unit_policy=lambda m: [m],
        offload=where,
        streams=LateStream if late else Stream,
        worker=LateWorker if late else start_worker,
    )
    ParamGroups([optimizer], lambda: engine, CPU).start(engine)
    for _ in range(3):
        with engine.step():
            loss = model(torch.randn(16, 64))
        with engine.backward():
            loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_sums_of_a_unit_of_several_dtypes():
    """All are on their way at the same time."""
    expected = train_three_dtypes(None, False)
    for late in (True, False):
        for mine, other in zip(
            train_three_dtypes(Offload("parameters"), late), expected, strict=True
        ):
            assert torch.equal(mine, other)


OPTIONS = [
    {},
    {"micro": 3},
    {"micro": 2, "looks": False},
    {"optimizer": "sgd"},
    {"optimizer": "adagrad"},
    {"optimizer": "rmsprop"},
    {"bf16": True},
]


def train_all(rank, world_size, options):
    """The run without offload, and those with it."""
    return train(rank, world_size, None, False, **options), {
        (kind, late): train(rank, world_size, Offload(kind), late, **options)
        for kind in ("optimizer", "parameters")
        for late in (True, False)
    }


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.variant), 2])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(its, marks=pytest.mark.variant)
        if its.get("optimizer") in ("sgd", "adagrad")
        else its
        for its in OPTIONS
    ],
)
def test_bit_for_bit(world_size, options):
    if options.get("bf16") and world_size == 1:
        pytest.skip("one rank without offload rounds nothing")
    for (losses, state), found in run_ranks(train_all, world_size, options, timeout=100):
        assert losses[0] != losses[-1]
        for case, (its, weights) in found.items():
            assert its == losses, case
            assert weights.keys() == state.keys()
            for name, value in state.items():
                assert torch.equal(weights[name], value), (case, name)


# Each wait, by the words of its line: where it is missing, numbers are others, or an error comes.
WAITS = [
    (offload, "ticket.result()"),
    (offload, "self.wait_for_host()  # hazard: sending values"),
    (offload, "self.streams[1].wait(self.stored)  # hazard: sums that still arrive"),
    (offload, "self.streams[1].wait(self.stored)  # hazard: stepping with sums"),
    (host_steps, "self.engine.wait_for_host()"),
    (unit, "self._stream.join(self._filled)"),
    (reduction, "self._stream.join(self._mark)"),
]
RUNS = [{"micro": 3}, {"micro": 2, "optimizer": "rmsprop"}, {"looks": False}]


def without(module, words):
    """Take the wait on the first line with ``words`` out of the functions of ``module``."""
    lines = inspect.getsource(module).splitlines()
    index = next(k for k, line in enumerate(lines) if line.strip().startswith(words))
    lines[index] = lines[index][: -len(lines[index].lstrip())] + "pass"
    changed = dict(vars(module))
    exec(compile("\n".join(lines), module.__file__, "exec"), changed)
    for name, cls in vars(module).items():
        if isinstance(cls, type) and cls.__module__ == module.__name__:
            for attribute, function in vars(cls).items():
                if inspect.isfunction(function) and function.__module__ == module.__name__:
                    function.__code__ = vars(changed[name])[attribute].__code__


def is_same(found, expected):
    """Whether two runs have the same losses, weights and state, to the bit."""
    (losses, state), (its, values) = found, expected
    return (
        losses == its
        and state.keys() == values.keys()
        and all(torch.equal(state[name], value) for name, value in values.items())
    )


def train_without(rank, world_size, number):
    """Whether runs with all waits are as without offload, and one without this one is not."""
    expected = [train(rank, world_size, None, False, **options) for options in RUNS]
    runs = [(options, kind) for options in RUNS for kind in ("optimizer", "parameters")]
    before = [train(0, 1, Offload(kind), True, **options) for options, kind in runs]
    without(*WAITS[number])
    after = []
    for options, kind in runs:
        try:
            after.append(train(0, 1, Offload(kind), True, **options))
        except Exception:  # nan, where something must be a number
            after.append(([], {}))
    expected = [each for each in expected for _ in range(2)]
    return all(map(is_same, before, expected)), all(map(is_same, after, expected))


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.variant) for n in range(len(WAITS))]
)
def test_a_wait_that_is_missing_shows(number):
    """On one rank, as others would wait for a rank that fails."""
    assert run_ranks(train_without, 1, number, timeout=60) == [(True, False)]


class Copies:
    """A stream whose copies never end by themselves."""

    def __init__(self):
        self.waited = []

    def wait(self, mark):
        if mark is not None:  # nothing was copied
            self.waited.append(mark)


@pytest.mark.parametrize("act", ["write", "step", "round"])
def test_memory_that_is_still_read_is_not_written_to(act):
    """Kernels of a forward may be far behind the host, which steps meanwhile."""
    entry = SimpleNamespace(trained=True, unit=0, part_of=lambda shard: shard)
    dtype = torch.bfloat16 if act == "round" else torch.float32
    chunk = HostChunk([entry], ChunkLayout.build([8], 1, 2), dtype, torch.float32)
    Host(Offload("parameters"), [chunk], CPU, LateWorker(CPU))
    chunk.own(torch.ones(8), 0)
    chunk.streams = Copies(), Copies()
    chunk.begin_load()
    chunk.end_load("copied")
    assert not chunk.streams[0].waited
    if act != "step":
        chunk.values.zero_()
    else:
        at_the_step = []
        chunk.step_with(lambda gradients: at_the_step.append(list(chunk.streams[0].waited)))
        chunk.wait_for_host()
        assert at_the_step == [["copied"]]
    if act == "round":
        chunk.end_load("copied again")
        chunk.begin_load()
        assert chunk.streams[0].waited == ["copied", "copied again"]
    else:
        assert chunk.streams[0].waited == ["copied"]


class Broken(Exception):
    """An error of the test's."""


def fail(rank, world_size):
    """What the worker raises reaches the training, with the unit's name, and stays an error."""
    for late in (True, False):
        engine, optimizer, model = build(world_size, Offload("optimizer"), late)
        step(engine, model, tokens(1)[0])
        with patch.object(host_steps.HostShards, "_change", side_effect=Broken):
            optimizer.step()
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"host's work on .*unit .* failed \(Broken"):
                    model.head.weight.norm()
        with pytest.raises(RuntimeError, match="failed"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="failed"):
            len(optimizer.state)


def test_an_error_of_the_worker_is_raised():
    run_ranks(fail, 1, timeout=60)


def call_hooks(rank, world_size):
    """A hook on all optimizers is called once in a step."""
    calls = []
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    engine, optimizer, model = build(world_size, Offload("parameters"), False)
    step(engine, model, tokens(1)[0])
    optimizer.step()
    model.head.weight.norm()
    handle.remove()
    return calls


def test_hooks_on_all_optimizers():
    assert run_ranks(call_hooks, 1, timeout=60) == [[1]]


def count_threads(rank, world_size):
    """Threads of the worker's operations, of the training's, and of a new thread's."""
    torch.set_num_threads(4)
    engine, *_ = build(world_size, Offload("optimizer"), False)
    with ThreadPoolExecutor(1) as other:
        return (
            engine.host.worker.submit(torch.get_num_threads).result(),
            torch.get_num_threads(),
            other.submit(torch.get_num_threads).result(),
        )


def test_the_worker_takes_half_of_the_cores():
    assert run_ranks(count_threads, 1, timeout=60) == [(2, 4, 4)]


def bind_to_gpu(rank, world_size, folder):
    """Processors of the worker of a GPU near number 1, and of the training's thread."""
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xAF, pci_device_id=2)
    (folder / "0000:af:02.0").mkdir()
    (folder / "0000:af:02.0/local_cpulist").write_text("1,3-5\n")
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(offload, "_PCI", folder)
        changed.setattr(torch.cuda, "set_device", lambda device: None)
        changed.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        worker = start_worker(torch.device("cuda", 0))
        return worker.submit(os.sched_getaffinity, 0).result(), os.sched_getaffinity(0)


@pytest.mark.skipif(not {0, 1} <= os.sched_getaffinity(0), reason="needs processors 0 and 1")
def test_the_worker_runs_at_the_numa_node_of_its_gpu(tmp_path):
    [(worker, training)] = run_ranks(bind_to_gpu, 1, tmp_path, timeout=60)
    assert worker == {1, 3, 4, 5} & training
    assert training == os.sched_getaffinity(0)
