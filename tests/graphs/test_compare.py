"""What is compared, what a fingerprint knows, and what a GPU's debug mode tells."""

import os
import re
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from helpers import recorded
from helpers.one_line import Small, train
from helpers.ranks import run_ranks
from helpers.recorded import Counting, Net, assert_same, fit
from helpers.tracking import needs_cuda
from lightning_zero3.callbacks import CUDAGraphStep
from lightning_zero3.callbacks.graphs import program
from lightning_zero3.callbacks.graphs.compare import first_difference, same
from lightning_zero3.callbacks.graphs.device import CudaGraphs
from lightning_zero3.callbacks.graphs.fingerprint import Fingerprint, names_read, state_of
from lightning_zero3.callbacks.graphs.runner import GraphCaptureError

NAN, INF = float("nan"), float("inf")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, NAN, INF], [1.0, NAN, INF], True),
        ([0.0], [-0.0], True),
        ([1.0], [1.0 + 2**-23], False),
        ([NAN], [1.0], False),
        ([1.0], [1.0, 1.0], False),
    ],
)
def test_tensors_are_the_same_bit_by_bit(a, b, expected):
    assert same(torch.tensor(a), torch.tensor(b)) is expected


def test_inputs_that_one_graph_can_take_have_the_same_signature():
    def packed(*lengths):
        return {"p": pack_sequence([torch.randn(n, 2) for n in lengths])}

    def signature(inputs):
        return program.signature(inputs, CPU)

    x = torch.randn(2, 3)
    assert signature({"x": x, "n": 1}) == signature({"x": x + 1, "n": 1})
    for other in (
        {"x": x, "n": True},
        {"x": x, "n": 1.0},
        {"x": x.T, "n": 1},
        {"x": x[:1], "n": 1},
    ):
        assert signature(other) != signature({"x": x, "n": 1})
    # as many rows and steps
    assert signature(packed(3, 3, 1)) != signature(packed(3, 2, 2)) == signature(packed(3, 2, 2))


def test_half_of_the_digits_where_kernels_are_noisy():
    a = torch.ones(100)
    assert same(a, a * (1 + 1e-4), noisy=True) and not same(a, a * (1 + 1e-2), noisy=True)
    assert not same(a, a * NAN, noisy=True)
    assert not same(torch.tensor(3), torch.tensor(4), noisy=True)  # no number of a kernel's


def test_the_first_difference_is_named():
    replayed = {"the loss": torch.tensor(2.0), "a": 1, "b": 1.0, "w": torch.zeros(2)}
    assert first_difference(replayed, replayed) is None
    for change, message in (
        (
            {"the loss": torch.tensor(3.0)},
            "the loss is 2.0 in the replay and 3.0 in the eager step",
        ),
        ({"a": True}, "a is 1 in the replay and True in the eager step"),
        ({"w": torch.ones(2)}, "w is up to 1 apart"),
        ({"w": torch.ones(3)}, r"w is a tensor of shape \[2\] in the replay and a tensor of shape"),
        ({"other": None}, "other is 'nothing' in the replay and None in the eager step"),
    ):
        assert re.fullmatch(f"{message}.*", first_difference(replayed, {**replayed, **change}))


@pytest.fixture
def noisy():
    """An operation whose results differ each time in the digits after this one."""
    with torch.library._scoped_library("graph_tests", "DEF") as library:
        library.define("noisy(Tensor x, float size) -> Tensor")

        def add_noise(x, size):
            return x * (1 + size * (0.5 + int.from_bytes(os.urandom(4), "big") / 2**33))

        library.impl("noisy", add_noise, "CompositeExplicitAutograd")
        library.impl("noisy", lambda x, size: x.view_as(x), "Autograd")
        library.impl("noisy", add_noise, "CPU")
        yield


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, size):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.graph_tests.noisy(x, size)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@pytest.mark.parametrize(("size", "captured"), [(1e-5, True), (1e-1, False)])
def test_kernels_that_add_up_in_any_order_may_be_captured(noisy, size, captured):
    def line(self, batch, batch_idx, loss):
        return Noisy.apply(loss, size)

    callback = Counting(software=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(Small(line), callback, max_epochs=3)
    said = [str(w.message) for w in caught if "are not the same: the output is" in str(w.message)]
    assert len(said) == (not captured) and (callback.replays > 5) is captured


# ---- fingerprints --------------------------------------------------------------------------------


@dataclass
class Config:
    beta: float = 1.0


class Program(nn.Module):
    gamma = 1.0

    def __init__(self):
        super().__init__()
        self.alpha, self.config, self.unread, self.layer = 1.0, Config(), 1.0, nn.Linear(2, 2)
        self.rates, self.space = [1.0], SimpleNamespace(delta=1.0)

    @property
    def scaled(self):
        return self.alpha * 2

    def helper(self, x):
        return (lambda y: y * self.gamma * self.config.beta)(x)

    def forward(self, x):
        return self.helper(self.layer(x)) * self.scaled * self.rates[0] * self.space.delta


def fingerprint(module, device=CPU):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1)), *module.parameters()], lr=0.1)
    trainer = SimpleNamespace(
        optimizers=[optimizer],
        strategy=SimpleNamespace(root_device=device),
        current_epoch=0,
        alpha=0,
    )
    return Fingerprint(trainer, module, "forward")


