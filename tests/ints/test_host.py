"""Devices."""

import torch

from lightning_zero3.strategies.launch import host
from lightning_zero3.strategies.launch.world import Devices


def test_devices_are_torchs():
    assert host.visible_devices("cpu") == Devices("cpu", 1, "gloo")
    assert host.visible_devices("cuda").backend == "nccl"
    assert host.visible_devices("cuda").count == torch.cuda.device_count()
    assert host.visible_devices().type == ("cuda" if torch.cuda.is_available() else "cpu")
