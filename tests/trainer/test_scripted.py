"""Export to TorchScript after training: what is made inside of `gathered` has values of its own,
and no hook of the engine.
"""

import copy
import io
import threading

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from helpers.parity import trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3.strategies.residency import ResidencyError


class Exported(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)
        )
        self.lstm = nn.LSTM(4, 4)  # which has a list of its parameters

    def forward(self, x):
        return self.net(self.lstm(x)[0])

    def training_step(self, batch):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)


def script_after_fit(rank, world_size):
    module = Exported()
    fitted = trainer(zero3(unit_policy=["Linear", "LSTM"]), world_size)
    fitted.fit(module)
    module.eval()
    if world_size > 1:
        with pytest.raises(ResidencyError, match="'net.0.weight'.*inside `with strategy.gathered"):
            torch.jit.script(module.net)
    with fitted.strategy.gathered(module):
        plain = Exported()
        assert module.net[0].weight.grad is not None
        plain.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})
        exported = torch.export.export(
            module.net, (torch.zeros(3, 4),)
        ).module()  # while its gradients are there
        copied, file = copy.deepcopy(module), io.BytesIO()
        # deepcopy takes neither
        module.net.lock, module.net.kept = (
            threading.Lock(),
            module.net(torch.ones(1, 4)),
        )
        module.net.pair = {"lock": threading.Lock(), "tensor": torch.zeros(1)}
        made = [module.to_torchscript(), copied.to_torchscript()]
        torch.jit.save(made[0], file)
        parts = [torch.jit.script(module.net), torch.jit.script(copied.net)]
    made.append(torch.jit.load(io.BytesIO(file.getvalue())))
    del module.net.lock, module.net.kept, module.net.pair
    x = torch.linspace(-1, 1, 12).view(3, 4)
    with fitted.strategy.gathered(module):
        torch.testing.assert_close(exported(x), plain.net(x), rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        expected, of_net = plain(x), plain.net(x)
        # it has its hooks; nobody else's values change
        trainer(zero3(unit_policy=["Linear", "LSTM"]), world_size).fit(module)
        for scripted in made:
            # kernels round by where a weight lies
            torch.testing.assert_close(scripted(x), expected, rtol=1e-6, atol=1e-7)
        for scripted in parts:
            torch.testing.assert_close(scripted(x), of_net, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("world_size", [1, 2])
def test_scripted_after_training(world_size):
    run_ranks(script_after_fit, world_size)
