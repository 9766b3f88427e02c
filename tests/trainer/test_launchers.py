"""Every launcher that is in use, or the variables that it sets, beside `ddp`; the table in
docs/howto/launch.md.

    python tests/trainer/test_launchers.py    # run all with both strategies; write the table
"""

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script

from helpers.parity import RTOL, assert_tensors_close, trainer
from helpers.ranks import free_port
from trainer.launched import Model

HERE = Path(__file__).resolve().parent
HOST = socket.gethostname()
PAGE = HERE.parents[1] / "docs" / "howto" / "launch.md"
BEGIN, END = "<!-- launchers: written by tests/trainer/test_launchers.py -->", "<!-- end -->"
PYTHON, SCRIPT = sys.executable, str(HERE / "launched.py")
TORCHRUN = [PYTHON, "-m", "torch.distributed.run"]
FOREIGN = re.compile(
    r"(GROUP_|JSM_|LOCAL_|LSB_|MASTER_|MPI_|NODE_|OMPI_|PMI|RANK|SLURM|TORCHELASTIC|WORLD)"
)
MEET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}


@dataclass
class Launch:
    """One row: commands, where `...` stands for the script and its arguments, and each one's variables."""

    about: str  # how, and from what the row is known
    layout: tuple[int, int] = (2, 1)  # devices, nodes
    commands: list[list[str]] = field(default_factory=lambda: [[PYTHON, "..."]])
    variables: list[dict[str, str]] = field(default_factory=lambda: [{}])
    how: str = ""
    needs: str = ""  # a command, or a module of Python
    is_right: bool = True  # else it is an error, as the page says why


def pair(**variables):
    """Variables of two processes: `{rank}` is replaced."""
    return [{k: v.replace("{rank}", str(r)) for k, v in variables.items()} for r in range(2)]


