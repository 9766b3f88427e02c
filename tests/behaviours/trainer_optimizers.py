"""Modules that reach for their optimizers, for `test_in_the_trainer.py`."""

import tempfile

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from behaviours.harness import DIM
from behaviours.trainer_modules import LikeDdp, Module, modules_in


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
        return [optimizer], [
            {
                "scheduler": LambdaLR(optimizer, lambda step: 1.0 if step else 1e-7),
                "interval": "step",
            }
        ]


class NormsByAttribute(Module):
    def configure_optimizers(self):
        class OnRequest(Lars):
            def step(self, closure=None):
                return (
                    super().step(closure) if self.normalise else torch.optim.SGD.step(self, closure)
                )

            normalise = False

        optimizer = OnRequest(self.parameters(), lr=0.5)
        optimizer.normalise = True
        return optimizer


class NormsWhenLarge(Module):
    """A rule that no trial of the optimizer brings about: few gradients are so large, and on no
    rank all of them.
    """

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


class NoDecayByAttribute(Module):
    """The optimizer looks for what the model has put on its parameters."""

    def __init__(self):
        super().__init__()
        for module in self.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.bias._no_weight_decay = True
        self.net.head.weight._no_weight_decay = True

    def configure_optimizers(self):
        class Decaying(torch.optim.SGD):
            def step(self, closure=None):
                loss = None if closure is None else closure()
                with torch.no_grad():
                    for p in [p for group in self.param_groups for p in group["params"]]:
                        if not getattr(p, "_no_weight_decay", False):
                            p.mul_(0.9)
                super().step()
                return loss

        return Decaying(self.parameters(), lr=0.1)


class NormsFromAStepOn(Module):
    """Which no option names."""

    def configure_optimizers(self):
        class Beginning(Lars):
            steps = 0

            def step(self, closure=None):
                self.steps += 1
                return (
                    super().step(closure) if self.steps > 5 else torch.optim.SGD.step(self, closure)
                )

        return Beginning(self.parameters(), lr=0.5)


class NormsLater(Module):
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
    def on_train_batch_end(self, *args):
        for p in self.optimizers().param_groups[0]["params"]:
            p.detach().norm()


class ElementsOfGroups(Module):
    def on_train_batch_end(self, *args):
        self.seen.append(float(self.optimizers().param_groups[0]["params"][0][0, 0]))


class ListOfGradients(Module):
    def on_before_optimizer_step(self, optimizer):
        optimizer.param_groups[0]["params"][0].grad.view(1, -1).tolist()


class LossOfGroups(Module):
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
    """In the middle of a window, where the next backward would add to them."""

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
            for p in [
                p for group in self.param_groups for p in group["params"] if p.grad is not None
            ]:
                p.grad = 0.5 * p.grad
                p.data = p.data - self.param_groups[0]["lr"] * p.grad
        return loss


