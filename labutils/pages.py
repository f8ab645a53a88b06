"""Plain HTML pages for reports, which open without anything else."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em }}
table {{ border-collapse: collapse; margin-bottom: 1.5em }}
th, td {{ text-align: left; padding: .3em .8em; border-bottom: 1px solid #ccc }}
</style>
<h1>{title}</h1>
{body}
</html>
"""


def page(title: str, *parts: str) -> str:
    """A page of a title (text) and parts (HTML)."""
    return _PAGE.format(title=html.escape(title), body="\n".join(parts))


def table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of a head (text) and rows whose cells are HTML."""
    lines = ["<tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return "<table>\n" + "\n".join(lines) + "\n</table>"
