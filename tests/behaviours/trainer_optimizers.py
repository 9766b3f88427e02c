"""Modules that reach for their optimizers, for `test_in_the_trainer.py`."""

import copy

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from behaviours.harness import DIM
from behaviours.trainer_modules import LikeDdp, Module


class Lars(torch.optim.SGD):
    """Gives each parameter a rate by its norms, and asks for no dimension."""

    trust = 0.05

    def step(self, closure=None):
        loss = None if closure is None else closure()
        with torch.no_grad():
            for p in [p for group in self.param_groups for p in group["params"]]:
                p.grad.mul_(self.trust * p.norm() / (p.grad.norm() + 1e-3))
        super().step()
        return loss


class WarmUpOfNorms(Module):
    """The rate when the optimizer is made shows nothing of what it will do."""

    def configure_optimizers(self):
        optimizer = Lars(self.parameters(), lr=0.5, momentum=0.9)
        return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda step: 1.0 if step else 1e-7), "interval": "step"}]


class NormsByAttribute(Module):
    def configure_optimizers(self):
        class OnRequest(Lars):
            def step(self, closure=None):
                return super().step(closure) if self.normalise else torch.optim.SGD.step(self, closure)

            normalise = False

        optimizer = OnRequest(self.parameters(), lr=0.5)
        optimizer.normalise = True
        return optimizer


class NormsWhenLarge(Module):
    """A rule that no trial of the optimizer brings about: few gradients are so large, and on no rank all of them."""

    def configure_optimizers(self):
        class Clipping(torch.optim.SGD):
            def step(self, closure=None):
                loss = None if closure is None else closure()
                with torch.no_grad():
                    for p in [p for group in self.param_groups for p in group["params"]]:
                        p.grad.mul_((250.0 / (p.grad.norm() + 1e-6)).clamp(max=1))
                super().step()
                return loss

        return Clipping(self.parameters(), lr=1e-4)

    def training_step(self, batch, batch_idx):
        return 1e4 * super().training_step(batch, batch_idx)


class NormsLater(Module):
    refused = "Scheduled steps on shards.*Now group 0 has weight_decay=0.01, with which it looks at whole.*1e-12"

    def configure_optimizers(self):
        class Scheduled(Lars):
            def step(self, closure=None):
                decays = self.param_groups[0]["weight_decay"]
                return super().step(closure) if decays else torch.optim.SGD.step(self, closure)

        return Scheduled(self.parameters(), lr=0.5)

    def on_train_epoch_start(self):
        self.optimizers().param_groups[0]["weight_decay"] = 0.01 * self.current_epoch


class SharpnessAware(Module):
    refused = "Perturbing combines several parameters"

    def configure_optimizers(self):
        class Perturbing(torch.optim.SGD):
            """Plain where it has no closure."""

            def step(self, closure=None):
                if closure is None:
                    return super().step()
                closure()
                with torch.no_grad():
                    parameters = [p for group in self.param_groups for p in group["params"]]
                    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
                    moves = [0.5 * p.grad / norm for p in parameters]
                    torch._foreach_add_(parameters, moves)
                    loss = torch.enable_grad()(closure)()
                    torch._foreach_sub_(parameters, moves)
                super().step()
                return loss

        return Perturbing(self.parameters(), lr=0.1)


class StepSizesInAList(Module):
    """An option that the optimizer writes into, as early RAdam does."""

    def configure_optimizers(self):
        class Cached(torch.optim.SGD):
            def step(self, closure=None):
                group = self.param_groups[0]
                group["sizes"][0] = group["sizes"][0] or group["lr"]
                group["lr"] = 0.9 * group["sizes"][0]
                return super().step(closure)

        return Cached([{"params": list(self.parameters()), "sizes": [None]}], lr=1e-4)


class NormsOfGroups(Module):
    refused = "`norm` would be of the values that this rank holds a shard of.*Use the module's parameters"

    def on_train_batch_end(self, *args):
        for p in self.optimizers().param_groups[0]["params"]:
            p.detach().norm()


