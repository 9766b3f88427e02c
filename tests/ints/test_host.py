"""CPUs, NUMA nodes and threads, on machines made of files."""

import os

import pytest
import torch

from lightning_zero3.strategies.launch import host
from lightning_zero3.strategies.launch.world import Devices


@pytest.fixture
def machine(tmp_path):
    """Two NUMA nodes of four CPUs each; a GPU on the second, another of which the firmware says
    nothing.
    """
    for node, cpus in enumerate(["0-1,4-5\n", "2-3,6-7\n"]):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    (tmp_path / "devices/system/cpu").mkdir()
    (tmp_path / "devices/system/cpu/online").write_text("0-7\n")
    for address, node in (("0000:0a:00.0", 1), ("0000:0b:00.0", -1)):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_a_gpu_has_the_cpus_of_its_node(machine):
    assert host.numa_node_of_pci("0000:0a:00.0", machine) == 1
    assert host.cpus_of_numa_node(1, machine) == {2, 3, 6, 7}
    assert host.online_cpus(machine) == set(range(8))
    # Unknown to the firmware, to the kernel, to the whole machine.
    assert host.numa_node_of_pci("0000:0b:00.0", machine) is None
    assert host.numa_node_of_pci("0000:0c:00.0", machine) is None
    assert host.cpus_of_numa_node(2, machine) == set()
    assert host.numa_node_of(torch.device("cpu"), machine) is None


def test_only_an_unbound_process_is_bound():
    everything, near = set(range(8)), {2, 3, 6, 7}
    assert host.choose_cpus(everything, everything, near) == near
    # a launcher has bound it, far from its GPU even
    assert host.choose_cpus({0, 1}, everything, near) is None
    assert host.choose_cpus(everything, everything, set()) is None
    # one node: nothing to choose
    assert host.choose_cpus(everything, everything, everything) is None
    assert host.choose_cpus(everything, everything, {8, 9}) is None


def test_binding_is_the_kernels(machine, monkeypatch):
    mine = os.sched_getaffinity(0)
    one = {min(mine)}
    monkeypatch.setattr(host, "numa_node_of", lambda device: 1)
    monkeypatch.setattr(host, "online_cpus", lambda: mine)
    monkeypatch.setattr(host, "cpus_of_numa_node", lambda node: one)
    expected = one if len(mine) > 1 else None
    try:
        assert host.bind_to_numa_node(torch.device("cuda", 0)) == expected
        assert os.sched_getaffinity(0) == one
    finally:
        os.sched_setaffinity(0, mine)


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_is_found_and_bound():
    node = host.numa_node_of(torch.device("cuda", 0))
    before = os.sched_getaffinity(0)
    try:
        bound = host.bind_to_numa_node(torch.device("cuda", 0))
        assert bound is None or bound <= host.cpus_of_numa_node(node)
        assert os.sched_getaffinity(0) == (bound or before)
    finally:
        os.sched_setaffinity(0, before)
