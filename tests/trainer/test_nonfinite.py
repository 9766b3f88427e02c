"""nan and inf are found in the step they appear in, and traced to rank, unit and parameter."""

from collections import Counter
from functools import cache

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from helpers.models import TinyLm, make, part, tokens
from helpers.parity import trainer, zero3
from helpers.ranks import run_ranks

STEPS, BAD_STEP = 4, 2


class Checkpointed(TinyLm):
    def forward(self, batch):
        x = self.embed(batch) + self.position
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class Model(pl.LightningModule):
    """Spoils one thing on its last rank in one micro-batch."""

    def __init__(self, kind, rank, world_size, bad=BAD_STEP, net=TinyLm):
        super().__init__()
        self.net = make(net)
        self.kind, self.rank, self.world_size, self.bad = kind, rank, world_size, bad

    def hooks(self):
        """Forward hooks of layers in the bad micro-batch."""
        first = self.net.blocks[1]
        if self.kind == "output":
            yield first.down, lambda m, a, out: out * torch.nan
        elif self.kind == "gradient":
            # The root of zero: 0 in forward, infinite slope in backward.
            yield first.up, lambda m, a, out: out + (0 * out).sqrt()

    def training_step(self, batch, batch_idx):
        spoil = batch_idx == self.bad and self.rank == self.world_size - 1
        handles = [layer.register_forward_hook(hook) for layer, hook in self.hooks() if spoil]
        loss = self.net.loss(batch)
        for handle in handles:
            handle.remove()
        self.log("loss", loss)
        return loss * torch.inf if spoil and self.kind == "loss" else loss

    def on_train_batch_start(self, batch, batch_idx):
        if self.kind == "weight" and batch_idx == self.bad:
            with torch.no_grad(), self.trainer.strategy.gathered(self.net.blocks[2], modify=True):
                self.net.blocks[2].up.weight[3, 1] = torch.nan

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(
            [part(b, self.rank, self.world_size) for b in tokens(STEPS)], batch_size=None
        )


class Manual(Model):
    def __init__(self, *args):
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


