"""Where the labs are, what they name, and what is kept of a learner."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def solutions_folder() -> Path:
    """``labs/solutions``: of the labs around the working directory, or of this package's clone.

    The environment variable LABUTILS_LABS names the folder of the labs where neither is right.
    """
    if told := os.environ.get("LABUTILS_LABS"):
        places = [Path(told)]
    else:
        here = Path.cwd()
        around = [place for folder in (here, *here.parents) for place in (folder, folder / "labs")]
        places = [*around, Path(__file__).resolve().parents[1] / "labs"]
    for place in places:
        # A folder of solutions counts only with notebooks beside it, or where it was named.
        if (place / "solutions").is_dir() and (told or any(place.glob("[0-9][0-9]_*.ipynb"))):
            return place / "solutions"
    raise ValueError(
        f"labs/solutions is not to be found from {Path.cwd()}: start the notebook in its folder, "
        "or set the environment variable LABUTILS_LABS to the folder of the labs."
    )


def progress_folder() -> Path:
    """Where progress is kept: a folder of this user's, or that named by LABUTILS_DATA."""
    if told := os.environ.get("LABUTILS_DATA"):
        return Path(told) / "progress"
    home = Path.home()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    return base / "labutils" / "progress"


def find_script(script: str | os.PathLike[str]) -> str:
    """Where ``script`` is.

    A copy of a notebook that lies elsewhere, as one that was handed in, finds ``scripts/...`` in
    the folder of the labs.  Raises FileNotFoundError.
    """
    name = os.fspath(script)
    if os.path.isfile(name):
        return os.path.abspath(name)
    try:
        beside = solutions_folder().parent / name
    except ValueError:  # there are no labs here
        beside = None
    if beside is not None and beside.is_file():
        return str(beside)
    raise FileNotFoundError(f"there is no script {name!r} in {os.getcwd()}.")
