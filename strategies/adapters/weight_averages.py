"""Averages of a sharded model's weights (EMA, SWA), themselves sharded.

Averaging is elementwise, so each rank averages its own flat tensors; nothing is gathered. The state
dict of an average has the names and shapes of the module, as if it were a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ..engine import Zero3Engine
from ..engine.shards import FlatGroup
from ..engine.unit import Unit


class ShardedModel(Protocol):
    """The strategy, as seen from here."""

    engine: Zero3Engine
    lightning_module: nn.Module

    def sliced_state_dict(self, flats: Callable[[FlatGroup], Tensor | None]) -> dict[str, Any]:
        """The module's, with slices of ``flats``; local."""


class Shards(nn.Module):
    """A sharded module as a list of tensors: its parameters are this rank's flat tensors, its
    buffers the module's.

    A deep copy has tensors of its own, and is a sharded copy of the module.
    """

    def __init__(self, model: ShardedModel) -> None:
        super().__init__()
        self._model = model
        for k, group in enumerate(model.engine.groups):
            self.register_parameter(f"flat_{k}", nn.Parameter(group.data, requires_grad=False))
        for k, buffer in enumerate(model.lightning_module.buffers()):
            self.register_buffer(f"buffer_{k}", buffer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Shards:
        """The copy."""
        copy = Shards(self._model)
        for parameter in copy.parameters():
            parameter.data = parameter.data.clone()
        for name, buffer in copy.named_buffers():
            copy._buffers[name] = buffer.clone()
        return copy

    def current(self) -> Shards:
        """The module as it is now."""
        return Shards(self._model)

    def exchange(self) -> None:
        """Swap the values of this copy with those of the module."""
        for mine, theirs in self._pairs():
            value = mine.clone()
            mine.copy_(theirs)
            theirs.copy_(value)
        self._model.engine.weights_changed()

    def store(self, buffers: bool) -> None:
        """Give the module the values of this copy."""
        for mine, theirs in self._pairs(buffers):
            theirs.copy_(mine)
        self._model.engine.weights_changed()

    def follow(self, old: Zero3Engine, new: Zero3Engine) -> None:
        """The module was sharded anew: so is this copy; collective."""
        flats = list(self.parameters())
        sources = {
            group: flat.to(old.device) for group, flat in zip(old.groups, flats, strict=True)
        }
        targets = {group: torch.zeros_like(group.data) for group in new.groups}
        for before, unit in zip(old.units, new.units, strict=True):
            # not WholeUnit's, which would look at its former parameters
            full = Unit.full(before, sources.get)
            for entry in unit.entries:
                entry.store(full[entry.name], targets[entry.group])
        for k in range(len(flats)):
            del self._parameters[f"flat_{k}"]
        for k, group in enumerate(new.groups):
            self.register_parameter(
                f"flat_{k}", nn.Parameter(targets[group].to(flats[0].device), requires_grad=False)
            )

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Of the module, with slices of this copy and its buffers; local."""
        destination = {} if destination is None else destination
        flats = dict(
            zip(self._model.engine.groups, (p.detach() for p in self.parameters()), strict=True)
        )
        buffers = dict(
            zip(map(id, self._model.lightning_module.buffers()), self.buffers(), strict=True)
        )
        for key, value in self._model.sliced_state_dict(flats.get).items():
            destination[prefix + key] = buffers.get(id(value), value)
        return destination

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self.exchange()
        wanted = {
            key.removeprefix(prefix): value
            for key, value in state_dict.items()
            if key.startswith(prefix)
        }
        self._model.lightning_module.load_state_dict(wanted, strict=args[1])
        self.exchange()

    def _pairs(self, buffers: bool = True) -> list[tuple[Tensor, Tensor]]:
        mine, theirs = list(self.parameters()), list(self.current().parameters())
        if buffers:
            mine, theirs = [*mine, *self.buffers()], [*theirs, *self.current().buffers()]
        return [(a.detach(), b.detach()) for a, b in zip(mine, theirs, strict=True)]


class ShardedAverage(AveragedModel):
    """torch's ``AveragedModel`` of a sharded module: ``module`` is a sharded copy."""

    def update_parameters(self, model: nn.Module) -> None:
        """Take the weights of the module into the average."""
        super().update_parameters(self.module.current())

    def follow(self, old: Zero3Engine, new: Zero3Engine) -> None:
        """See :meth:`Shards.follow`."""
        self.module.follow(old, new)


def require_elementwise_average(
    name: str, average: Callable[[list[nn.Module]], Iterable[Tensor]]
) -> None:
    """Refuse an averaging function that would be wrong on flat tensors, by trying it on whole
    vectors and on their parts.

    Args:
        name: of the callback it belongs to.
        average: from models to the parameters of their average.

    Raises:
        ValueError: the parts of the average are not the average of the parts.
    """
    values = torch.randn(4, 40, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    cuts = ([40], [13, 27])
    found = [
        average([nn.ParameterList(map(nn.Parameter, row.split(cut))) for row in values])
        for cut in cuts
    ]
    whole, parts = (torch.cat([p.detach() for p in parameters]) for parameters in found)
    if not torch.allclose(whole, parts, rtol=1e-4, atol=1e-6):
        raise ValueError(
            f"The averaging function of {name} does not average each element by itself, and"
            " Zero3Strategy gives it slices of parameters. Use an elementwise one, like"
            " `torch.optim.swa_utils.get_ema_avg_fn`."
        )
