"""One program, several engines, one reference.

A `Case` is a model and a training program. `run_case` runs it on every rank twice: in plain torch,
where gradients are averaged over ranks by hand, and under an engine; losses, gradients and
parameters must agree. The outcome is one of

right    all numbers agree
refused  an error on every rank, whose text the case announces
wrong    it ran, with other numbers
error    any other exception, or a dead process
hang     no end before the case's time-out
-        it calls what only zero3 has
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.ranks import run_ranks

DIM = 8
STEPS = 3
BATCH = 20
# What other sums of the same numbers may differ by: relative to the element, or to the tensor's
# largest where terms cancel.
RTOL = {torch.float64: 4e-15, torch.complex128: 4e-15, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# cuBLAS sums in another order for each shape. Of the cases that ran on an H100, these took 1.5 and
# 1.7 times that.
TIMES_ON_A_GPU = {"penalty-outside-the-step": 2, "optimizer-lbfgs-line-search": 2}
CASES: dict[str, Case] = {}


def under_a_mode() -> bool:
    """Whether a default device is set: where one looks at every function, torch takes no fast
    path.
    """
    return torch.utils._device.CURRENT_DEVICE is not None


def seeded(seed: int) -> torch.Generator:
    """For numbers on the device that the cases run on."""
    return torch.Generator(device=torch.get_default_device()).manual_seed(seed)


# ---- models ----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Chain(nn.Module):
    """Embedding-like input, repeated blocks, head: every block is a unit, and all of them share
    memory.
    """

    has_gain = False  # a parameter of its own, which is in use during the whole step

    def __init__(self, *blocks: nn.Module, depth: int = 4) -> None:
        super().__init__()
        if self.has_gain:
            self.gain = nn.Parameter(torch.linspace(0.9, 1.1, DIM))
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(blocks or (Block() for _ in range(depth)))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        return x * self.gain if self.has_gain else x


# ---- a case ----------------------------------------------------------------------------------


class Case:
    """A behaviour. Subclasses replace what differs from ordinary training; the docstring is the
    row's name.
    """

    refused: str | None = None  # pattern of the error with which zero3 declines on several ranks
    refused_on_one: str | None = None  # the same on one rank, which is never alone in what it does
    # the rank at fault raises, and the others wait for it until they are ended
    refused_by_one = False
    ddp_options: dict[str, Any] = {}  # what torch's documentation says to give DDP for such a model
    methods: tuple[str, ...] = ()  # of units, which run like a forward: FSDP2 is told of them
    # it takes addresses or arrays, or sends between ranks as gloo does on the host alone: not on
    # CUDA
    on_host = False
    # the optimizer steps inside the step: not inside of the model's forward then, with FSDP2
    manual = False
    pitfalls: tuple[int, ...] = ()  # numbers of PITFALLS in `test_behaviours`
    worlds: tuple[int, ...] = (1, 2)
    timeout = 15.0
    steps = STEPS
    compare_gradients = True
    small_numel = 0  # neighbours with fewer elements than this share a unit; by default none do
    rtol: float | None = None  # in the place of RTOL; the case says why

    def refusal(self, world_size: int) -> str | None:
        """Pattern of the error that is expected of zero3, if any."""
        return self.refused if world_size > 1 else self.refused_on_one

    def expected(self, world_size: int) -> str:
        """Kind of zero3's outcome."""
        return "refused" if self.refusal(world_size) else "right"

    def model(self) -> nn.Module:
        return Chain()

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        # Weight decay and momentum tell a parameter without a gradient from one whose gradient is
        # zero.
        return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)]

    def units(self, model: nn.Module) -> list[nn.Module]:
        """What FSDP2 shards one by one, before the model; the zero3 engine finds its units by
        itself.
        """
        found: dict[nn.Module, None] = {}
        # of a unit: what is repeated in there is no unit of its own, as with zero3
        inside: set[nn.Module] = set()
        for blocks in (
            m for m in model.modules() if isinstance(m, nn.ModuleList) and m not in inside
        ):
            found |= dict.fromkeys(b for b in blocks if any(True for _ in b.parameters()))
            inside |= {m for b in blocks for m in b.modules()}
        return list(found)

    def batch(self, step: int, rank: int) -> Any:
        generator = seeded(1000 * step + rank)
        return torch.randn(4, DIM, generator=generator)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return model(batch).square().mean()

    def prepare(self, model: nn.Module) -> None:
        """Something that users do before training is set up."""

    def clear(self, run: Run) -> None:
        """Before a step: gradients of the last one are over."""
        for optimizer in run.optimizers:
            optimizer.zero_grad()

    def backward(self, run: Run, loss: Any) -> None:
        with run.backward():
            loss.backward()

    def between(self, run: Run) -> None:
        """Something that users do between backward and the optimizer's step."""

    def train(self, run: Run) -> None:
        for step in range(self.steps):
            run.train_step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))


