"""Steps of the host on shards in its memory, unit by unit, while the training goes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW

from ..engine import Chunk, Entry, HostChunk, OptimizerStep, StandIns, State

# Of torch, with fused kernels for the CPU. They update each element by itself, so that a step may
# be done in parts.
FUSED = frozenset({Adam, AdamW, SGD, Adagrad})

Options = dict[str, Any]  # of a param group


class HostShards(StandIns):
    """Shards that are stepped on when the optimizer's own step, of nothing, is over.

    Each unit's are by a copy of the optimizer, with the options of that moment, and with fused
    kernels.
    """

    steps_later = True

    def __init__(self, engine: Any, step: OptimizerStep) -> None:
        super().__init__(engine)
        self._step = step

    def load(self, groups: Sequence[Sequence[Entry]]) -> None:
        """See :meth:`StandIns.load`; each unit's are loaded as it is stepped on."""

    def store(self, groups: Sequence[Sequence[Entry]]) -> None:
        """See :meth:`StandIns.store`; the worker will."""
        optimizer, state = self._step.optimizer, self._step.state
        # what a gradient scaler tells fused kernels
        scaling = {
            name: value.to("cpu", copy=True)
            for name in ("grad_scale", "found_inf")
            if isinstance(value := getattr(optimizer, name, None), Tensor)
        }
        has_gradient = self.engine.gradients.has_gradient
        work: dict[Chunk, list[tuple[Options, list[Entry]]]] = defaultdict(list)
        for group, entries in zip(optimizer.param_groups, groups, strict=True):
            options = {
                # hazard: a kernel of the host would read one that is still being copied
                key: value.to("cpu", copy=True) if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            by_chunk: dict[Chunk, list[Entry]] = defaultdict(list)
            for entry in filter(has_gradient, entries):
                by_chunk[entry.chunk].append(entry)
            for chunk, its in by_chunk.items():
                work[chunk].append((options, its))
        for chunk in sorted(work, key=lambda chunk: chunk.entries[0].unit.index):
            step = partial(self._change, work[chunk], state, scaling)
            if isinstance(chunk, HostChunk):
                chunk.step_with(step)
            else:
                step(chunk.room_for_gradients())

    def finish(self) -> None:
        """See :meth:`StandIns.finish`."""
        self.engine.wait_for_host()

    def _change(
        self,
        groups: Sequence[tuple[Options, list[Entry]]],
        state: dict[Any, State],
        scaling: dict[str, Tensor],
        gradients: Tensor,
    ) -> None:
        its = self._step.optimizer
        optimizer = type(its).__new__(type(its))  # without the hooks, which have run
        optimizer.__setstate__({"defaults": its.defaults, "state": {}, "param_groups": []})
        optimizer.state = state  # type: ignore[assignment]
        vars(optimizer).update(scaling)
        for options, entries in groups:
            for entry in entries:
                entry.shard.grad = entry.part_of(gradients)
            shards: list[nn.Parameter] = [entry.shard for entry in entries]
            if shards[0].device.type == "cpu" and shards[0].is_floating_point():
                options = {**options, "fused": True, "foreach": False, "differentiable": False}
            optimizer.param_groups.append({**options, "params": shards})
        step: Any = type(its).step
        step.__wrapped__(optimizer)  # past hooks on all optimizers: they have run
        for shard in (entry.shard for _, entries in groups for entry in entries):
            shard.grad = None