class Counted(Model):
    """Counts the operations of its last step, from the batch to the optimizer."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == STEPS - 1:
            self.counter = Operations()
            self.counter.__enter__()

    def on_after_backward(self):
        if self.trainer.global_step == STEPS - 1:
            self.counter.__exit__(None, None, None)

    def configure_optimizers(self):
        vectors = [p for p in self.net.parameters() if p.dim() < 2]
        matrices = [p for p in self.net.parameters() if p.dim() > 1]
        return torch.optim.SGD(
            [{"params": vectors}, {"params": matrices, "weight_decay": 0.1}], lr=0.1
        )


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found[str(function)] += 1
        return function(*args, **(kwargs or {}))


def half():
    return {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))}


# The strategy's options, the Trainer's, the micro-batch to spoil.
WINDOW = {"accumulate_grad_batches": 2}
CASES = {
    **{
        name: (name, Model, {}, {}, BAD_STEP)
        for name in ("output", "gradient", "loss", "weight", "nothing")
    },
    "gradient in bf16": ("gradient", Model, {"reduce_dtype": "bf16"}, {}, BAD_STEP),
    "gradient, second of a window": ("gradient", Model, {}, WINDOW, 3),
    "gradient, held": ("gradient", Model, {"reduce_once": True}, WINDOW, 2),
    "gradient, manual": ("gradient", Manual, {}, {}, BAD_STEP),
    "output, manual": ("output", Manual, {}, {}, BAD_STEP),
    "loss, 16-mixed": ("loss", Model, {}, half, BAD_STEP),
    "gradient, 16-mixed": ("gradient", Model, {}, half, BAD_STEP),
}


def fit(module, strategy, **options):
    """What it says."""
    try:
        trainer(strategy, module.world_size, **options).fit(module)
    except FloatingPointError as error:
        return str(error)
    return f"trained {module.trainer.global_step} steps"


def fit_all(rank, world_size):
    said = {}
    for name, (kind, cls, own, options, bad) in CASES.items():
        options = options() if callable(options) else options
        said[name] = fit(
            cls(kind, rank, world_size, bad), zero3(stop_on_nonfinite=True, **own), **options
        )
    said["weight, checkpointed"] = fit(
        Model("weight", rank, world_size, BAD_STEP, Checkpointed), zero3(stop_on_nonfinite=True)
    )
    for block in (compiled := Model("weight", rank, world_size)).net.blocks:
        block.compile(backend="eager")
    said["weight, compiled"] = fit(compiled, zero3(stop_on_nonfinite=True))
    return said


@cache
def results(world_size):
    return run_ranks(fit_all, world_size, timeout=200)


FIRST = f"In step {BAD_STEP} the first value that is not finite, "
LAST = " This step has changed no weight."
BLOCK = ("norm.weight", "norm.bias", "up.weight")  # what it names of a whole block


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_names_the_first_place(world_size):
    everyone = results(world_size)
    for name in CASES:
        assert all(said[name] == everyone[0][name] for said in everyone), name
    said, rank = everyone[0], world_size - 1
    for name in ("output", "output, manual"):
        assert said[name].startswith(
            FIRST + f"nan, is in the output of unit net.blocks.1 in forward, on rank {rank}."
            " Gradients that"
        )
        assert said[name].endswith(LAST)
    assert said["loss"].startswith(FIRST + f"inf, is in the loss, on rank {rank}.")
    everywhere = ", ".join(map(str, range(world_size)))
    for name in ("weight", "weight, checkpointed", "weight, compiled"):
        text = said[name]
        assert text.startswith(
            FIRST + f"nan, is in the output of unit net.blocks.2 in forward, on rank {everywhere}."
        ), text
        assert "Weights that are not finite: net.blocks.2.up.weight." in text
    assert said["nothing"] == f"trained {STEPS} steps"


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("case", ["", " in bf16", ", second of a window", ", held", ", manual"])
def test_gradients_alone_are_traced_to_the_unit_that_made_them(world_size, case):
    text = results(world_size)[0]["gradient" + case]
    step = 1 if "window" in case or "held" in case else BAD_STEP
    where = f"nan, is in the gradients of unit net.blocks.1 in backward, on rank {world_size - 1}."
    names = ", ".join(f"net.blocks.1.{name}" for name in BLOCK)
    assert text == (
        FIRST.replace(str(BAD_STEP), str(step), 1)
        + f"{where} Gradients that are not finite: {names} ....{LAST}"
    )


@pytest.mark.parametrize("world_size", [1, 3])
def test_with_a_loss_scaler_the_loss_alone_must_be_finite(world_size):
    said, rank = results(world_size)[0], world_size - 1
    assert said["loss, 16-mixed"].startswith(FIRST + f"inf, is in the loss, on rank {rank}.")
    # one of which the scaler skipped
    assert said["gradient, 16-mixed"] == f"trained {STEPS} steps"


# ---- cost
# --------------------------------------------------------------------------------------------------


def count_both(rank, world_size):
    counts = []
    for watched in (False, True):
        trainer(zero3(stop_on_nonfinite=watched), world_size).fit(
            module := Counted("nothing", rank, world_size)
        )
        counts.append(module.counter.found)
    engine = module.trainer.strategy.engine
    with Operations() as agreement:
        int(engine.collectives.agree(torch.tensor([0])))
    assert not counts[0] - counts[1]
    return counts[1] - counts[0] - agreement.found, len(engine.units)


@pytest.mark.parametrize("world_size", [1, 3])
def test_outputs_gradients_and_the_loss_cost_one_operation_each(world_size):
    for added, units in run_ranks(count_both, world_size, timeout=100):
        assert units == 7
        outputs = units - 1  # the root's own module has no forward, but `training_step`
        assert added == {"aten.aminmax.default": outputs + units + 1, "aten.stack.default": 1}
