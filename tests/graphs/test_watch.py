"""What a watch sees of a step, and what it does not take for the user's."""

import math
import re
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from threading import Thread
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers import recorded
from helpers.ranks import run_ranks
from helpers.recorded import Counting, Net, fit
from lightning_zero3.callbacks.graphs.frozen_values import Everything, freeze, is_itself
from lightning_zero3.callbacks.graphs.log_tape import LogTape
from lightning_zero3.callbacks.graphs.module_state import GroupSettings, Guard
from lightning_zero3.callbacks.graphs.python_effects import WatchedIndex
from lightning_zero3.callbacks.graphs.software_graph import SoftwareGraph
from lightning_zero3.callbacks.graphs.watch import Watch


def watched(program, x):
    watch = Watch(x.device, x)
    with watch.watching(None, forward=True):
        program(x)
    return watch


def test_values_that_the_watch_reads_itself_are_no_problem(monkeypatch):
    state = torch.zeros(16, dtype=torch.uint8)  # of a CUDA generator: the seed and the offset
    monkeypatch.setattr(torch, "get_rng_state", lambda: state)
    monkeypatch.setattr(torch, "set_rng_state", lambda _: None)
    x = torch.ones(2, requires_grad=True)
    assert (
        watched(
            lambda x: checkpoint(torch.tanh, x * torch.tensor(2.0), use_reentrant=False), x
        ).problems
        == []
    )


def splits(x):
    return x * len(re.compile("a+").findall("aab"))


def test_the_standard_library_is_not_taken_for_the_users(device):
    tables = [
        table["__name__"]
        for table, _ in watched(splits, torch.ones(2, device=device)).globals.values()
    ]
    assert not [name for name in tables if name.partition(".")[0] in ("re", "enum")]


ALPHA, SETTINGS = 1.0, SimpleNamespace(beta=1.0)


class Scales(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ALPHA


def test_functions_of_a_backward_in_another_thread_are_seen(device):
    """On CUDA autograd has a thread for each device; here it works in the one that calls it."""
    x = torch.ones(2, requires_grad=True, device=device)
    loss = Scales.apply(x).sum()
    x.register_hook(lambda gradient: gradient * SETTINGS.beta)
    watch = Watch(x.device, x)

    def backward():
        with watch:
            loss.backward()

    with watch.watching(None, forward=False):
        thread = Thread(target=backward)
        thread.start()
        thread.join()
    assert {name for table, name in watch.globals.values() if table is globals()} == {
        "ALPHA",
        "SETTINGS",
    }
    assert "beta" in watch.names


class Namespace:
    temperature = 1.0


class Inherits(Namespace):
    pass


package, package.config = ModuleType("package"), ModuleType("package.config")
package.config.BETA = 1.0


def computes(x):
    return x * Inherits.temperature * package.config.BETA


@pytest.mark.parametrize(("owner", "name"), [(Namespace, "temperature"), (package.config, "BETA")])
def test_numbers_of_classes_and_of_modules_in_packages(owner, name, device, monkeypatch):
    watch = watched(computes, torch.ones(2, device=device))
    guard = Guard(nn.Module(), [], watch.names, watch.globals.values())
    assert guard.changed() is None
    monkeypatch.setattr(owner, name, 0.5)
    assert guard.changed() is not None


@dataclass(slots=True)
class Slotted:
    beta: float = 1.0


MANY = {f"setting{k}": 1.0 for k in range(40)}


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (dict(MANY), lambda value: value.update(setting3=0.5)),
        (Slotted(), lambda value: setattr(value, "beta", 0.5)),
    ],
    ids=["many settings", "slots"],
)
def test_a_setting_that_changes_within_its_holder(value, change):
    before = freeze(value, {"beta"})
    assert freeze(value, {"beta"}) == before
    change(value)
    assert freeze(value, {"beta"}) != before


def test_what_lies_deep_is_itself():
    chain = None
    for _ in range(450):
        chain = SimpleNamespace(next=chain, kept=[])
    assert freeze(chain, Everything()) == freeze(chain, Everything())
    assert str(freeze(chain, Everything())).count("SimpleNamespace") < 40


@pytest.mark.parametrize(
    "value", [(1, "a"), nn.functional.relu], ids=["constants", "function of torch"]
)
def test_what_cannot_change_is_not_looked_into_before_each_replay(value):
    assert is_itself(value, freeze(value, ()))


def test_settings_of_precision_through_the_newer_interface():
    convolutions = torch.backends.cudnn.conv
    before, convolutions.fp32_precision = convolutions.fp32_precision, "ieee"
    try:
        guard = Guard(nn.Module(), [], set())
        assert guard.changed() is None
        convolutions.fp32_precision = "tf32"
        assert "precision" in guard.changed()
    finally:
        convolutions.fp32_precision = before


OPTIMIZER = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, weight_decay=0.2)


def reads_decay(x):
    return x * OPTIMIZER.param_groups[0]["weight_decay"]


def reads_any(x):
    return x * sum(
        value for name, value in OPTIMIZER.param_groups[0].items() if name.endswith("decay")
    )


