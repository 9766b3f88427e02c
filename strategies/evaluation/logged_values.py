"""Logs values of weight zero on a rank that ran no step of an evaluation loader.

Lightning's ``_ResultCollection`` sums logged values over the ranks when a loader ends, name by
name. A rank that has logged nothing would not take part, and its next exchange would meet the sum
of the others. So it logs the names that the others have logged.
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
class LoggedValue:
    """One logged value of a rank.

    Attributes:
        key: its key in Lightning's collection of results.
        meta: how Lightning reduces and shows it; without ``_sync``, which has a function.
        is_synchronised: whether Lightning reduces it over the ranks at the end of the loader.
        rank_zero_only: the option of ``self.log``.
        state: sums of this rank by name, on the CPU; empty for a torchmetrics object, which is
            found by its name in the module.
    """

    key: str
    meta: _Metadata
    is_synchronised: bool
    rank_zero_only: bool
    state: dict[str, Tensor]


def collect_logged(results: _ResultCollection) -> list[LoggedValue]:
    """Return the values that this rank has logged for its current loader."""
    logged = []
    for key, metric in results.items():
        meta = metric.meta
        if metric.has_reset or meta.dataloader_idx != results.dataloader_idx:
            continue
        state = (
            {name: getattr(metric, name).cpu() for name in metric._defaults}
            if metric.is_tensor
            else {}
        )
        sync = meta.sync
        logged.append(
            LoggedValue(key, replace(meta, _sync=None), sync.should, sync.rank_zero_only, state)
        )
    return logged


def log_without_weight(
    logged: list[LoggedValue], results: _ResultCollection, strategy: Strategy
) -> None:
    """Log in ``results`` what another rank has ``logged``, with no weight in sums over the ranks.

    Values that Lightning does not reduce over the ranks are copied from the other rank.
    """
    for value in logged:
        if value.key in results and not results[value.key].has_reset:
            continue
        value.meta.sync = _Sync(
            fn=strategy.reduce, _should=value.is_synchronised, rank_zero_only=value.rank_zero_only
        )
        metric = _ResultMetric(value.meta, is_tensor=bool(value.state))
        if metric.is_tensor:
            for name in metric._defaults:
                state = value.state[name]
                if value.is_synchronised:
                    state = getattr(metric, name).to(state.dtype)
                setattr(metric, name, state.to(strategy.root_device))
        else:
            module, attribute = strategy.lightning_module, value.meta.metric_attribute
            assert module is not None and attribute is not None
            metric.value = module.get_submodule(attribute)
        metric._update_count = 1  # else `_ResultMetric.compute` warns that nothing was logged
        results[value.key] = metric
