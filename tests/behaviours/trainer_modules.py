"""Modules that bring in callbacks of Lightning and hooks of their own, for
`test_in_the_trainer.py`.
"""

import csv
import tempfile
import zlib
from contextlib import nullcontext
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.accelerators.cpu import get_cpu_stats
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.model_summary import summarize
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader

from behaviours.harness import DIM, Chain


class Module(pl.LightningModule):
    """Automatic optimization, SGD"""

    refused: str | None = None
    reference = "one"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = Chain()
        self.seen = []  # of this rank's batches: the one process sees the mean over the ranks
        self.shared = []  # the same on every rank, and in the one process

    def train_dataloader(self):
        mine = range(2) if self.trainer.world_size == 1 else [self.trainer.global_rank]
        parts = [
            torch.randn(4, 4, DIM, generator=torch.Generator().manual_seed(rank)) for rank in mine
        ]
        return DataLoader(torch.cat(parts, 1), batch_size=None)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self):
        parameters = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)

    def callbacks(self):
        return []


class Averaged(Module):
    """The validation loss is that of the average."""

    def val_dataloader(self):
        return self.train_dataloader()

    def validation_step(self, batch, batch_idx):
        self.seen.append(self.net(batch).square().mean().item())


class Ema(Averaged):
    """`WeightAveraging`"""

    def callbacks(self):
        return [WeightAveraging(avg_fn=get_ema_avg_fn(0.5))]


class EmaOfSomeSteps(Averaged):
    """`EMAWeightAveraging` of some steps"""

    def callbacks(self):
        return [EMAWeightAveraging(decay=0.7, update_every_n_steps=2, update_starting_at_step=3)]


class EmaWhileUnfreezing(Averaged):
    """`WeightAveraging` beside `BaseFinetuning`"""

    def callbacks(self):
        return [WeightAveraging(avg_fn=get_ema_avg_fn(0.5)), *Unfreezing().callbacks()]


class Swa(Averaged):
    """`StochasticWeightAveraging`"""

    def callbacks(self):
        return [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)]


class NotElementwise(Module):
    """`WeightAveraging` with a function of whole tensors"""

    refused = (
        "averaging function of WeightAveraging does not average each element by"
        " itself.*get_ema_avg_fn"
    )

    def callbacks(self):
        return [WeightAveraging(avg_fn=lambda average, weight, n: weight / weight.norm())]


class Unfreezing(Module):
    """`BaseFinetuning`"""

    def callbacks(self):
        class Finetuning(BaseFinetuning):
            def freeze_before_training(self, module):
                self.freeze(module.net.blocks[:2])

            def finetune_function(self, module, epoch, optimizer):
                if epoch == 1:
                    self.unfreeze_and_add_param_group(module.net.blocks[:2], optimizer)

        return [Finetuning()]


class UnfreezingTwice(Unfreezing):
    """`BaseFinetuning` twice, with Adam's step counts, and a group that is edited"""

    def callbacks(self):
        class Finetuning(BaseFinetuning):
            def freeze_before_training(self, module):
                self.freeze([module.net.blocks[:3], module.net.stem])

            def finetune_function(self, module, epoch, optimizer):
                if epoch == 1:
                    self.unfreeze_and_add_param_group(module.net.blocks[1], optimizer, lr=0.02)
                if epoch == 2:
                    self.unfreeze_and_add_param_group(
                        [module.net.stem, module.net.blocks[0]], optimizer
                    )
                    optimizer.param_groups[0]["lr"] /= 2

        return [Finetuning()]

    def configure_optimizers(self):
        return torch.optim.Adam(
            [p for p in self.parameters() if p.requires_grad], lr=0.01, eps=1e-3
        )


class UnfreezingByHand(Module):
    """`add_param_group` in `on_train_batch_start`"""

    def __init__(self):
        super().__init__()
        self.net.blocks[:2].requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        if (self.current_epoch, batch_idx) == (1, 1):
            late = list(self.net.blocks[:2].requires_grad_(True).parameters())
            self.optimizers().add_param_group({"params": late, "lr": 0.05})


