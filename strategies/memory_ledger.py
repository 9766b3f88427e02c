"""Bytes of model state on this rank: by what they are for, and by the unit that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from .engine import Zero3Engine


def by_category(engine: Zero3Engine, module: nn.Module) -> dict[str, int]:
    """Parameters, gradients, optimizer_state, unsharded_units, reduce_buffer and buffers; with
    offload what is in host memory, apart.
    """
    values = [tensor for chunk in engine.chunks for tensor in chunk.shards()]
    gradients = [chunk.gradients for chunk in engine.chunks if chunk.gradients is not None]
    states = [state for step in engine.steps.values() for state in step.state.values()]
    kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def on_device(tensors: Sequence[Tensor]) -> int:
        # an optimizer's counter of steps may be on the host, too, and is no memory to speak of
        return sum(t.nbytes for t in tensors if t.device == engine.device or not t.dim())

    everything = [*values, *gradients, *kept]
    return {
        "parameters": on_device(values),
        "gradients": on_device(gradients),
        "unsharded_units": engine.pool.memory.nbytes,
        "reduce_buffer": engine.reducer.buffer.nbytes,
        "optimizer_state": on_device(kept),
        "host": sum(tensor.nbytes for tensor in everything) - on_device(everything),
        "buffers": sum(buffer.nbytes for buffer in module.buffers()),
    }


def by_unit(engine: Zero3Engine) -> dict[str, int]:
    """This rank's shards of parameters, gradients and optimizer state.

    State of optimizers that look at whole tensors is missing: it belongs to parameters that this
    rank owns, not to its shards.
    """
    states = [step.state for step in engine.steps.values()]

    return {
        unit.name: sum(
            value.nbytes
            for values in (
                *((chunk.shards()[0], chunk.gradients) for chunk in unit.chunks),
                *(state.get(e.shard, {}).values() for state in states for e in unit.entries),
            )
            for value in values
            if isinstance(value, Tensor)
        )
        for unit in engine.units
    }