class ByReplacingData(Module):
    """Some parameters have no gradient in some steps."""

    def configure_optimizers(self):
        return ReplacesData(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        if batch_idx != 1:
            return super().training_step(batch, batch_idx)
        loss = self.net.head(self.net.stem(batch)).square().mean()
        self.seen.append(loss.item())
        return loss


class ClearsItself(Module):
    """The step of its optimizer clears the gradients, and nobody else does."""

    def configure_optimizers(self):
        class Clearing(torch.optim.SGD):
            def step(self, closure=None):
                loss = super().step(closure)
                self.zero_grad()
                return loss

        return Clearing(self.parameters(), lr=0.1, momentum=0.9)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        pass


class GradientsOfBefore(Module):
    """Something was differentiated before the model is sharded: Lightning clears gradients when
    training starts.
    """

    def __init__(self):
        super().__init__()
        self.net(torch.ones(2, DIM)).sum().backward()


class ScalerOfItsOwn(Module):
    """The one that the error names; a step overflows on one rank alone."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def on_train_start(self):
        cls = ShardedGradScaler if self.trainer.world_size > 1 else torch.amp.GradScaler
        self.scaler = cls("cpu", init_scale=2.0**10, growth_interval=3)

    def training_step(self, batch, batch_idx):
        loss, optimizer = (
            super().training_step(batch, batch_idx),
            self.optimizers(use_pl_optimizer=False),
        )
        if batch_idx == 1 and self.global_rank == self.trainer.world_size - 1:
            loss = loss * 1e38
        optimizer.zero_grad()
        self.manual_backward(self.scaler.scale(loss))
        self.scaler.step(optimizer)
        self.scaler.update()
        self.seen.append(self.scaler.get_scale())


class PlainScaler(ScalerOfItsOwn):
    def on_train_start(self):
        self.scaler = torch.amp.GradScaler("cpu")


class OptimizerOfItsOwn(Module):
    """Nobody else knows of it, so nobody keeps gradients for it."""

    refused = (
        "gradient of parameter '.*', which no optimizer has.*Give the parameter to an optimizer"
    )

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
    refused = "This Adam was not there when the parameters were sharded.*Return it"

    def on_train_epoch_start(self):
        if self.current_epoch:
            self.trainer.optimizers = [torch.optim.Adam(self.parameters())]


class RatesOfEachRank(LikeDdp):
    refused = "'lr' = .* in param group 0 of SGD, rank 1 to 'lr' = .*sync_dist=True"

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0, mode="max")
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "monitor": "rank"},
        }

    def training_step(self, batch, batch_idx):
        self.log("rank", float(batch_idx * (1 - 2 * self.global_rank)))
        return super().training_step(batch, batch_idx)


class BetasOfEachRank(Module):
    refused = r"'betas' = \(0.9, .*\) in param group 0 of Adam, rank 1 to 'betas' = \(0.4, .*\) in"

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

    def on_train_batch_start(self, batch, batch_idx):
        self.optimizers().param_groups[0]["betas"] = (0.9 - 0.5 * self.global_rank, 0.99)


class OptionOfEachRank(Module):
    """One that the optimizer has no default for."""

    refused = "'scale' = 1.0 in param group 0 of SGD, rank 1 to 'scale' = 2.0"

    def configure_optimizers(self):
        return torch.optim.SGD(
            [{"params": self.parameters(), "scale": 1.0 + self.global_rank}], lr=0.1
        )


# ---- hooks of a step


class Normalized(torch.optim.SGD):
    """Needs whole tensors."""

    def step(self, closure=None):
        loss = None if closure is None else closure()
        with torch.no_grad():
            for p in [
                p for group in self.param_groups for p in group["params"] if p.grad is not None
            ]:
                p.grad.div_(p.grad.norm() + 1e-2)
        super().step()
        return loss


class WeightsNormedAfterAStep(Module):
    """In a hook that is older than the strategy's."""

    kind = torch.optim.SGD

    def configure_optimizers(self):
        optimizer = self.kind(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(self.renorm)
        return optimizer

    @staticmethod
    @torch.no_grad()
    def renorm(optimizer, *args):
        for p in [p for group in optimizer.param_groups for p in group["params"]]:
            p.div_(p.norm().clamp_min(0.9))


class WeightsNormedAfterAWholeStep(WeightsNormedAfterAStep):
    kind = Normalized


class GradientsNormedBeforeAStep(Module):
    """In a hook that is younger than the strategy's, and without a closure."""

    kind = torch.optim.SGD

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=0.1)

    def on_train_start(self):
        self.optimizers(use_pl_optimizer=False).register_step_pre_hook(self.clip)

    @staticmethod
    def clip(optimizer, *args):
        torch.nn.utils.clip_grad_norm_(
            [p for group in optimizer.param_groups for p in group["params"]], 0.01
        )

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class ScaledAroundAWholeStep(GradientsNormedBeforeAStep):
    """Element by element, by hooks of either age."""

    refused = None

    def configure_optimizers(self):
        optimizer = Normalized(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda optimizer, *args: self.scale(optimizer, 0.9))
        return optimizer

    @staticmethod
    @torch.no_grad()
    def scale(optimizer, factor):
        for p in [p for group in optimizer.param_groups for p in group["params"]]:
            p.mul_(factor)

    @classmethod
    def clip(cls, optimizer, *args):
        cls.scale(optimizer, 1.05)


class GroupsMerged(Module):
    """Outside of `param_groups()`; then some parameters are not used, and the run is saved."""

    def configure_optimizers(self):
        rest = [*self.net.head.parameters(), *self.net.stem.parameters()]
        groups = [{"params": self.net.blocks.parameters()}, {"params": rest, "lr": 0.01}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def on_train_epoch_start(self):
        groups = self.optimizers().param_groups
        if self.current_epoch == 1:
            groups[0]["params"].extend(groups[1]["params"])
            groups[1]["params"].clear()
        if self.current_epoch == 2:
            del groups[1]

    def training_step(self, batch, batch_idx):
        if self.current_epoch != 1:
            return super().training_step(batch, batch_idx)
        loss = (
            self.net.head(self.net.blocks[0](self.net.stem(batch) if batch_idx % 2 else batch))
            .square()
            .mean()
        )
        self.seen.append(loss.item())
        return loss

    def on_train_epoch_end(self):
        self.trainer.save_checkpoint(
            f"{self.trainer.strategy.broadcast(tempfile.mkdtemp())}/saved.ckpt"
        )


OPTIMIZERS = modules_in(vars())
