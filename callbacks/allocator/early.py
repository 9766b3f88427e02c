"""Set allocator options before torch is imported, which `backend` needs above all.

From the command line, for any script and any launcher that inherits the environment:

    python -m lightning_zero3.callbacks.allocator_early backend:cudaMallocAsync -- train.py

Or in the first lines of a script; the process then restarts itself once, before it has done
anything:

    from lightning_zero3.callbacks import allocator_early
    allocator_early.ensure("backend:cudaMallocAsync")

Both check the options and start a fresh interpreter with them in its environment.
"""

import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from importlib.metadata import version as installed_version

from .environment import NAMES, merge
from .grammar import Version, parse, to_text
from .rules import Surroundings, check_conflicts

# Variable set by a restart: a process that has it and still the wrong options fails, else it would
# restart without end.
MARKER = "LIGHTNING_ZERO3_ALLOCATOR_RESTARTED"
USAGE = (
    "usage: python -m lightning_zero3.callbacks.allocator_early OPTION:VALUE[,OPTION:VALUE...] --"
    " script.py [args]"
)


def torch_version() -> Version:
    """Return (major, minor) of the installed torch, without importing it."""
    major, minor = installed_version("torch").split("+")[0].split(".")[:2]
    return int(major), int(minor)


def prepare(options: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set for these options joined with those of the environment."""
    version = torch_version()
    merged, _ = merge(parse(options, version), environ, "merge", version)
    check_conflicts(merged, Surroundings(version))
    return dict.fromkeys(NAMES, to_text(merged))


def ensure(options: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Return if this process was started with these options, else restart it once with them.

    Raises:
        RuntimeError: a restart has set other options, or CUDA has started in this process.
    """
    wanted = prepare(options, environ)
    if all(environ.get(name) == text for name, text in wanted.items()):
        environ.pop(MARKER, None)  # a child process that needs other options may restart, too
        return
    if MARKER in environ:
        raise RuntimeError(
            f"the process was restarted with {environ[MARKER]!r} and now {options!r} is wanted:"
            " call ensure() once, with all options, as the first thing the script does"
        )
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError(
            f"too late for {options!r}: CUDA has started in this process. Move this call to the top"
            f" of the script, or use: {USAGE.removeprefix('usage: ')}"
        )
    environ.update(wanted)
    environ[MARKER] = options
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], dict(environ))


def main(arguments: Sequence[str]) -> None:
    """Start `script.py` in a fresh interpreter with the options in its environment."""
    if len(arguments) < 3 or arguments[1] != "--":
        raise SystemExit(USAGE)
    os.environ.update(prepare(arguments[0], os.environ))
    os.execve(sys.executable, [sys.executable, *arguments[2:]], dict(os.environ))


if __name__ == "__main__":
    main(sys.argv[1:])
