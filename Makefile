# The two commands of the README are `make demo` and `make test`; the rest serves them.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FRAMEWORKS := $(VENV)/.frameworks
# Most tests wait for Slurm: more of them than cores may run at once.
PYTEST_WORKERS ?= 4
export PREFIX DESTDIR SYSCONFDIR UNITDIR PIP_OPTIONS BASEPYTHON
# Where Python may keep no byte code, every worker rewrites every test, every program of theirs compiles the project.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test collected check audit unit slurm-tests faults bench slurm venv man install deb uninstall proto clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

demo: slurm venv ## Install what is missing and run the demonstration on a Slurm of its own
	@$(BIN)/python -m slurm_synergy.cli.demo

test: slurm venv ## Install what is missing and pass every check and test
	@$(MAKE) --no-print-directory -j2 --output-sync check collected
	@$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder

# Each worker reads all tests, and finds them compiled; what cannot be read is for the run to tell.
collected: $(FRAMEWORKS)
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true

check: venv ## Formatting, lint, types, import contracts, the lock of the dependencies
	@$(BIN)/ruff format --check . && $(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@[ -n "$$SYNERGY_UNLOCKED" ] || $(BIN)/python scripts/lock.py check

audit: venv ## The lock of the dependencies, and their known vulnerabilities where pip-audit can ask
	@$(BIN)/python scripts/lock.py audit

unit: venv ## The tests that need no Slurm
	@$(BIN)/python -m pytest tests/unit tests/properties tests/simulator

slurm-tests: slurm venv ## The tests on the embedded cluster
	@$(BIN)/python -m pytest tests/slurm tests/jobside

faults: slurm venv ## Break everything that can break, and write docs/faults.md from the results (about 15 minutes)
	@$(BIN)/python tests/slurm/faults/fault_report.py --workers $(PYTEST_WORKERS)

bench: venv ## Every benchmark, one JSON object each
	@for b in benchmarks/*.py; do echo "== $$b"; $(BIN)/python $$b --json || exit 1; done

slurm: ## Debian's slurm-wlm and munge, if missing
	@scripts/install-slurm.sh

venv: $(STAMP) ## .venv with the project and its extras

$(STAMP): setup.cfg pyproject.toml constraints.txt constraints-hashes.txt scripts/make-venv.sh
	@scripts/make-venv.sh $(PYTHON) $(VENV)
	@touch $@

# DALI, Lightning and Transformers: 1.2 GB that only the tests of them need.
$(FRAMEWORKS): $(STAMP)
	@scripts/make-venv.sh $(PYTHON) $(VENV) dali,integrations
	@touch $@

man: venv ## The manual pages, in build/man
	@$(BIN)/python scripts/make_man.py build/man

install: venv ## Programs, manual pages, unit, examples: PREFIX=/usr/local DESTDIR=
	@scripts/install.sh $(BIN)/python

deb: venv ## A Debian package of that for this distribution, in build/
	@scripts/make-deb.sh $(BIN)/python

uninstall: ## Take them away again; settings and state stay
	@scripts/uninstall.sh

proto: venv ## Generate the stubs of the contracts with jobs and nodes again
	@$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. slurm_synergy/proto/*.proto

clean: ## Remove what `make` made in this directory
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
