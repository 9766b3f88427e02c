"""An optimizer's own code around ``state_dict`` and ``load_state_dict``, which zero3 does not call.

The strategy saves and loads optimizer states itself, and runs here the hooks and ``__setstate__``
that ``torch.optim.Optimizer.state_dict`` and ``load_state_dict`` would run.
"""

from __future__ import annotations

from typing import Any

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
