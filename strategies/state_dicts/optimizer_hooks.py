"""An optimizer's own code around ``state_dict`` and ``load_state_dict``, which zero3 does not call.

The strategy saves and loads optimizer states itself, and runs here the hooks and ``__setstate__``
that ``torch.optim.Optimizer.state_dict`` and ``load_state_dict`` would run.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from ..engine import OptimizerStep

NO_STATES = (
    "it has no optimizer states (a `validate`, `test` or `predict` has begun since the `fit`, or"
    " spawned processes have ended), so no `fit` can go on from this file.\nSave before that, or,"
    " where weights are all you want, with `weights_only=True`."
)


def run_hooks(optimizer: Optimizer, kind: str, *state: dict[str, Any]) -> Any:
    """Run the user's hooks of a kind in torch's order; return ``state`` as the hooks changed it.

    Hooks of this package are left out: they work on other states than the one saved here.
    """
    for hook in vars(optimizer).get(f"_optimizer_{kind}_hooks", {}).values():
        if not getattr(hook, "__module__", "").startswith(__name__.partition(".")[0]):
            changed = hook(optimizer, *state)
            state = (changed,) if state and changed is not None else state
    return state[0] if state else None


def finish_loading(step: OptimizerStep) -> None:
    """Run ``__setstate__`` and the hooks after loading, as ``Optimizer.load_state_dict`` does.

    To be called when all values have been read: this code may change them.
    """
    optimizer = step.optimizer
    with step.stand_ins_there():
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
        run_hooks(optimizer, "load_state_dict_post")


def warn_of_methods(optimizer: Optimizer) -> None:
    """Warn if an optimizer's class overrides how states are saved or loaded."""
    cls = type(optimizer)
    own = [
        name
        for name in ("state_dict", "load_state_dict")
        if getattr(cls, name) is not getattr(Optimizer, name)
    ]
    if own:
        rank_zero_warn(
            f"{cls.__name__} has its own {' and '.join(f'`{name}`' for name in own)}, which zero3"
            " does not call: only `state` and `param_groups` of optimizers are saved and loaded.\n"
            "Keep what belongs to no parameter in `state`, under a string, and adjust what was"
            " loaded in `__setstate__`."
        )