TWO = [[PYTHON, "..."]] * 2
SRUN = {
    **{"SLURM_JOB_ID": "5", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
    **{"SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "{rank}", "SLURM_LOCALID": "{rank}"},
    **{"SLURM_NODEID": "0", "SLURM_NODELIST": "localhost", "SLURM_NNODES": "1"},
}
JSM = {"RANK": "{rank}", "SIZE": "2", "LOCAL_RANK": "{rank}", "LOCAL_SIZE": "2"}
LAUNCHES = {
    "the Trainer": Launch("`python train.py`"),
    "torchrun": Launch(
        "`torchrun --nproc-per-node 2`",
        commands=[[*TORCHRUN, "--standalone", "--nproc-per-node=2", "..."]],
    ),
    "torchrun, two nodes": Launch(
        "`torchrun --nnodes 2 --node-rank ...`",
        (1, 2),
        [
            [
                *TORCHRUN,
                "--nnodes=2",
                f"--node-rank={r}",
                "--master-addr=127.0.0.1",
                "--master-port={port}",
                "...",
            ]
            for r in (0, 1)
        ],
        [{}, {}],
    ),
    "accelerate": Launch(
        "`accelerate launch --num_processes 2`",
        commands=[
            [
                PYTHON,
                "-m",
                "accelerate.commands.launch",
                "--multi_gpu",
                "--num_processes=2",
                "--num_machines=1",
                "--mixed_precision=no",
                "--dynamo_backend=no",
                "--main_process_port={port}",
                "...",
            ]
        ],
        needs="accelerate",
    ),
    "variables": Launch(
        "`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT` (clouds, DeepSpeed's)",
        commands=TWO,
        variables=pair(RANK="{rank}", WORLD_SIZE="2", LOCAL_RANK="{rank}", **MEET),
    ),
    "variables, a process a node": Launch(
        "the same without `LOCAL_RANK`", (1, 2), TWO, pair(RANK="{rank}", WORLD_SIZE="2", **MEET)
    ),
    "Open MPI": Launch(
        "`mpirun -n 2`, without mpi4py",
        commands=[["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", PYTHON, "..."]],
        needs="mpirun -mpi4py",
    ),
    "Open MPI, mpi4py": Launch(
        "`mpirun -n 2`, with mpi4py",
        commands=[["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", PYTHON, "..."]],
        needs="mpirun mpi4py",
    ),
    "MPICH, Intel MPI": Launch(
        "`mpiexec -n 2` (Hydra)",
        commands=[["mpiexec.hydra", "-n", "2", PYTHON, "..."]],
        needs="mpiexec.hydra",
    ),
    "MPICH's gforker": Launch(
        "`mpiexec.gforker -n 2`",
        commands=[["mpiexec.gforker", "-n", "2", PYTHON, "..."]],
        needs="mpiexec.gforker",
    ),
    "SLURM": Launch("`srun python train.py`: its variables", commands=TWO, variables=pair(**SRUN)),
    "SLURM, salloc": Launch(
        "`python train.py` in the shell of `salloc -J interactive`: its variables",
        variables=[
            {**SRUN, "SLURM_JOB_NAME": "interactive", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
        ],
    ),
    "Kubeflow": Launch(
        "PyTorchJob, two pods: its variables",
        (1, 2),
        TWO,
        pair(
            RANK="{rank}",
            WORLD_SIZE="2",
            PET_NODE_RANK="{rank}",
            KUBERNETES_SERVICE_HOST="h",
            **MEET,
        ),
    ),
    "Kubeflow, plugin": Launch(
        "`plugins=[KubeflowEnvironment()]` outside of Kubernetes",
        (1, 2),
        TWO,
        pair(RANK="{rank}", WORLD_SIZE="2", **MEET),
        "KubeflowEnvironment",
    ),
    "one pod": Launch(
        "one pod with two devices: its variables",
        variables=[{"RANK": "0", "WORLD_SIZE": "1", "PET_NODE_RANK": "0", **MEET}],
    ),
    "LSF": Launch(
        "`jsrun`: its variables",
        commands=TWO,
        variables=pair(
            LSB_JOBID="2005",
            LSB_DJOB_RANKFILE="{folder}/ranks",
            LSB_MCPU_HOSTS=f"launch 1 {HOST} 2",
            **{f"JSM_NAMESPACE_{k}": v for k, v in JSM.items()},
        ),
    ),
    "spawn by hand": Launch(
        "`torch.multiprocessing.spawn` and `init_process_group` (Dask's dispatch does so)",
        (1, 1),
        variables=[MEET],
        how="by hand",
    ),
    "python -m": Launch(
        "`python -m package.train`", commands=[[PYTHON, "-m", "trainer.launched", "arguments"]]
    ),
    "stdin": Launch("`python - < train.py`", commands=[[PYTHON, "-", "arguments"]], is_right=False),
    "hydra": Launch(
        "`python train.py key=value`",
        commands=[
            [
                PYTHON,
                str(HERE / "launched_by_hydra.py"),
                "+folder={folder}",
                "+strategy={strategy}",
                "hydra.run.dir={folder}/run",
            ]
        ],
        needs="hydra",
    ),
    "hydra, multirun": Launch(
        "`python train.py -m key=1,2`",
        commands=[
            [
                PYTHON,
                str(HERE / "launched_by_hydra.py"),
                "-m",
                "+folder={folder}",
                "+strategy={strategy}",
                "+key=1,2",
                "hydra.sweep.dir={folder}/sweep",
            ]
        ],
        needs="hydra",
    ),
    "optuna": Launch("several Trainers in one process", how="twice"),
    "changed folder": Launch(
        "`os.chdir` before the Trainer, a relative script",
        commands=[[PYTHON, "launched.py", "arguments"]],
        how="changed folder",
        is_right=False,
    ),
    "changed argv": Launch(
        "`sys.argv` emptied before the Trainer", how="changed argv", is_right=False
    ),
}


def lacks(launch):
    for name in launch.needs.split():
        is_there = shutil.which(name, path=path()) or importlib.util.find_spec(name.strip("-"))
        if bool(is_there) == name.startswith("-"):
            return name
    return ""


def path():
    return f"{Path(PYTHON).parent}:{os.environ['PATH']}"


def launch(name, strategy, folder, seconds=100):
    """Start a row; return exit codes (None: it was ended) and what was printed."""
    row, port = LAUNCHES[name], free_port()
    clean = {k: v for k, v in os.environ.items() if not FOREIGN.match(k)}
    clean |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PATH": path()}
    clean["PYTHONPATH"] = f"{HERE.parent}:{clean.get('PYTHONPATH', '')}"
    (folder / "ranks").write_text(f"launch\n{HOST}\n{HOST}\n")
    arguments = [str(folder), strategy, *map(str, row.layout), *([row.how] if row.how else [])]
    parts = {"...": [SCRIPT, *arguments], "arguments": arguments}
    running = []

    def filled(text):
        for mark, value in ("port", port), ("folder", folder), ("strategy", strategy):
            text = text.replace(f"{{{mark}}}", str(value))
        return text

    for number, (command, variables) in enumerate(zip(row.commands, row.variables, strict=True)):
        words = [w for word in command for w in parts.get(word, [word])]
        with (folder / f"log.{number}").open("w") as log:
            running.append(
                subprocess.Popen(
                    list(map(filled, words)),
                    env={**clean, **{k: filled(v) for k, v in variables.items()}},
                    cwd=HERE,
                    stdin=open(SCRIPT) if "-" in command else subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
    codes = []
    for process in running:
        try:
            codes.append(process.wait(seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            codes.append(None)
    return codes, "".join(file.read_text(errors="replace") for file in sorted(folder.glob("log.*")))


def single():
    trainer("auto", max_epochs=2).fit(module := Model())
    return module


def verdict(name, strategy, folder, reference):
    """ "right", or in a few words what was not; and what detection said."""
    codes, said = launch(name, strategy, folder, 100 if LAUNCHES[name].is_right else 60)
    records = [json.loads(file.read_text()) for file in folder.glob("said.*")]
    found = " ".join(
        sorted(
            {
                f"{r['launcher']} ({r['why']})"
                for r in records
                if r["launcher"] and r["rank"] == max(x["rank"] for x in records)
            }
        )
    )
    if None in codes:
        return "waits for ever", found, said
    if any(codes):
        return "error", found, said
    if sorted((r["rank"], r["ranks"]) for r in records) != [(0, 2), (1, 2)]:
        return (
            f"{len(records)} runs of {records[0]['ranks']}" if records else "nothing",
            found,
            said,
        )
    losses = [sum(pair) / 2 for pair in zip(*(r["losses"] for r in records), strict=True)]
    assert losses == pytest.approx(reference.losses, rel=RTOL)
    saved = torch.load(folder / "end.ckpt", weights_only=True)["state_dict"]
    assert_tensors_close(saved, dict(reference.state_dict()))
    return "right", found, said


@pytest.fixture(scope="module")
def reference():
    return single()


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launcher(name, tmp_path, reference):
    if missing := lacks(LAUNCHES[name]):
        pytest.skip(f"needs {missing}" if missing[0] != "-" else f"{missing[1:]} is installed")
    result, found, said = verdict(name, "zero3", tmp_path, reference)
    assert result == ("right" if LAUNCHES[name].is_right else "error"), said
    (line,) = [x for x in table().splitlines() if x.startswith(f"| {name} |")]
    assert not LAUNCHES[name].is_right or found in line


def table():
    text = PAGE.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


def write(names):
    expected, old = single(), {x.split(" | ")[0].strip("| "): x for x in table().splitlines()}
    head = [
        "| launcher | start | devices, nodes | found, by | zero3 | `ddp` |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in LAUNCHES.items():
        if name not in names or lacks(row):
            continue
        results = []
        for strategy in ("zero3", "ddp"):
            with tempfile.TemporaryDirectory() as folder:
                results.append(verdict(name, strategy, Path(folder), expected))
                print(strategy, results[-1][0], results[-1][2][-1500:], sep="\n", flush=True)
        (mine, found, _), (theirs, _, _) = results
        layout = f"{row.layout[0]}, {row.layout[1]}"
        old[name] = f"| {name} | {row.about} | {layout} | {found} | {mine} | {theirs} |"
        lines = [*head, *(old[name] for name in LAUNCHES if name in old)]
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(text.replace(table(), "\n".join(lines)), encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1:] or LAUNCHES)