class Moving(Module):
    """Parameters moved between param groups in `on_train_epoch_start`"""

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim == 2]
        rest = [p for p in self.parameters() if p.ndim != 2]
        return torch.optim.Adam(
            [{"params": matrices}, {"params": rest, "lr": 0.002}], lr=0.01, eps=1e-3
        )

    def on_train_epoch_start(self):
        with getattr(self.trainer.strategy, "param_groups", nullcontext)():
            first, second = (group["params"] for group in self.optimizers().param_groups)
            if self.current_epoch == 1:
                second += [p for p in first if any(p is q for q in self.net.head.parameters())]
                first[:] = [p for p in first if not any(p is q for q in self.net.head.parameters())]
            if self.current_epoch == 2:
                first.append(second.pop())


class UnfreezingByFlag(Module):
    """`requires_grad_` in `on_train_epoch_start`"""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_epoch_start(self):
        self.net.blocks[:2].requires_grad_(self.current_epoch > 0)


class ByLbfgs(Module):
    """LBFGS with a line search"""

    options = {"precision": "64-true"}  # its line search magnifies rounding

    def configure_optimizers(self):
        return torch.optim.LBFGS(
            self.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"
        )


class ByAdafactor(Module):
    """Adafactor, clipped, over two micro-batches"""

    options = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}

    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters(), lr=0.02, eps=(1e-3, 1e-2))


class AccumulationSchedule(Module):
    """`GradientAccumulationScheduler`, the last window of an epoch short"""

    options = {"limit_train_batches": 3}

    def callbacks(self):
        return [GradientAccumulationScheduler({0: 1, 1: 2})]


class Profiled(Module):
    """`profiler="simple"`"""

    options = {"profiler": "simple"}


class ProfiledByTorch(Module):
    """`PyTorchProfiler`"""

    @property
    def options(self):
        return {
            "profiler": PyTorchProfiler(
                dirpath=tempfile.mkdtemp(), filename="trace", export_to_chrome=False
            )
        }


class DeviceStats(Module):
    """`DeviceStatsMonitor`"""

    @property
    def options(self):
        return {"logger": CSVLogger(tempfile.mkdtemp()), "log_every_n_steps": 1}

    def callbacks(self):
        return [DeviceStatsMonitor(cpu_stats=True)]

    def on_train_end(self):
        if self.trainer.is_global_zero:
            self.trainer.logger.save()
            rows = list(csv.DictReader(open(Path(self.trainer.logger.log_dir) / "metrics.csv")))
            for hook in ("on_train_batch_start", "on_train_batch_end"):
                for name in get_cpu_stats():
                    column = [row[f"DeviceStatsMonitor.{hook}/{name}"] for row in rows]
                    found = [float(value) for value in column if value]
                    assert len(found) == self.trainer.global_step and all(
                        0 <= value <= 100 for value in found
                    ), name
                    assert all(found) or name != "cpu_vm_percent", (
                        "of the machine's memory, some is in use"
                    )


class Summarized(Module):
    """The model summary: parameters, shapes and operations of each layer"""

    def __init__(self):
        super().__init__()
        self.example_input_array = torch.ones(4, DIM)

    def forward(self, x):
        return self.net(x)

    def on_train_start(self):
        summary = summarize(self, max_depth=3)
        self.shared += [
            summary.total_parameters,
            summary.trainable_parameters,
            summary.total_flops,
            summary.model_size,
        ]
        self.shared += [zlib.crc32(str(column).encode()) for column in summary._get_summary_data()]


def sync_batch_norm(self, x):
    """What ``nn.SyncBatchNorm`` computes, which torch has for CUDA only."""
    from torch.distributed.nn.functional import all_reduce

    count = x.shape[0] * torch.distributed.get_world_size()
    mean = all_reduce(x.sum(0)) / count
    variance = all_reduce((x - mean).square().sum(0)) / count
    with torch.no_grad():
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * count / (count - 1), self.momentum)
    return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


