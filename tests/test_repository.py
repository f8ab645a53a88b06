"""The files around the code: they must fit each other, and work where people really run them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
CONDA_NAMES = {"matplotlib": "matplotlib-base", "torch": "pytorch"}
"""Where conda-forge calls a package by another name."""
BINDER_NAMES = {**CONDA_NAMES, "torch": "pytorch-cpu"}
GPU_NAMES = {**CONDA_NAMES, "torch": "pytorch-gpu"}
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(*extras: str) -> dict[str, Requirement]:
    texts = list(project()["dependencies"])
    for extra in extras:
        texts += project()["optional-dependencies"][extra]
    found = {r.name: r for r in map(Requirement, texts)}
    found.pop(project()["name"], None)  # labutils[test]
    return found


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def conda(path: str) -> tuple[dict[str, str], list[str], list[str]]:
    """Versions by name, what pip adds, and the channels."""
    content = yaml.safe_load((ROOT / path).read_text())
    plain = [line for line in content["dependencies"] if isinstance(line, str)]
    by_pip = [line for entry in content["dependencies"] if isinstance(entry, dict)
              for line in entry["pip"]]  # fmt: skip
    pairs = (line.partition(" ") for line in plain)
    return {name: version for name, _, version in pairs}, by_pip, content["channels"]


def tracked() -> list[Path]:
    """Files under version control, or new and not ignored; everything where there is no git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return [path for name in done.stdout.split("\0") if (path := ROOT / name).is_file()]
    hidden = (".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache")
    paths = (path for path in ROOT.rglob("*") if path.is_file())
    return [path for path in paths if not set(path.relative_to(ROOT).parts) & set(hidden)]


def texts() -> dict[str, bytes]:
    contents = {str(path.relative_to(ROOT)): path.read_bytes() for path in tracked()}
    return {name: content for name, content in contents.items() if b"\0" not in content}


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_cover_what_the_project_asks_for(python: str) -> None:
    pins = {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in constraints()
        if pin.marker is None or pin.marker.evaluate({"python_version": python})
    }
    for name, requirement in requirements("test", "dev").items():
        if requirement.marker and not requirement.marker.evaluate({"python_version": python}):
            continue
        pinned = pins[canonicalize_name(name)]
        assert requirement.specifier.contains(pinned), f"{name} {pinned} on Python {python}"


def test_constraints_are_exact_and_portable() -> None:
    for pin in constraints():
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        assert "+" not in specifier.version, "a local build is to be had on one machine only"
        assert pin.url is None
        assert not canonicalize_name(pin.name).startswith(("nvidia-", "cuda-", "triton"))


@pytest.mark.parametrize(
    ("path", "names", "extras"),
    [
        ("environment.yml", CONDA_NAMES, ["test"]),
        ("environment-gpu.yml", GPU_NAMES, ["test"]),
        ("binder/environment.yml", BINDER_NAMES, []),
    ],
)
def test_conda_environments_ask_for_what_the_project_asks_for(
    path: str, names: dict[str, str], extras: list[str]
) -> None:
    versions, by_pip, channels = conda(path)
    assert channels == ["conda-forge", "nodefaults"]
    assert by_pip in ([], ["--editable ."]), "pip adds nothing but this package"
    wanted = requirements(*extras)
    wanted.pop("playwright", None)  # its browsers are not conda-forge's
    for name, requirement in wanted.items():
        version = versions.pop(names.get(name, name))
        asked = set(version.split(","))
        assert asked == set(str(requirement.specifier).split(",")), f"{name} in {path}"
    assert set(versions) == {"python", "pip"}, "conda-forge packages that the project does not need"


def test_conda_environments_have_a_python_that_the_project_takes() -> None:
    wanted = SpecifierSet(project()["requires-python"])
    for path in ("environment.yml", "environment-gpu.yml", "binder/environment.yml"):
        version = conda(path)[0]["python"]
        taken = [python for python in PYTHONS if _takes(version, python)]
        assert taken, f"{path} takes none of {PYTHONS}"
        assert all(wanted.contains(python) for python in taken)


def _takes(conda_version: str, python: str) -> bool:
    """conda's ``=3.12`` is what pip writes as ``==3.12.*``."""
    fuzzy = re.sub(r"^=(?!=)(.*)", r"==\1.*", conda_version)
    return SpecifierSet(fuzzy).contains(f"{python}.1")


def test_binder_gets_the_cpu_build_and_labutils() -> None:
    versions, _, _ = conda("binder/environment.yml")
    assert "pytorch-cpu" in versions
    assert not {"pytorch", "pytorch-gpu", "torch", "cuda-version"} & set(versions)
    script = (ROOT / "binder" / "postBuild").read_text()
    install = next(line for line in script.splitlines() if "pip install" in line)
    assert "--no-deps" in install, "or pip would put its own build of PyTorch over conda's"
    assert install.endswith(" .")
    assert not (ROOT / "binder" / "requirements.txt").exists(), "repo2docker would install it too"


