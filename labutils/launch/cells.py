"""``%%ranks``: one notebook cell on every rank, and the ranks stay alive between cells."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import traceback
from typing import Any, NoReturn

from IPython.core import magic
from IPython.core.error import UsageError

from labutils.launch import cellcode, output, wire
from labutils.launch.pool import Ranks
from labutils.launch.processes import fork_server, forking_is_safe
from labutils.launch.run import Run
from labutils.launch.world import World

DEFAULT_RANKS = 4

_cell_magic: Any = magic.cell_magic
_line_magic: Any = magic.line_magic


_NOT_PYTHON = re.compile(r"\s*([\w, ]+=\s*)?[%!]")


class CellSyntaxError(Exception):
    """The cell is not Python.  (IPython shows the frames of a SyntaxError whatever it says.)"""

    def __init__(self, error: SyntaxError) -> None:
        text = "".join(traceback.format_exception_only(type(error), error)).rstrip()
        if _NOT_PYTHON.match(error.text or ""):
            text += (
                f"\nLine {error.lineno} is for IPython: its magics (%) and commands (!) do not "
                "work on ranks. Put them into a cell of their own, without %%ranks."
            )
        super().__init__(text)

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class _Parser(argparse.ArgumentParser):
    """A wrong option is a message in the cell, not the end of the kernel."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}. Write {self.format_usage()[7:].strip()}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise UsageError(message or "")


def _numbers(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks such as 0,2") from None


def _limit(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)


def _parser(magic: str) -> _Parser:
    parser = _Parser(prog=magic, add_help=False)
    if magic == "%%ranks":
        parser.add_argument("ranks", nargs="?", type=int, help="how many; kept until it changes")
        parser.add_argument("--restart", action="store_true", help="fresh ranks, without variables")
        parser.add_argument(
            "--collect", action="store_true", help="output at the end, in rank order"
        )
        parser.add_argument("--unchecked", action="store_true", help="do not compare collectives")
    else:
        parser.add_argument("names", nargs="+", help="variables")
    parser.add_argument("--only", type=_numbers, help="ranks that take part, such as 0,2")
    parser.add_argument("--timeout", type=_limit, default=30.0, help="seconds without progress")
    return parser


@magic.magics_class
class RanksMagics(magic.Magics):
    """The magics, and the ranks that they talk to."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.notebook: dict[str, Any] = shell.user_ns
        self.ranks: Ranks | None = None
        self.cells = itertools.count(1)
        self.last: Run | None = None

    @_cell_magic("ranks")
    def run_cell(self, line: str, cell: str) -> None:
        """``%%ranks 4 [--only 0,2] [--timeout 30] [--restart] [--collect]``: the cell on each rank.

        In the cell, ``rank``, ``world_size``, ``device``, ``torch``, ``dist`` and ``lab`` are there
        already.  The value of the last expression is shown for each rank.
        """
        options = _parser("%%ranks").parse_args(shlex.split(line))
        filename = f"%%ranks cell {next(self.cells)}"
        cellcode.remember(cell, filename)
        try:
            cellcode.compile_cell(cell, filename)
        except SyntaxError as error:  # the notebook's, not four ranks'
            raise CellSyntaxError(error) from None
        ranks = self._ranks(options.ranks, options.restart)
        shown = (lambda _: None) if options.collect else output.to_cell
        message = ("cell", {"source": cell, "filename": filename})
        run = self._run(ranks, message, None, options, show=shown, checked=not options.unchecked)
        try:
            run.supervise()
        finally:
            if options.collect:
                output.to_cell(output.in_rank_order(run.logs, output.coloured()))
            self._after(ranks)
        self._show_values(run)

    @_line_magic("ranks_push")
    def push(self, line: str) -> None:
        """``%ranks_push name …``: give variables of the notebook to each rank."""
        options = _parser("%ranks_push").parse_args(shlex.split(line))
        missing = [name for name in options.names if name not in self.notebook]
        if missing:
            raise UsageError(
                f"%ranks_push: the notebook has no variable named {', '.join(missing)}."
            )
        values = {name: self.notebook[name] for name in options.names}
        try:
            packed = wire.pack(values)
        except Exception as error:
            raise UsageError(f"%ranks_push: these cannot travel to the ranks: {error}.") from None
        ranks = self._ranks(None, False)
        try:
            self._run(ranks, ("put", {}), packed, options).supervise()
        finally:
            self._after(ranks)

    @_line_magic("ranks_pull")
    def pull(self, line: str) -> None:
        """``%ranks_pull name …``: make each name a list of the ranks' values."""
        options = _parser("%ranks_pull").parse_args(shlex.split(line))
        if self.ranks is None or not self.ranks.alive:
            raise UsageError("%ranks_pull: there are no ranks yet; run a %%ranks cell first.")
        run = self._run(self.ranks, ("get", {"names": options.names}), None, options)
        try:
            run.supervise()
        finally:
            self._after(self.ranks)
        for name in options.names:
            self.notebook[name] = [run.results[rank][name] for rank in run.members]
            print(f"{name}: a list of {len(run.members)} values, one per rank")

    def close(self) -> None:
        """End the ranks."""
        ranks, self.ranks = self.ranks, None
        if ranks is not None:
            ranks.close()

    def _ranks(self, number: int | None, restart: bool) -> Ranks:
        """The ranks that are alive, or fresh ones where they are not what is asked for."""
        old = self.ranks
        alive = old is not None and old.alive and all(p.exit_code() is None for p in old.processes)
        if number is None:
            number = old.world.size if old is not None else DEFAULT_RANKS
        if old is not None and alive and old.world.size == number and not restart:
            return old
        world = World(number)
        self.close()
        fresh = Ranks(world)
        fresh.start()
        self.ranks = fresh
        output.to_cell(f"Started {world.about()}.\n")
        return fresh

    def _run(
        self, ranks: Ranks, message: tuple[str, dict[str, Any]], packed: wire.Packed | None,
        options: argparse.Namespace, **more: Any,
    ) -> Run:  # fmt: skip
        members = options.only
        unknown = [rank for rank in members or () if not 0 <= rank < ranks.world.size]
        if unknown or members == []:
            raise UsageError(f"--only {unknown}: the ranks are 0 to {ranks.world.size - 1}.")
        self.last = Run(
            ranks, message, packed, members=members, timeout=options.timeout, keep=True,
            title="%%ranks", colour=output.coloured(), record=message[0] == "cell", **more,
        )  # fmt: skip
        return self.last

    def _after(self, ranks: Ranks) -> None:
        if ranks is self.ranks and not ranks.alive:
            output.to_cell(
                "The ranks were stopped and their variables are gone; the next %%ranks cell starts "
                "fresh ones.\n"
            )

    def _show_values(self, run: Run) -> None:
        text = []
        for rank in run.members:
            if run.results[rank] is not None:
                mark = output.prefix(rank, output.coloured())
                first, *rest = run.results[rank].split("\n")
                indent = " " * len(f"[rank {rank}] Out: ")
                text.append(f"{mark}Out: {first}\n" + "".join(f"{indent}{line}\n" for line in rest))
        if text:
            output.to_cell("".join(text))


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext labutils``: the magics; the fork server starts to warm up in the background."""
    shell.register_magics(RanksMagics)
    if forking_is_safe():
        fork_server()


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext labutils``: end the ranks of this notebook."""
    magics = shell.magics_manager.registry.get("RanksMagics")
    if magics is not None:
        magics.close()