class SyncedNorms(Module):
    """`Trainer(sync_batchnorm=True)`, with a stand-in for the layers that torch has for CUDA
    only
    """

    options = {"sync_batchnorm": True}

    def __init__(self):
        super().__init__()
        self.net = Chain(
            *(nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.ReLU()) for _ in range(3))
        )
        nn.SyncBatchNorm.forward = sync_batch_norm  # in this process, which is a rank of the test

    def on_train_start(self):
        converted = isinstance(self.net.blocks[0][1], nn.SyncBatchNorm)
        assert converted == isinstance(self.trainer.strategy, ParallelStrategy)


class LikeDdp(Module):
    """The reference is two ranks of ddp: what is seen depends on the ranks."""

    reference = "ddp"


class ByMuon(LikeDdp):
    """Manual optimization, Muon for matrices and AdamW for the rest"""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim == 2]
        rest = [p for p in self.parameters() if p.ndim != 2]
        return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01, eps=1e-3)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()


class AllGatherWithGradients(LikeDdp):
    """`self.all_gather(..., sync_grads=True)`"""

    def training_step(self, batch, batch_idx):
        mine = self.net(batch)
        everyone = self.all_gather(mine, sync_grads=True)
        loss = (everyone * everyone.flip(0)).mean() + mine.square().mean()
        self.seen.append(loss.item())
        return loss


class LearningRateFound(LikeDdp):
    """`LearningRateFinder`, and the steps after it"""

    lr = 0.1
    options = {"max_epochs": 4}

    def callbacks(self):
        steps = 16  # it suggests nothing of less than 13
        self.finder = LearningRateFinder(
            min_lr=1e-3, max_lr=0.5, num_training_steps=steps, early_stop_threshold=None
        )
        return [self.finder]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def teardown(self, stage):
        found = self.finder.optimal_lr
        assert len(found.results["loss"]) == 16 and 1e-3 < found.suggestion() == self.lr != 0.1
        self.seen += [self.lr, *found.results["loss"]]


class BatchSizeFound(LikeDdp):
    """`BatchSizeFinder`"""

    refused = "Batch size finder is not supported with distributed strategies"

    def callbacks(self):
        return [BatchSizeFinder()]


class Pruned(Module):
    """`ModelPruning` over several layers, more with each epoch, back to the first weights once"""

    def __init__(self):
        super().__init__()
        prune.l1_unstructured(self.net.blocks[0].up, "weight", amount=0.5)  # by other hands

    def callbacks(self):
        layers = [
            (self.net.head, "weight"),
            (self.net.head, "bias"),
            (self.net.blocks[1].up, "weight"),
        ]
        again = {"use_lottery_ticket_hypothesis": lambda epoch: epoch == 0}
        return [ModelPruning("l1_unstructured", amount=0.3, parameters_to_prune=layers, **again)]


class PrunedAfterValidation(Averaged):
    """`ModelPruning` of each layer by rows, masks kept"""

    def callbacks(self):
        options = {
            "pruning_dim": 0,
            "pruning_norm": 2,
            "prune_on_train_epoch_end": False,
            "make_pruning_permanent": False,
        }
        options |= {"use_global_unstructured": False, "use_lottery_ticket_hypothesis": False}
        layers = [(block.up, "weight") for block in self.net.blocks]
        return [ModelPruning("ln_structured", layers, amount=0.2, **options)]

    def on_train_end(self):
        self.shared += [
            b.sum().item() for name, b in self.named_buffers() if name.endswith("_mask")
        ]


class PrunedBefore(Module):
    """`torch.nn.utils.prune` before `fit`"""

    def __init__(self):
        super().__init__()
        for layer in (self.net.head, self.net.blocks[1].up):
            prune.l1_unstructured(layer, "weight", amount=0.5)


class SkippedSteps(Module):
    """`training_step` that returns `None`"""

    # Lightning's own
    refused = (
        "Skipping the `training_step` by returning None in distributed training is not supported"
    )

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class GradientNorms(Module):
    """`grad_norm` in `on_before_optimizer_step`"""

    def on_before_optimizer_step(self, optimizer):
        self.shared += [
            v.item() if isinstance(v, torch.Tensor) else v
            for kind in (2, 1, "inf")
            for v in grad_norm(self, kind).values()
        ]


