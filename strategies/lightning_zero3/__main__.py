"""Runs ``python -m lightning_zero3 COMMAND``; each command is a module."""

from __future__ import annotations

import argparse
import importlib
import sys

from .strategies.state_dicts.collective_errors import CheckpointError
from .strategies.support import printable

# Command -> module with `DESCRIPTION`, `add_arguments(parser)` and `run(arguments) -> exit code`.
COMMANDS = {
    "env": "lightning_zero3.strategies.launch.env_command",
    "consolidate": "lightning_zero3.strategies.checkpoints.consolidate",
    "export": "lightning_zero3.callbacks.export.command",
    "plan": "lightning_zero3.strategies.plan",
    "inspect": "lightning_zero3.strategies.checkpoints.inspect",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_zero3", description="Tools that need no GPU and no model class."
    )
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        command = importlib.import_module(module)
        command.add_arguments(
            subparsers.add_parser(
                name, help=command.DESCRIPTION, description=command.DESCRIPTION, allow_abbrev=False
            )
        )
    arguments = parser.parse_args(argv)
    try:
        code = importlib.import_module(COMMANDS[arguments.command]).run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # as of `inspect x | head`
        sys.stdout = None
        return 1
    except Exception as error:
        # A wrong path, a full disk or a damaged file needs no traceback.
        text = str(error)
        if not isinstance(error, CheckpointError | OSError):
            text = f"{' '.join(argv or sys.argv[1:])} failed: {type(error).__name__}: {error}"
        print(printable(text), file=sys.stderr)
        sys.stdout = None  # else Python tries to write the rest of it again at exit
        return 1


if __name__ == "__main__":
    sys.exit(main())
