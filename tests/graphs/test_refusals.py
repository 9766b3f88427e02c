"""Why a step cannot be captured: each reason, with the message and the line that a user reads."""

import random
import re
import time
import warnings
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers import recorded
from helpers.one_line import Small, train
from helpers.recorded import Counting, assert_same
from lightning_zero3.callbacks import CUDAGraphStep
from lightning_zero3.callbacks.graphs.preconditions import GraphCaptureError

pytestmark = pytest.mark.usefixtures("device")


def item(self, batch, batch_idx, loss):
    return loss * 2 if loss.item() > 1e9 else loss


def mask(self, batch, batch_idx, loss):
    return self.layer(batch)[batch > 0].sum()


def nonzero(self, batch, batch_idx, loss):
    return self.layer(batch).sum(1).nonzero().sum() * 0 + loss


def other_shapes(self, batch, batch_idx, loss):
    self.trainer.history = torch.ones(
        2 + len(getattr(self.trainer, "history", [])), device=self.device
    )
    return loss + self.trainer.history.sum()


def growing_list(self, batch, batch_idx, loss):
    self.trainer.kept = [*getattr(self.trainer, "kept", []), loss.detach()]
    return loss + torch.stack(self.trainer.kept).sum()


def one_more(self, batch, batch_idx, loss):
    self.trainer.turn = not getattr(self.trainer, "turn", False)
    return loss.exp() if self.trainer.turn else loss


def log_options(self, batch, batch_idx, loss):
    self.trainer.turn = not getattr(self.trainer, "turn", False)
    self.log("loss", loss, batch_size=1 + self.trainer.turn)
    return loss


def step_number(self, batch, batch_idx, loss):
    return loss * (1 + self.global_step)


def epoch_number(self, batch, batch_idx, loss):
    return loss * (1 + self.trainer.current_epoch)


def index(self, batch, batch_idx, loss):
    return loss + batch_idx


def branch_on_index(self, batch, batch_idx, loss):
    if batch_idx % 100 == 0:
        self.log("rare", loss)
    return loss


def bits_of_index(self, batch, batch_idx, loss):
    if not batch_idx & 127:
        self.log("rare", loss)
    return loss


def last_batch(self, batch, batch_idx, loss):
    if self.trainer.is_last_batch:
        self.log("rare", loss)
    return loss


def solves(self, batch, batch_idx, loss):
    return (
        loss
        + torch.linalg.solve(
            torch.eye(3, device=self.device) + self.layer.weight * 0.01, self.layer.bias
        ).sum()
    )


def growing_number(self, batch, batch_idx, loss):
    self.trainer.temperature = getattr(self.trainer, "temperature", 0.5) * 2
    return loss * self.trainer.temperature


def growing_tensor(self, batch, batch_idx, loss):
    self.trainer.temperature = getattr(self.trainer, "temperature", 0.5) * 2
    return loss * torch.tensor(self.trainer.temperature, device=self.device)


def branch(self, batch, batch_idx, loss):
    self.trainer.turn = not getattr(self.trainer, "turn", False)
    return loss.exp() if self.trainer.turn else loss.tanh()


def logged_number(self, batch, batch_idx, loss):
    self.trainer.temperature = getattr(self.trainer, "temperature", 0.5) * 2
    self.log("temperature", self.trainer.temperature)
    return loss


def logged_sometimes(self, batch, batch_idx, loss):
    self.trainer.turn = not getattr(self.trainer, "turn", False)
    if self.trainer.turn:
        self.log("sometimes", 1.0)
    return loss


def metric(self, batch, batch_idx, loss):
    self.metric(loss)
    return loss


def logged_metric(self, batch, batch_idx, loss):
    self.log("metric", self.metric)
    return loss


def prints(self, batch, batch_idx, loss):
    print("loss", loss.shape)
    return loss


def module_print(self, batch, batch_idx, loss):
    self.print("loss", loss.shape)
    return loss


def loggers(self, batch, batch_idx, loss):
    for each in self.loggers:
        each.log_metrics({})
    return loss


def waits(self, batch, batch_idx, loss):
    with suppress(AssertionError):  # of a torch without CUDA
        torch.cuda.synchronize()
    return loss


def logger(self, batch, batch_idx, loss):
    if self.logger is not None:
        self.logger.log_metrics({})
    return loss


