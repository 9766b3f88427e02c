"""``python -m lightning_zero3 env``: where this process runs, as lines or as JSON.

Under a launcher they tell of all ranks, and mark differences that matter (versions, devices,
variables). The command trains nothing and starts no process group.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..support import printable
from .detect import detect
from .host import visible_devices
from .launchers import shown_variables
from .preflight import describe_process, package_version
from .rendezvous import meet
from .world import LaunchError, World

DESCRIPTION = (
    "show where this process runs; under torchrun, srun or mpirun of all ranks, with what differs"
)

# Prefixes of the options of libraries that decide how processes meet and use the machine.
_LIBRARIES = (
    *("CUDA_", "FI_", "GLOO_", "KMP_", "MKL_", "NCCL_", "NVIDIA_VISIBLE_", "OMP_", "PET_", "PL_"),
    *("PYTORCH_", "TORCH_", "TORCHELASTIC_", "TORCHINDUCTOR_", "UCX_"),
)
# Items and ends of names of items that may differ between ranks without a mark.
_RANK_ITEMS = (
    *("rank", "local_rank", "node_rank", "pid", "hostname", "free_gib"),
    "RANK",
)
_RANK_ENDS = ("_RANK", "_PID", "ERROR_FILE", "GTIDS", "LOCALID", "NODEID", "PROCID", "RANKID")

Facts = dict[str, dict[str, Any]]  # section -> item -> value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        help="seconds to wait for the other ranks (default: 30)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the lines or JSON on rank 0 and return the exit status.

    The status is 1 if this process was started in a way that cannot work, or if ranks are missing;
    then every rank prints.
    """
    world = None
    try:
        world = detect(os.environ, visible_devices())
        card = {**describe_process(world), "facts": collect(world)}
        problem, cards, _ = meet(world, card, timedelta(seconds=arguments.timeout))
        everyone = {rank: card["facts"] for rank, card in cards.items()}
    except LaunchError as error:
        problem, everyone = str(error), {world.rank if world is not None else 0: collect(world)}
    if problem or 0 in everyone:
        marked = differences(everyone)
        if arguments.json:
            print(
                json.dumps(
                    {"problem": problem or None, "differs": marked, "ranks": everyone},
                    indent=1,
                    default=str,
                )
            )
        else:
            _print_lines(everyone, marked, problem)
    return 1 if problem else 0


# ---- facts ---------------------------------------------------------------------------------------


def collect(world: World | None) -> Facts:
    """Return the facts of this process, without the other ranks."""
    record: dict[str, Any] = {}
    if world is not None:
        record = {key: value for key, value in asdict(world).items() if key != "why"}
    return {
        "process": {**record, "pid": os.getpid(), "hostname": socket.gethostname()},
        "why": dict(world.why) if world is not None else {},
        "versions": _versions(),
        "host": {"cpus": os.cpu_count(), "threads": torch.get_num_threads()},
        "devices": _devices(world),
        "variables": shown_variables(os.environ, _LIBRARIES),
    }


def _versions() -> dict[str, Any]:
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    return {
        "lightning_zero3": package_version("lightning-zero3"),
        "lightning": package_version("lightning"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "backends": ", ".join(
            b for b in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(b)
        ),
    }


def _devices(world: World | None) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        p = torch.cuda.get_device_properties(device)
        memory = f"{p.total_memory / 2**30:.1f} GiB"
        facts[f"cuda:{index}"] = f"{p.name}, {memory}, compute {p.major}.{p.minor}"
    if facts and world is not None and world.device_type == "cuda":
        try:
            # This opens a context, so each process asks for its own device only.
            facts["free_gib"] = round(torch.cuda.mem_get_info(world.local_rank)[0] / 2**30, 1)
        except RuntimeError as error:  # another process uses the device exclusively, or all memory
            facts["free_gib"] = f"unknown: {str(error).splitlines()[0]}"
    return facts or {"cpu": platform.processor() or platform.machine()}


# ---- all ranks -----------------------------------------------------------------------------------


def differences(everyone: Mapping[int, Facts]) -> list[str]:
    """Return "section.item" for each item that should be the same on all ranks and is not."""
    return [
        f"{section}.{item}"
        for section, item in _items(everyone)
        if section != "why"
        and not (item in _RANK_ITEMS or item.endswith(_RANK_ENDS))
        and len({str(facts[section].get(item)) for facts in everyone.values()}) > 1
    ]


def _items(everyone: Mapping[int, Facts]) -> list[tuple[str, str]]:
    """Return (section, item) of all ranks' facts, each once, in order of appearance."""
    return list(
        dict.fromkeys(
            (s, i) for facts in everyone.values() for s, items in facts.items() for i in items
        )
    )


def _print_lines(everyone: Mapping[int, Facts], marked: list[str], problem: str) -> None:
    print(f"number of ranks: {len(everyone)}")
    for section, item in _items(everyone):
        if section == "why":
            continue
        ranks: dict[str, list[str]] = {}  # by value, with what decided it
        for rank, facts in everyone.items():
            value = facts[section].get(item)
            why = facts["why"].get(item) if section == "process" else None
            text = ("-" if value is None else str(value)) + (f"  ({why})" if why else "")
            ranks.setdefault(printable(text), []).append(str(rank))
        name = f"{'differs ' * (f'{section}.{item}' in marked)}{section}.{item}"
        for text, owners in ranks.items():
            print(f"{name}: {text}" if len(ranks) == 1 else f"{name}: {','.join(owners)}: {text}")
    if problem:
        print(problem)
