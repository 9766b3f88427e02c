"""The module tree as it was sharded: parameters that come, go or are replaced later are refused by name."""

from __future__ import annotations

from itertools import chain

from torch import nn
from torch.optim import Optimizer

from .resting import is_sharded

_REMEDY = (
    "Parameters must exist, for good, when the strategy shards the model: create or replace them in `__init__`, "
    "`configure_model` or `setup`."
)


class Structure:
    """Remembers which objects a model consists of. A check compares identities only, and costs microseconds."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._look()

    def _look(self) -> None:
        # The parameters and the children of every module. Scripted modules have other tables, which do not change.
        tables = [table for module in self.model.modules() for table in (module._parameters, module._modules)]
        self._tables = [table for table in tables if isinstance(table, dict)]
        self._seen = self._identities()
        self._names = {id(p): name for name, p in self.model.named_parameters(remove_duplicate=False)}

    def check(self) -> None:
        """Compare with the model now.

        Raises:
            ValueError: a parameter was added, replaced or removed.
        """
        if self._identities() != self._seen:
            self._refuse()
            self._look()  # only names changed (pruning does that), or modules without parameters: nothing that is sharded

    def _identities(self) -> list[int]:
        # Without a Python loop: this runs in every step.
        return list(map(id, chain.from_iterable(map(dict.values, self._tables))))

    def _refuse(self) -> None:
        now = {id(p): name for name, p in self.model.named_parameters(remove_duplicate=False)}
        for key, name in now.items():
            if key not in self._names:
                raise ValueError(f"Parameter {name!r} was added or replaced after the model was sharded. {_REMEDY}")
        for key, name in self._names.items():
            if key not in now:
                raise ValueError(f"Parameter {name!r} was removed after the model was sharded. {_REMEDY}")


def check_optimizer(optimizer: Optimizer, in_backward: bool) -> None:
    """Refuse steps that would not see their gradients.

    Raises:
        RuntimeError: gradients are being made, and are not yet summed over the ranks.
        ValueError: a group that holds parameters of the model, and not flat shards, was added since the forward of this step.
    """
    if in_backward:
        raise RuntimeError(
            f"{type(optimizer).__name__} was stepped inside of a backward pass (in a hook of a parameter, for instance), where "
            "gradients have not been summed over the ranks. Step it after it."
        )
    for index, group in enumerate(optimizer.param_groups):
        if any(is_sharded(p) for p in group["params"]):
            raise ValueError(
                f"Param group {index} of {type(optimizer).__name__} was added within a step, and the gradients of its "
                "parameters were not kept. Add it between steps (in `on_train_epoch_start` or `on_train_batch_start`)."
            )