def clock(self, batch, batch_idx, loss):
    time.perf_counter()
    return loss


def python_random(self, batch, batch_idx, loss):
    random.random()
    return loss


def numpy_random(self, batch, batch_idx, loss):
    np.random.rand()
    return loss


def numpy_generator(self, batch, batch_idx, loss):
    GENERATOR.normal()
    return loss


def own_generator(self, batch, batch_idx, loss):
    self.generator.normal()
    return loss


def arrays(self, batch, batch_idx, loss):
    return loss * len(batch.cpu().numpy())


def seeds(self, batch, batch_idx, loss):
    torch.manual_seed(3)
    return loss


def assigns(self, batch, batch_idx, loss):
    self.last = loss.detach()
    return loss


def appends(self, batch, batch_idx, loss):
    self.history.append(loss.detach())
    return loss


def new_buffer(self, batch, batch_idx, loss):
    self.average = 0.9 * self.average + 0.1 * loss.detach()
    return loss


def counts(self, batch, batch_idx, loss):
    self.temperature += 1
    return loss


def writes_batch(self, batch, batch_idx, loss):
    batch.add_(1)
    return self.layer(batch.clone()).sum()


def no_loss(self, batch, batch_idx, loss):
    return None


def nested(self, batch, batch_idx, loss):
    def inner(x):
        return nn.functional.dropout(self.layer(x)).sum()

    return loss + checkpoint(
        lambda x: checkpoint(inner, x, use_reentrant=False), loss.expand(3), use_reentrant=True
    )


class Rewinds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.state = source().get_rng_state()
        return nn.functional.dropout(x)

    @staticmethod
    def backward(ctx, gradient):
        source().set_rng_state(ctx.state)
        return gradient


def source():
    return torch.cuda if recorded.DEVICE == "cuda" else torch


def rewinds(self, batch, batch_idx, loss):
    return Rewinds.apply(loss)


def returns_index(self, batch, batch_idx, loss):
    return {"loss": loss, "index": batch_idx}


def returns_number(self, batch, batch_idx, loss):
    return {"loss": loss, "number": self.trainer.fit_loop.epoch_loop.batch_progress.current.ready}


def returns_object(self, batch, batch_idx, loss):
    return {"loss": loss, "object": SimpleNamespace(kept=loss.detach())}


def reads_another(self, batch, batch_idx, loss):
    before, self.trainer.kept = getattr(self.trainer, "kept", loss), loss.detach().clone()
    return loss + before


LOSSES, COUNTS, GENERATOR = [], {"steps": 0}, np.random.default_rng(0)


def appends_elsewhere(self, batch, batch_idx, loss):
    LOSSES.append(loss.detach())
    return loss


def counts_elsewhere(self, batch, batch_idx, loss):
    COUNTS["steps"] += 1
    return loss


def counts_in_dict(self, batch, batch_idx, loss):
    self.trainer.counts = self.counts
    self.trainer.counts["steps"] += 1
    return loss


def counter():
    steps = 0

    def count():
        nonlocal steps
        steps += 1

    return count


count = counter()


def counts_in_closure(self, batch, batch_idx, loss):
    count()
    return loss


def counts_in_class(self, batch, batch_idx, loss):
    type(self).steps = getattr(type(self), "steps", 0) + 1
    return loss


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * -ctx.factor, None


def reverses(self, batch, batch_idx, loss):
    self.trainer.factor = getattr(self.trainer, "factor", 0.5) * 2
    return Reverse.apply(loss, self.trainer.factor)


def trains_batch(self, batch, batch_idx, loss):
    batch.requires_grad_()
    return self.layer(batch).sum()


def lists(self, batch, batch_idx, loss):
    return loss * len([value for value in batch.flatten().tolist() if value > 0])


