"""What a graph would not repeat is found before the capture, or by the comparison: training is as
eager in any case.
"""

import random
import re
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers import recorded
from helpers.one_line import Small, train
from helpers.recorded import Counting, assert_same
from lightning_zero3.callbacks import CUDAGraphStep
from lightning_zero3.callbacks.graphs.runner import GraphCaptureError

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


def loggers(self, batch, batch_idx, loss):
    for each in self.loggers:
        each.log_metrics({})
    return loss


def waits(self, batch, batch_idx, loss):
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return loss


def logger(self, batch, batch_idx, loss):
    if self.logger is not None:
        self.logger.log_metrics({})
    return loss


def clock(self, batch, batch_idx, loss):
    return loss * (1 + time.perf_counter_ns() * 0)


def python_random(self, batch, batch_idx, loss):
    return loss * random.random()


def numpy_random(self, batch, batch_idx, loss):
    return loss * float(np.random.rand())


def numpy_generator(self, batch, batch_idx, loss):
    return loss * float(GENERATOR.normal())


def own_generator(self, batch, batch_idx, loss):
    return loss * float(self.generator.normal())


def torch_generator(self, batch, batch_idx, loss):
    return loss * torch.rand((), generator=self.noise, device=self.device)


def arrays(self, batch, batch_idx, loss):
    return loss * float(batch.cpu().numpy().mean())


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


def adds_to_batch(self, batch, batch_idx, loss):
    batch["doubled"] = loss.detach() * 2
    return loss


def writes_weight(self, batch, batch_idx, loss):
    with torch.no_grad():
        self.layer.bias.mul_(0.9)
    return loss


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
    return loss + torch.stack(LOSSES).sum()


def counts_elsewhere(self, batch, batch_idx, loss):
    COUNTS["steps"] += 1
    return loss * COUNTS["steps"]


def counts_in_dict(self, batch, batch_idx, loss):
    self.trainer.counts = self.counts
    self.trainer.counts["steps"] += 1
    return loss


def counter():
    steps = 0

    def count():
        nonlocal steps
        steps += 1
        return steps

    return count


def counts_in_closure(self, batch, batch_idx, loss):
    return loss * self.trainer.count()


def counts_in_class(self, batch, batch_idx, loss):
    type(self).steps = getattr(type(self), "steps", 0) + 1
    return loss * type(self).steps


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


def returns_loss(self, batch, batch_idx, loss):
    return loss


def hooked(self, batch, batch_idx, loss):
    return loss


def doubles(parameter):
    parameter.grad.mul_(2)


def hooked_when_it_is_added(self, batch, batch_idx, loss):
    return loss


