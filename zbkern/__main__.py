"""The `zbkern` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status."""
    try:
        return _main(arguments)
    except KeyboardInterrupt:  # also in the imports
        return 130


def _main(arguments: Sequence[str] | None) -> int:
    import zbkern
    from zbkern.pipeline.rehearsal import command as rehearsal
    from zbkern.planning.command import cli, play

    parser = argparse.ArgumentParser(prog="zbkern", description="Zero-bubble pipeline parallelism for PyTorch.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {zbkern.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="what this machine can run, and how to get what is missing")
    info.set_defaults(run=_info)
    cli.add_to(commands)
    play.add_to(commands)
    rehearsal.add_to(commands)
    parsed = parser.parse_args(arguments)
    try:
        status = parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as in `zbkern plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is not None:  # of no file: the output, which a full device does not take
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"zbkern: the output could not be written: {error.strerror}", file=sys.stderr)
        return 1
    return status


def _info(arguments: argparse.Namespace) -> int:
    from zbkern import info

    return info.main()


if __name__ == "__main__":
    sys.exit(main())
