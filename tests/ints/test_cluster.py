"""Which cluster environment a Trainer gets, and that it and our record say the same."""

import os
import socket

import lightning.pytorch as pl
import pytest
from lightning.fabric.plugins.environments import (
    KubeflowEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from lightning_zero3 import Zero3Strategy
from lightning_zero3.strategies.launch.cluster_environment import DetectedEnvironment, identify
from lightning_zero3.strategies.launch.detect import detect
from lightning_zero3.strategies.launch.world import Devices, LaunchError, Request

LAUNCHERS = (
    "GROUP_",
    "JSM_",
    "LOCAL_",
    "LSB_",
    "MASTER_",
    "MPI_",
    "NODE_RANK",
    "OMPI_",
    "PMI_",
    "RANK",
    "SLURM",
    "TORCHELASTIC",
)
MEET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "77"}
ELASTIC = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    **MEET,
}
OPEN_MPI = {
    **{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
}
SRUN = {
    **{
        "SLURM_JOB_ID": "5",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
    },
    **{"SLURM_NODEID": "0", "SLURM_STEP_ID": "0"},
}
ALONE = (0, 0, 1)
SECOND_OF_TWO = (1, 1, 2)  # rank, local rank, world size

CASES = {
    "nothing": ({}, LightningEnvironment, ALONE, "single"),
    "torchrun": (ELASTIC, TorchElasticEnvironment, SECOND_OF_TWO, "torchrun"),
    "srun": (SRUN, SLURMEnvironment, SECOND_OF_TWO, "slurm"),
    "openmpi": (OPEN_MPI, DetectedEnvironment, SECOND_OF_TWO, "openmpi"),
    "openmpi in slurm": (
        {**SRUN, "SLURM_PROCID": "0", **OPEN_MPI},
        DetectedEnvironment,
        SECOND_OF_TWO,
        "openmpi",
    ),
    "variables": (
        {k: v for k, v in ELASTIC.items() if k[0] != "T"},
        DetectedEnvironment,
        SECOND_OF_TWO,
        "variables",
    ),
    "pod": (
        {"PET_NODE_RANK": "0", "RANK": "1", "WORLD_SIZE": "2", **MEET},
        KubeflowEnvironment,
        (1, 0, 2),
        "kubeflow",
    ),
    "the only pod": (
        {"PET_NODE_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", **MEET},
        LightningEnvironment,
        ALONE,
        "single",
    ),
    # MPICH's gforker, of which each process would train by itself
    "pmi": ({"PMI_RANK": "1", "PMI_SIZE": "2"}, DetectedEnvironment, SECOND_OF_TWO, "pmi"),
    "srun with pmi": (
        {**SRUN, "PMI_RANK": "1", "PMI_SIZE": "2"},
        SLURMEnvironment,
        SECOND_OF_TWO,
        "slurm",
    ),
}


@pytest.fixture
def environ(monkeypatch):
    for name in list(os.environ):
        if name.startswith(LAUNCHERS) or name == "WORLD_SIZE":
            monkeypatch.delenv(name)
    return lambda variables: [monkeypatch.setenv(name, value) for name, value in variables.items()]


def make_trainer(devices, strategy="zero3", **options):
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        **options,
    )


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_gets_lightnings_environment_or_ours(name, environ):
    variables, kind, places, launcher = CASES[name]
    environ(variables)
    layout = (1, places[2]) if name == "pod" else (places[2], 1)
    strategy = make_trainer(layout[0], num_nodes=layout[1]).strategy
    plugin = strategy.cluster_environment
    assert type(plugin) is kind
    assert (strategy.global_rank, strategy.local_rank, strategy.world_size) == places
    assert plugin.creates_processes_externally == (kind is not LightningEnvironment)
    world = identify(plugin, Devices(), Request(*layout))
    assert (world.rank, world.local_rank, world.world_size, world.launcher) == (*places, launcher)
    assert kind is LightningEnvironment or (plugin.main_address, plugin.main_port) == (
        world.main_address,
        world.main_port,
    )


def test_lsf(environ, tmp_path):
    here = socket.gethostname()
    (tmp_path / "ranks").write_text(f"launch\n{here}\n{here}\n")
    jsm = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    environ({f"JSM_NAMESPACE_{name}": value for name, value in jsm.items()})
    environ({"LSB_JOBID": "2005", "LSB_DJOB_RANKFILE": str(tmp_path / "ranks")})
    alone = detect({**os.environ, "LSB_MCPU_HOSTS": f"launch 1 {here} 2"}, Devices())
    plugin = make_trainer(2).strategy.cluster_environment
    assert type(plugin) is LSFEnvironment
    # Lightning reads the file, we the variable
    assert identify(plugin, Devices(), Request(2)) == alone
    assert (alone.main_address, alone.main_port) == (here, 10005)


