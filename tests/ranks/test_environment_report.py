"""`python -m lightning_zero3 env`: alone, among ranks, and where the launch is wrong."""

import contextlib
import io
import json
import os

from helpers.ranks import free_port, run_ranks
from lightning_zero3.__main__ import main
from lightning_zero3.strategies.environment_report import differences


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


def test_ranks_come_into_one_table_and_differences_are_marked():
    port = free_port()
    (code, as_json, table), others = run_ranks(on_a_rank, 2, port)
    assert code == 0 and others == (0, "", "")
    found = json.loads(as_json)
    assert found["problem"] is None and found["differs"] == ["variables.OMP_NUM_THREADS"]
    assert [found["ranks"][r]["process"]["rank"] for r in "01"] == [0, 1]
    assert found["ranks"]["1"]["why"]["rank"] == "RANK=1"
    lines = [" ".join(line.replace("│", " ").split()) for line in table.splitlines()]
    assert "differs OMP_NUM_THREADS 0: 1" in lines and lines[lines.index("differs OMP_NUM_THREADS 0: 1") + 1] == "1: 2"
    assert "rank 0: 0 0: RANK=0" in lines and "NCCL_DEBUG WARN" in lines and "world_size 2 WORLD_SIZE=2" in lines
    assert sum("differs" in line for line in lines) == 1


def test_alone_it_shows_the_machine(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_NTASKS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    code, text = report("--json")
    facts = json.loads(text)["ranks"]["0"]
    assert code == 0 and facts["process"]["launcher"] == "single"
    assert facts["addresses"]["lo"] == "127.0.0.1" and "lo" in facts["network"]
    assert facts["host"]["cpus"] >= facts["host"]["cpus_allowed"] == len(os.sched_getaffinity(0))
    with open("/proc/meminfo") as file:
        assert facts["host"]["memory_gib"] == round(int(file.readline().split()[1]) / 2**20, 1)


def test_a_wrong_launch_is_shown_with_its_reason(monkeypatch):
    for name in ("LOCAL_RANK", "WORLD_SIZE", "SLURM_NTASKS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    code, text = report()
    assert code == 1 and "WORLD_SIZE is not set" in text and "│ RANK" in text


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
    assert code == 1 and "Ranks [1] of 2 did not come" in text


def test_what_ranks_have_for_themselves_is_no_difference():
    own = {0: {"process": {"rank": 0, "pid": 1}, "variables": {"OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "0"}}}
    own[1] = {"process": {"rank": 1, "pid": 2}, "variables": {"OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "1"}}
    assert differences(own) == []
    own[1]["process"]["backend"] = "nccl"
    assert differences(own) == ["process.backend"]
