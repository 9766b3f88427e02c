"""The devices that this process sees."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .world import Devices


def visible_devices(device_type: str | None = None) -> Devices:
    """Return the devices that torch sees.

    Args:
        device_type: by default that of torch's accelerator, or "cpu" if there is none.
    """
    if device_type is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        device_type = "cpu" if found is None else found.type
    count = 1 if device_type == "cpu" else torch.get_device_module(device_type).device_count()
    return Devices(
        device_type, count, dist.Backend.default_device_backend_map.get(device_type, "gloo")
    )