WAIT = "needs a value, or a size that depends on values"
SOMETIMES = "is logged or returned in some steps only, which a replay would not do again"
DIFFERS = "An eager run and its replay are not the same: "
# What is said, or None where a graph repeats the step.
CASES = {
    returns_index: DIFFERS + r"the output\['index'\] is 3 in the replay and 4 in the eager step",
    returns_number: DIFFERS + r"the output\['number'\] is 4 in the replay and 5 in the eager step",
    returns_object: DIFFERS + r"the output\['object'\] is namespace\(",
    reads_another: DIFFERS + r"the output is 0\.\d+ in the replay and 0\.\d+ in the eager step",
    appends_elsewhere: DIFFERS + "the output is",
    counts_elsewhere: DIFFERS + "the output is",
    counts_in_dict: r"It changes `self\.counts`, which a replay would not do again",
    counts_in_closure: DIFFERS + "the output is",
    counts_in_class: r"It changes|went out of date|" + DIFFERS + "the output is",
    reverses: DIFFERS + r"the gradient of layer\.weight is up to .* apart",
    trains_batch: "It writes to its inputs, which a replay would not do again",
    lists: DIFFERS + "the output is",
    item: rf"test_refusals\.py:\d+: `return loss \* 2 if .*_local_scalar_dense {WAIT}",
    mask: rf"test_refusals\.py:\d+: `return .*aten\.index {WAIT}",
    nonzero: rf"test_refusals\.py:\d+: `return .*aten\.nonzero {WAIT}",
    solves: rf"test_refusals\.py:\d+: .*torch\.linalg\.solve\(.*_linalg_check_errors {WAIT}",
    metric: rf"torchmetrics/aggregation\.py:\d+: .*{WAIT}",
    other_shapes: DIFFERS + "the output is",
    growing_list: DIFFERS + "the output is",
    one_more: DIFFERS + "the output is",
    branch: DIFFERS + "the output is",
    index: DIFFERS + "the output is",
    growing_number: DIFFERS + "the output is",
    growing_tensor: DIFFERS + "the output is",
    log_options: rf"`self\.log\('loss', .*'batch_size': \d.*, {SOMETIMES}",
    logged_number: DIFFERS
    + r"`self\.log\('temperature', .* is 8\.0 in the replay and 16\.0 in the",
    logged_sometimes: rf"`self\.log\('sometimes', .* {SOMETIMES}",
    branch_on_index: rf"`self\.log\('rare', .* {SOMETIMES}",
    bits_of_index: rf"`self\.log\('rare', .* {SOMETIMES}",
    last_batch: rf"`self\.log\('rare', .* {SOMETIMES}",
    step_number: (
        r"went out of date 6 times, each time before they had paid; the last time,"
        r" `trainer\.global_step` changed\. .*`self\.weight\.fill_\("
    ),
    prints: None,  # in eager steps only
    loggers: r"`training_step` mentions `loggers`, and a graph would use it only once",
    logger: r"`training_step` mentions `logger`, and a graph would use it only once",
    python_random: DIFFERS + "the output is",
    numpy_random: DIFFERS + "the output is",
    numpy_generator: DIFFERS + "the output is",
    own_generator: DIFFERS + "the output is",
    torch_generator: r"It changes `self\.noise`, which a replay would not do again",
    arrays: DIFFERS + "the output is",
    seeds: DIFFERS + r"the random state\['torch'\]",
    assigns: r"It changes `self\.last`, which a replay would not do again",
    appends: r"It changes `self\.history`, which a replay would not do again",
    new_buffer: r"It changes `self\.average`.*write into these \(`self\.name\.copy_\(\.\.\.\)`\)",
    counts: r"It changes `self\.temperature`, which a replay would not do again",
    writes_batch: "It writes to its inputs, which a replay would not do again",
    adds_to_batch: "It writes to its inputs, which a replay would not do again",
    writes_weight: "It writes to parameters, which a replay would not do again",
    no_loss: "`training_step` returned no loss",
    hooked: r"layer\.weight has a hook, which would run twice",
    hooked_when_it_is_added: None,  # which happens outside of the graph
    epoch_number: None,  # captured anew in each epoch
    logged_metric: None,
    clock: None,
    waits: None,
    nested: r"differentiated an additional time \(a checkpoint needs `use_reentrant=False`\)",
    rewinds: None,
}
ON_CUDA = {  # where the host is another matter
    arrays: rf"\.numpy\(\).*{WAIT}",
    lists: rf"\.tolist\(\).*{WAIT}",
    waits: rf"torch\.cuda\.synchronize\(\).*{WAIT}",
    growing_tensor: rf"torch\.tensor\(.*{WAIT}",
    # torch tells the line there, and not the operation
    item: rf"test_refusals\.py:\d+: `return loss \* 2 if .*{WAIT}",
    mask: rf"test_refusals\.py:\d+: `return self\.layer\(batch\)\[.*{WAIT}",
    nonzero: rf"test_refusals\.py:\d+: `return self\.layer\(batch\)\.sum.*{WAIT}",
    solves: rf"test_refusals\.py:\d+: .*{WAIT}",
}


def run(line, *callbacks, **options):
    """A module after its training, what was logged, and how far it came."""
    LOSSES.clear()
    COUNTS["steps"], Small.steps = 0, 0
    random.seed(0)
    torch.manual_seed(0)
    np.random.seed(0)
    GENERATOR.bit_generator.state = np.random.default_rng(0).bit_generator.state
    module = Small(line)
    module.noise = torch.Generator(recorded.DEVICE)
    if line is hooked:
        module.layer.weight.register_hook(lambda gradient: gradient * 2)
    if line is hooked_when_it_is_added:
        module.layer.weight.register_post_accumulate_grad_hook(doubles)
    if line is counts_in_closure:
        module.on_train_start = lambda: setattr(module.trainer, "count", counter())
    if line is adds_to_batch:
        module.batches = [{"x": torch.randn(4, 3)} for _ in range(6)]
        module.on_train_batch_end = lambda outputs, batch, *_: module.average.add_(batch["doubled"])
    fitter = train(module, *callbacks, max_epochs=5, **options)
    return module, dict(fitter.callback_metrics)