class LossOfGroups(Module):
    refused = "`sum` would be of the values that this rank holds a shard of"

    def training_step(self, batch, batch_idx):
        decayed = self.optimizers().param_groups[0]["params"]
        return super().training_step(batch, batch_idx) + sum(p.square().sum() for p in decayed)


class GroupsDecayedByHand(Module):
    """Element by element, which the optimizer's tensors allow."""

    def on_train_batch_end(self, *args):
        with torch.no_grad():
            for p in self.optimizers().param_groups[0]["params"]:
                p.mul_(0.99).add_(torch.sign(p), alpha=-1e-4)


class DataOfGroupsSet(Module):
    refused = "flat shards, whose `.data` cannot be set.*Write `p.copy_"

    def on_train_batch_end(self, *args):
        for p in self.optimizers().param_groups[0]["params"]:
            p.data = p.data * 0.99


class DataOfGroupsChanged(Module):
    """Between two forwards, the second of which must see it."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.seen.append(self.net(batch).mean().item())
        for p in self.optimizers().param_groups[0]["params"]:
            p.data.mul_(0.95)
        return super().training_step(batch, batch_idx)


class GradientsOfGroupsReplaced(Module):
    """In the middle of a window, where the next backward adds to them."""

    options = {"accumulate_grad_batches": 2}

    def on_after_backward(self):
        for p in self.optimizers().param_groups[0]["params"]:
            p.grad = p.grad * 0.5
        self.seen.append(self.net.head.weight.grad.sum().item())


class ReplacesData(torch.optim.SGD):
    """Puts another tensor where weights and gradients were, as old optimizers do."""

    def step(self, closure=None):
        loss = None if closure is None else closure()
        with torch.no_grad():
            for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
                p.grad = 0.5 * p.grad
                p.data = p.data - self.param_groups[0]["lr"] * p.grad
        return loss


class ByReplacingData(Module):
    """Gradients are cleared in every other step, and some parameters have none in some."""

    def configure_optimizers(self):
        return ReplacesData(self.parameters(), lr=0.1)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2:
            optimizer.zero_grad()

    def training_step(self, batch, batch_idx):
        if batch_idx != 1:
            return super().training_step(batch, batch_idx)
        loss = self.net.head(self.net.stem(batch)).square().mean()
        self.seen.append(loss.item())
        return loss


class MomentaInADict(ByReplacingData):
    """State that is no tensor, of parameters that some steps do not use."""

    def configure_optimizers(self):
        class Aggregated(torch.optim.SGD):
            def step(self, closure=None):
                loss = None if closure is None else closure()
                with torch.no_grad():
                    for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
                        momenta = self.state[p].setdefault("momenta", {beta: torch.zeros_like(p) for beta in (0.0, 0.9)})
                        for beta, momentum in momenta.items():
                            p.sub_(momentum.mul_(beta).add_(p.grad), alpha=0.05)
                return loss

        return Aggregated(self.parameters(), lr=0.1)


class GradientsOfBefore(Module):
    """Something was differentiated before the model is sharded: Lightning clears gradients when training starts."""

    def __init__(self):
        super().__init__()
        self.net(torch.ones(2, DIM)).sum().backward()


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
            self.optimizers().add_param_group({"params": list(self.net.head.requires_grad_(True).parameters())})


class StateOfAParameter(Module):
    refused = "An optimizer's state is of the flat tensors.*none of a single parameter.*param_groups"

    def on_train_epoch_start(self):
        if self.current_epoch and self.net.head.weight in self.optimizers().state:
            raise AssertionError


class StateOfAParameterSet(StateOfAParameter):
    def on_train_epoch_start(self):
        self.optimizers().state[self.net.head.weight] = {}


class StateOfAParameterTaken(StateOfAParameter):
    def on_train_epoch_start(self):
        self.optimizers().state.pop(self.net.head.weight, None)


class StateHalved(Module):
    """As the error says."""

    def on_train_epoch_start(self):
        for state in self.optimizers().state.values():
            state["momentum_buffer"] *= 0.5


class StateStartedAnew(Module):
    """One parameter's, as the error says."""

    def on_train_epoch_start(self):
        if self.current_epoch != 1:
            return
        weight, optimizer = self.net.head.weight, self.optimizers()
        if not hasattr(self.trainer.strategy, "param_groups"):
            del optimizer.state[weight]
            return
        with self.trainer.strategy.param_groups():
            inside = optimizer.param_groups[0]["params"]
            inside[:] = [p for p in inside if p is not weight]
        with self.trainer.strategy.param_groups():
            optimizer.param_groups[0]["params"].append(weight)


