# Every target does its own set-up: it needs Python 3.11 or later and, the first time, a package
# index. `make help` lists them.

PYTHON ?= python3
DEVICE ?=
GPU ?=
GPUS ?=
BUDGET ?=
THREADS ?=
SWEEPS ?=
MACHINE ?=
FRESH ?=
PART ?=
PYTEST ?=
WRITE ?=

# Recipes read them from the environment, where a shell takes them for text and never for commands.
export PYTHON DEVICE GPU GPUS BUDGET THREADS SWEEPS MACHINE FRESH PART WRITE

.DEFAULT_GOAL := help
.PHONY: help sweep test plots table rules families record import test-all attacks bench compile-check lint format hooks clean

# pytest splits this as a shell would.
export PYTEST_ADDOPTS := $(PYTEST_ADDOPTS) $(PYTEST)

# The interpreter that has what a target needs, set up if it must be.
python = set -f; py=$$("$$PYTHON" -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Rooftile needs Python 3.11 or later; this is %d.%d. Point PYTHON at one." % v[:2])' \
	&& "$$PYTHON" sweeps/bootstrap.py $(1)) || exit 1
on_device = $${DEVICE:+--device "$$DEVICE"} $${GPU:+--gpu "$$GPU"}
on_gpus = $(on_device) $${GPUS:+--gpus "$$GPUS"}
# After a worker has crashed, the suite ends: pytest-xdist 3.8 waits forever for a worker that it
# started in its place (its issue 1323).
pytest = "$$py" -m pytest -q -n auto --dist loadgroup --max-worker-restart 0 --benchmark-disable
of_machine = $${MACHINE:+--machine "$$MACHINE"}
fresh = $${FRESH:+--fresh}
budget = $${BUDGET:+--budget "$$BUDGET"}

help:  ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: .*## /\t/' | expand -t 16

sweep:  ## measure this machine, then plots, table and page (BUDGET=10m SWEEPS="a b" FRESH=1 DEVICE=cpu THREADS=4 GPU=0 GPUS=all)
	@$(call python,page?); "$$py" -m sweeps run $$SWEEPS $(budget) --leave 0.2 $(fresh) $(on_gpus) \
	&& { "$$py" -m analysis recommend --measure $(on_gpus) || test $$? -ne 130; } \
	&& "$$py" -m analysis report $(of_machine)

test:  ## every test that is not slow (PYTEST="-k name" narrows it)
	@$(call python,test page?); $(pytest)

test-all:  ## the slow tests too, as CI runs them
	@$(call python,test page?); $(pytest) --tier all

plots:  ## draw the plots from recorded results (MACHINE=slug)
	@$(call python); "$$py" -m analysis plot $(of_machine)

table:  ## write the recommendation table from recorded results (MACHINE=slug)
	@$(call python); "$$py" -m analysis table $(of_machine)

families:  ## compare the Triton kernels with the vendor library, by class of shape; needs a GPU (BUDGET=8m)
	@$(call python); "$$py" -m sweeps run families families-conv candidates candidates-conv --add \
		--budget "$${BUDGET:-8m}" $(fresh) $(on_device) --results results/families \
	&& "$$py" -m analysis compare --kernels --results results/families

rules:  ## test common rules of thumb, after measuring what they need (BUDGET=5m MACHINE=slug)
	@$(call python,page?); test -n "$$MACHINE" || { "$$py" -m sweeps run $$("$$py" -m analysis rules --sweeps) \
		--add --budget "$${BUDGET:-5m}" $(fresh) $(on_device) \
		--results results/rules --skip-recorded results \
	&& "$$py" -m sweeps profile $(fresh) $(on_device) --results results/rules; } \
	&& "$$py" -m analysis rules $(of_machine)

record:  ## measure everything that this machine supports, into one archive; resumable (BUDGET=50m PART="clock real-layers")
	@$(call python,test?); "$$py" -m analysis record $(budget) \
		$$(for part in $$PART; do printf -- '--part %s ' "$$part"; done) $(on_device)

import:  ## public tables as recordings under results/public/ (MACHINE=slug)
	@$(call python,public page?); "$$py" -m analysis import $(of_machine)

attacks:  ## wrong kernels, kills, damaged files, hostile names, the wheel: the long tests, some hours
	@$(call python,test page? public? models?); $(pytest) --tier long -o faulthandler_timeout=14400

bench:  ## benchmark our own code
	@$(call python,test); mkdir -p .benchmarks && "$$py" -m pytest -q tests/benchmarks --tier all \
		--benchmark-only -s --benchmark-json .benchmarks/bench.json

# What most GPU nodes have. It only compiles and launches here: the kernels must suit both.
OLDER_TRITON = .venv-triton-3.6.0

compile-check:  ## compile the kernels for named architectures without a GPU, with two versions of Triton, and launch them on a stub
	@$(call python); "$$py" -m kernels compile $${WRITE:+--write "$$WRITE"} \
	&& { test -d $(OLDER_TRITON) || "$$py" -m pip install -q --no-deps --target $(OLDER_TRITON) triton==3.6.0; } \
	&& PYTHONPATH=$(OLDER_TRITON) "$$py" -m kernels compile --arch sm_90 \
	&& "$$py" -m tests.support.launching.launch $(OLDER_TRITON)/launched \
	&& "$$py" -m tests.support.launching.launch $(OLDER_TRITON)/launched-older $(OLDER_TRITON)

lint:  ## ruff and the type checker
	@$(call python,test lint); "$$py" -m ruff check . && "$$py" -m ruff format --check . && "$$py" -m mypy

format:  ## rewrite the code as lint wants it
	@$(call python,test lint); "$$py" -m ruff check --fix . && "$$py" -m ruff format .

hooks:  ## run lint and the tests of changed packages before each commit
	git config core.hooksPath .githooks

clean:  ## remove the environment; results stay
	rm -rf .venv .venv-failed $(OLDER_TRITON)
