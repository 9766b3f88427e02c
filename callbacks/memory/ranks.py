"""Gather every figure of every rank in one packed all-gather, on a group of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Spread:
    """One figure over all ranks."""

    low: float
    mean: float
    high: float
    rank: int  # the rank with the highest value


class RankGatherer:
    """Gathers figures over ranks without touching the device.

    The group uses gloo whatever the training uses, so that the figures stay in host memory and the
    host waits for no stream. hazard: on the group of the training the all-gather could meet another
    collective.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")

    @property
    def world_size(self) -> int:
        """The number of ranks that take part; 1 without torch.distributed."""
        return dist.get_world_size(self._group) if self._group is not None else 1

    def gather(self, figures: Sequence[float]) -> torch.Tensor:
        """Gather the figures of all ranks: [world, figures]; collective.

        Every rank must pass the same number of figures.
        """
        mine = torch.tensor(figures, dtype=torch.float64, device="cpu")
        if self._group is None:
            return mine.unsqueeze(0)
        self.calls += 1
        all_figures = torch.empty(self.world_size * len(figures), dtype=torch.float64, device="cpu")
        _all_gather(all_figures, mine, group=self._group)
        return all_figures.view(self.world_size, len(figures))

    def close(self) -> None:
        """Destroy the group."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def spread(names: Sequence[str], gathered: torch.Tensor) -> dict[str, Spread]:
    """Return the spread of each figure by name, without figures that are NaN on every rank."""
    found = {}
    # In Python: for a few hundred floats each torch operation would cost microseconds.
    for name, column in zip(names, zip(*gathered.tolist(), strict=True), strict=True):
        known = [(value, rank) for rank, value in enumerate(column) if value == value]
        if known:
            values = [value for value, _ in known]
            high = max(values)
            rank = next(rank for value, rank in known if value == high)
            found[name] = Spread(min(values), sum(values) / len(values), high, rank)
    return found


def to_metrics(
    spreads: Mapping[str, Spread], world_size: int, in_full: Sequence[str]
) -> dict[str, float]:
    """Return flat keys for the loggers: the highest value of each figure under its name.

    Over several ranks the names `in_full` also have `/min`, `/mean` and `/max_rank`.
    """
    metrics: dict[str, float] = {}
    for name, figure in spreads.items():
        metrics[name] = figure.high
        if world_size > 1 and name in in_full:
            metrics[f"{name}/min"] = figure.low
            metrics[f"{name}/mean"] = figure.mean
            metrics[f"{name}/max_rank"] = float(figure.rank)
    return metrics
