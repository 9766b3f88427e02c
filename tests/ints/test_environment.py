"""Who a process is, from variables alone. `environment_vectors.json` holds what Lightning 2.6
answers.
"""

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from lightning_zero3.strategies.launch import detect as detection
from lightning_zero3.strategies.launch.detect import list_variables, locate
from lightning_zero3.strategies.launch.launchers import first_host, shown_variables, tasks_on_node
from lightning_zero3.strategies.launch.world import (
    Devices,
    LaunchError,
    Request,
    require_devices,
    require_requested,
)

VECTORS = {
    v["name"]: v
    for v in json.loads((Path(__file__).parent / "environment_vectors.json").read_text())
}
FIELDS = (
    "rank",
    "local_rank",
    "node_rank",
    "world_size",
    "local_world_size",
    "main_address",
    "main_port",
)

# Where Lightning's answer is wrong or there is none: our record, or what our error says; and why.
DEVIATIONS = {
    # Lightning: one process, so four processes train alone. All four meet at the loopback address,
    # so all are on this host.
    "rank+world, no LOCAL_RANK": (1, 1, 0, 4, 4, "127.0.0.1", 29500),
    # Lightning: one process.
    "WORLD_SIZE only": "its rank is unknown: RANK is not set. Variables set: WORLD_SIZE=4",
    # Lightning: rank 0 on every node.
    "manual launcher (torchrun vars without TORCHELASTIC_RUN_ID)": (5, 1, 1, 8, 4, "h0", 1),
    # Lightning refuses too, but names 8 tasks on each of 2 nodes as the remedy for 8 tasks.
    "srun --ntasks without --ntasks-per-node": "SLURM_TASKS_PER_NODE is not set",
    # Lightning: rank 0 of 4, which waits for ever.
    "sbatch step without srun": "was not started by srun (SLURM_STEP_ID is not set)",
    # The same, of 2; `test_slurm` has these variables with srun's. Lightning takes a-3 for the
    # first host, which is a-3-x.
    "slurm nodelist with suffix": "was not started by srun (SLURM_STEP_ID is not set)",
}


def detect(environ, devices, request=None):
    """The record; with the Trainer's request, as the strategy finds and checks it."""
    if request is None:
        return detection.detect(environ, devices)
    world = locate(environ, devices, request)
    require_requested(world, request)
    require_devices(world, devices)
    return world


def record(world):
    return tuple(getattr(world, field) for field in FIELDS)


def refusal(environ, devices=None, request=None):
    with pytest.raises(LaunchError) as caught:
        detect(environ, devices or Devices(), request)
    return str(caught.value)