def test_settings_of_the_optimizer_that_a_step_reads_are_followed_into_new_groups(device):
    x = torch.ones(2, device=device)
    assert watched(computes, x).settings_of_groups(OPTIMIZER) == set()
    assert watched(reads_decay, x).settings_of_groups(OPTIMIZER) == {"weight_decay"}
    assert watched(reads_any, x).settings_of_groups(OPTIMIZER) == OPTIMIZER.param_groups[
        0
    ].keys() - {"params"}
    guard = Guard(nn.Module(), [OPTIMIZER], set(), [(GroupSettings(OPTIMIZER), "weight_decay")])
    state = OPTIMIZER.state_dict()
    state["param_groups"][0]["lr"] = 0.3
    OPTIMIZER.load_state_dict(state)
    assert guard.changed() is None
    OPTIMIZER.param_groups[0]["weight_decay"] = 0.4
    assert guard.changed() == "`weight_decay` changed to something else"


def test_logged_values_are_kept_without_their_history():
    tape, module = LogTape(), Net()
    with tape.listen(module, lambda *_, **__: None):
        module.log("loss", torch.ones(2, requires_grad=True).sum())
    assert tape.calls[0].value.grad_fn is None


USES = {
    "bits": lambda k: not k & 127,
    "shift": lambda k: k >> 7,
    "of another": lambda k: 1 << k,
    "set": lambda k: k in {100, 200},
    "list": lambda k: k in [100, 200],
    "power": lambda k: 2**k,
    "sign": lambda k: -k + +k + ~k,
    "rounding": lambda k: round(k, -2),
    "floor": lambda k: math.floor(k),
    "absolute": lambda k: abs(k),
    "length": lambda k: k.bit_length(),
    "quotient": lambda k: divmod(1000, k),
    "float": lambda k: math.sqrt(k),
    "compared": lambda k: k > 1e3,
    "text": lambda k: f"{k}",
    "truth": lambda k: 1 if k else 0,
}


@pytest.mark.parametrize("use", USES)
def test_whatever_is_computed_from_the_index_of_a_batch_is_told(use):
    told = []
    assert USES[use](WatchedIndex(3, lambda what, place: told.append(what))) == USES[use](3)
    assert told and "`batch_idx` is read, and changes" in told[0]


class Prints(Net):
    """In the first step of the second epoch, which is watched as the five before the capture."""

    def training_step(self, batch, batch_idx):
        if next(self.trainer.ticks) == 4:
            print("again")
        return super().training_step(batch, batch_idx)

    def on_train_start(self):
        self.trainer.ticks = count()


@pytest.mark.usefixtures("device")
def test_the_first_step_of_an_epoch_counts_with_all_that_it_does():
    callback = Counting(software=True, strict=True)
    fit(Prints(), callback, limit_val_batches=0)
    assert callback.recaptures == 1 and callback.replays > 8


class LooksLater(Net):
    """Waits for its loss in one step only, by what no watch sees: that of the capture."""

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        if next(self.trainer.ticks) == 3:
            output["loss"].item()
        return output

    def on_train_start(self):
        self.trainer.ticks = count()


class LooksBackLater(LooksLater):
    def training_step(self, batch, batch_idx):
        output = Net.training_step(self, batch, batch_idx)
        output["loss"].register_hook(self.look)
        return output

    def look(self, gradient):
        if next(self.trainer.ticks) == 3:
            gradient.item()


def fail_in_a_capture(rank, world_size, device, module):
    """The message of the error, and what caused it."""
    recorded.DEVICE = device
    with pytest.raises(RuntimeError) as error:
        fit(module(), Counting(software=True))
    return str(error.value), str(error.value.__cause__)


@pytest.mark.parametrize(
    ("module", "what", "line"),
    [
        (LooksLater, "forward", r'output\["loss"\]\.item'),
        (LooksBackLater, "backward", r"gradient\.item"),
    ],
)
def test_a_capture_that_fails_is_named_with_its_line(module, what, line, device):
    if device == "cuda":  # in a process of its own, which is of no more use afterwards
        [(message, cause)] = run_ranks(fail_in_a_capture, 1, device, module)
        assert "captur" in cause
    else:
        message, cause = fail_in_a_capture(0, 1, device, module)
        assert "_local_scalar_dense" in cause
    expected = (
        rf"(?s)CUDAGraphStep: capturing the {what} of the training step failed.*test_watch\.py:\d+:"
        rf" `{line}\(\)"
    )
    assert re.search(expected, message), message


def test_of_two_errors_the_users_is_named(monkeypatch):
    real = SoftwareGraph.capture

    def capture(self):
        both = ExitStack()
        # CUDA ends a capture that failed with an error of its own
        both.callback(torch.ones(2).view, 3)
        both.enter_context(real(self))
        return both

    monkeypatch.setattr(SoftwareGraph, "capture", capture)
    message, cause = fail_in_a_capture(0, 1, "cpu", LooksLater)
    assert (
        re.search(r'test_watch\.py:\d+: `output\["loss"\]\.item', message)
        and "_local_scalar_dense" in cause
    )
