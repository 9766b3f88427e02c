"""Who owns sharded parameters, as seen from here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, nn


class Home(Protocol):
    """The owner of parameters; see :class:`~.engine.access.Access`."""

    in_step: bool  # all ranks run the same code: a read may gather, and a change may be stored

    def retire(self) -> None:
        """Another engine has taken the parameters over: stop watching them."""

    def read(self, parameter: nn.Parameter) -> Tensor:
        """The whole value in memory of its own, connected to autograd; collective."""

    def full_values(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """The whole values, detached, of parameters that share this home; collective, each unit is gathered once."""

    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Store a full value that all ranks have; local."""

    def age(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Another one whenever its value has changed."""

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The whole reduced gradient, if the optimizers see one; collective then."""

    def set_gradient(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        """Store a full gradient that all ranks have, or clear it; local."""

    def keep_gradient(self, gradient: Tensor) -> None:
        """``gradient`` was changed in place: store it, if it is still what the parameter has; local."""