CASES = {
    returns_index: r"`batch_idx` is returned, and changes.*def training_step",
    returns_number: (
        r"What the step returns changes, apart from the values of tensors.*def training_step"
    ),
    returns_object: (
        r"What is returned\['object'\] is a types\.SimpleNamespace\. What goes into a graph.*def"
        r" training_step"
    ),
    reads_another: (
        r"aten\.add reads a tensor of before the step, and another one in each step.*return loss \+"
        r" before"
    ),
    appends_elsewhere: (
        r"`LOSSES`, which belongs to no module, changes from step to step.*LOSSES\.append\("
    ),
    counts_elsewhere: (
        r"`COUNTS`, which belongs to no module, changes from step to step.*COUNTS\[\"steps\"\]"
        r" \+= 1"
    ),
    counts_in_dict: r"assigns or extends `self\.counts`.*self\.counts",
    counts_in_closure: (
        r"`steps`, which belongs to no module, changes from step to step.*steps \+= 1"
    ),
    counts_in_class: r"assigns or extends `self\.steps`.*type\(self\)\.steps = ",
    reverses: (
        r"A Python number that changes goes into aten\.mul: -2\.0, then -4\.0.*return gradient \*"
        r" -ctx\.factor"
    ),
    trains_batch: (
        r"A tensor of the batch gets a gradient, which a replay would leave with its copy"
    ),
    lists: r"`Tensor\.tolist` reads values on the host.*batch\.flatten\(\)\.tolist\(\)",
    item: (
        r"_local_scalar_dense needs a value, or a size that depends on values, on the host.*if"
        r" loss\.item\(\) > 1e9"
    ),
    mask: (
        r"aten\.index needs a value, or a size.*return self\.layer\(batch\)\[batch > 0\]\.sum\(\)"
    ),
    nonzero: (
        r"aten\.nonzero needs a value, or a size that depends on values.*\.nonzero\(\)\.sum\(\)"
    ),
    other_shapes: r"A Python number that changes goes into aten\.ones",
    growing_list: r"Shapes change from step to step in aten\.stack: \[\] \[\], then \[\] \[\] \[\]",
    one_more: (
        r"Not every step runs aten\.exp: a branch in Python, of which a graph would keep one side"
    ),
    log_options: (
        r"The options of `self\.log\('loss', \.\.\.\)` change.*loss, batch_size=1 \+"
        r" self\.trainer\.turn\)"
    ),
    step_number: (
        r"`global_step` is read, and changes .*`self\.weight\.fill_\(.*return loss \* \(1 \+"
        r" self\.global_step\)"
    ),
    epoch_number: r"`trainer\.current_epoch` is read, and changes",
    index: r"A Python number that changes goes into aten\.add: 1, then 2.*return loss \+ batch_idx",
    branch_on_index: r"`batch_idx` is read, and changes.*if batch_idx % 100 == 0",
    bits_of_index: r"`batch_idx` is read, and changes.*if not batch_idx & 127",
    last_batch: r"`trainer\.is_last_batch` is read, and changes.*if self\.trainer\.is_last_batch",
    solves: r"_linalg_check_errors needs a value.*`torch\.linalg\.inv_ex`.*torch\.linalg\.solve\(",
    growing_number: (
        r"A Python number that changes goes into aten\.mul: 2\.0, then 4\.0.*loss \*"
        r" self\.trainer\.temperature"
    ),
    growing_tensor: r"A Python number that changes goes into aten\.lift_fresh: 2\.0, then 4\.0",
    branch: (
        r"Steps run different operations, aten\.(exp|tanh) .*a branch in Python.*if"
        r" self\.trainer\.turn else"
    ),
    logged_number: (
        r"`self\.log\('temperature', \.\.\.\)` logs a Python number that changes: 2\.0, then 4\.0"
    ),
    logged_sometimes: (
        r"`self\.log\('sometimes', \.\.\.\)` is not called in every step.*self\.log\(\"sometimes\","
        r" 1\.0\)"
    ),
    metric: (
        r"A torchmetrics metric is used, and would be updated only once\. Move it to"
        r" .*self\.metric\(loss\)"
    ),
    logged_metric: r"A torchmetrics metric is used.*self\.log\(\"metric\", self\.metric\)",
    prints: r"`print` is called, and would be called only once.*print\(\"loss\", loss\.shape\)",
    module_print: (
        r"`self\.print` is called, and would be called only once.*self\.print\(\"loss\","
        r" loss\.shape\)"
    ),
    loggers: (
        r"`self\.loggers` is used, and would be used only once\. Use `self\.log`.*for each in"
        r" self\.loggers"
    ),
    waits: r"`torch\.cuda\.synchronize` is called, .* Remove it.*torch\.cuda\.synchronize\(\)",
    logger: r"`self\.logger` is used, and would be used only once",
    clock: r"The time is read, and changes.*time\.perf_counter\(\)",
    python_random: r"A random number of Python or numpy is read.*random\.random\(\)",
    numpy_random: r"A random number of Python or numpy is read.*np\.random\.rand\(\)",
    numpy_generator: (
        r"`GENERATOR`, which belongs to no module, changes from step to step.*GENERATOR\.normal\(\)"
    ),
    own_generator: r"assigns or extends `self\.generator`.*self\.generator\.normal\(\)",
    arrays: r"`Tensor\.numpy` reads values on the host: .*\.numpy\(\)",
    seeds: (
        r"`torch\.manual_seed` is called, and would be called only once.*torch\.manual_seed\(3\)"
    ),
    assigns: r"assigns or extends `self\.last`.*self\.last = loss\.detach\(\)",
    appends: r"assigns or extends `self\.history`.*self\.history\.append",
    new_buffer: (
        r"assigns or extends `self\.average`.*: `self\.average\.copy_\(\.\.\.\)`.*self\.average = 0"
    ),
    counts: r"assigns or extends `self\.temperature`.*self\.temperature \+= 1",
    writes_batch: r"The step writes into its inputs.*batch\.add_\(1\)",
    no_loss: r"`training_step` returned no loss.*def training_step",
    nested: (
        r"aten\.\w+ draws random numbers in the backward pass from a state"
        r" .*dropout\(self\.layer\(x\)\)"
    ),
    rewinds: (
        r"The backward pass leaves the random state"
        r" elsewhere.*source\(\)\.set_rng_state\(ctx\.state\)"
    ),
}


