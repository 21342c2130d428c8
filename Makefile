# Two commands, each from a bare checkout: `make train` and `make test`.
#
#   PYTHON=python3.12       the interpreter the environment is made with (3.11 or newer)
#   ARGS="trainer.max_steps=50"   added to the command that `train` or `test` runs
#   PIP_ARGS="--no-index --find-links wheels"   added to every pip install

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= experiments/configs/tiny.yaml
ARGS ?=
PIP_ARGS ?=

BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
INPUTS := pyproject.toml constraints.txt

.PHONY: help train test check format clean
.DEFAULT_GOAL := help

help:
	@echo "make train   set up, then train the tiny model on the built-in text (again: resume)"
	@echo "make test    set up, then run every test"
	@echo "make check   set up, then verify format, lint and types"
	@echo "make format  set up, then apply the formatter and the safe lint fixes"
	@echo "make clean   remove the environment, caches and builds; runs are kept"

train: $(VENV)/.ready
	$(BIN)/zs train $(CONFIG) $(ARGS)

# One thread per process: the tests start up to four of them, and two cores are enough for all.
test: $(VENV)/.ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.ready-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# The stamps are written last, so an interrupted set-up is simply done again.
$(VENV)/.ready: $(INPUTS) | $(VENV)/.created
	$(INSTALL) -e .
	@touch $@

$(VENV)/.ready-dev: $(INPUTS) | $(VENV)/.created
	$(INSTALL) -e '.[dev]'
	@touch $(VENV)/.ready $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "PYTHON = $(PYTHON): must be Python 3.11 or newer. Name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "PYTHON = $(PYTHON): must have the venv and ensurepip modules. Install your system's" \
	  "python3-venv package, or name another Python: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@