class ClippedByValue(Module):
    """`gradient_clip_algorithm="value"`"""

    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


class ClippedByNorm(Module):
    """`gradient_clip_val`, gradients read before and after"""

    options = {"gradient_clip_val": 0.01}

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.shared.append(self.net.head.weight.grad.norm().item())
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.shared.append(self.net.head.weight.grad.norm().item())


class Manual(Module):
    """Manual optimization, two optimizers, toggled"""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1), torch.optim.SGD(
            self.judge.parameters(), lr=0.05, momentum=0.9
        )

    def training_step(self, batch, batch_idx):
        for sign, optimizer in zip((1, -1), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            loss = sign * self.judge(self.net(batch)).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.seen.append(loss.item())


class ManualAfterFailure(Manual):
    """Manual optimization, two optimizers, toggled, and a backward that fails in the middle once"""

    failed = False

    def training_step(self, batch, batch_idx):
        for sign, optimizer in zip((1, -1), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            first = self.judge[0](self.net(batch))
            if sign < 0 and self.global_step > 1 and not self.failed:
                first.register_hook(self.fail)
            loss = sign * self.judge[2](self.judge[1](first)).mean()
            try:
                self.manual_backward(loss)
            except ValueError:
                self.failed = True
            else:
                optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.seen.append(loss.item())

    def fail(self, grad):
        raise ValueError("no gradient today")


class Distance(torchmetrics.Metric):
    """Between what a network that is not trained makes of two batches, as of FID and LPIPS."""

    def __init__(self):
        super().__init__()
        self.features = nn.Linear(DIM, 2 * DIM).requires_grad_(False).eval()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, first, second):
        self.total += (self.features(first) - self.features(second)).square().mean()

    def compute(self):
        return self.total


class MetricOfANetwork(Module):
    """A metric of torchmetrics that holds a network, updated in `training_step` and logged"""

    def __init__(self):
        super().__init__()
        self.distance = Distance()

    def training_step(self, batch, batch_idx):
        out = self.net(batch)
        self.distance(out.detach(), batch)
        self.log("distance", self.distance, on_step=False, on_epoch=True)
        self.seen.append(out.square().mean().item())
        return out.square().mean()

    def on_train_epoch_end(self):
        self.shared.append(self.distance.compute().item())


class ManualAccumulation(Module):
    """Manual optimization, two batches to a step, clipped by the user"""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.shared.append(nn.utils.clip_grad_norm_(self.parameters(), 0.1).item())
            self.optimizers().step()
            self.optimizers().zero_grad()


class ChangedByHand(Module):
    """In a step and between steps, where the refusal of a change says that it can be made."""

    def training_step(self, batch, batch_idx):
        weight = self.net.head.weight
        with torch.no_grad():
            weight.copy_(weight.detach() * 0.9)
            self.net.head.bias.mul_(0.9).add_(self.net.stem.bias, alpha=0.1)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        gathered = getattr(self.trainer.strategy, "gathered", lambda module, modify: nullcontext())
        with gathered(self, modify=True), torch.no_grad():
            self.net.head.weight.mul_(0.9)
            self.net.head.bias[0] = 0.1


class ExceptionOnce(Module):
    """A step that fails inside, is caught, and is taken again"""

    def training_step(self, batch, batch_idx):
        with pytest.raises(RuntimeError):
            self.net(batch[:, :3])
        return super().training_step(batch, batch_idx)


def modules_in(names):
    """Name -> class, of what is to be trained among the ``names`` of a file."""
    found = {
        name: cls
        for name, cls in names.items()
        if isinstance(cls, type) and issubclass(cls, Module)
    }
    return {
        name: cls
        for name, cls in found.items()
        if cls not in (Averaged, LikeDdp) and cls.__module__ == names["__name__"]
    }


MODULES = modules_in(vars())
