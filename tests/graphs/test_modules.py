"""Chosen modules as graphs, in steps that cannot be captured as a whole."""

import pickle
from copy import deepcopy
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers import recorded
from helpers.ranks import run_ranks
from helpers.recorded import CLASSES, Frees, Net, assert_same, assert_same_run, fit
from lightning_zero3 import Zero3Strategy
from lightning_zero3.callbacks import CUDAGraphStep
from lightning_zero3.callbacks.graphs import program
from lightning_zero3.callbacks.graphs.runner import GraphCaptureError

pytestmark = pytest.mark.usefixtures("device")


class Looks(Net):
    """Waits for the loss, and runs one of its layers twice."""

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        twice = self.head(self.net(batch["x"]).relu()).square().mean()
        return {
            **output,
            "loss": output["loss"] + twice * (0.1 if output["loss"].item() > 1 else 0.2),
        }


class Manual(Net):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(output["loss"])
        optimizer.step()
        return output


class Checkpoints(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Checkpointed(Net):
    """A captured module with a checkpoint and dropout inside, and dropout between its forward and
    its backward.
    """

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.net = Checkpoints(*self.net)
        self.head = nn.Sequential(nn.Dropout(0.2), self.head)


class ChangesBetween(Net):
    """Runs layers twice, and changes one when the first run waits for its backward."""

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        if self.global_step == 4:
            self.net[3].p = 0.05
        return {
            **output,
            "loss": output["loss"] + 0.1 * self.head(self.net(batch["x"])).square().mean(),
        }


class Scale(nn.Module):
    scale, shift = 1.5, 0.5

    def forward(self, x):
        return x * self.scale if len(x) == 8 else x + self.shift


class Branches(Net):
    """What a number is used for depends on the shape; it changes when both are captured."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.net[2] = Scale()

    def on_train_epoch_start(self):
        if self.current_epoch == 4:
            self.net[2].scale = 3.0


class Pair(nn.Linear):
    """Its second output and bias get gradients only if somebody asks for them."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight), x.sum(1, keepdim=True) * self.bias


class Unasked(Net):
    """Weight decay changes a weight whose gradient is zero, and leaves one that has none."""

    with_second = ()

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.head = Pair(16, CLASSES)

    def forward(self, x):
        first, second = self.head(self.frozen(self.net(x)))
        return first + second if self.global_step in self.with_second else first


class AskedFromAnEpoch(Unasked):
    with_second = range(12, 99)  # the third epoch's


class Outside(nn.Module):
    def __init__(self, owner):
        super().__init__()
        self.factor_of = [partial(getattr, owner)]

    def forward(self, x):
        return x * self.factor_of[0]("current").value


class Current:
    """Belongs to no module that is captured."""

    __slots__ = ("value",)


class Annealed(Net):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.current = Current()
        self.current.value = 1.0
        self.net[2] = Outside(self)

    def on_train_epoch_start(self):
        self.current.value = 1.0 if self.current_epoch < 3 else 0.5


class RunsBefore(Net):
    """In the step of the capture the head has run already, with other inputs, and autocast keeps
    what it made of weights.
    """

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            hidden = self.frozen(self.net(x))
            if self.training and self.global_step == 3:
                self.head(hidden[:2])
            return self.head(hidden).float()


class Counting(CUDAGraphStep):
    def on_train_end(self, trainer, pl_module):
        parts = self._runner.parts
        self.replays = {each.name.split("'")[1]: each.replays for each in parts if "'" in each.name}
        self.recaptures = sum(each.recaptures for each in parts)
        self.inputs = self.graph_input_nbytes
        super().on_train_end(trainer, pl_module)
        assert not any("forward" in vars(module) for module in pl_module.modules())


class MovesWeight(Callback):
    """Of the layer whose weight a captured module computes with."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 20:
            pl_module.net[4].weight.data = pl_module.net[4].weight.data * 0.5


class LessDropout(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 5:
            pl_module.net[3].p = 0.05


CASES = {
    "looks": (
        Looks,
        "auto",
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "val_check_interval": 3},
    ),
    "a change": (Net, "auto", {"max_epochs": 4}),
    "manual": (Manual, "auto", {"precision": "bf16-mixed"}),
    "zero3": (Looks, "zero3", {}),
    "checkpoint": (Checkpointed, "auto", {}),
    "a change before the backward": (ChangesBetween, "auto", {}),
    "numbers of two shapes": (Branches, "auto", {"max_epochs": 6}),
    "an output that nobody needs": (Unasked, "auto", {"max_epochs": 3}),
    "weights that autocast keeps": (RunsBefore, "auto", {}),
}
CHANGES = [case for case in CASES if case.startswith(("a change", "numbers"))]


@pytest.mark.parametrize("case", CASES)
def test_captured_modules_give_the_eager_run(case):
    module, strategy, options = CASES[case]
    change = [LessDropout()] if case == "a change" else []
    runs = []
    callback = Counting(modules=["net", "h*d"], software=True, strict=True)
    for extra in ([], [callback]):
        made = Zero3Strategy() if strategy == "zero3" else strategy
        runs.append(fit(module(batch_size=8), *extra, *change, strategy=made, **options))
    assert_same_run(runs[1], runs[0])
    assert callback.replays.keys() == {"net", "head"} and min(callback.replays.values()) > 2
    assert callback.recaptures == (case in CHANGES) and callback.inputs > 0


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            AskedFromAnEpoch,
            r"'head' cannot .*\n.* not the same: other outputs get gradients than before",
        ),
        (Annealed, r"'net' cannot .*\n.* not the same: the output is up to .* apart"),
    ],
)
def test_what_no_fingerprint_sees_is_found_at_the_next_epoch(module, message):
    runs, callback = [], Counting(modules=["net", "h*d"], software=True)
    with pytest.warns(UserWarning, match=message):
        runs.append(fit(module(batch_size=8), callback, max_epochs=5))
    assert_same_run(runs[0], fit(module(batch_size=8), max_epochs=5))
    assert min(callback.replays.values()) > 1


class Peeks(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 1e9 else x * 2


class Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * (3 if grad.sum().item() > 1e9 else 2)


class LooksBack(nn.Module):
    def forward(self, x):
        return Backwards.apply(x)


class HasLooksBack(Net):
    def __init__(self):
        super().__init__()
        self.net[2] = LooksBack()


class HasPeeks(Net):
    def __init__(self):
        super().__init__()
        self.net[2] = Peeks()


class IsCheckpointed(Net):
    def forward(self, x):
        return self.head(self.frozen(checkpoint(self.net, x, use_reentrant=False)))


class TiedHead(nn.Module):
    """Computes with a weight of another module, which it does not own."""

    def __init__(self, owner):
        super().__init__()
        self.owners = [owner]

    def forward(self, x):
        return x @ self.owners[0].weight[:, :CLASSES] if len(x) % 2 == 0 else x[:, :CLASSES]


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.head = TiedHead(self.net[4])


class HookedAndTied(Tied):
    def __init__(self):
        super().__init__()
        self.net[4].weight.register_hook(lambda gradient: gradient * 0.5)


class TiedForOneShape(Tied):
    """Of two that are captured."""

    def training_step(self, batch, batch_idx):
        count = 4 - self.global_step % 2
        return super().training_step({key: x[:count] for key, x in batch.items()}, batch_idx)


class Doubled(nn.Module):
    """Has a leaf of its own in the middle, whose gradient nobody wants."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, x):
        if not self.training:
            return self.head(x)
        middle = (x.detach() * 2).requires_grad_()
        [slope] = torch.autograd.grad(self.head(middle).square().sum(), middle, create_graph=True)
        return self.head(x) + 0.1 * slope.sum(1, keepdim=True)


class HasDoubled(Net):
    def __init__(self):
        super().__init__()
        self.head = Doubled(self.head)


class Aside(Net):
    """Of one module nobody uses what it returns."""

    def training_step(self, batch, batch_idx):
        self.unused(batch["x"][:, :3])
        return super().training_step(batch, batch_idx)


class Logs(nn.Module):
    def __init__(self, owner):
        super().__init__()
        self.owners = [owner]

    def forward(self, x):
        if self.training:
            self.owners[0].log("inside", x.mean())
        return x


class HasLogs(Net):
    def __init__(self):
        super().__init__()
        self.net[2] = Logs(self)


class GradientsInValidation(Net):
    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            x = batch["x"].clone().requires_grad_()
            [slope] = torch.autograd.grad(self(x).square().sum(), x)
        self.log("validation", slope.norm())


class AskedOnce(Unasked):
    with_second = (1,)


EXACT = {  # options of the run, and how often a module is replayed at least
    "a module that logs": (HasLogs, "net", 10, {}),
    "an output that is asked for once, before the capture": (AskedOnce, "head", 10, {}),
    "a module without a backward": (Aside, "unused", 0, {}),
    "a validation with gradients": (
        GradientsInValidation,
        "net",
        50,
        {"max_epochs": 6, "inference_mode": False},
    ),
}


@pytest.mark.parametrize("case", EXACT)
def test_captured_modules_that_log_or_get_no_gradient_give_the_eager_run(case):
    module, name, replays, options = EXACT[case]
    callback = Counting(software=True, strict=True, modules=[name])
    mine = fit(module(), callback, **options)
    assert callback.replays[name] >= replays and callback.recaptures == 0
    assert_same_run(mine, fit(module(), **options))


@pytest.mark.parametrize(
    ("module", "options", "error", "message"),
    [
        (
            HasPeeks,
            {"modules": ["net"]},
            GraphCaptureError,
            r"(?s)module 'net' .*test_modules\.py:\d+: `return x if.*needs a value",
        ),
        (
            HasLooksBack,
            {"modules": ["net"]},
            GraphCaptureError,
            r"(?s)module 'net' .*return grad \* \(3 if.*needs a value",
        ),
        (
            IsCheckpointed,
            {"modules": ["net"]},
            GraphCaptureError,
            r"(?s)'net' .*a checkpoint runs it, .* Put the checkpoint inside",
        ),
        (
            Tied,
            {"modules": ["head"]},
            GraphCaptureError,
            r"(?s)'head' .*It computes with net\.4\.weight, which is none of its parameters: its gradient"
            r" would be lost",
        ),
        (
            Net,
            {"modules": ["encoder"]},
            ValueError,
            r"modules=\['encoder'\]\) matches no module of Net",
        ),
    ],
    ids=["host", "backward", "checkpoint", "tied", "name"],
)
def test_a_module_that_cannot_be_captured_is_named(module, options, error, message):
    with pytest.raises(error, match=message):
        fit(module(), CUDAGraphStep(software=True, strict=True, **options))


def test_one_module_that_cannot_be_captured_leaves_the_others():
    reference = fit(HasLooksBack(), Frees())
    callback = Counting(software=True, modules=["net", "head"])
    with pytest.warns(UserWarning, match="module 'net' cannot be captured:"):
        mine = fit(HasLooksBack(), callback, Frees())
    assert_same_run(mine, reference)
    assert callback.replays["net"] == 0 and callback.replays["head"] > 10


@pytest.mark.parametrize("module", [Tied, HookedAndTied, TiedForOneShape])
def test_a_module_that_computes_with_a_weight_of_another_runs_eagerly(module):
    """Whose gradient would be lost, whose hook nobody would see, and which may move."""
    callback = Counting(software=True, modules=["head"])
    with pytest.warns(UserWarning, match=r"'head' cannot .*\n.* computes with net\.4\.weight"):
        mine = fit(module(), MovesWeight(), callback, max_epochs=3)
    assert_same_run(mine, fit(module(), MovesWeight(), max_epochs=3))


class InPlace(Net):
    """One module changes its input, which others use."""

    def __init__(self):
        super().__init__()
        self.net[2] = nn.ReLU(inplace=True)

    def forward(self, x):
        hidden = self.net[1](self.net[0](x))
        return self.head(self.frozen(self.net[3:](self.net[2](hidden) + hidden)))


def test_a_module_that_changes_its_input_is_refused():
    callback = Counting(software=True, modules=["net.2", "head"])
    message = r"module 'net\.2' cannot be captured:\n  - It writes to its inputs"
    with pytest.warns(UserWarning, match=message):
        mine = fit(InPlace(), callback)
    assert_same_run(mine, fit(InPlace()))
    assert callback.replays["net.2"] == 0 and callback.replays["head"] > 10


def test_tensors_that_a_module_makes_and_derives_by_are_its_own():
    callback = Counting(software=True, strict=True, modules=["head"])
    mine = fit(HasDoubled(), callback)
    assert callback.replays["head"] > 10
    assert_same_run(mine, fit(HasDoubled()))


class LooksInTheCapture(nn.Module):
    """Waits for a value in its fourth run only."""

    runs = 0

    def forward(self, x):
        type(self).runs += self.training
        return x * (3 if self.runs == 4 and x.sum().item() > 1e9 else 2)


def fail_in_a_capture(rank, world_size, device):
    recorded.DEVICE, LooksInTheCapture.runs = device, 0
    net = Net()
    net.net[2] = LooksInTheCapture()
    with pytest.raises(RuntimeError, match="capturing the forward of module 'net.2' failed"):
        fit(net, CUDAGraphStep(software=True, modules=["net.2"]))


def test_a_capture_that_fails_names_its_module(device):
    if device == "cuda":  # in a process of its own, which is of no more use afterwards
        run_ranks(fail_in_a_capture, 1, device)
    else:
        fail_in_a_capture(0, 1, device)


class Lengths(Net):
    """Half of the batches have a length that comes seldom."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        if not self.trainer.training:
            return batch
        self.turn = getattr(self, "turn", -1) + 1
        rows = 12 - self.turn if self.turn % 2 else 12
        return {name: value[: max(rows, 2)] for name, value in batch.items()}


def test_graphs_are_replayed_beside_more_lengths_than_are_told_apart(monkeypatch):
    monkeypatch.setattr(program, "MOST_SIGNATURES", 4)
    callback = Counting(modules=["net"], software=True, strict=True)
    mine = fit(Lengths(batch_size=12), callback, max_epochs=5)
    assert callback.replays["net"] == 3
    assert_same_run(mine, fit(Lengths(batch_size=12), max_epochs=5))
    monkeypatch.setattr(program, "MOST_SIGNATURES", 1)
    with pytest.raises(
        GraphCaptureError,
        match=r"module 'net' cannot .*\n.* kinds of inputs came, and none of them often",
    ):
        fit(Lengths(batch_size=12), Counting(modules=["net"], software=True, strict=True))


class AskedLate(Unasked):
    with_second = (8,)


def test_gradients_of_other_outputs_than_before_are_an_error():
    with pytest.raises(
        RuntimeError,
        match="module 'head': other outputs get gradients now than in its eager runs",
    ):
        fit(AskedLate(), CUDAGraphStep(software=True, modules=["head"]))


class TwoLosses(Manual):
    """Each with a backward of its own, from some step on."""

    twice_from = 0

    def training_step(self, batch, batch_idx):
        optimizer, is_twice = self.optimizers(), self.global_step >= self.twice_from
        optimizer.zero_grad()
        hidden = self.net(batch["x"])
        loss = self.head(hidden).square().mean()
        self.manual_backward(loss, retain_graph=is_twice)
        if is_twice:
            self.manual_backward(hidden.square().mean())
        optimizer.step()
        return {"loss": loss.detach()}


class TwoOutputs(TwoLosses):
    """Of which each loss needs another one."""

    def __init__(self):
        super().__init__()
        self.net = Apart(self.net)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        first, second = self.net(batch["x"])
        self.manual_backward(self.head(first).square().mean(), retain_graph=True)
        self.manual_backward(second.square().mean())
        optimizer.step()
        return {"loss": first.detach().mean()}


class Apart(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        hidden = self.net(x)
        return (hidden * 2, hidden * 3) if self.training else hidden


@pytest.mark.parametrize("module", [TwoLosses, TwoOutputs])
def test_a_module_that_is_differentiated_twice_is_eager(module):
    callback, options = Counting(software=True, modules=["net"]), {"limit_val_batches": 0}
    with pytest.warns(UserWarning, match=r"'net' cannot .*\n  - It is differentiated twice"):
        mine = fit(module(), callback, **options)
    assert callback.replays["net"] == 0
    assert_same_run(mine, fit(module(), **options))


class TwiceLater(TwoLosses):
    twice_from = 8


class TwiceWhenItIsVerified(TwoLosses):
    twice_from = 11  # the first of the second epoch


def test_a_second_backward_of_a_replay_is_an_error():
    options = {"limit_val_batches": 0}
    message = "module 'net', which is captured, is differentiated twice"
    with pytest.raises(RuntimeError, match=message):
        fit(TwiceLater(), CUDAGraphStep(software=True, modules=["net"]), **options)
    with pytest.warns(UserWarning, match=r"'net' cannot .*\n  - It is differentiated twice"):
        mine = fit(
            TwiceWhenItIsVerified(), CUDAGraphStep(software=True, modules=["net"]), **options
        )
    assert_same_run(mine, fit(TwiceWhenItIsVerified(), **options))


class BackwardLate(Manual):
    """Its first backward comes when the module has run once more."""

    def training_step(self, batch, batch_idx):
        first = self.net(batch["x"]).sum()
        if self.global_step >= 8:
            self.manual_backward(self.net(batch["x"]).sum(), retain_graph=True)
        self.manual_backward(first)
        self.optimizers().step()
        return {"loss": first.detach()}


def test_a_backward_after_a_later_run_is_the_eager_one():
    options = {"max_epochs": 1, "limit_val_batches": 0}
    callback = Counting(software=True, strict=True, modules=["net"])
    mine = fit(BackwardLate(), callback, **options)
    assert callback.replays["net"] > 4
    assert_same_run(mine, fit(BackwardLate(), **options))


class Copies(Callback):
    """Keeps copies of a module, one made when it is replayed, and one that was pickled."""

    def __init__(self, name):
        self.name, self.copies = name, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 8:
            self.original = original = pl_module.get_submodule(self.name)
            self.copies = [deepcopy(original), pickle.loads(pickle.dumps(original))]
            for each in self.copies:
                each.eval()

    def on_train_end(self, trainer, pl_module):
        for each in self.copies:
            for method in ("forward", "training_step"):
                bound = getattr(each, method, None)
                assert bound is None or bound.__self__ is each
            each.load_state_dict(self.original.state_dict())
        x = torch.randn(3, 12, device=pl_module.device)
        self.outputs = [each(x) for each in [self.original.eval(), *self.copies]]


@pytest.mark.parametrize(("name", "options"), [("net", {"modules": ["net"]}), ("", {})])
def test_a_copy_of_what_is_captured_runs_by_itself(name, options):
    callback, copies = Counting(software=True, strict=True, **options), Copies(name)
    mine = fit(Net(), callback, copies)
    assert_same(copies.outputs[1:], [copies.outputs[0]] * 2)
    assert_same_run(mine, fit(Net(), Copies(name)))


class NeverTheSame(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step % 3 == 0:  # after each capture
            pl_module.net[3].p = 0.1 + 0.001 * trainer.global_step


def test_a_module_that_changes_again_and_again_is_given_up():
    with pytest.raises(
        GraphCaptureError, match=r"module 'net' cannot .*\n.* Its graphs went out of date 6 times"
    ):
        fit(
            Net(),
            NeverTheSame(),
            CUDAGraphStep(software=True, strict=True, warmup=2, modules=["net"]),
        )


class Early(Net):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        if batch_idx == 5:  # by then the module is replayed
            with torch.no_grad():
                self.head.weight.mul_(1.0)
        return output


def test_weights_that_change_before_the_backward_are_an_error_as_ever():
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fit(Early(), CUDAGraphStep(software=True, modules=["head"]))


def capture_on_two_ranks(rank, world_size):
    strategy = Zero3Strategy(unit_policy=[nn.Linear])
    graphs = CUDAGraphStep(software=True, strict=True, modules=["net.0"])
    message = "With `zero3` on several ranks weights of single modules .*Capture the whole step"
    with pytest.raises(GraphCaptureError, match=message):
        fit(Net(), graphs, strategy=strategy, devices=world_size, num_sanity_val_steps=0)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_modules_of_which_each_rank_has_a_part_are_refused():
    run_ranks(capture_on_two_ranks, 2)
