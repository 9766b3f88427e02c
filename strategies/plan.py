"""``python -m lightning_zero3 plan``: what a training will need on each rank, before it runs.

State follows from the layout of the shards, for which nothing is allocated. Activations are those
of one forward and backward on tensors without memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import traceback
import weakref
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .engine import HostChunk, Offload, Unit, find_units
from .engine.build import build_units, trained_parameters
from .engine.reduction import reduce_layout
from .engine.unit import pool_layout
from .optimizers.classify import ELEMENTWISE
from .optimizers.trial import train_copy
from .support import parse_size

DESCRIPTION = "tell what memory each rank of a training needs, from its script, without the ranks"
PLAN = "LIGHTNING_ZERO3_PLAN"  # set for a script that is to be planned: options as JSON
_TOLD = 64  # a script's exit code where a plan was told, and nothing is wrong
_CLI = (
    "import lightning_zero3; from lightning.pytorch.cli import LightningCLI;"
    " LightningCLI(save_config_callback=None)"
)
_LASTING = ("parameters", "optimizer state", "unsharded units", "reduce buffer", "buffers")
_SHOWN = (*_LASTING, "gradients", "activations", "optimizer's step", "most in a step", "host")

State = Counter[str]  # bytes by what they are for


# ---------------------------------------------------------------------------------------- command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    about = "that trains with zero3, and its arguments; or a configuration of a CLI, *.yaml"
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help=about)
    parser.add_argument("--devices", type=int, required=True, help="ranks on each node")
    parser.add_argument("--nodes", type=int, default=1)
    size = partial(parse_size, "memory", "")
    parser.add_argument("--device-memory", type=size, help="of a GPU: 24GiB")
    parser.add_argument("--host-memory", type=size, help="of a node, for offload: 64GiB")
    parser.add_argument("--json", action="store_true", help="print bytes as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the script up to its training, which prints the plan.

    Returns:
        0, or the script's exit code; 2 if it ends well without a training.
    """
    environment = {**os.environ, PLAN: json.dumps(vars(arguments))}
    is_config = "".join(arguments.script[:1]).endswith(".yaml")
    script = ["-c", _CLI, "fit", "--config"] if is_config else []
    code = subprocess.run([sys.executable, *script, *arguments.script], env=environment).returncode
    if code == 0:
        print(
            f"There is no plan: {' '.join(arguments.script)} has ended, and did not call"
            " `trainer.fit` with zero3.\nGive it the arguments with which it trains, and"
            ' `Trainer(strategy="zero3")`.',
            file=sys.stderr,
        )
        return 2
    return 0 if code == _TOLD else code


