"""Sharded averages of a sharded model's weights (EMA, SWA).

Averaging is elementwise, so each rank averages its own shards, and no weight is gathered. The
state dict of an average has the names and shapes of the module's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ..engine import Zero3Engine


class Shards(nn.Module):
    """A sharded module as a list of tensors.

    Its parameters are this rank's shards, its buffers the module's. A deep copy has tensors
    of its own, and is a sharded copy of the module.

    Args:
        model: a `Zero3Strategy`, which this room may not import, with an engine.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model
        for k, chunk in enumerate(model.engine.chunks):
            self.register_parameter(f"shard_{k}", nn.Parameter(chunk.values, requires_grad=False))
        for k, buffer in enumerate(model.lightning_module.buffers()):
            self.register_buffer(f"buffer_{k}", buffer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Shards:
        """Return a sharded copy of the module, with tensors of its own."""
        copy = Shards(self._model)
        for parameter in copy.parameters():
            parameter.data = parameter.data.clone()
        for name, buffer in copy.named_buffers():
            copy._buffers[name] = buffer.clone()
        return copy

    def shards_of_module(self) -> Shards:
        """Return the module's own tensors of this moment."""
        return Shards(self._model)

    def swap_values(self) -> None:
        """Swap the values of this copy with those of the module."""
        for mine, theirs in self._pairs():
            value = mine.clone()
            mine.copy_(theirs)
            theirs.copy_(value)
        self.weights_changed()

    def write_to_module(self) -> None:
        """Write the values of this copy to the module."""
        for mine, theirs in self._pairs():
            theirs.copy_(mine)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Tell the engine that the module's shards were written to."""
        self._model.engine.weights_changed()

    def reshard(self, old: Zero3Engine, new: Zero3Engine) -> None:
        """Shard this copy as ``new`` shards the module, instead of ``old``; collective."""
        sources = dict(zip(old.chunks, self.parameters(), strict=True))
        self._parameters.clear()
        for old_unit, unit in zip(old.units, new.units, strict=True):
            whole = old_unit.full(lambda chunk: sources[chunk].to(old.device))
            for chunk in unit.chunks:
                shard = torch.zeros_like(chunk.values)
                for entry in chunk.entries:
                    entry.part_of(shard).copy_(entry.cut(whole[entry.name]))
                device = sources[old_unit.chunks[0]].device
                self.register_parameter(
                    f"shard_{len(self._parameters)}",
                    nn.Parameter(shard.to(device), requires_grad=False),
                )

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return the module's state dict with this copy's slices and buffers; no exchange."""
        destination = {} if destination is None else destination
        shards = dict(
            zip(self._model.engine.chunks, (p.detach() for p in self.parameters()), strict=True)
        )
        buffers = dict(
            zip(map(id, self._model.lightning_module.buffers()), self.buffers(), strict=True)
        )
        for key, value in self._model.sliced_state_dict(shards.__getitem__).items():
            destination[prefix + key] = buffers.get(id(value), value)
        return destination

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # The module loads the values, so it has this copy's for that time.
        self.swap_values()
        wanted = {
            key.removeprefix(prefix): value
            for key, value in state_dict.items()
            if key.startswith(prefix)
        }
        self._model.lightning_module.load_state_dict(wanted, strict=args[1])
        self.swap_values()

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        mine, theirs = (
            [t.detach() for t in (*shards.parameters(), *shards.buffers())]
            for shards in (self, self.shards_of_module())
        )
        return list(zip(mine, theirs, strict=True))


class ShardedAverage(AveragedModel):
    """torch's ``AveragedModel`` of a sharded module; its ``module`` is a sharded copy."""

    module: Shards

    def update_parameters(self, model: nn.Module) -> None:
        """Add the weights of the module to the average; ``model`` is not read."""
        super().update_parameters(self.module.shards_of_module())

    def reshard(self, old: Zero3Engine, new: Zero3Engine) -> None:
        """Shard the average as ``new`` shards the module; see :meth:`Shards.reshard`."""
        self.module.reshard(old, new)


def require_elementwise(average: Callable[[Tensor, Tensor, Tensor], Tensor], callback: str) -> None:
    """Try an averaging function (of average, weight and count) on vectors and on their parts.

    Raises:
        ValueError: the parts of its average are not the averages of the parts.
    """
    random, count = torch.Generator("cpu").manual_seed(0), torch.tensor(1, device="cpu")
    old, new = torch.randn(2, 40, generator=random, device="cpu")
    pairs = zip(old.clone().split(13), new.clone().split(13), strict=True)
    parts = [average(x, y, count) for x, y in pairs]
    if not torch.allclose(torch.cat(parts), average(old, new, count), atol=1e-6):
        raise ValueError(
            f"The averaging function of {callback} does not average each element by itself, and"
            " Zero3Strategy gives it slices of parameters. Use an elementwise one, like"
            " `torch.optim.swa_utils.get_ema_avg_fn`."
        )
