"""Modules whose optimizers keep state in ways of their own, for `test_in_the_trainer.py`."""

import copy
import io
import os
import pickle

import torch

from behaviours.harness import Chain
from behaviours.trainer_modules import Module, modules_in
from behaviours.trainer_optimizers import ByReplacingData


class MomentaInADict(ByReplacingData):
    """State that is no tensor, of parameters that some steps do not use. Gradients are cleared in
    every other step.
    """

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2:
            optimizer.zero_grad()

    def configure_optimizers(self):
        class Aggregated(torch.optim.SGD):
            def step(self, closure=None):
                loss = None if closure is None else closure()
                with torch.no_grad():
                    for p in [
                        p
                        for group in self.param_groups
                        for p in group["params"]
                        if p.grad is not None
                    ]:
                        momenta = self.state[p].setdefault(
                            "momenta", {beta: torch.zeros_like(p) for beta in (0.0, 0.9)}
                        )
                        for beta, momentum in momenta.items():
                            p.sub_(momentum.mul_(beta).add_(p.grad), alpha=0.05)
                return loss

        return Aggregated(self.parameters(), lr=0.1)


class StateOfNoParameter(Module):
    """Made with the optimizer, and kept when a group is added."""

    def __init__(self):
        super().__init__()
        self.net.head.requires_grad_(False)

    def configure_optimizers(self):
        class Counting(torch.optim.SGD):
            def __init__(self, params, lr, momentum):
                super().__init__(params, lr=lr, momentum=momentum)
                self.state["all"]["steps"] = 5

            def step(self, closure=None):
                loss = super().step(closure)
                self.state["all"]["steps"] += 1
                for group in self.param_groups:
                    group["lr"] = 1 / self.state["all"]["steps"]
                return loss

        return Counting([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.optimizers().add_param_group(
                {"params": list(self.net.head.requires_grad_(True).parameters())}
            )


class StateOfAParameter(Module):
    def on_train_epoch_start(self):
        self.shared.append(float(self.net.head.weight in self.optimizers().state))


class StateOfAParameterSet(StateOfAParameter):
    def on_train_epoch_start(self):
        self.optimizers().state[self.net.head.weight] = {}


class StateOfAParameterTaken(StateOfAParameter):
    def on_train_epoch_start(self):
        self.optimizers().state.pop(self.net.head.weight, None)


class StateHalved(Module):
    """In place."""

    def on_train_epoch_start(self):
        for state in self.optimizers().state.values():
            state["momentum_buffer"] *= 0.5


class NormOfState(Module):
    def on_train_batch_end(self, *args):
        for state in self.optimizers().state.values():
            self.shared.append(state["momentum_buffer"].square().mul(0.5).norm().item())


class StateStartedAnew(Module):
    """One parameter's."""

    def on_train_epoch_start(self):
        if self.current_epoch != 1:
            return
        weight, optimizer = self.net.head.weight, self.optimizers()
        del optimizer.state[weight]


class StatePutBack(Module):
    """What each rank has taken, on the same rank, of ordinary tensors."""

    def on_train_epoch_start(self):
        optimizer = self.optimizers(use_pl_optimizer=False)
        if self.current_epoch == 1:
            torch.save(optimizer.state_dict(), kept := io.BytesIO())
            kept.seek(0)
            self.kept = torch.load(kept, weights_only=True)
        if self.current_epoch == 2:
            optimizer.load_state_dict(self.kept)


class StateCopied(StatePutBack):
    """A deep copy of what each rank has, with moments."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_epoch_start(self):
        optimizer = self.optimizers(use_pl_optimizer=False)
        if self.current_epoch == 1:
            self.kept = copy.deepcopy(optimizer.state_dict())
        if self.current_epoch == 2:
            optimizer.load_state_dict(self.kept)


class StateOfACopiedOptimizer(StateCopied):
    """The whole optimizer is copied; what it returns is of its own tensors."""

    def on_train_epoch_start(self):
        optimizer = self.optimizers(use_pl_optimizer=False)
        if self.current_epoch == 1:
            copied = copy.deepcopy(optimizer)
            copied.step()
            self.kept = copied.state_dict()
        if self.current_epoch == 2:
            optimizer.load_state_dict(self.kept)


class PickledOptimizer(StateCopied):
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            pickle.dumps(self.optimizers(use_pl_optimizer=False))


class StateOfRankZero(Module):
    def on_train_epoch_start(self):
        state = self.trainer.strategy.broadcast(
            self.optimizers(use_pl_optimizer=False).state_dict()
        )
        if self.current_epoch:
            self.optimizers(use_pl_optimizer=False).load_state_dict(state)


class Subclassed(torch.optim.SGD):
    """Not torch's any more."""


class StateOfAParameterOfASubclass(StateOfAParameter):
    def configure_optimizers(self):
        return Subclassed(self.parameters(), lr=0.1, momentum=0.9)


class StateOfAParameterLoaded(StateOfAParameterOfASubclass):
    """`load_state_dict` puts another dict in the place of the one that is looked after."""

    def on_train_epoch_start(self):
        optimizer = self.optimizers(use_pl_optimizer=False)
        if self.current_epoch:
            optimizer.load_state_dict(optimizer.state_dict())
        super().on_train_epoch_start()


class StateSharedWithAWrapped(Module):
    """One dict of two optimizers."""

    def configure_optimizers(self):
        class Wrapping(torch.optim.Optimizer):
            def __init__(self, params, lr):
                super().__init__(params, {"lr": lr})
                self.inner = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
                self.param_groups, self.state = self.inner.param_groups, self.inner.state

            def step(self, closure=None):
                loss = None if closure is None else closure()
                self.inner.step()
                for state in self.state.values():
                    state["momentum_buffer"] *= 0.9
                return loss

        return Wrapping(self.parameters(), lr=0.1)


class AnchoredToItsStart(Module):
    """Ranks begin with other weights, and the optimizer remembers them: rank 0's count."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(int(os.environ["RANK"]))
        self.net = Chain()

    def configure_optimizers(self):
        class Anchored(torch.optim.SGD):
            def __init__(self, params, lr):
                super().__init__(params, lr=lr)
                for p in [p for group in self.param_groups for p in group["params"]]:
                    self.state[p]["start"] = p.detach().clone()

            @torch.no_grad()
            def step(self, closure=None):
                with torch.enable_grad():
                    loss = None if closure is None else closure()
                for p in [p for group in self.param_groups for p in group["params"]]:
                    p.grad.add_(p - self.state[p]["start"], alpha=0.5)
                super().step()
                return loss

        return Anchored(self.parameters(), lr=0.1)


class StateMadeWhenAdded(Module):
    """By the optimizer's own `add_param_group`; of parameters among which one has no dimensions."""

    def __init__(self):
        super().__init__()
        self.net.head.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.net.head.register_forward_hook(lambda head, args, out: out * head.scale)
        self.net.head.requires_grad_(False)

    def factor(self, grad):
        return 1.0

    def configure_optimizers(self):
        factor = self.factor

        class Making(torch.optim.Optimizer):
            def __init__(self, params, lr):
                super().__init__(params, {"lr": lr})

            def add_param_group(self, group):
                super().add_param_group(group)
                for p in self.param_groups[-1]["params"]:
                    self.state[p]["momentum"] = torch.full_like(p, 0.01)

            @torch.no_grad()
            def step(self, closure=None):
                with torch.enable_grad():
                    loss = None if closure is None else closure()
                for group in self.param_groups:
                    for p in group["params"]:
                        momentum = self.state[p]["momentum"].mul_(0.9).add_(p.grad * factor(p.grad))
                        p.sub_(momentum, alpha=group["lr"])
                return loss

        return Making([p for p in self.parameters() if p.requires_grad], lr=0.05)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.optimizers().add_param_group(
                {"params": list(self.net.head.requires_grad_(True).parameters())}
            )


class WholeStateMadeWhenAdded(StateMadeWhenAdded):
    def factor(self, grad):
        return 1 / (grad.norm() + 1e-2)


class StateOfBeforeACut(Module):
    """A block was not used in between."""

    def training_step(self, batch, batch_idx):
        if batch_idx != 1:
            return super().training_step(batch, batch_idx)
        return self.net.head(self.net.stem(batch)).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        if batch_idx == 0:
            self.kept = copy.deepcopy(optimizer.state_dict())
        if batch_idx == 2:
            optimizer.load_state_dict(self.kept)


STATES = modules_in(vars())