def case(cls: type[Case]) -> type[Case]:
    """Add a behaviour to the matrix."""
    name = kebab(cls.__name__)
    assert name not in CASES and cls.__doc__, cls
    cls.__doc__ = " ".join(cls.__doc__.split())  # a row of the table
    CASES[name] = cls()
    return cls


def kebab(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


# ---- engines ---------------------------------------------------------------------------------


class Run:
    """One rank's training under one engine. This class is the reference: replicas, gradients
    averaged by hand.
    """

    is_reference = True
    refuses = False  # what it cannot do is an error that cases announce

    def __init__(self, case: Case, rank: int, world_size: int) -> None:
        self.case, self.rank, self.world_size = case, rank, world_size
        self.logged: list[Any] = []
        torch.manual_seed(0)
        self.model = case.model()
        case.prepare(self.model)
        self.set_up()
        torch.manual_seed(100 + rank)  # dropout differs between ranks

    def set_up(self) -> None:
        self.optimizers = self.case.optimizers(self.model)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers[0]

    def train_step(self, loss: Callable[[nn.Module], Any]) -> Any:
        """One batch as most people train on it."""
        self.case.clear(self)
        value = self.step(loss)
        self.case.backward(self, value)
        self.log(value)
        self.case.between(self)
        for optimizer in self.optimizers:
            optimizer.step()
        return value

    def begin_forward(self) -> None:
        """What an engine does to buffers when a forward begins; to be called before they are looked
        at between steps.
        """

    def log(self, *values: Any) -> None:
        """Numbers that must agree with the reference."""
        self.logged += [_whole(v.detach()) if isinstance(v, Tensor) else v for v in values]

    def step(self, function: Callable[[nn.Module], Any]) -> Any:
        """Run the model inside `function`, as in a `training_step`."""
        return function(self.model)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around `loss.backward()`, which adds to what is the same on all ranks: the mean of the
        sums is the sum of means.
        """
        before = {n: p.grad for n, p in self.model.named_parameters()}
        try:
            yield
        finally:  # after an exception, too: all ranks raise it
            self._average(before)

    def _average(self, before: dict[str, Tensor | None]) -> None:
        """In two exchanges, of who has which gradients and of their bytes: one for each parameter
        would take half the time.
        """
        parameters = list(self.model.named_parameters())
        everyone = self._all_gather(torch.tensor([p.grad is not None for _, p in parameters]))
        parameters = [
            named
            for named, there in zip(parameters, torch.stack(everyone).any(0).tolist(), strict=True)
            if there
        ]
        grads = [
            torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for _, p in parameters
        ]
        numbers = [_real(grad.detach()).contiguous() for grad in grads]
        packed = [each.flatten().view(torch.uint8) for each in numbers]
        ranks = (
            [row.split(list(map(len, packed))) for row in self._all_gather(torch.cat(packed))]
            if packed
            else []
        )
        for (name, p), like, *parts in zip(parameters, numbers, *ranks, strict=True):
            parts = [part.clone().view(like.dtype).view(like.shape) for part in parts]
            mean = (
                sum(part.float() if part.dtype.itemsize < 4 else part for part in parts)
                / self.world_size
            )
            mean = (torch.view_as_complex(mean) if p.is_complex() else mean).to(p.dtype)
            if p.grad is not None and p.grad is before.get(name):
                p.grad.detach().copy_(mean)  # users may hold it
            else:
                p.grad = mean

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        ranks = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(ranks, tensor)
        return ranks

    def gathered(self, what: Any, modify: bool = False) -> AbstractContextManager[None]:
        """Inside, parameters have their full values."""
        return nullcontext()

    def recover(self) -> None:
        """After an exception in a step, before the next."""

    def parameters(self) -> dict[str, Tensor]:
        """Full values by name."""
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        """Full gradients by name, as the optimizer has them; zero where there is none."""
        return {
            n: torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense().clone()
            for n, p in self.model.named_parameters()
        }

    def result(self) -> dict[str, Any]:
        gradients = self.gradients() if self.case.compare_gradients else {}
        found = {f"logged[{i}]": v for i, v in enumerate(self.logged)}
        found |= {f"gradient of {n}": v for n, v in gradients.items()}
        return found | {f"parameter {n}": v for n, v in self.parameters().items()}


class Zero3Run(Run):
    """The engine as `Zero3Strategy` drives it."""

    is_reference = False
    refuses = True
    options: dict[str, Any] = {}

    def set_up(self) -> None:
        from lightning_zero3.strategies.engine import Zero3Engine, partition
        from lightning_zero3.strategies.optimizers.param_groups import ParamGroups

        partition.SMALL_NUMEL = self.case.small_numel
        self.optimizers = self.case.optimizers(self.model)
        device = torch.get_default_device()
        collectives = self.communicator(device)

        def shard() -> Zero3Engine:
            options = {
                "device": device,
                "collectives": collectives,
                "slot_dtype": self.slot_dtype,
                **self.options,
            }
            return Zero3Engine(self.model, self.optimizers, **options)

        names = {p: name for name, p in self.model.named_parameters()}
        states = [{names[p]: state for p, state in o.state.items()} for o in self.optimizers]
        self.param_groups = ParamGroups(self.optimizers, shard, device)
        self.engine = shard()
        self.param_groups.start(self.engine, states)

    def communicator(self, device: torch.device) -> Any:
        """To the other ranks."""
        from lightning_zero3.strategies.communicators import make_collectives

        return make_collectives(dist.group.WORLD, device)

    def slot_dtype(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        """What a parameter is gathered in."""
        return parameter.dtype

    def step(self, function: Callable[[nn.Module], Any]) -> Any:
        self.engine = self.param_groups.apply_edits(self.engine)
        with self.engine.step():
            return function(self.model)

    def backward(self) -> AbstractContextManager[None]:
        return self.engine.backward()

    def gathered(self, what: Any, modify: bool = False) -> AbstractContextManager[None]:
        from lightning_zero3.strategies.engine import gathered

        return gathered(what, modify)

    def _present(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: found[name] for name, _ in self.model.named_parameters() if name in found}

    def parameters(self) -> dict[str, Tensor]:
        units = self.engine.units
        return self._present({name: v for unit in units for name, v in unit.values().items()})

    def gradients(self) -> dict[str, Tensor]:
        has, engine = self.engine.gradients.has_gradient, self.engine
        found = {name: v for unit in engine.units for name, v in unit.gradients().items()}
        for entry in engine.entries.values():
            if not (entry.trained and has(entry)):
                found[entry.name] = torch.zeros_like(found[entry.name])
        return self._present(found)


class OnlyZero3(Exception):
    """The program calls what other engines do not have."""


class _Redirect(Run):
    """Engines that act in the `forward` of the root module: it calls the step, as Lightning does
    for DDP.
    """

    is_reference = False
    wrapper: nn.Module

    def step(self, function: Callable[[nn.Module], Any]) -> Any:
        original = self.model.forward

        def forward() -> Any:
            self.model.forward = original
            return function(self.model)

        self.model.forward = forward
        try:
            return self.wrapper()
        finally:
            self.model.forward = original

    def backward(self) -> AbstractContextManager[None]:
        return nullcontext()

    def gathered(self, what: Any, modify: bool = False) -> AbstractContextManager[None]:
        raise OnlyZero3("gathered")


class DdpRun(_Redirect):
    """torch's DistributedDataParallel with find_unused_parameters, driven as Lightning's
    `DDPStrategy` does it.

    DDP's forward prepares one backward. Others (inside of the step, or a second one) are manual
    optimization, in which Lightning prepares each, and lets DDP prepare none at the end of the
    forward.
    """

    prepared = False  # a backward, by a forward that has ended
    inside_step = manual = False

    def set_up(self) -> None:
        options = {"find_unused_parameters": True, **self.case.ddp_options}
        self.wrapper = nn.parallel.DistributedDataParallel(self.model, **options)
        super().set_up()

    def begin_forward(self) -> None:
        self.wrapper._sync_buffers()

    def step(self, function: Callable[[nn.Module], Any]) -> Any:
        def inner(model: nn.Module) -> Any:
            result = function(model)
            self.wrapper.require_backward_grad_sync = not self.manual
            return result

        self.inside_step, self.manual = True, False
        try:
            return super().step(inner)
        finally:
            self.inside_step, self.wrapper.require_backward_grad_sync = False, True
            if torch.is_grad_enabled():
                self.prepared = not self.manual

    @contextmanager
    def backward(self) -> Iterator[None]:
        from lightning.pytorch.overrides.distributed import prepare_for_backward

        if self.prepared and not self.inside_step:
            self.prepared = False
            yield
            return
        self.manual, run = True, torch.autograd.backward

        def prepare_and_run(losses: Any, *args: Any, **kwargs: Any) -> None:
            torch.autograd.backward = run
            prepare_for_backward(self.wrapper, losses)
            run(losses, *args, **kwargs)

        with mock.patch.object(torch.autograd, "backward", prepare_and_run):
            yield


class Fsdp2Run(_Redirect):
    """torch's fully_shard on every block and the root."""

    def set_up(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        mesh = init_device_mesh("cpu", (self.world_size,))
        for unit in self.case.units(self.model):
            fully_shard(unit, mesh=mesh)
            for name in self.case.methods:
                register_fsdp_forward_method(unit, name)
        fully_shard(self.model, mesh=mesh)
        self.wrapper = self.model
        super().set_up()

    def step(self, function: Callable[[nn.Module], Any]) -> Any:
        return function(self.model) if self.case.manual else super().step(function)

    def recover(self) -> None:
        if hasattr(self.model, "reset_iter_state"):  # since torch 2.13
            self.model.reset_iter_state()

    def parameters(self) -> dict[str, Tensor]:
        return {n: _whole(p.detach()) for n, p in self._shards().items()}

    def gradients(self) -> dict[str, Tensor]:
        return {
            n: torch.zeros(p.shape, dtype=p.dtype) if p.grad is None else _whole(p.grad)
            for n, p in self._shards().items()
        }

    def _shards(self) -> dict[str, nn.Parameter]:
        """What the optimizer has. A root that had a forward without backward still shows what it
        gathered.
        """
        from torch.distributed.fsdp import FSDPModule

        for m in self.model.modules():
            if isinstance(m, FSDPModule):
                m.reshard()
        return dict(self.model.named_parameters())


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


class DebuggedRun(Zero3Run):
    def set_up(self) -> None:
        from lightning_zero3.strategies.checked_units import CheckedUnit

        self.options = {"unit_class": CheckedUnit}
        super().set_up()
        assert all(type(unit) is CheckedUnit for unit in self.engine.units)


class GroupRun(Zero3Run):
    """Through a process group even on one rank, where slots and exchanges are those of several
    then: NCCL's on a GPU.
    """

    def set_up(self) -> None:
        super().set_up()
        assert not self.engine.collectives.alone

    def communicator(self, device: torch.device) -> Any:
        from lightning_zero3.strategies.collectives import GroupCollectives

        group = (
            dist.new_group(backend="nccl")
            if device.type == "cuda" and dist.get_world_size() == 1
            else dist.group.WORLD
        )
        return GroupCollectives(group, dist.group.WORLD)


class ComparedRun(Zero3Run):
    """Through the communicator of gloo with CUDA tensors."""

    def communicator(self, device: torch.device) -> Any:
        from lightning_zero3.strategies.collectives import ComparedCollectives

        return ComparedCollectives(dist.group.WORLD)


ENGINES: dict[str, type[Run]] = {
    "zero3": Zero3Run,
    "zero3 compared": ComparedRun,
    "zero3 debug": DebuggedRun,
    "zero3 group": GroupRun,
    "ddp": DdpRun,
    "fsdp2": Fsdp2Run,
}


# ---- running one -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    kind: str
    detail: str = ""


class Raised(Exception):
    """What the ranks raised as one line of JSON, to be found in the text of a failed
    `run_ranks`.
    """


def accumulated(before: Tensor, grad: Tensor) -> Tensor:
    """As autograd does it: in place, but for a sparse one."""
    return before.add_(grad) if before.layout == torch.strided else before.to_dense() + grad


def execute(case: Case, run: type[Run], rank: int, world_size: int) -> dict[str, Any]:
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # what earlier cases compiled counts towards a limit
    trained = run(case, rank, world_size)
    case.train(trained)
    return trained.result()


def compare_on_rank(
    rank: int, world_size: int, engine: str, names: list[str], device: str, gain: bool = False
) -> dict[str, list[Any]]:
    """Run cases twice on this rank. With ``gain`` a chain has a parameter of its own.

    Returns:
        for each case what differs, in words; where all ranks refuse it, (type, text) of each
        rank's error.
    """
    from . import load_cases

    load_cases()
    Chain.has_gain = gain
    if device != "cpu":
        # from here on every function of torch is looked at: not without need
        torch.set_default_device(device)
        Tensor.record_stream = _record_stream
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        expected = execute(case := CASES[name], Run, rank, world_size)
        try:
            trained = execute(case, ENGINES[engine], rank, world_size)
        except BaseException as error:
            _tell(name, rank, mine := [type(error).__name__, str(error)])
            everyone = ENGINES[engine].refuses and not case.refused_by_one
            raised = _told(name, world_size) if everyone else [mine]
            # A refusal of all ranks leaves the process group as it was; the next case may have it.
            if len(names) > 1 and ENGINES[engine].refuses and _is_refusal(case, world_size, raised):
                found[name] = raised
                continue
            raise Raised(json.dumps(raised)) from error
        _tell(name, rank, None)
        found[name] = differences(
            expected, trained, case.rtol, TIMES_ON_A_GPU.get(name, 1) if device == "cuda" else 1
        )
    return found


def _record_stream(*args: Any) -> None:
    raise AssertionError(
        "record_stream makes the allocator wait for a stream; slots are nobody's to reuse"
    )


def _tell(name: str, rank: int, raised: list[str] | None) -> None:
    """Note for the other ranks how a case ended here."""
    dist.distributed_c10d._get_default_store().set(f"{name}/{rank}", json.dumps(raised))


def _told(name: str, world_size: int) -> list[list[str] | None]:
    """How a case ended on each rank: type and text of the error, or None."""
    store, told = dist.distributed_c10d._get_default_store(), []
    for key in (f"{name}/{rank}" for rank in range(world_size)):
        try:
            store.wait([key], timedelta(seconds=CASES[name].timeout / 3))
            told.append(json.loads(store.get(key)))
        except dist.DistError:
            told.append(["nothing", "it still runs"])
    return told


def differences(
    expected: dict[str, Any], found: dict[str, Any], rtol: float | None = None, times: int = 1
) -> list[str]:
    if list(expected) != list(found) and sorted(expected) != sorted(found):
        return [f"names differ: {sorted(set(expected) ^ set(found))}"]
    wrong = []
    for name, value in expected.items():
        try:
            if isinstance(value, Tensor):
                # with float8 torch hardly computes
                if value.is_floating_point() and value.itemsize == 1:
                    value, found[name] = value.float(), found[name].float()
                if _has_nan(found[name]) and not _has_nan(value):
                    wrong.append(f"{name}: NaN")
                torch.testing.assert_close(
                    found[name], value, equal_nan=True, **_tolerance(value, rtol, times)
                )
            elif value != found[name]:
                wrong.append(f"{name}: {found[name]!r} instead of {value!r}")
        except AssertionError as error:
            wrong.append(f"{name}: {' '.join(str(error).split())}")
    return wrong


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def _has_nan(value: Any) -> bool:
    return isinstance(value, Tensor) and bool(value.isnan().any())


def _tolerance(expected: Tensor, rtol: float | None, times: int) -> dict[str, float]:
    if not (expected.is_floating_point() or expected.is_complex()):
        return {"rtol": 0, "atol": 0}
    rtol = times * (rtol or RTOL.get(expected.dtype, 2e-6))
    sizes = expected.detach().to_dense().abs().nan_to_num(0, 0, 0)
    return {"rtol": rtol, "atol": rtol * float(sizes.max()) if sizes.numel() else 0}


def run_case(
    engine: str, name: str, world_size: int = 2, device: str = "cpu", gain: bool = False
) -> Outcome:
    """Run a case under an engine on `world_size` ranks."""
    case = CASES[name]
    start = 0 if device == "cpu" else 45  # a process begins to use CUDA
    try:
        ranks = run_ranks(
            compare_on_rank, world_size, engine, [name], device, gain, timeout=case.timeout + start
        )
    except AssertionError as failure:
        return _failed(engine, case, world_size, str(failure))
    return _compared([found[name] for found in ranks])


def run_cases(
    engine: str,
    names: list[str],
    world_size: int,
    together: Collection[str],
    device: str = "cpu",
    gain: bool = False,
) -> dict[str, Outcome]:
    """Run many cases, those ``together`` in one process group that leave it as it was; two such at
    a time, as ranks often wait.
    """
    right = [n for n in names if n in together and CASES[n].expected(world_size) == "right"]
    refused = [n for n in names if n in together and n not in right]
    batches = [
        kind[start : start + BATCH]
        for kind in (right, refused)
        for start in range(0, len(kind), BATCH)
    ]
    batches += [[n] for n in names if n not in together]
    with ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(lambda batch: _run_together(engine, batch, world_size, device, gain), batches)
        )
    return {name: outcome for outcomes in found for name, outcome in outcomes.items()}


def _run_together(
    engine: str, names: list[str], world_size: int, device: str, gain: bool
) -> dict[str, Outcome]:
    """In one process for each rank; where one raises, halves of them; where one hangs, each alone,
    which takes less time.
    """
    if len(names) == 1:
        return {n: run_case(engine, n, world_size, device, gain) for n in names}
    try:
        ranks = run_ranks(
            compare_on_rank, world_size, engine, names, device, gain, timeout=60 + 5 * len(names)
        )
        return {n: _outcome(CASES[n], world_size, [found[n] for found in ranks]) for n in names}
    except AssertionError as failure:
        size = 1 if "not finished after" in str(failure) else -(-len(names) // 2)
        parts = [names[start : start + size] for start in range(0, len(names), size)]
        outcomes = {
            n: o
            for part in parts
            for n, o in _run_together(engine, part, world_size, device, gain).items()
        }
        alone = engine != "zero3" or any(o.kind != "right" for o in outcomes.values())
        assert alone, f"{names} are right in parts, but not together: {failure}"
        return outcomes


def _is_refusal(case: Case, world_size: int, raised: list[Any]) -> bool:
    """Whether all ranks have raised what is expected."""
    refusal = case.refusal(world_size)
    return refusal is not None and all(
        error and re.search(refusal, error[1], re.DOTALL) for error in raised
    )


def _outcome(case: Case, world_size: int, ranks: list[list[Any]]) -> Outcome:
    if case.refusal(world_size) and ranks[0] and isinstance(ranks[0][0], list):
        return Outcome("refused", ": ".join(ranks[0][0]))
    return _compared(ranks)


def _compared(ranks: list[list[str]]) -> Outcome:
    wrong = [f"rank {rank}: {line}" for rank, lines in enumerate(ranks) for line in lines]
    return (
        Outcome("wrong", "\n".join([*wrong[:8], f"{len(wrong)} differences"]))
        if wrong
        else Outcome("right")
    )


def _failed(engine: str, case: Case, world_size: int, text: str) -> Outcome:
    if "not finished after" in text:
        return Outcome("hang", text)
    raised = re.search(r"^\S*Raised: (\[.*\])$", text, re.MULTILINE)
    if raised is None:
        return Outcome("error", text)
    ranks = json.loads(raised[1])
    if any(error and error[0] == OnlyZero3.__name__ for error in ranks):
        return Outcome("-")
    if ENGINES[engine].refuses and _is_refusal(case, world_size, ranks):
        return Outcome("refused", ": ".join(ranks[0]))
    said = [
        f"rank {rank} raised {': '.join(error) if error else 'nothing'}"
        for rank, error in enumerate(ranks)
    ]
    return Outcome("error", "\n".join([*said, text]))