def test_what_a_program_mentions_is_followed_through_its_methods():
    names = names_read(Program(), "forward")
    assert {"helper", "layer", "scaled", "alpha", "gamma", "config", "beta", "rates"} <= names
    assert "unread" not in names


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: setattr(m, "alpha", 2.0), "`alpha`"),
        (lambda m: setattr(m, "gamma", 2.0), "`gamma`"),  # of its class until now
        (lambda m: setattr(m.config, "beta", 2.0), "`config`"),
        (lambda m: setattr(m.space, "delta", 2.0), "`space`"),
        (lambda m: m.rates.append(2.0), "`rates`"),
        (lambda m: m.eval(), "`training`"),
        (lambda m: m.layer.weight.requires_grad_(False), "`layer.weight`"),
        (lambda m: setattr(m.layer.weight, "data", torch.ones(2, 2)), "`layer.weight`"),
        (lambda m: m.layer.register_forward_hook(print), "`layer._forward_hooks`"),
        (lambda m: setattr(m, "layer", nn.Linear(2, 2)), "`_modules`"),
    ],
)
def test_a_fingerprint_knows_what_a_program_depends_on(change, name):
    module = Program()
    found = fingerprint(module)
    assert found.changes() == []
    module.unread, module.counter, module.alpha = 2.0, 1, 0.5 * 2  # an equal number, another object
    assert found.changes() == []
    change(module)
    assert name in found.changes()


@pytest.mark.parametrize("value", [0.0, 1, True, "a", None, [1.0, 2], {"a": 1}, (1, "a")])
def test_states_of_equal_values_are_equal_and_of_others_are_not(value):
    assert state_of(value, CPU) == state_of(value, CPU) != state_of([value], CPU)
    assert state_of(-0.0, CPU) != state_of(0.0, CPU) and state_of(1, CPU) != state_of(True, CPU)


def test_graphs_on_a_gpu_keep_the_values_of_tensors_on_the_cpu():
    """A kernel gets such a number as an argument."""
    module, rate, many = Program(), torch.tensor(0.1), torch.zeros(100)
    module.alpha, module.rates = rate, [many]
    module.layer.register_buffer("nan", torch.tensor(NAN))
    on_cpu, on_gpu = fingerprint(module, CPU), fingerprint(module, CUDA)
    assert on_gpu.changes() == []
    before = [program.signature({"x": rate}, device) for device in (CPU, CUDA)]
    rate.fill_(0.2)
    many.add_(1)
    assert on_cpu.changes() == [] and sorted(on_gpu.changes()) == ["`alpha`", "`rates`"]
    same_key, other_key = (program.signature({"x": rate}, device) for device in (CPU, CUDA))
    assert before[0] == same_key and before[1] != other_key
    with torch.inference_mode():
        assert state_of(torch.zeros(100), CUDA) != state_of(torch.zeros(100), CUDA)


# ---- captures that fail, and waits on a GPU ------------------------------------------------------


class SkipsLater(Net):
    """Returns something else for once: no loss, or one before other outputs."""

    def __init__(self, number, *names):
        super().__init__()
        self.number, self.names = number, names

    def on_train_start(self):
        self.trainer.ticks = count()

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        is_late = next(self.trainer.ticks) == self.number
        return ({name: output[name] for name in self.names} or None) if is_late else output

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if outputs:
            super().on_train_batch_end(outputs, batch, batch_idx)


