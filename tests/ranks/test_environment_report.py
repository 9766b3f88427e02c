"""`python -m lightning_zero3 env`: alone, among ranks, and where the launch is wrong."""

import contextlib
import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from helpers.ranks import free_port, run_ranks
from lightning_zero3.__main__ import main
from lightning_zero3.strategies.launch import env_command
from lightning_zero3.strategies.launch.detect import detect
from lightning_zero3.strategies.launch.env_command import differences
from lightning_zero3.strategies.launch.world import Devices


def report(*options):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(["env", *options])
    return code, out.getvalue()


def on_a_rank(rank, size, port):
    os.environ.update(MASTER_PORT=str(port), OMP_NUM_THREADS=str(1 + rank), NCCL_DEBUG="WARN")
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    code, as_json = report("--json")
    code_2, table = report()
    return code + code_2, as_json, table


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_NTASKS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def test_ranks_come_into_one_table_and_differences_are_marked():
    port = free_port()
    (code, as_json, table), others = run_ranks(on_a_rank, 2, port)
    assert code == 0 and others == (0, "", "")
    found = json.loads(as_json)
    assert found["problem"] is None and found["differs"] == ["variables.OMP_NUM_THREADS"]
    assert [found["ranks"][r]["process"]["rank"] for r in "01"] == [0, 1]
    assert found["ranks"]["1"]["why"]["rank"] == "RANK=1"
    lines = table.splitlines()
    first = lines.index("differs variables.OMP_NUM_THREADS: 0: 1")
    assert lines[first + 1] == "differs variables.OMP_NUM_THREADS: 1: 2"
    assert {
        "process.rank: 0: 0  (RANK=0)",
        "process.rank: 1: 1  (RANK=1)",
        "process.world_size: 2  (WORLD_SIZE=2)",
        "variables.NCCL_DEBUG: WARN",
    } <= set(lines)
    assert sum("differs" in line for line in lines) == 2


def test_what_other_ranks_have_does_not_write_to_the_terminal(capsys):
    facts = {"why": {"rank": "RANK=\x07"}, "process": {"rank": "\x1b[2J"}}
    env_command._print_lines({0: facts, 1: {**facts, "process": {"rank": "a\nb"}}}, [], "")
    assert capsys.readouterr().out.splitlines() == [
        "number of ranks: 2",
        r"process.rank: 0: \x1b[2J  (RANK=\x07)",
        r"process.rank: 1: a\nb  (RANK=\x07)",
    ]


def test_alone_it_shows_the_machine(alone):
    code, text = report("--json")
    facts = json.loads(text)["ranks"]["0"]
    assert code == 0 and facts["process"]["launcher"] == "single"
    assert facts["versions"].keys() >= {
        "lightning_zero3",
        "lightning",
        "torch",
        "cuda",
        "nccl",
        "python",
    }
    assert (
        facts["versions"]["torch"] == torch.__version__
        and facts["versions"]["cuda"] == torch.version.cuda
    )
    assert facts["host"] == {"cpus": os.cpu_count(), "threads": torch.get_num_threads()}


def test_a_wrong_launch_is_shown_with_its_reason(monkeypatch):
    for name in ("LOCAL_RANK", "WORLD_SIZE", "SLURM_NTASKS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    code, text = report()
    assert code == 1 and "WORLD_SIZE is not set" in text and "variables.RANK: 1" in text


def test_missing_ranks_are_named(monkeypatch):
    port = free_port()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    names = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    code, text = report("--timeout", "1")
    assert code == 1 and "Ranks [1] of 2 (WORLD_SIZE=2) did not come" in text


def test_what_ranks_have_for_themselves_is_no_difference():
    own = {
        0: {
            "process": {"rank": 0, "pid": 1},
            "variables": {"OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "0"},
        }
    }
    own[1] = {
        "process": {"rank": 1, "pid": 2},
        "variables": {"OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "1"},
    }
    assert differences(own) == []
    own[1]["process"]["backend"] = "nccl"
    assert differences(own) == ["process.backend"]


def test_torchrun_brings_all_ranks_into_one_report():
    torchrun = (
        "-m torch.distributed.run --standalone --nproc-per-node 2 -m lightning_zero3 env --json"
    )
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *torchrun.split()],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # of rank 0 alone
    assert found["problem"] is None and found["differs"] == []
    places = [
        (facts["process"]["launcher"], facts["process"]["rank"])
        for facts in found["ranks"].values()
    ]
    assert places == [("torchrun", 0), ("torchrun", 1)]
    # torchrun serves the store
    assert found["ranks"]["1"]["variables"]["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_values_are_shown_as_they_are(alone, monkeypatch):
    monkeypatch.setenv("NCCL_HOSTID", "a[gpu] b[/x]")
    code, table = report()
    assert code == 0 and "a[gpu] b[/x]" in table


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_without_standard_output_nothing_is_shown(alone, monkeypatch, options):
    monkeypatch.setattr(sys, "stdout", None)  # what Python has after `>&-`
    assert main(["env", *options]) == 0


def test_a_gpu_that_another_process_has_does_not_end_the_report(monkeypatch):
    gpu = SimpleNamespace(
        major=9,
        minor=0,
        name="H200",
        total_memory=144 * 2**30,
        pci_domain_id=0,
        pci_bus_id=1,
        pci_device_id=0,
    )

    def refuse(device):
        raise RuntimeError(
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with ..."
        )

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    world = detect({}, Devices("cuda", 1, "nccl"))
    found = env_command._devices(world)
    assert found["cuda:0"].startswith("H200, 144.0 GiB, compute 9.0")
    assert (
        found["free_gib"]
        == "unknown: CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    )