def test_an_environment_that_the_user_passes_stays(environ):
    environ({**SRUN, **OPEN_MPI})
    strategy = make_trainer(1, Zero3Strategy(cluster_environment=LightningEnvironment())).strategy
    assert type(strategy.cluster_environment) is LightningEnvironment
    world = identify(strategy.cluster_environment, Devices(), Request())
    assert (world.launcher, world.rank, world.world_size) == ("single", 0, 1)


def by_hand(rank, local_rank):
    """What clouds set, and DeepSpeed's launcher on several nodes."""
    places = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(local_rank)}
    return {**places, "MASTER_ADDR": "h0", "MASTER_PORT": "77"}


@pytest.mark.parametrize(
    ("variables", "layout", "places"),
    [
        (by_hand(3, 1), (2, 2), (3, 1, 1, 4, 2)),
        # of one process on each node nobody has to say the number
        ({k: v for k, v in by_hand(3, 0).items() if k != "LOCAL_RANK"}, (1, 4), (3, 0, 3, 4, 1)),
    ],
)
def test_the_trainer_says_how_many_processes_a_node_has(environ, variables, layout, places):
    environ(variables)
    strategy = make_trainer(layout[0], num_nodes=layout[1]).strategy
    world = identify(strategy.cluster_environment, Devices(), Request(*layout))
    assert type(strategy.cluster_environment) is DetectedEnvironment
    assert (strategy.global_rank, strategy.local_rank, strategy.world_size) == (
        places[0],
        places[1],
        places[3],
    )
    assert (
        *(world.rank, world.local_rank, world.node_rank, world.world_size, world.local_world_size),
        world.main_address,
    ) == (*places, "h0")


@pytest.mark.parametrize(
    ("plugin", "variables", "layout", "places"),
    [
        # outside of Kubernetes
        (
            KubeflowEnvironment,
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h0", "MASTER_PORT": "77"},
            (1, 2),
            (1, 0, 1, 2, "kubeflow"),
        ),
        # in a shell of `salloc`, where Lightning takes srun's processes for single ones
        (
            SLURMEnvironment,
            {**SRUN, "SLURM_JOB_NAME": "interactive"},
            (2, 1),
            (1, 1, 0, 2, "slurm"),
        ),
        # another launcher that sets torchrun's variables
        (
            TorchElasticEnvironment,
            {k: v for k, v in ELASTIC.items() if k != "TORCHELASTIC_RUN_ID"},
            (2, 1),
            (1, 1, 0, 2, "torchrun"),
        ),
    ],
)
def test_the_type_of_a_plugin_decides(environ, plugin, variables, layout, places):
    environ(variables)
    strategy = make_trainer(layout[0], num_nodes=layout[1], plugins=[plugin()]).strategy
    world = identify(strategy.cluster_environment, Devices(), Request(*layout))
    assert places == (
        *(world.rank, world.local_rank, world.node_rank, world.world_size),
        world.launcher,
    )


NODES = {
    **{
        "SLURM_NTASKS": "16",
        "SLURM_NTASKS_PER_NODE": "8",
        "SLURM_NNODES": "2",
        "SLURM_STEP_ID": "0",
    },
    **{"SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_NODEID": "0", "SLURM_JOB_ID": "77"},
    **{"SLURM_STEP_NODELIST": "a[1-2]", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_NODELIST": "a[1-2]"},
}


@pytest.mark.parametrize("left", [{}, {"WORLD_SIZE": "2"}, {"LOCAL_RANK": "0", "RANK": "0"}])
def test_a_slurm_job_starts_whatever_else_its_script_has_set(environ, left):
    environ({**NODES, **left})  # a script may count nodes in WORLD_SIZE
    strategy = make_trainer(8, num_nodes=2).strategy
    assert type(strategy.cluster_environment) is SLURMEnvironment
    world = identify(strategy.cluster_environment, Devices(), Request(8, 2))
    assert (world.rank, world.local_rank, world.world_size, world.launcher) == (3, 3, 16, "slurm")
    assert world.main_address == strategy.cluster_environment.main_address == "a1"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        # by another program than srun: Lightning takes each process for rank 0 of 16
        ({"SLURM_STEP_ID": None, "SLURM_PROCID": "0"}, "SLURM_NTASKS=16, but .* not started by"),
        # by a program that srun has started once on each node: two are rank 0 of 2, and so on
        (
            {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_PROCID": "0"},
            r"slurm started 2 processes \(SLURM_NTASKS=2\), but .* asks for 16",
        ),
    ],
)
def test_processes_started_by_rank_in_a_slurm_job_are_told(environ, changed, words):
    places = {"RANK": "3", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "SLURM_LOCALID": "0"}
    environ({k: v for k, v in {**NODES, **places, **changed}.items() if v is not None})
    with pytest.raises(LaunchError, match=words):
        identify(SLURMEnvironment(), Devices(), Request(8, 2))


