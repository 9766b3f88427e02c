"""The record of one process among those of a run, and its checks: strings and integers only."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..support import printable

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class LaunchError(RuntimeError):
    """The processes of this run were started in a way that cannot work.

    Attributes:
        world: this process's record, if the error says that it must not be.
    """

    def __init__(self, message: str, world: World | None = None) -> None:
        # it may quote variables and other processes
        super().__init__(printable(message, kept="\n"))
        self.world = world


@dataclass(frozen=True)
class Devices:
    """The devices that this process can compute on."""

    type: str = "cpu"  # as in `torch.device(...).type`
    count: int = 1  # how many this process sees
    backend: str = "gloo"  # torch's default backend for them


@dataclass(frozen=True)
class Request:
    """The options of the Trainer and the strategy that say which processes the user wants."""

    processes: int = 1  # on each node: `Trainer(devices=...)`
    nodes: int = 1  # `Trainer(num_nodes=...)`
    start_method: str = "popen"  # how Lightning starts processes if no launcher has
    interactive: bool = False  # whether this process is a notebook or a shell
    backend: str | None = None  # of the process group, if the user chose one


@dataclass(frozen=True)
class World:
    """One process among those of a run.

    Attributes:
        launcher: "single", "torchrun", "slurm", "openmpi", "mvapich", "intelmpi", "pmi" (another
            MPI's), "lsf", "kubeflow", "variables" (RANK and so on without a launcher's name),
            "subprocess" (Lightning ran the script again), "spawn", "notebook", "process group" (it
            was there before the Trainer), or the class name of the user's own ClusterEnvironment.
        rank: number of this process among all.
        local_rank: number of this process among those of its node.
        node_rank: number of its node.
        world_size: number of processes in all.
        local_world_size: number of processes on this node.
        main_address: host of rank 0, where processes meet.
        main_port: port of rank 0 there; 0 stands for any free port.
        device_type: as in ``torch.device(...).type``.
        backend: backend of the process group.
        why: pairs of the name of an attribute above and the variable with its value, or the rule,
            that decided it.
    """

    launcher: str
    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    main_address: str
    main_port: int
    device_type: str
    backend: str
    why: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for small, large in (("rank", "world_size"), ("local_rank", "local_world_size")):
            if not 0 <= getattr(self, small) < getattr(self, large):
                raise LaunchError(
                    f"{small} {getattr(self, small)} ({self.because(small)}) is none of the {large}"
                    f" {getattr(self, large)} ({self.because(large)}), which are numbered from 0."
                    " Correct the variable, or unset it where another launcher has left it."
                )
        if not 0 <= self.main_port < 2**16:
            raise LaunchError(
                f"{self.because('main_port')} is not a port. Set MASTER_PORT to a number from 1024"
                " to 65535."
            )

    def because(self, item: str) -> str:
        """Return what decided ``item``: a variable and its value, or a rule."""
        return dict(self.why).get(item, "given")

    @property
    def meeting_point(self) -> str:
        """Address and port of rank 0, and what decided them."""
        return (
            f"{self.main_address}:{self.main_port} ({self.because('main_address')};"
            f" {self.because('main_port')})"
        )

    @property
    def num_nodes(self) -> int:
        """Number of nodes, if all have as many processes as this one."""
        return -(-self.world_size // self.local_world_size)


def require_requested(world: World, request: Request, owns_layout: bool = False) -> None:
    """Raise :class:`LaunchError` unless the Trainer asks for the processes that were started.

    torchrun alone decides the number of nodes, which changes when a node joins or leaves. A cluster
    environment of the user's, or a process group that is there, owns all of the layout: one device
    and one node, the defaults, do not contradict it, and nodes may have unequal numbers.
    """
    processes, nodes, local = request.processes, request.nodes, world.local_world_size
    if owns_layout:
        is_right = processes in (1, local) and (nodes == 1 or local + nodes - 1 <= world.world_size)
    else:
        is_right = world.launcher == "torchrun" and processes == local
    if processes * nodes != world.world_size and not is_right:
        raise LaunchError(
            f"{world.launcher} started {world.world_size} processes"
            f" ({world.because('world_size')}), but Trainer(devices={processes},"
            f" num_nodes={nodes}) asks for {processes * nodes}. Use"
            f" Trainer(devices={local}, num_nodes={world.num_nodes}), or start"
            f" {processes * nodes} processes.",
            world,
        )


def require_devices(world: World, devices: Devices) -> None:
    """Raise :class:`LaunchError` if two processes would share a device."""
    if devices.type != "cpu" and world.local_world_size > devices.count:
        raise LaunchError(
            f"{world.local_world_size} processes on this node"
            f" ({world.because('local_world_size')}), but this one sees {devices.count}"
            f" {devices.type} device(s). Start fewer, or let every process see all devices of its"
            " node (CUDA_VISIBLE_DEVICES alike for all; SLURM: --gpu-bind=none).",
            world,
        )
