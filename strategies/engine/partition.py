"""Which modules form a unit: unsharded, used and resharded together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

# below 1 MiB of fp32 an exchange costs its latency, not its bytes: neighbours share a unit
SMALL_NUMEL = 1 << 18

UnitPolicy = (
    Sequence[type[nn.Module] | str]
    | Callable[[nn.Module], Sequence[nn.Module | Sequence[nn.Module]]]
)


@dataclass(eq=False)
class UnitModules:
    """The modules of one unit."""

    members: list[nn.Module]  # whose forward needs the unit; none contains another
    names: list[str]  # theirs in the model
    nested: bool = False  # contains modules of other units, so it stays in use while those run
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For errors and logs."""
        return "+".join(self.names) or "(root)"

    def joined(self, other: UnitModules) -> UnitModules:
        """One unit of the modules of both."""
        return UnitModules(self.members + other.members, self.names + other.names)


def find_units(model: nn.Module, policy: UnitPolicy | None = None) -> list[UnitModules]:
    """Split ``model`` into units that together own every parameter exactly once, in definition
    order.

    Args:
        model: the whole model.
        policy: None takes the children of the outermost
            ``ModuleList``/``Sequential``/``ModuleDict`` that repeat a class (the blocks), and
            every other module that has parameters and no children; neighbours below 1 MiB share a
            unit. A list of module classes (or their names) takes modules of those classes, and of
            classes derived from them, as the blocks instead. A function gets the model and returns
            the units, each a module or a list of modules; what these leave is a unit of its own.

    Raises:
        ValueError: the policy names classes that are not in the model.
    """
    names = {module: name for name, module in model.named_modules()}
    if policy is not None and callable(policy):
        units = [_unit(found, names) for found in policy(model)]
    else:
        blocks = _blocks_of_classes(model, policy) if policy else set(_repeated_blocks(model))
        units = [_unit(module, names) for module in _candidates(model, blocks)]
    units = _join_tied(units)
    if policy is None:
        units = _join_small(units)
    _assign_parameters(model, units)
    return [unit for unit in units if unit.parameters]


def _unit(found: nn.Module | Sequence[nn.Module], names: dict[nn.Module, str]) -> UnitModules:
    # A ModuleList or Sequential is one module here, although it can be iterated.
    members = [found] if isinstance(found, nn.Module) else list(found)
    return UnitModules(members, [names[m] for m in members])


def _can_own(module: nn.Module) -> bool:
    # A module around a scripted one takes its parameters; torch refuses forward hooks on scripted
    # ones.
    return next(module.parameters(), None) is not None and not isinstance(
        module, torch.jit.ScriptModule
    )


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = [child for child in module.children() if _can_own(child)]
    classes = {type(child) for child in children}
    if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict) and len(children) > 1:
        composite = all(any(True for _ in child.children()) for child in children)
        if composite and len(classes) < len(children):
            yield from children
            return
    for child in children:
        yield from _repeated_blocks(child)


def _blocks_of_classes(model: nn.Module, policy: Sequence[type[nn.Module] | str]) -> set[nn.Module]:
    blocks: set[nn.Module] = set()
    for wanted in policy:
        found = [m for m in model.modules() if any(_is_class(c, wanted) for c in type(m).__mro__)]
        if not found:
            raise ValueError(
                f"unit_policy names {wanted!r}, but the model has no module of that class."
            )
        blocks.update(m for m in found if m is not model and _can_own(m))
    return blocks


def _is_class(cls: type, wanted: type[nn.Module] | str) -> bool:
    return wanted in (cls, cls.__name__, f"{cls.__module__}.{cls.__qualname__}")


def _candidates(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if not _can_own(child):
            continue
        if child in blocks:
            yield from (module for module in child.modules() if module in blocks)
        elif any(True for _ in child.children()):
            yield from _candidates(child, blocks)
        else:
            yield child


def _join_tied(units: list[UnitModules]) -> list[UnitModules]:
    """Units that share a parameter become one: a parameter has one unit, unsharded for whoever uses
    it.
    """
    ids = {unit: {id(p) for m in unit.members for p in m.parameters()} for unit in units}
    result: list[UnitModules] = []
    for unit in units:
        place = len(result)
        for other in reversed(result[:]):
            if not ids[other].isdisjoint(ids[unit]) and not _is_inside(unit, other):
                place = result.index(other)
                result.remove(other)
                joined = other.joined(unit)
                ids[joined] = ids[other] | ids[unit]
                unit = joined
        result.insert(place, unit)
    return result


def _is_inside(inner: UnitModules, outer: UnitModules) -> bool:
    return any(module in around.modules() for around in outer.members for module in inner.members)


def _join_small(units: list[UnitModules]) -> list[UnitModules]:
    result: list[UnitModules] = []
    for unit in units:
        joined = result[-1].joined(unit) if result else unit
        numels = {id(p): p.numel() for m in joined.members for p in m.parameters()}
        if result and sum(numels.values()) <= SMALL_NUMEL:
            result[-1] = joined
        else:
            result.append(unit)
    return result


def _assign_parameters(model: nn.Module, units: list[UnitModules]) -> None:
    """Give each parameter to the innermost unit around it, and the rest to a root unit put
    first.
    """
    home: dict[int, UnitModules] = {}
    for unit in units:  # outer units come before the units inside them
        for member in unit.members:
            for p in member.parameters():
                if (taken := home.get(id(p))) is not None and taken is not unit:
                    taken.nested = True
                home[id(p)] = unit
    root = UnitModules([model], [""], nested=True)
    for name, p in model.named_parameters():
        home.get(id(p), root).parameters[name] = p
    if root.parameters:
        units.insert(0, root)