class StatePutBack(Module):
    """What each rank has taken, on the same rank."""

    def on_train_epoch_start(self):
        optimizer = self.optimizers(use_pl_optimizer=False)
        if self.current_epoch == 1:
            self.kept = copy.deepcopy(optimizer.state_dict())
        if self.current_epoch == 2:
            optimizer.load_state_dict(self.kept)


class StateOfRankZero(Module):
    refused = "This state of SGD is of rank 0's shards.*rank 1 steps on shards of its own.*trainer.save_checkpoint"

    def on_train_epoch_start(self):
        state = self.trainer.strategy.broadcast(self.optimizers(use_pl_optimizer=False).state_dict())
        if self.current_epoch:
            self.optimizers(use_pl_optimizer=False).load_state_dict(state)


class StateOfWholeParameters(Module):
    refused = "This state of SGD is of whole parameters"

    def on_train_start(self):
        self.optimizers(use_pl_optimizer=False).load_state_dict(torch.optim.SGD([torch.ones(1)]).state_dict())


class ScalerOfItsOwn(Module):
    """The one that the error names; a step overflows on one rank alone."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def on_train_start(self):
        cls = ShardedGradScaler if self.trainer.world_size > 1 else torch.amp.GradScaler
        self.scaler = cls("cpu", init_scale=2.0**10, growth_interval=3)

    def training_step(self, batch, batch_idx):
        loss, optimizer = super().training_step(batch, batch_idx), self.optimizers(use_pl_optimizer=False)
        if batch_idx == 1 and self.global_rank == self.trainer.world_size - 1:
            loss = loss * 1e38
        optimizer.zero_grad()
        self.manual_backward(self.scaler.scale(loss))
        self.scaler.step(optimizer)
        self.scaler.update()
        self.seen.append(self.scaler.get_scale())


class PlainScaler(ScalerOfItsOwn):
    refused = "A GradScaler would look for infinities.*16-mixed.*ShardedGradScaler"

    def on_train_start(self):
        self.scaler = torch.amp.GradScaler("cpu")


class OptimizerOfItsOwn(Module):
    """Nobody else knows of it, so nobody keeps gradients for it."""

    refused = "This SGD steps on parameters that are sharded.*Return it there"

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.hidden = [torch.optim.SGD(self.parameters(), lr=0.1)]

    def configure_optimizers(self):
        return None

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        self.hidden[0].step()


class OptimizerReplaced(Module):
    refused = "This Adam steps on parameters that are sharded.*was not there when they were"

    def on_train_epoch_start(self):
        if self.current_epoch:
            self.trainer.optimizers = [torch.optim.Adam(self.parameters())]


class RatesOfEachRank(LikeDdp):
    refused = "'lr' of param group 0 of SGD is .* on rank 0 and .* on rank 1.*sync_dist=True"

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0, mode="max")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "monitor": "rank"}}

    def training_step(self, batch, batch_idx):
        self.log("rank", float(batch_idx * (1 - 2 * self.global_rank)))
        return super().training_step(batch, batch_idx)


OPTIMIZERS = {
    name: cls
    for name, cls in vars().items()
    if isinstance(cls, type) and issubclass(cls, Module) and cls not in (Module, LikeDdp)
}