@pytest.mark.parametrize("line", CASES, ids=lambda line: line.__name__)
def test_each_reason_is_named_with_its_line(line):
    with pytest.raises(GraphCaptureError, match=re.compile(CASES[line], re.DOTALL)) as error:
        train(Small(line), CUDAGraphStep(software=True, strict=True))
    assert re.search(r"(test_refusals|one_line)\.py:\d+: `", str(error.value))


def made_in_a_function():
    """Modules whose steps have free variables."""
    losses, stats = [], {"steps": 0}

    class Appends(Small):
        def training_step(self, batch, batch_idx):
            losses.append(self.layer(batch).mean().detach())
            return self.layer(batch).mean()

    class Counts(Small):
        def training_step(self, batch, batch_idx):
            stats["steps"] += 1
            return self.layer(batch).mean()

    return {r"losses\.append\(": Appends(None), r'stats\["steps"\] \+= 1': Counts(None)}


@pytest.mark.parametrize(
    "line", [r"losses\.append\(", r'stats\["steps"\] \+= 1'], ids=["list", "dict"]
)
def test_what_a_function_has_in_a_closure_is_named(line):
    message = (
        r"(?s)`(losses|stats)`, which belongs to no module, changes from step to"
        r" step.*test_refusals\.py:\d+: `" + line
    )
    with pytest.raises(GraphCaptureError, match=message):
        train(made_in_a_function()[line], CUDAGraphStep(software=True, strict=True))


def fine(self, batch, batch_idx, loss):
    self.average.mul_(0.9).add_(loss.detach(), alpha=0.1)
    self.log("constant", 2.0)
    scale, parts = loss.detach(), []  # in closures of functions that each step makes anew
    parts.append(
        checkpoint(lambda x: self.layer(x) * scale + len(parts), batch, use_reentrant=False).sum()
    )
    # goes through all modules, the metric too
    decay = sum(p.square().sum() for p in self.parameters())
    return {"loss": loss + sum(parts) + 0.01 * decay, "kept": "text"}


def test_nothing_is_said_of_a_step_that_can_be_captured():
    reference, mine, callback = Small(fine), Small(fine), Counting(software=True, strict=True)
    train(reference)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="CUDAGraphStep")
        train(mine, callback)
    assert callback.replays == 3  # of six
    assert_same(mine.state_dict(), reference.state_dict())


@pytest.mark.parametrize("line", [item, returns_index, growing_number, counts, metric])
def test_without_strict_the_run_goes_on_eagerly(line):
    reference, mine = Small(line), Small(line)
    train(reference)
    with pytest.warns(
        UserWarning, match="CUDAGraphStep: the training step cannot be captured:"
    ) as caught:
        train(mine, CUDAGraphStep(software=True))
    assert sum("CUDAGraphStep" in str(w.message) for w in caught) == 1
    assert_same(mine.state_dict(), reference.state_dict())