@pytest.mark.parametrize("name", VECTORS)
def test_a_recorded_environment(name):
    environ, theirs = VECTORS[name]["env"], VECTORS[name]["lightning"]
    expected = DEVIATIONS.get(name)
    if isinstance(expected, str):
        assert expected in refusal(environ)
    elif expected is not None:
        assert record(detect(environ, Devices())) == expected
    else:
        world = detect(environ, Devices())
        free_port = theirs["env"] == "LightningEnvironment" and "MASTER_PORT" not in environ
        assert (
            world.rank,
            world.local_rank,
            world.node_rank,
            world.world_size,
            world.main_address,
            world.main_port,
        ) == (
            *(
                theirs[key]
                for key in ("global_rank", "local_rank", "node_rank", "world_size", "main_address")
            ),
            0 if free_port else theirs["main_port"],
        )


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MVAPICH = {name.replace("OMPI_", "MV2_"): value for name, value in OPEN_MPI.items()}
INTEL_MPI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
LSF = {
    "LSB_JOBID": "123456",
    "LSB_MCPU_HOSTS": "batch1 1 h1 42 h2 42",
    "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "8",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4",
}
TORCHRUN = VECTORS["torchrun"]["env"]
SRUN = {**VECTORS["srun 2x4"]["env"], "SLURM_STEP_ID": "0"}
BY_HAND = VECTORS["manual launcher (torchrun vars without TORCHELASTIC_RUN_ID)"]["env"]
MEET = {"MASTER_ADDR": "h0", "MASTER_PORT": "77"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "RANK": "1", "WORLD_SIZE": "2", **MEET}
POPEN = {"LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "4", **MEET}
TWO_BY_TWO = Request(processes=2, nodes=2)

LAUNCHED = {
    "openmpi": ({**OPEN_MPI, **MEET}, None, (5, 1, 1, 8, 4, "h0", 77)),
    "mvapich": ({**MVAPICH, **MEET}, None, (5, 1, 1, 8, 4, "h0", 77)),
    "intelmpi": ({**INTEL_MPI, **MEET}, None, (5, 1, 1, 8, 4, "h0", 77)),
    # One node: they can meet without being told where.
    "openmpi on a node": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "5", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"},
        None,
        (5, 5, 0, 8, 8, "127.0.0.1", 29500),
    ),
    "lsf": (LSF, None, (5, 1, 1, 8, 4, "h1", 10456)),
    "slurm": (SRUN, None, (5, 1, 1, 8, 4, "gpu07", 18456)),
    # mpirun in a SLURM job, whose variables say that this is the first of two tasks.
    "openmpi in slurm": ({**SRUN, **OPEN_MPI, **MEET}, None, (5, 1, 1, 8, 4, "h0", 77)),
    # `srun --mpi=pmi2` sets PMI's global variables.
    "slurm with pmi": (
        {**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"},
        None,
        (5, 1, 1, 8, 4, "gpu07", 18456),
    ),
    "torchrun in openmpi": ({**OPEN_MPI, **TORCHRUN}, None, (1, 1, 0, 4, 4, "127.0.0.1", 29500)),
    "kubeflow": (POD, None, (1, 0, 1, 2, 1, "h0", 77)),
    "variables in a pod": (
        {**BY_HAND, "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        None,
        (5, 1, 1, 8, 4, "h0", 1),
    ),
    "subprocess": (POPEN, TWO_BY_TWO, (3, 1, 1, 4, 2, "h0", 77)),
    # After a first Trainer: Lightning deletes WORLD_SIZE and leaves the others.
    "subprocess again": (
        {k: v for k, v in POPEN.items() if k != "WORLD_SIZE"},
        TWO_BY_TWO,
        (3, 1, 1, 4, 2, "h0", 77),
    ),
    "spawn": (
        {"LOCAL_RANK": "1", "MASTER_PORT": "77"},
        Request(2, start_method="spawn"),
        (1, 1, 0, 2, 2, "127.0.0.1", 77),
    ),
    "notebook": (
        {"LOCAL_RANK": "1", "MASTER_PORT": "77"},
        Request(2, start_method="fork"),
        (1, 1, 0, 2, 2, "127.0.0.1", 77),
    ),
    "notebook alone": ({}, Request(interactive=True), (0, 0, 0, 1, 1, "127.0.0.1", 0)),
    "single": ({}, Request(), (0, 0, 0, 1, 1, "127.0.0.1", 0)),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_launcher(name):
    environ, request, expected = LAUNCHED[name]
    world = detect(environ, Devices("cuda", 8, "nccl"), request)
    launcher = {"torchrun in openmpi": "torchrun", "variables in a pod": "variables"}.get(
        name, name.split()[0]
    )
    assert (world.launcher, *record(world)) == (launcher, *expected)
    assert (world.device_type, world.backend) == ("cuda", "nccl")
    assert {item for item, _ in world.why} == set(FIELDS) | {"launcher", "device_type", "backend"}


def test_every_rank_of_every_size_has_its_place():
    for nodes in range(1, 5):
        for local in range(1, 5):
            size, seen = nodes * local, set()
            for rank in range(size):
                node, place = divmod(rank, local)
                values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": place, "LOCAL_SIZE": local}
                world = detect(
                    {**{f"OMPI_COMM_WORLD_{k}": str(v) for k, v in values.items()}, **MEET},
                    Devices(),
                )
                assert (
                    record(world) == (rank, place, node, size, local, "h0", 77)
                    and world.num_nodes == nodes
                )
                slurm = {
                    "PROCID": rank,
                    "NTASKS": size,
                    "LOCALID": place,
                    "NODEID": node,
                    "NODELIST": "n[1-9]",
                    "STEP_ID": 0,
                }
                slurm["TASKS_PER_NODE"] = f"{local}(x{nodes})" if nodes > 1 else local
                assert (
                    detect({f"SLURM_{k}": str(v) for k, v in slurm.items()}, Devices()).node_rank
                    == node
                )
                seen.add((world.node_rank, world.local_rank))
            assert len(seen) == size


def test_why_names_what_decided():
    why = dict(detect(SRUN, Devices()).why)
    assert why["rank"] == "SLURM_PROCID=5" and why["local_world_size"] == "SLURM_NTASKS_PER_NODE=4"
    assert why["main_address"] == "first host of SLURM_NODELIST=gpu[07-08]"
    assert why["main_port"] == "15000 + last 4 digits of SLURM_JOB_ID=123456"


def test_the_record_is_read_only_and_needs_nothing_else():
    world = detect(TORCHRUN, Devices())
    with pytest.raises(FrozenInstanceError):
        world.rank = 0
    assert world == detect(dict(TORCHRUN), Devices()) and hash(world) == hash(
        detect(TORCHRUN, Devices())
    )


def without(environ, *names):
    return {k: v for k, v in environ.items() if k not in names}


REFUSED = {
    "rank without world size": (
        {"RANK": "1"},
        ["its world size is unknown: WORLD_SIZE is not set", "RANK=1"],
    ),
    "world size without rank": (
        {"WORLD_SIZE": "4", **MEET},
        ["its rank is unknown: RANK is not set", "MASTER_ADDR=h0"],
    ),
    "no local rank": (
        without(BY_HAND, "LOCAL_RANK"),
        ["its local rank is unknown: LOCAL_RANK is not set"],
    ),
    "no local size": (without(BY_HAND, "LOCAL_WORLD_SIZE"), ["LOCAL_WORLD_SIZE is not set"]),
    "not a number": ({**TORCHRUN, "RANK": "one"}, ["RANK='one' is not a whole number"]),
    "rank too large": (
        {**TORCHRUN, "RANK": "4"},
        ["rank 4 (RANK=4)", "world_size 4 (WORLD_SIZE=4)", "unset it where"],
    ),
    "negative rank": (
        {**TORCHRUN, "RANK": "-1"},
        ["rank -1 (RANK=-1)", "numbered from 0", "Correct the variable"],
    ),
    "no ranks": (
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "0"},
        ["rank 0 (RANK=0) is none of the world_size 0 (WORLD_SIZE=0)"],
    ),
    "nobody on the node": (
        {**OPEN_MPI, **MEET, "OMPI_COMM_WORLD_LOCAL_SIZE": "0"},
        ["none of the local_world_size 0 (OMPI_COMM_WORLD_LOCAL_SIZE=0)", "Correct the variable"],
    ),
    "nobody on the node, by hand": (
        {**without(BY_HAND, "GROUP_RANK", "NODE_RANK"), "LOCAL_WORLD_SIZE": "0"},
        ["none of the local_world_size 0 (LOCAL_WORLD_SIZE=0)"],
    ),
    "local rank too large": (
        {**TORCHRUN, "LOCAL_RANK": "4"},
        ["local_rank 4 (LOCAL_RANK=4)", "(LOCAL_WORLD_SIZE=4)"],
    ),
    "not a port": ({**TORCHRUN, "MASTER_PORT": "70000"}, ["MASTER_PORT=70000 is not a port"]),
    "SLURM against itself": (
        {**SRUN, "SLURM_NTASKS": "6"},
        ["SLURM_NTASKS=6 is not SLURM_NTASKS_PER_NODE=4 times SLURM_NNODES=2"],
    ),
    "no srun": (
        {**without(SRUN, "SLURM_STEP_ID"), "SLURM_PROCID": "0"},
        ["not started by srun", "wait for 7 processes", "`srun`"],
    ),
    "nowhere to meet": (
        OPEN_MPI,
        ["8 processes on several nodes", "MASTER_ADDR is not set", "mpirun -x MASTER_ADDR"],
    ),
    "ranks dealt round": (
        {**OPEN_MPI, **MEET, "OMPI_COMM_WORLD_RANK": "2"},
        ["OMPI_COMM_WORLD_RANK=2", "node by node"],
    ),
}


@pytest.mark.parametrize("variables", [SRUN, {**OPEN_MPI, **MEET}], ids=["slurm", "openmpi"])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_what_a_launcher_does_not_set_counts_nothing_beside_it(variables, name):
    """An image's LOCAL_RANK=0, a script's WORLD_SIZE=$SLURM_NNODES."""
    assert detect({**variables, name: "2"}, Devices()) == detect(variables, Devices())


@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_itself_is_an_error_that_names_the_variables(name):
    environ, parts = REFUSED[name]
    message = refusal(environ)
    for part in parts:
        assert part in message, message


REFUSED_BY_TRAINER = {
    "fewer devices": (
        TORCHRUN,
        Request(2),
        ["torchrun started 4 processes (WORLD_SIZE=4)", "Trainer(devices=4, num_nodes=1)"],
    ),
    "fewer nodes": (
        SRUN,
        Request(4),
        ["slurm started 8 processes (SLURM_NTASKS=8)", "Trainer(devices=4, num_nodes=2)"],
    ),
    "more than the pod's": (
        POD,
        Request(4, 2),
        ["kubeflow started 2 processes", "asks for 8", "Trainer(devices=1, num_nodes=2)"],
    ),
    "stray LOCAL_RANK": (
        {"LOCAL_RANK": "0"},
        Request(4),
        ["LOCAL_RANK=0 says", "no MASTER_ADDR and no MASTER_PORT", "wait for 3"],
    ),
    "stray LOCAL_RANK and a host": (
        {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"},
        Request(4),
        ["LOCAL_RANK=0 says", "set no MASTER_PORT", "Unset LOCAL_RANK"],
    ),
    "stale WORLD_SIZE": (
        {**POPEN, "WORLD_SIZE": "8"},
        TWO_BY_TWO,
        ["WORLD_SIZE=8", "devices=2 and num_nodes=2", "4 processes"],
    ),
    "WORLD_SIZE that is no number": (
        {**POPEN, "WORLD_SIZE": "four"},
        TWO_BY_TWO,
        ["WORLD_SIZE='four' is not a whole number"],
    ),
}


@pytest.mark.parametrize("name", REFUSED_BY_TRAINER)
def test_what_contradicts_the_trainer_is_an_error_that_names_both(name):
    environ, request, parts = REFUSED_BY_TRAINER[name]
    message = refusal(environ, request=request)
    for part in parts:
        assert part in message, message


def test_torchrun_decides_how_many_nodes_there_are():
    one_left = {**TORCHRUN, "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"}
    assert detect(one_left, Devices(), Request(4, 2)).num_nodes == 1
    assert "asks for 8" in refusal(one_left, request=Request(8, 1))


def test_two_processes_never_share_a_device():
    assert (
        "4 processes on this node (LOCAL_WORLD_SIZE=4), but this one sees 2 cuda device(s)"
        in refusal(TORCHRUN, Devices("cuda", 2, "nccl"))
    )
    assert detect(TORCHRUN, Devices("cpu", 1)).local_world_size == 4  # CPUs are shared


def test_slurm():
    suffix = {**VECTORS["slurm nodelist with suffix"]["env"], "SLURM_STEP_ID": "0"}
    nodes = {**suffix, "SLURM_NTASKS": "4"}
    assert record(detect(nodes, Devices())) == (0, 0, 0, 4, 2, "a-3-x", 18456)
    assert record(detect(suffix, Devices())) == (0, 0, 0, 2, 2, "127.0.0.1", 18456)  # on one node
    uneven = {
        **without(SRUN, "SLURM_NTASKS_PER_NODE", "SLURM_NNODES"),
        "SLURM_TASKS_PER_NODE": "5,3",
    }
    assert detect(uneven, Devices()).local_world_size == 3
    # Variables that a script exported for torch, and that say the same.
    same = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", **MEET}
    assert record(detect({**SRUN, **same}, Devices())) == (5, 1, 1, 8, 4, "h0", 77)


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("h1", "h1"),
        ("h1,h2", "h1"),
        ("host0 host1", "host0"),
        ("gpu[07-08]", "gpu07"),
        ("a-[003,5-7]-x,b[1-2]", "a-003-x"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("a[5],b", "a5"),
    ],
)
def test_first_host_of_a_slurm_node_list(node_list, host):
    assert first_host(node_list) == host


def test_tasks_per_node_of_slurm():
    assert [tasks_on_node("4(x2),3", node) for node in range(4)] == [4, 4, 3, None]
    assert tasks_on_node("", 0) is None and tasks_on_node("many", 0) is None


def test_a_kind_of_device_is_all_that_devices_change():
    cpu = detect(TORCHRUN, Devices())
    assert replace(cpu, device_type="xpu", backend="xccl") == detect(
        TORCHRUN, Devices("xpu", 4, "xccl")
    )


SECRETS = {
    "SLURM_JWT": "eyJ-login",
    "MASTER_PASSWORD": "hunter2",
    "MASTER_KEY": "k-1",
    "PMI_SHARED_SECRET": "s-12345",
    "TORCHSERVE_API_KEY": "k-2",
    "RANKING_DB_PASSWORD": "p-54321",
    "NCCL_AUTH_TOKEN": "t-1",
    "OMP_cookie": "c-1",
}


def test_secrets_are_not_shown():
    environ = {"RANK": "1", "SLURM_NTASKS": "2", "NCCL_DEBUG": "INFO", **SECRETS}
    assert list_variables(environ) == "Variables set: RANK=1, SLURM_NTASKS=2."
    shown = shown_variables(environ, ("NCCL_", "OMP_", "RANK", "SLURM_", "TORCH"))
    assert shown == {"NCCL_DEBUG": "INFO", "RANK": "1", "SLURM_NTASKS": "2"}
