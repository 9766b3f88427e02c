"""Read, merge, write and put back the allocator options in the environment.

torch reads the options from a variable when CUDA starts, and launchers hand the environment to the
processes that they start. So options in the environment reach every process in time.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Literal

from .grammar import AllocatorOptionError, Value, Version, parse

# torch 2.13 obeys the first of these variables that is set, other versions the last. So we write
# the same text to both of NAMES, and raise when a user's variables disagree.
NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
READ_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

Policy = Literal["merge", "replace", "respect", "refuse"]
POLICIES = ("merge", "replace", "respect", "refuse")


def find_text(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return (variable, text) of the options in the environment; ("", "") where there are none.

    Raises:
        AllocatorOptionError: the variables disagree.
    """
    texts = {name: environ[name] for name in READ_NAMES if environ.get(name, "").strip()}
    if len(set(texts.values())) > 1:
        listed = ", ".join(f"{name}={text!r}" for name, text in texts.items())
        raise AllocatorOptionError(
            next(iter(texts)),
            f"these variables disagree: {listed}; torch versions differ in which one they obey."
            " Keep one of them, or pass environment='replace'",
        )
    return next(iter(texts.items()), ("", ""))


def merge(
    ours: Mapping[str, Value], environ: Mapping[str, str], policy: Policy, version: Version
) -> tuple[dict[str, Value], list[str]]:
    """Join our options with those of the environment.

    The result has every option that only one side names, except that "replace" drops all options of
    the environment. Of an option that both sides name "merge" takes our value and "respect" the
    environment's.

    Returns:
        The options, and a sentence for each option of both sides on which side won.

    Raises:
        AllocatorOptionError: the environment's text is malformed, or both sides name an option with
            different values and the policy is "refuse".
    """
    if policy == "replace":
        return dict(ours), []
    variable, text = find_text(environ)
    try:
        theirs = parse(text, version)
    except AllocatorOptionError as error:
        raise AllocatorOptionError(
            error.option,
            f"{error} (in {variable}={text!r}); correct it or pass environment='replace'",
        ) from error
    result, decisions = {**theirs, **ours}, []
    for name in ours.keys() & theirs.keys():
        if ours[name] == theirs[name]:
            continue
        if policy == "refuse":
            raise AllocatorOptionError(
                name,
                f"the argument is {ours[name]!r} and {variable} says {theirs[name]!r}; make them"
                " agree",
            )
        if policy == "respect":
            result[name] = theirs[name]
        winner, loser = (
            (variable, "the argument") if policy == "respect" else ("the argument", variable)
        )
        decisions.append(f"{name}={result[name]!r}: {winner} wins over {loser}")
    return result, sorted(decisions)


@dataclass
class EnvironmentChange:
    """Variables that we set; `undo` puts back those that still have our text."""

    before: dict[str, str | None] = field(default_factory=dict)  # None: the variable was not set
    written: dict[str, str] = field(default_factory=dict)

    def set(self, environ: MutableMapping[str, str], name: str, text: str) -> None:
        """Set one variable, and keep the value that it had before our first change."""
        self.before.setdefault(name, environ.get(name))
        self.written[name] = text
        environ[name] = text

    def undo(self, environ: MutableMapping[str, str]) -> list[str]:
        """Put the variables back, except those that somebody else has changed; return these."""
        foreign = []
        for name, text in self.before.items():
            if environ.get(name) != self.written[name]:
                foreign.append(name)
            elif text is None:
                del environ[name]
            else:
                environ[name] = text
        self.before.clear()
        self.written.clear()
        return foreign
