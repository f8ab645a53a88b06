# Each line is a command that a person could type. Everything that is installed lives in .venv.
#   make lab                                  JupyterLab on the labs
#   make lab JUPYTER_ARGS="--port 9000"       ... with options of Jupyter's own
#   make test PYTHON=python3.12               ... with another Python, for a fresh .venv

PYTHON       ?= python3
JUPYTER_ARGS ?=

VENV  := .venv
RUN   := $(VENV)/bin/python
READY := $(VENV)/.ready

# Over SSH and without a display nobody sees a browser that opens here: the address is printed.
HERE := $(if $(SSH_CONNECTION),,$(or $(DISPLAY),$(WAYLAND_DISPLAY),$(filter Darwin,$(shell uname))))
OPEN := $(if $(HERE),,--no-browser)
# Containers run as root, where Jupyter wants to be told that this is meant.
ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: setup lab test test-all labs bench check clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("The labs need Python 3.10 or newer; name one: make PYTHON=python3.12")'
	@echo "Setting up .venv; the first time, PyTorch and JupyterLab are downloaded, which takes minutes."
	$(RUN) -m pip --version || $(PYTHON) -m venv --clear $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV) install --quiet pip; }
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

lab: $(READY)
	$(RUN) -m jupyterlab --ServerApp.root_dir=labs $(OPEN) $(ROOT) $(JUPYTER_ARGS)

test: $(READY)
	$(RUN) -m pytest -m "not full"

test-all: $(READY)
	$(RUN) -m pytest

labs: $(READY)
	$(RUN) -m labutils refresh labs

bench: $(READY)
	$(RUN) tests/benchmarks

check: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

clean:
	rm -rf $(VENV)
