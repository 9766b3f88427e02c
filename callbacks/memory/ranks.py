"""One packed collective: every figure of every rank in one all-gather, on a group of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

# its name since torch 2.13
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Spread:
    """One figure over all ranks."""

    low: float
    mean: float
    high: float
    rank: int  # that has the highest


class RankGatherer:
    """Gathers figures over ranks without touching the device.

    The group uses gloo whatever the training uses, so that the figures stay in host memory and no
    stream is waited for, and so that it cannot be mixed up with collectives of the training.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")

    @property
    def world_size(self) -> int:
        """Ranks that take part; 1 without torch.distributed."""
        return dist.get_world_size(self._group) if self._group is not None else 1

    def gather(self, figures: Sequence[float]) -> torch.Tensor:
        """Figures of all ranks, [world, figures]; every rank must call it with as many."""
        mine = torch.tensor(figures, dtype=torch.float64, device="cpu")
        if self._group is None:
            return mine.unsqueeze(0)
        self.calls += 1
        everyone = torch.empty(self.world_size * len(figures), dtype=torch.float64, device="cpu")
        _all_gather(everyone, mine, group=self._group)
        return everyone.view(self.world_size, len(figures))

    def close(self) -> None:
        """Give the group back."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def spread(names: Sequence[str], gathered: torch.Tensor) -> dict[str, Spread]:
    """Figures by name; a figure that is NaN on every rank is left out."""
    found = {}
    # In Python: a few hundred floats, where each torch operation would cost microseconds.
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
    """Flat keys for the loggers: the highest under the plain name, the rest below the names
    `in_full`.
    """
    metrics: dict[str, float] = {}
    for name, figure in spreads.items():
        metrics[name] = figure.high
        if world_size > 1 and name in in_full:
            metrics[f"{name}/min"] = figure.low
            metrics[f"{name}/mean"] = figure.mean
            metrics[f"{name}/max_rank"] = float(figure.rank)
    return metrics