@pytest.mark.parametrize("strategy", ["zero3_spawn", "zero3_notebook"])
def test_processes_of_a_launcher_do_not_start_others(environ, strategy):
    environ(ELASTIC)
    with pytest.raises(
        LaunchError,
        match="TorchElasticEnvironment says that a launcher has started this one, .* RANK=1, "
        '.*\nUse strategy="zero3"',
    ):
        make_trainer(2, strategy)


class Mine(LightningEnvironment):
    def world_size(self):
        return 6

    def global_rank(self):
        return 5

    def local_rank(self):
        return 2

    def node_rank(self):
        return 1


def test_an_environment_of_the_users_is_asked(environ):
    environ(MEET)
    strategy = make_trainer(3, num_nodes=2, plugins=[Mine()]).strategy
    world = identify(strategy.cluster_environment, Devices(), Request(3, 2))
    assert (world.launcher, world.rank, world.local_rank, world.node_rank, world.world_size) == (
        "Mine",
        5,
        2,
        1,
        6,
    )
    assert (world.local_world_size, world.main_port, world.because("rank")) == (
        3,
        77,
        "Mine's rank=5",
    )
    # The plugin owns the layout, and what the Trainer leaves at 1 is no contradiction.
    assert identify(strategy.cluster_environment, Devices(), Request(3)) == world
    with pytest.raises(
        LaunchError,
        match=r"Mine started 6 processes \(Mine's world_size=6\), but Trainer\(devices=3,"
        r" num_nodes=5\) asks for 15. Use Trainer\(devices=3, num_nodes=2\)",
    ):
        identify(strategy.cluster_environment, Devices(), Request(3, 5))
    with pytest.raises(LaunchError, match=r"local_rank 2 .* \(devices of the Trainer=2\)"):
        identify(strategy.cluster_environment, Devices(), Request(2, 3))


class Uneven(Mine):
    """Two processes on the first node, one on the second."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def world_size(self):
        return 3

    def global_rank(self):
        return self.rank

    def local_rank(self):
        return self.rank % 2

    def node_rank(self):
        return self.rank // 2


def test_nodes_of_a_plugin_may_have_unequal_numbers(environ):
    environ(MEET)
    found = []
    for rank, devices in ((0, 2), (1, 2), (2, 1)):
        strategy = make_trainer(devices, num_nodes=2, plugins=[Uneven(rank)]).strategy
        world = identify(strategy.cluster_environment, Devices(), Request(devices, 2))
        found.append((world.rank, world.local_rank, world.local_world_size, world.world_size))
    assert found == [(0, 0, 2, 3), (1, 1, 2, 3), (2, 0, 1, 3)]


def test_a_rank_without_a_world_size_stops_the_trainer(environ):
    environ({"RANK": "1"})
    with pytest.raises(LaunchError, match="WORLD_SIZE is not set"):
        make_trainer(2)


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({**ELASTIC, "GROUP_RANK": "x"}, "GROUP_RANK"),
        ({**SRUN, "SLURM_LOCALID": ""}, "SLURM_LOCALID"),
        ({"NODE_RANK": "zz"}, "NODE_RANK"),
    ],
)
def test_a_place_that_is_no_number_stops_the_trainer_and_is_named(environ, variables, name):
    environ(variables)
    with pytest.raises(
        LaunchError,
        match=rf"is no whole number \(invalid literal .*Variables set: .*{name}={variables[name]}",
    ):
        make_trainer(2)


@pytest.mark.parametrize("port", ["abc", "", "-1"])
def test_a_port_that_is_no_number_stops_the_trainer_and_is_named(environ, port):
    environ({"MASTER_PORT": port})
    with pytest.raises(LaunchError, match=f"MASTER_PORT='{port}' is not a port"):
        make_trainer(2)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 .* has set no MASTER_ADDR and no MASTER_PORT"),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "8", **MEET}, "WORLD_SIZE=8, but the Trainer has"),
    ],
)
def test_a_run_that_would_wait_for_nobody_is_refused_at_once(environ, variables, words):
    environ(variables)
    with pytest.raises(LaunchError, match=words):
        make_trainer(2).strategy.setup_environment()


def test_what_an_earlier_trainer_left_is_named(environ):
    environ({"LOCAL_RANK": "1", "NODE_RANK": "0", **MEET})
    strategy = make_trainer(1).strategy
    with pytest.raises(
        LaunchError, match="LightningEnvironment says rank 1, but node_rank .* says 0. Unset"
    ):
        identify(strategy.cluster_environment, Devices(), Request())


@pytest.mark.parametrize("strategy", ["zero3", "zero3_spawn"])
def test_several_nodes_cannot_each_choose_a_port(environ, strategy):
    environ({"MASTER_ADDR": "node1"})
    with pytest.raises(LaunchError, match=r"Trainer\(num_nodes=2\) .* but MASTER_PORT is not set"):
        make_trainer(2, strategy, num_nodes=2)
