"""Importing the package, and training with it, leaves torch and all other modules as they were."""

import subprocess
import sys
import types

import lightning.pytorch as pl
import torch
import torch._dynamo
import torch._functorch.eager_transforms
import torch.distributed
from lightning.pytorch.demos.boring_classes import BoringModel

from helpers.ranks import run_ranks

CLASSES = (
    torch.Tensor,
    torch.nn.Parameter,
    torch.nn.Module,
    torch.distributed.ProcessGroup,
    torch.autograd.Function,
    torch.autograd.graph.saved_tensors_hooks,
    torch.optim.Optimizer,
    torch.utils.data.DataLoader,
    pl.Trainer,
    pl.LightningModule,
)


def functions():
    """Every function and class of every module but ours, and of some classes, by their places."""
    found = {}
    owners = {
        name: module
        for name, module in tuple(sys.modules.items())
        if isinstance(module, types.ModuleType) and not name.startswith(("lightning_zero3", "__m"))
    }
    owners |= {f"class {cls.__name__}": cls for cls in CLASSES}
    for owner, thing in owners.items():
        for name, value in tuple(vars(thing).items()):
            if callable(value) or isinstance(value, property | types.GetSetDescriptorType):
                found[owner, name] = value
    return found


def train(devices):
    module = BoringModel()
    trainer = pl.Trainer(
        strategy="zero3",
        devices=devices,
        accelerator="cpu",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=1,
    )
    trainer.fit(module)
    module.layer.weight.norm()


def replaced(before):
    after = functions()
    before.pop(("sys", "excepthook"), None)  # `torch.distributed.init_process_group` sets its own
    return sorted(key for key, value in before.items() if after.get(key) is not value)


def import_and_train():
    before = functions()
    import lightning_zero3  # noqa: F401

    train(1)
    print("replaced:", replaced(before))


def test_by_the_import_and_one_rank():
    script = f"import sys; sys.path[:0] = {sys.path}; import test_nothing_patched as test"
    done = subprocess.run(
        [sys.executable, "-c", f"{script}; test.import_and_train()"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "replaced: []\n" in done.stdout, done.stdout


def train_on_two(rank, world_size):
    before = functions()
    train(world_size)
    return replaced(before)


def test_by_two_ranks():
    assert run_ranks(train_on_two, 2, timeout=60) == [[], []]