@pytest.mark.parametrize("names", [(), ("loss",), ("scores", "loss")], ids=len)
@pytest.mark.parametrize(
    ("number", "message"),
    [(1, "is logged or returned in some steps only"), (5, "are not the same: ")],
)
def test_a_step_that_returns_something_else_is_eager_from_there_on(number, message, names):
    is_same = len(names) == 2 and number == 1  # in another order
    with nullcontext() if is_same else pytest.warns(UserWarning, match=message):
        mine = fit(SkipsLater(number, *names), CUDAGraphStep(software=True, verify=4))
    reference = fit(SkipsLater(number, *names))
    assert_same(mine.state, reference.state)


class LooksLater(Net):
    """Waits for its loss in one step only, that of the capture."""

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        if next(self.trainer.ticks) == 3:
            output["loss"].item()
        return output

    def on_train_start(self):
        self.trainer.ticks = count()


class LooksBackLater(LooksLater):
    """The same in a hook of the backward."""

    def training_step(self, batch, batch_idx):
        output = Net.training_step(self, batch, batch_idx)
        output["loss"].register_hook(self.look)
        return output

    def look(self, gradient):
        # Twice in each of three steps that are watched.
        if next(self.trainer.ticks) == 6:
            gradient.item()


def fail_in_a_capture(rank, world_size, device, module, what):
    recorded.DEVICE = device
    message = f"CUDAGraphStep: capturing the {what} of the training step failed"
    with pytest.raises(RuntimeError, match=message):
        fit(module(), CUDAGraphStep(software=True))


@pytest.mark.parametrize(
    ("module", "what"), [(LooksLater, "forward"), (LooksBackLater, "backward")]
)
@pytest.mark.usefixtures("device")
def test_a_capture_that_fails_is_named(module, what, device):
    if device == "cuda":  # in a process of its own, which is of no more use afterwards
        run_ranks(fail_in_a_capture, 1, device, module, what)
    else:
        fail_in_a_capture(0, 1, device, module, what)


WAIT = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:1.)"


def test_each_wait_on_a_gpu_is_told_with_its_line_and_other_warnings_go_on(monkeypatch):
    modes, found = [], []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    graphs = CudaGraphs(torch.device("cuda"))
    with pytest.warns(UserWarning) as others, graphs.watch(found):
        for _ in range(2):
            warnings.warn(WAIT, stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert modes == ["warn", 0] and [str(each.message) for each in others] == ["something else"]
    assert len(found) == 2
    assert all(re.search(r"test_compare\.py:\d+: `warnings\.warn\(WAIT", each) for each in found)


@pytest.mark.gpu
@needs_cuda
def test_waits_on_a_gpu():
    found = []
    with CudaGraphs(torch.device("cuda")).watch(found):
        torch.ones(2, device="cuda").sum().item()
    [line] = found
    assert re.search(r"test_compare\.py:\d+: `torch\.ones\(2, device=\"cuda\"\)\.sum", line)


@pytest.mark.parametrize("strategy", ["auto", "zero3"])
def test_a_wrong_replay_never_reaches_the_weights_while_it_is_verified(strategy, monkeypatch):
    """As if a graph had computed something else than the program."""
    from lightning_zero3.callbacks.graphs.software_graph import SoftwareGraph

    reference, replay, replays = fit(Net(), strategy=strategy), SoftwareGraph.replay, []

    def wrong(graph):
        replay(graph)
        replays.append(graph)
        if len(replays) > 2:  # of a forward and a backward, at the capture
            for _, targets in graph._calls:
                for _, target in targets:
                    if target.is_floating_point():
                        target.add_(0.5)

    monkeypatch.setattr(SoftwareGraph, "replay", wrong)
    with pytest.warns(UserWarning, match="An eager run and its replay are not the same"):
        mine = fit(Net(), CUDAGraphStep(software=True), strategy=strategy)
    assert_same(mine.state, reference.state)
    assert_same(mine.seen, reference.seen)
    with pytest.raises(GraphCaptureError, match="are not the same"):
        replays.clear()
        fit(Net(), CUDAGraphStep(software=True, strict=True), strategy=strategy)