def test_binder_starts_in_the_labs(tmp_path: Path) -> None:
    for command in ("jupyter-lab", "echo"):
        fake = tmp_path / command
        fake.write_text('#!/bin/sh\necho "$@"\n')
        fake.chmod(0o755)
    start = [str(ROOT / "binder" / "start")]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}

    def shown(*command: str) -> str:
        done = subprocess.run(
            [*start, *command], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    served = shown("jupyter-lab", "--ip", "0.0.0.0")
    assert served.startswith("--ip 0.0.0.0 ")
    (url,) = re.findall(r"--LabApp.default_url=/lab/tree/(\S+)", served)
    assert (ROOT / url).is_file(), f"there is no {url} to start with"
    assert shown("echo", "two words") == "two words\n"


@pytest.mark.skipif(sys.platform != "linux", reason="an image is built on Linux, with GNU sed")
def test_binder_begins_with_two_gpus(tmp_path: Path) -> None:
    labs = sorted((ROOT / "labs").glob("*.ipynb"))
    (tmp_path / "labs").mkdir()
    for path in labs:
        (tmp_path / "labs" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "python").write_text("#!/bin/sh\n")  # pip has nothing to do here
    (tmp_path / "python").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = [str(ROOT / "binder" / "postBuild")]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    for path in labs:
        before, after = (json.loads(p.read_text()) for p in (path, tmp_path / "labs" / path.name))
        told, asked = _gpus(before), _gpus(after)
        assert asked == min(told, 2), path.name
        changed = [a["id"] for a, b in zip(after["cells"], before["cells"]) if a != b]
        assert len(changed) == int(told > 2), f"{path.name}: {changed}"


def _gpus(notebook: dict[str, Any]) -> int:
    (cell,) = (c for c in notebook["cells"] if "parameters" in c["metadata"].get("tags", ()))
    values: dict[str, Any] = {}
    exec("".join(cell["source"]), values)
    return int(values["gpus"])


def test_repo2docker_accepts_the_repository() -> None:
    program = shutil.which("jupyter-repo2docker")
    if program is None:
        pytest.skip("there is no repo2docker here: pip install jupyter-repo2docker")
    done = subprocess.run([program, "--no-build", "--debug", ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    recipe = done.stdout + done.stderr
    for step in ('--file "binder/environment.yml"', "./binder/postBuild", "binder/start"):
        assert step in recipe, step


def test_batch_jobs_are_good_bash(tmp_path: Path) -> None:
    jobs = [path for path in tracked() if path.suffix == ".sbatch"]
    assert jobs
    for path in jobs:
        first, *rest = path.read_text().splitlines()
        assert first == "#!/usr/bin/env bash"
        assert "set -euo pipefail" in rest
        subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("there is no shellcheck: apt-get install shellcheck")
    files = [*jobs, *(ROOT / name for name in SCRIPTS)]
    done = subprocess.run(["shellcheck", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_batch_job_runs_the_labs(tmp_path: Path) -> None:
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
    (programs / "labutils").write_text('#!/bin/sh\necho labutils "$@"\n[ "$1" = run ]\n')
    (programs / "labutils").chmod(0o755)
    job = {"SLURM_JOB_ID": "77", "SLURM_GPUS_ON_NODE": "4", "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", ROOT / "labs" / "scripts" / "run_labs.sbatch", "--only", "03"],
        env={"PATH": "/usr/bin:/bin", **job},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "labutils doctor",
        "labutils run labs --gpus 4 --out results-77 --resume --only 03",
    ]
    assert "because of the problems above" in done.stderr


SCRIPTS = (".ci/run", "binder/postBuild", "binder/start")


def test_scripts_can_be_run() -> None:
    for name in SCRIPTS:
        path = ROOT / name
        assert path.stat().st_mode & 0o111 == 0o111, f"{name} is not executable"
        first, *rest = path.read_text().splitlines()
        assert first == "#!/usr/bin/env bash"
        assert "set -euo pipefail" in rest
        subprocess.run(["bash", "-n", path], check=True)
    plain = [path for path in tracked() if path.suffix in (".py", ".ipynb", ".md", ".yml", ".toml")]
    assert plain
    assert [path for path in plain if path.stat().st_mode & 0o111] == []


def test_lines_end_as_they_should() -> None:
    for name, content in texts().items():
        assert b"\r\n" not in content, name
        assert not content or content.endswith(b"\n"), f"{name} lacks its last line end"
        assert not content.startswith(b"\xef\xbb\xbf"), f"{name} starts with a byte order mark"


def test_no_file_names_a_registry() -> None:
    hosts = ("pypi" + ".org", "python" + "hosted", "download.py" + "torch", "registry.np" + "mjs")
    options = re.compile(rb"--(extra-)?index-url|--find-links|--trusted-host")
    for name, content in texts().items():
        found = [host for host in hosts if host.encode() in content]
        assert not found, f"{name} names {found}"
        assert name == "tests/test_repository.py" or not options.search(content), name


def test_links_of_the_readme_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert "LICENSE" in targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_readme_maps_the_labs() -> None:
    mapped = re.findall(
        r"^\| \[`(\w+)`\]\(labs/\1\.ipynb\)", (ROOT / "README.md").read_text(), re.M
    )
    assert mapped == sorted(path.stem for path in (ROOT / "labs").glob("*.ipynb"))


def test_the_package_carries_its_data() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = data["package-data"]["*"]
    kinds = {path.suffix for path in (ROOT / "labutils").rglob("*") if path.is_file()}
    assert kinds - {".py", ".pyc"} <= {pattern.removeprefix("*") for pattern in patterns}


HEAVY = ("matplotlib", "ipywidgets", "IPython", "anywidget", "jupyter_client", "jupyterlab",
         "notebook", "nbformat", "nbclient", "papermill", "traitlets", "playwright")  # fmt: skip


@pytest.mark.parametrize(
    "module", ["labutils", "labutils.cli", "labutils.hardware", "labutils.exercises"]
)
def test_import_is_light(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_make_says_what_a_person_would_type() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "lab", "PYTHON=python3", "JUPYTER_ARGS=--port 9123"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "SSH_CONNECTION": "10.0.0.1 5 10.0.0.2 22", "DISPLAY": ":0"},
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert "jupyterlab" in last
    assert "root_dir=labs" in last
    assert "--no-browser" in last
    assert last.endswith("--port 9123")