def show_plan(
    trainer: pl.Trainer, options: dict[str, Any], shard_size: int | None, gradients_stay: bool
) -> None:
    """Print what each rank of a run would need, and end the process.

    Args:
        trainer: is about to train, on one process.
        options: of the engine, and `activations`.
        shard_size: that many ranks share a copy of the model; None: all.
        gradients_stay: whether gradients are there in the next forward.

    Raises:
        SystemExit: always; with a limit its code is 2 if activations could not be counted, 1 if
            something does not fit; else it is `_TOLD`.
    """
    asked = json.loads(os.environ[PLAN])
    ranks = asked["devices"] * asked["nodes"]
    # a device with memory of its own is none of the host's
    on_gpu = bool(trainer.strategy.root_device.type != "cpu" or asked["device_memory"])
    module, own, moves = trainer.lightning_module, options["offload"], options["activations"]
    world_size = min(shard_size or ranks, ranks)
    laid_out, plans = {}, {}
    for kind in (own, Offload("optimizer"), Offload("parameters")):
        its = module, trainer.optimizers, {**options, "offload": kind}, world_size
        laid_out[kind] = lay_out(*its)
        plans[kind] = count_state(laid_out[kind], *its, on_gpu)
    units, comment = laid_out[own], ""
    entries = [(c, e) for unit in units for c in unit.chunks for e in c.entries]
    # the gradient that comes last, before its unit's part of the shards
    last = max(
        e.size.numel() * (c.dtype.itemsize - c.master_dtype.itemsize // world_size)
        for c, e in entries
        if e.trained
    )
    activations = 0
    try:
        activations = _count_activations(trainer, {id(e.parameter): c.dtype for c, e in entries})
    except Exception as error:
        traceback.print_exc()
        comment = f", without activations ({type(error).__name__}, see above)"
    lacks = {}
    for kind, state in plans.items():
        # what is under way to the host is not counted
        kept = min(activations, activations if moves is None else moves)
        moments = [kept, state["gradients"] + max(last, state["optimizer's step"])]
        if gradients_stay or on_gpu or state["host"]:
            moments[0] += state["gradients"]
        state["activations"] = kept
        state["host"] += activations - kept
        state["most in a step"] = sum(state[name] for name in _LASTING) + max(moments)
        needed = {"device": state["most in a step"], "host": state["host"] * asked["devices"]}
        lacks[kind] = [
            f"the {place} lacks {size_text(nbytes - limit)}"
            for place, nbytes in needed.items()
            if (limit := asked[f"{place}_memory"]) and nbytes > limit
        ]
    has_limit = bool(asked["device_memory"] or asked["host_memory"])
    if asked["json"]:
        print(json.dumps({**plans[own], "units": [unit.name for unit in units]}))
    else:
        names = Counter(re.sub(r"\d+", "*", unit.name) for unit in units)
        print(f"{type(module).__name__}: each of {ranks} ranks needs{comment}")
        print("  units:", ", ".join(f"{name} x {n}" for name, n in names.items()))
        rows = {"": ["as it is" if kind is own else f"offload={kind.kind!r}" for kind in plans]}
        for name in _SHOWN:
            rows[name] = [size_text(state[name]) for state in plans.values()]
        if has_limit:
            rows["state fits" if comment else "fits"] = [
                " and ".join(lack) or "yes" for lack in lacks.values()
            ]
        for name, cells in rows.items():
            print(f"  {name:<18}", *(f"{cell:>26}" for cell in cells))
        if lacks[own]:
            print(
                "Activations shrink with torch.utils.checkpoint, smaller batches"
                " (accumulate_grad_batches) and activations='host'; state with more ranks."
            )
    raise SystemExit(2 if has_limit and comment else 1 if lacks[own] else _TOLD)


def size_text(nbytes: int) -> str:
    """Return bytes as text; a dash for what takes none, or cannot be counted."""
    if not nbytes:
        return "-"
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


# ------------------------------------------------------------------------------------------ state


def lay_out(
    module: nn.Module, optimizers: Sequence[Optimizer], options: dict[str, Any], world_size: int
) -> list[Unit]:
    """Return the units that an engine with these ``options`` would have; nothing is allocated."""
    ranks: Any = SimpleNamespace(alone=_is_alone(options, world_size), world_size=world_size)
    parts = find_units(module, options["unit_policy"])
    trained = trained_parameters(module, optimizers)
    return build_units(parts, trained, options["slot_dtype"], ranks, offload=options["offload"])


def _is_alone(options: dict[str, Any], world_size: int) -> bool:
    """Say whether parameters view their shards."""
    return world_size == 1 and options["offload"] is options["activations"] is None


def count_state(
    units: Sequence[Unit],
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    options: dict[str, Any],
    world_size: int,
    on_gpu: bool,
) -> State:
    """Count the bytes that a rank will have.

    Args:
        units: those of the engine.
        module: stays as it is.
        optimizers: stay as they are; copies of them step on tensors without memory. One that asks
            for values there (Adafactor) is left out.
        options: of the engine, and `activations`.
        world_size: number of ranks that share a copy of the model.
        on_gpu: reductions overlap the backward there.

    Returns:
        bytes by what they are for; "host" is what offload keeps in host memory of all this.
    """
    offload, is_alone = options["offload"], _is_alone(options, world_size)
    found = State(buffers=sum(buffer.nbytes for buffer in module.buffers()))
    for chunk in (chunk for unit in units for chunk in unit.chunks):
        nbytes = chunk.layout.shard_numel * chunk.master_dtype.itemsize
        if isinstance(chunk, HostChunk):
            found["host"] += sum(chunk.sizes())
            if offload.kind == "optimizer":
                found["parameters"] += chunk.layout.shard_numel * chunk.dtype.itemsize
        else:
            found["parameters"] += nbytes
            found["gradients"] += nbytes * chunk.trained
    once = options["reduce_once"] and not is_alone
    found["unsharded units"] = pool_layout(units, is_alone).nbytes
    found["reduce buffer"] = reduce_layout([u for u in units if u.trained], once, on_gpu).nbytes
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            with suppress(Exception):
                its = _count_group(optimizer, group, units, world_size, on_gpu)
                found.update(its)
    return found


def _count_group(
    optimizer: Optimizer,
    group: dict[str, Any],
    units: Sequence[Unit],
    world_size: int,
    on_gpu: bool,
) -> State:
    """Count what a copy of an optimizer keeps of tensors without memory, as large as a rank's."""
    ids = {id(p) for p in group["params"] if p.requires_grad}
    # Others than elementwise optimizers step on whole parameters, of which each rank has its share.
    is_cut = type(optimizer) in ELEMENTWISE
    shards = {
        nn.Parameter(
            torch.empty(
                [e.size.numel() // world_size] if is_cut else e.size, dtype=e.dtype, device="meta"
            )
        ): isinstance(chunk, HostChunk)
        for unit in units
        for chunk in unit.chunks
        for e in chunk.entries
        if id(e.parameter) in ids
    }
    own = {k: v for k, v in group.items() if k != "params"}
    is_fused = own.get("fused")
    if is_fused:  # its kernels have no form without memory, and take none
        own["fused"] = None
    elif on_gpu and own.get("foreach", False) is None:
        own["foreach"] = True  # torch's choice for parameters there
    grads = [torch.empty_like(p) for p in shards]
    with _LiveBytes() as live:
        kept = train_copy(optimizer, own, [*shards], [grads]).state
    found = State()
    for p, is_hosted in shards.items():
        nbytes = sum(value.nbytes for value in kept[p].values() if isinstance(value, Tensor))
        where = "host" if is_hosted else "optimizer state"
        found[where] += nbytes if is_cut else nbytes // world_size
    if not is_fused and not found["host"]:
        found["optimizer's step"] = live.peak - live.now
    if not is_cut:  # for its step a rank has its share of weights and gradients, and a unit, whole
        whole = max(c.layout.numel * c.master_dtype.itemsize for u in units for c in u.chunks)
        found["optimizer's step"] += 2 * (sum(p.nbytes for p in shards) // world_size + whole)
    return found


# ------------------------------------------------------------------------------------ activations


class _LiveBytes(TorchDispatchMode):
    """Counts the storages of what operations return in the block, until they are freed."""

    now = peak = 0

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()  # storages that have been counted, or are not to be

    def _free(self, storage: int, nbytes: int) -> None:
        self.known.discard(storage)
        self.now -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, Tensor)):
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
                self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return out


def _count_activations(trainer: pl.Trainer, dtypes: Mapping[int, torch.dtype]) -> int:
    """Run one forward and backward of the module, whose parameters lose their values for good.

    Args:
        trainer: is about to train; its first batch is taken.
        dtypes: dtype that a parameter is unsharded in, by its ``id``.

    Returns:
        the most bytes at once of activations and of one parameter's gradient.

    Raises:
        Exception: whatever the module raises, as where it asks a tensor for its values.
    """
    # Imported here, as the import takes its time.
    from torch._subclasses.fake_tensor import FakeTensorMode

    module, strategy = trainer.lightning_module, trainer.strategy
    loader = trainer.fit_loop._data_source.dataloader()
    loader = loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader)
    batch = trainer.precision_plugin.convert_input(next(iter(loader))[0])
    batch = strategy.batch_to_device(batch, dataloader_idx=0)
    inputs = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0)
    _update_properties(module, device=strategy.root_device)
    # Lightning's need a loop that runs
    vars(module).update(dict.fromkeys(("log", "log_dict"), lambda *args, **kwargs: None))
    mode, live, made = FakeTensorMode(allow_non_fake_inputs=True), _LiveBytes(), dict[int, Any]()

    def without_memory(old: Tensor) -> Tensor:
        dtype = dtypes.get(id(old), old.dtype)
        new = torch.empty(old.size(), dtype=dtype, device=strategy.root_device)
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, old.requires_grad)
            if old.requires_grad:
                new.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        return made.setdefault(id(old), new)

    inputs = tree_map_only(Tensor, mode.from_tensor, inputs)
    with mode:
        tables: Any = (its for m in module.modules() for its in (m._parameters, m._buffers))
        for its in tables:
            its.update({k: without_memory(old) for k, old in its.items() if old is not None})
        live.known = {tensor.untyped_storage()._cdata for tensor in made.values()}
        with live, trainer.precision_plugin.train_step_context():
            output = module.training_step(*inputs.values())
            loss: Any = output["loss"] if isinstance(output, Mapping) else output
        with live:
            loss.backward()
    return live.peak
