"""State dicts of all kinds, and what rank 0 does alone in `gathered`."""

import io
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from .harness import DIM, Block, Case, Chain, case


@case
class StateDictUngathered(Case):
    """`state_dict()` outside `gathered`"""

    pitfalls = (32,)

    def train(self, run):
        super().train(run)
        run.log(*run.model.state_dict().values())


@case
class StateDictInAStep(Case):
    """`state_dict()` in a step"""

    pitfalls = (32,)

    def loss(self, model, batch):
        state = model.state_dict()
        values = {name: value * 0.5 for name, value in state.items()}
        return (
            super().loss(model, batch)
            + torch.func.functional_call(model, values, (batch,)).square().mean()
        )


class Loaded(Case):
    """A state dict loaded between steps"""

    pitfalls = (33,)

    def state(self):
        torch.manual_seed(5)
        return self.model().state_dict()

    def load(self, run, state):
        run.model.load_state_dict(state)

    def train(self, run):
        super().train(run)
        self.load(run, self.state())
        run.log(*run.parameters().values())
        super().train(run)


@case
class LoadedOnRankZero(Loaded):
    """`load_state_dict` between steps on rank 0 alone"""

    refused = "a value stored to parameter 'blocks.0.down.bias'.*gathered"

    def train(self, run):
        if run.rank == 0:
            self.load(run, self.state())
        Case.train(self, run)


@case
class CopiedIntoByEachRank(Loaded):
    """`copy_` into a parameter between steps, other values on each rank"""

    refused = "a value stored to parameter 'head.bias'.*other values on each.*gathered"

    def train(self, run):
        super().train(run)
        with torch.no_grad():
            run.model.head.bias.copy_(torch.full((DIM,), float(run.rank)))
        Case.train(self, run)


@case
class StateDictOfAPart(Loaded):
    """`load_state_dict(strict=False)` of some names, and of names that are not there"""

    def load(self, run, state):
        some = {name: value for name, value in state.items() if "1" in name} | {
            "nowhere.weight": torch.ones(3)
        }
        found = run.model.load_state_dict(some, strict=False)
        run.log(sorted(found.missing_keys), found.unexpected_keys)


@case
class StateDictOfAModule(Loaded):
    """`load_state_dict` of one block"""

    def load(self, run, state):
        run.model.blocks[1].load_state_dict(Block().state_dict())


@case
class StateDictOfAnotherDtype(Loaded):
    """`load_state_dict` of float64 and bfloat16 values"""

    def state(self):
        dtypes = torch.float64, torch.bfloat16
        return {
            name: value.to(dtypes[i % 2]) for i, (name, value) in enumerate(super().state().items())
        }


@case
class StateDictOfAnotherShape(Loaded):
    """`load_state_dict` of a wrong shape, which raises and leaves that weight as it was, then
    continuing
    """

    def load(self, run, state):
        state["head.weight"] = torch.ones(DIM, DIM + 1)
        del state["stem.bias"]
        with pytest.raises(
            RuntimeError, match=r"(?s)Missing key.*stem\.bias.*size mismatch for head\.weight"
        ):
            run.model.load_state_dict(state)


@case
class StateDictHooks(Loaded):
    """Modules with extra state and hooks on saving and loading"""

    pitfalls = (32, 33)

    class Hooked(Block):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.register_state_dict_post_hook(self.rename)
            self.register_load_state_dict_pre_hook(self.name_back)

        @staticmethod
        def rename(module, state, prefix, metadata):
            state[prefix + "above.weight"] = state.pop(prefix + "up.weight")

        @staticmethod
        def name_back(module, state, prefix, *_):
            state[prefix + "up.weight"] = state.pop(prefix + "above.weight")

        def get_extra_state(self):
            return {"calls": self.calls, "norm": self.norm.weight.detach().sum()}

        def set_extra_state(self, state):
            self.calls = state["calls"]

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    def model(self):
        return Chain(*(self.Hooked() for _ in range(3)))

    def load(self, run, state):
        with run.gathered(run.model) if run.refuses else nullcontext():
            kept = {
                name: v.clone() if isinstance(v, torch.Tensor) else v
                for name, v in run.model.state_dict().items()
            }
        run.log(*(v for name, v in sorted(kept.items()) if "extra" not in name))
        run.log(*(v["norm"] for name, v in sorted(kept.items()) if "extra" in name))
        run.model.load_state_dict(state)
        run.log(*(block.calls for block in run.model.blocks))
        run.model.load_state_dict(
            {name: 0.5 * v if isinstance(v, torch.Tensor) else v for name, v in kept.items()}
        )
        run.log(*(block.calls for block in run.model.blocks))


# ---- rank 0 alone ----------------------------------------------------------------------------


@case
class SurgeryOnRankZero(Case):
    """Writing on rank 0 alone inside `gathered(modify=True)`"""

    def writes(self, run):
        return run.rank == 0 or run.is_reference

    def train(self, run):
        super().train(run)
        with run.gathered(run.model, modify=True), torch.no_grad():
            if self.writes(run):
                run.model.head.weight.mul_(0.5)
                run.model.blocks[0].up.weight[3] = 0
                nn.init.ones_(run.model.blocks[1].norm.weight)
                run.model.stem.weight.data = torch.eye(DIM)
        run.log(*run.parameters().values())
        super().train(run)


@case
class OtherSurgeryOnRankOne(SurgeryOnRankZero):
    """Other values on each rank inside `gathered(modify=True)`: rank 0's are stored"""

    def train(self, run):
        Case.train(self, run)
        with run.gathered(run.model, modify=True), torch.no_grad():
            run.model.head.weight.fill_(0.25 + (0 if run.is_reference else run.rank))
            if not self.writes(run):
                run.model.stem.weight.zero_()
        run.log(*run.parameters().values())
        Case.train(self, run)


@case
class SurgeryOnRankOneUnannounced(Case):
    """Writing on one rank alone inside `gathered` without `modify=True`"""

    worlds = (2,)
    refused = "'head.weight' was changed inside `gathered`, and the change is lost"
    refused_by_one = True

    def train(self, run):
        super().train(run)
        with run.gathered(run.model), torch.no_grad():
            if run.rank == 1:
                run.model.head.weight.mul_(0.5)
        super().train(run)


@case
class GatheredOnRankZero(Case):
    """`gathered` entered on rank 0 alone"""

    refused = "to enter `strategy.gathered`, which is for all ranks"
    modify = False

    def train(self, run):
        super().train(run)
        if run.rank == 0:
            with run.gathered(run.model, self.modify):
                run.log(run.model.head.weight)
        super().train(run)


@case
class GatheredOnRankZeroToChange(GatheredOnRankZero):
    """`gathered(modify=True)` entered on rank 0 alone"""

    modify = True


@case
class SavedOnRankZero(Case):
    """`torch.save(model.state_dict())` on rank 0 alone inside `gathered`"""

    pitfalls = (32,)

    def train(self, run):
        super().train(run)
        with run.gathered(run.model):
            if run.rank == 0:
                file = io.BytesIO()
                torch.save(run.model.state_dict(), file)
                file.seek(0)
                run.log(*torch.load(file).values())
        super().train(run)


@case
class ForwardOnRankZero(Case):
    """A forward on rank 0 alone inside `gathered`"""

    def train(self, run):
        super().train(run)
        with run.gathered(run.model), torch.no_grad():
            if run.rank == 0:
                run.log(run.model(self.batch(0, 0)))
        super().train(run)
