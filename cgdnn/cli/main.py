"""The command `cgdnn`: finds the subcommand, and turns exceptions into messages and exit codes.

Exit codes: 0 done; 1 failed while running; 2 wrong usage or description; 3 data; 4 non-finite
loss; 130 SIGINT; 143 SIGTERM; 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from cgdnn import __version__
from cgdnn.errors import CgdnnError

COMMANDS = ("train", "test", "time", "plan", "summary", "tune", "bench", "fetch")
"""Modules of this package, each with ``add_parser(subparsers)`` and ``run(arguments) -> int``."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    words : sequence of str, optional
        The command line without the program's name; by default this process's.

    Returns
    -------
    int
        The exit code.
    """
    words = sys.argv[1:] if words is None else words
    try:
        try:
            return _run(words)
        finally:
            sys.stdout.flush()  # here, where a closed output is no traceback
    except CgdnnError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except MemoryError as error:
        print(
            f"error: out of memory: {error}. Use a smaller batch, or fewer outputs.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Nobody reads on. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception:  # noqa: BLE001 - the last resort: say that it is our fault
        traceback.print_exc()
        print(
            "error: this is a bug in cgdnn; please report it with the lines above.", file=sys.stderr
        )
        return 1


def _run(words: Sequence[str]) -> int:
    # A command imports what it needs, so only the one that is asked for is imported.
    parser = _parser(words[:1] if words and words[0] in COMMANDS else COMMANDS)
    arguments, late = parser.parse_known_args(words)
    if not hasattr(arguments, "run"):
        parser.print_help(sys.stderr)
        return 2
    if late:
        # argparse takes a command's free words up to the next option only; later ones come here.
        if not hasattr(arguments, "words") or any(word.startswith("-") for word in late):
            parser.error(f"unrecognized arguments: {' '.join(late)}")
        arguments.words += late
    code: int = arguments.run(arguments)
    return code


def _parser(commands: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cgdnn",
        description="Train convolutional networks on all cores from Caffe's descriptions.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cgdnn {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND")
    for name in commands:
        import_module(f"cgdnn.cli.{name}").add_parser(subparsers)
    return parser
