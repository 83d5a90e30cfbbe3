# The two commands of the README: `make study` and `make test`. Each sets up .venv with pip where there is none.
#
#   make study                                the study of config/default.yaml
#   make study CONFIG=config/objectives.yaml  another study, laid over it
#   make smoke                                the same workflow on small budgets, in minutes
#   make test                                 linters, then all tests
#   make test-tools                           Slurm, Chromium and rsync for the tests that are skipped without (Debian, root)
#   make bench                                speed against peers, after `make study`
#
# Which torch: pip's own choice on Linux is a build for CUDA. Another one (CPU only, another CUDA) comes from the wheel
# index that pytorch.org names for it:
#   make setup PIP_ARGS="--extra-index-url ADDRESS"
# CONSTRAINTS= drops the pinned versions.

PYTHON ?= python3
PIP_ARGS ?=
CONSTRAINTS ?= envs/constraints.txt
CORES ?= all
CONFIG ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=

BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup study smoke test test-tools bench clean

setup: $(READY)

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit("draftpool needs Python 3.11 or newer -> make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[dev]'
	touch $@

study: $(READY)
	$(BIN)/snakemake --cores $(CORES) $(if $(CONFIG),--configfile $(CONFIG))

smoke: $(READY)
	$(BIN)/snakemake --cores $(CORES) --configfile config/smoke.yaml

test: export PATH := $(CURDIR)/$(BIN):$(PATH)
test: $(READY)
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile workflow
	snakemake --lint
	pytest $(PYTEST_ARGS)

test-tools:
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver rsync
	tests/cluster/slurm.sh install

# Speed against peers, on the artefacts of `make study`; nothing else should run meanwhile.
bench: $(READY)
	$(BIN)/python bench/bench_decode.py $(BENCH_ARGS)
	$(BIN)/python bench/bench_peers.py $(BENCH_ARGS)
	$(BIN)/python bench/roofline.py results/bench/decode.json
	$(BIN)/python bench/bench_train.py $(BENCH_ARGS)
	$(BIN)/python bench/bench_generate.py $(BENCH_ARGS)
	$(BIN)/python bench/bench_pipeline.py $(BENCH_ARGS)
	$(BIN)/python bench/bench_startup.py $(BENCH_ARGS)
	$(BIN)/python bench/bench_replay.py $(BENCH_ARGS)

clean:
	rm -rf .venv build *.egg-info src/*.egg-info