def message_of(line):
    on_cuda = recorded.DEVICE == "cuda" and line in ON_CUDA
    return ON_CUDA[line] if on_cuda else CASES[line]


@pytest.mark.parametrize("line", CASES, ids=lambda line: line.__name__)
def test_whatever_a_step_does_training_is_as_eager(line, device):
    message, callback = message_of(line), Counting(software=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mine, logged = run(line, callback)
    reference, expected = run(line)
    assert_same(mine.state_dict(), reference.state_dict())
    assert_same(logged, expected)
    said = [str(w.message) for w in caught if "CUDAGraphStep" in str(w.message)]
    if message is None:
        assert said == [] and callback.replays > 3
    else:
        [text] = said
        assert text.startswith("CUDAGraphStep: the training step cannot be captured:")
        assert re.search(message, text, re.DOTALL), text
        assert callback.replays <= (6 if line is step_number else 2)


class HooksLate(Callback):
    """When the step has been watched, and before it is captured."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 3:
            pl_module.layer.weight.register_hook(lambda gradient: gradient * 2)


def test_a_hook_that_nobody_has_seen_before_the_capture_is_an_error():
    with pytest.raises(RuntimeError, match="capturing the backward of the training step failed"):
        run(returns_loss, Counting(software=True), HooksLate())


class Ends(CUDAGraphStep):
    """Knows the step in which a run failed."""

    def on_exception(self, trainer, pl_module, exception):
        self.step = trainer.global_step
        super().on_exception(trainer, pl_module, exception)


PLANTED = [
    growing_number,  # a Python counter in the loss
    counts_elsewhere,  # in a global
    counts_in_closure,
    counts_in_dict,
    branch,
    numpy_random,
    growing_list,
    appends,
    metric,
    logged_number,
    returns_index,
    counts,
    item,
]


@pytest.mark.parametrize("line", PLANTED, ids=lambda line: line.__name__)
def test_with_strict_it_is_an_error_within_the_micro_batches_that_are_verified(line):
    callback = Ends(software=True, strict=True)
    with pytest.raises(GraphCaptureError, match=re.compile(message_of(line), re.DOTALL)):
        run(line, callback)
    assert callback.step <= 3 + 1 + 3


SHIFT = {"value": 0.0}


def shifted(self, batch, batch_idx, loss):
    return loss + SHIFT["value"] * loss


class ShiftsLater(Callback):
    """Changes a number where nobody looks, when it is no longer verified in this epoch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        SHIFT["value"] = float(trainer.global_step >= 8)


class Shifted(Callback):
    """As in the second epoch of a run with the other callback."""

    def on_train_batch_start(self, *_):
        SHIFT["value"] = 1.0


def test_what_nobody_sees_is_found_at_the_next_epoch_and_trains_on_as_eager():
    callback, states = Counting(software=True), []
    module = Small(shifted, list(torch.randn(10, 4, 3)))
    module.on_train_epoch_end = lambda: states.append(
        {name: value.clone() for name, value in module.state_dict().items()}
    )
    message = r"the output is .*\n    Since the last comparison 3 runs were replayed\."
    with pytest.warns(UserWarning, match=message):
        train(module, callback, ShiftsLater(), max_epochs=3)
    # Three are watched, one captured, three verified: 7, 8 and 9 are replayed, 8 and 9 wrongly.
    assert (callback.replays, callback.verified) == (4, 4)
    reference = Small(shifted, module.batches)
    reference.on_train_start = lambda: reference.load_state_dict(states[0])
    train(reference, Shifted(), max_epochs=2)
    assert_same(module.state_dict(), reference.state_dict())


def fine(self, batch, batch_idx, loss):
    self.average.mul_(0.9).add_(loss.detach(), alpha=0.1)
    self.log("constant", 2.0)
    scale, parts = loss.detach(), []
    parts.append(
        checkpoint(lambda x: self.layer(x) * scale + len(parts), batch, use_reentrant=False).sum()
    )
    # goes through all modules, the metric too
    decay = sum(p.square().sum() for p in self.parameters())
    return {"loss": loss + sum(parts) + 0.01 * decay, "kept": "text"}


def test_nothing_is_said_of_a_step_that_can_be_captured():
    reference, mine, callback = Small(fine), Small(fine), Counting(software=True, strict=True)
    train(reference, max_epochs=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="CUDAGraphStep")
        train(mine, callback, max_epochs=2)
    assert (callback.replays, callback.verified) == (6, 3)  # of twelve
    assert_same(mine.state_dict(), reference.state_dict())
