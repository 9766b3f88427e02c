"""Threads and devices."""

import pytest
import torch

from lightning_zero3.strategies.launch import host
from lightning_zero3.strategies.launch.world import Devices


@pytest.mark.parametrize(
    ("environ", "cpus", "processes", "threads"),
    [
        ({}, 64, 8, 8),
        ({}, 2, 8, 1),
        ({}, 64, 1, None),
        ({"OMP_NUM_THREADS": "1"}, 64, 8, None),
        ({"MKL_NUM_THREADS": "4"}, 64, 8, None),
        ({"SLURM_CPUS_PER_TASK": "6"}, 6, 8, 6),  # bound by srun
        ({"SLURM_CPUS_PER_TASK": "6"}, 48, 8, 6),
        ({"SLURM_CPUS_PER_TASK": "6"}, 4, 8, 4),
    ],
)
def test_threads_are_shared_out(environ, cpus, processes, threads):
    assert host.threads_per_process(environ, cpus, processes) == threads


def test_threads_are_torchs(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    try:
        assert host.limit_threads(10**6) == 1 == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def test_devices_are_torchs():
    assert host.visible_devices("cpu") == Devices("cpu", 1, "gloo")
    assert host.visible_devices("cuda").backend == "nccl"
    assert host.visible_devices("cuda").count == torch.cuda.device_count()
    assert host.visible_devices().type == ("cuda" if torch.cuda.is_available() else "cpu")
