"""Values logged in evaluation, on a rank that ran no step of a loader: the same names as elsewhere,
with no weight.

Lightning sums logged values over the ranks when a loader ends, name by name. A rank that has logged
nothing would not take part, and its next exchange would meet the sum of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor


@dataclass(frozen=True)
class Logged:
    """One logged value.

    Attributes:
        key: in Lightning's collection of results.
        meta: how it is reduced and shown, without the function that does it.
        synchronised: over the ranks, at the end of the loader.
        rank_zero_only: as in ``self.log``.
        state: what is summed up on this rank; empty for a torchmetrics object, which is reached by
            its name in the module.
    """

    key: str
    meta: _Metadata
    synchronised: bool
    rank_zero_only: bool
    state: dict[str, Tensor]


def describe(results: _ResultCollection) -> list[Logged]:
    """What this rank has logged for the loader that it is at."""
    found = []
    for key, metric in results.items():
        meta = metric.meta
        if metric.has_reset or meta.dataloader_idx != results.dataloader_idx:
            continue
        state = (
            {name: getattr(metric, name).cpu() for name in metric._defaults}
            if metric.is_tensor
            else {}
        )
        found.append(
            Logged(
                key, replace(meta, _sync=None), meta.sync.should, meta.sync.rank_zero_only, state
            )
        )
    return found


def adopt(logged: list[Logged], results: _ResultCollection, strategy: Strategy) -> None:
    """Log the same, with no weight in what is summed; a value that stays on its rank is the other
    rank's.
    """
    for one in logged:
        if one.key in results and not results[one.key].has_reset:
            continue
        one.meta.sync = _Sync(
            fn=strategy.reduce, _should=one.synchronised, rank_zero_only=one.rank_zero_only
        )
        metric = _ResultMetric(one.meta, is_tensor=bool(one.state))
        if metric.is_tensor:
            for name, default in metric._defaults.items():
                value = default.to(one.state[name].dtype) if one.synchronised else one.state[name]
                setattr(metric, name, value.to(strategy.root_device))
        else:
            assert one.meta.metric_attribute is not None
            metric.value = strategy.lightning_module.get_submodule(one.meta.metric_attribute)
        metric._update_count = 1  # or torchmetrics warns that nothing was logged
        results[one.key] = metric
