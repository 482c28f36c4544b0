"""The `zbkern` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status."""
    from zbkern.pipeline import command

    parser = argparse.ArgumentParser(prog="zbkern", description="Pipelines without bubbles.")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="what this machine can run, and how to get what is missing")
    info.set_defaults(run=_info)
    command.add_to(commands)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


def _info(arguments: argparse.Namespace) -> int:
    from zbkern import info

    return info.main()


if __name__ == "__main__":
    sys.exit(main())
