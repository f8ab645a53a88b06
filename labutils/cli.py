"""The ``labutils`` command.

A subcommand is one line in :data:`COMMANDS`: its name, the module behind it, one line of help.  The
module has ``add_arguments(parser)`` and ``main(arguments) -> exit code`` and is imported only when
its command is asked for, so that ``labutils --help`` is quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "run": ("labutils.batch", "execute the labs without a browser and write a summary"),
    "doctor": ("labutils.doctor", "check that this machine is ready for the labs"),
    "slurm": ("labutils.cluster.slurm", "write a Slurm batch script for training on several nodes"),
    "ssh": ("labutils.cluster.ssh", "train on several machines that ssh reaches"),
    "preflight": ("labutils.cluster.preflight", "let the nodes of a job check each other"),
    "class-report": ("labutils.class_report", "which exercises a class has solved"),
    "predict": ("labutils.timing.command", "predict a training step on other hardware"),
    "measure-hardware": ("labutils.timing.measure", "measure this machine, and write a profile"),
    "refresh": ("labutils.notebooks", "execute the labs in place, for stored outputs (authors)"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (2: what was asked for makes no sense)."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(words[0] if words else "")
    arguments = parser.parse_args(words)
    if arguments.command is None:
        parser.print_help()
        return 2
    try:
        code = import_module(COMMANDS[arguments.command][0]).main(arguments)
        sys.stdout.flush()  # what cannot be written is an error here, not at the interpreter's end
    except (ValueError, OSError) as error:
        print(f"labutils {arguments.command}: {_sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"labutils {arguments.command}: interrupted", file=sys.stderr)
        return 130
    return int(code)


def _sentence(error: ValueError | OSError) -> str:
    """An error in words; what the system says of a file names the file, and no number."""
    if not (isinstance(error, OSError) and error.strerror):
        return str(error)
    if error.filename is not None:
        return f"cannot use {error.filename}: {error.strerror}."
    return f"cannot write the output: {error.strerror}." if _output_fails() else error.strerror


def _output_fails() -> bool:
    """Whether standard output takes nothing; what is left for it then goes nowhere."""
    try:
        print(flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return True
    return False


def _parser(chosen: str) -> argparse.ArgumentParser:
    """The command line; only the chosen command's module is imported, for its arguments."""
    parser = argparse.ArgumentParser(prog="labutils", description="The data-parallel training lab.")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        if name == chosen:
            import_module(module).add_arguments(command)
    return parser
