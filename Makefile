# Every target sets up .venv by itself; a second call reuses it. `make` alone lists the targets.

SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
RUN := $(VENV)/bin/python workflows/run.py
PYTEST := $(VENV)/bin/python -m pytest
READY := $(VENV)/.ready
MEASURED := tests/drills/test_drill_table.py tests/drills/test_drill_memory.py
RUN_ID ?= demo

# Two processes, five faults of three kinds, a short heartbeat so that a hang is not waited for long.
DEMO := --run-id $(RUN_ID) --model tiny --gpus-per-node 2 --recovery combined --max-steps 80 \
	--checkpoint-interval-steps 10 --snapshot-interval-steps 1 --fault-count 5 --fault-kinds exception,hang,sigkill --heartbeat-timeout-seconds 5

.PHONY: help setup demo test lint ci compile cluster-test gpu-test drills clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | while IFS='|' read -r name text; do \
		printf '  make %-13s %s\n' "$$name" "$$text"; done

setup: $(READY) ## make .venv with everything in it

$(READY): pyproject.toml constraints.txt .ci/find-python
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || { python=$$(.ci/find-python) && "$$python" -m venv --clear $(VENV); }
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY) ## train a tiny model through five real faults and report what they cost
	$(RUN) local $(DEMO)

test: $(READY) ## the tests, without those that need a cluster and without the long drills
	$(PYTEST) -q -m "not cluster and not drill" -n 2 --dist loadfile --no-loadscope-reorder

lint: $(READY) ## style, types, import rules, and that templates/ is what compiles
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache
	$(RUN) compile --check

ci: lint test ## what .ci/run runs

compile: $(READY) ## write templates/*.yaml from workflows/
	$(RUN) compile

cluster-test: $(READY) ## the drills on a real Kubernetes with Argo Workflows (KUBECONFIG)
	@sed -n '3,/^"""/{/^"""/!p}' tests/cluster/cluster_support.py
	$(PYTEST) -v -rs -m cluster tests/cluster tests/workflows

gpu-test: $(READY) ## the tests that need a GPU; no other test sees one
	$(PYTEST) -v -rs -m gpu

drills: $(READY) ## the long fault drills, up to an hour: two side by side, then alone those that measure
	$(PYTEST) -v -m drill --timeout 3600 -n 2 --dist load $(MEASURED:%=--ignore=%)
	$(PYTEST) -v -m drill --timeout 3600 $(MEASURED)

clean: ## remove .venv and caches; runs under fsx/ stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
