# make quickstart [CORPUS=...]   install, then run the whole workflow from raw text to a fitted law; CORPUS of less
#                                than 12 MB is an error
# make test                      install, then run the tests
# make test-all                  also run the slow tests
# make docs                      generate the pages that are derived from the code
# make check                     list what is installed, what is missing, and how to install it
# make site                      build the guides as a searchable site in build/site
# make bench-smoke               run a reduced form of every CPU bench, to show that each works
# make bench-gpu-parity          check losses, gradients, resuming and graphs on a GPU, under 10 minutes
# make bench-gpu                 measure training steps on a GPU, under 10 minutes; again: the missing cells
# make lint                      run ruff, mypy, shellcheck and hadolint
# make help                      print these lines
PYTHON ?= python3
VENV := .venv
CORPUS ?= auto
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
READY := $(VENV)/ready

.PHONY: quickstart test test-all bench-smoke bench-gpu-parity bench-gpu lint check docs help site clean

quickstart: $(READY)
	bash examples_scaling/quickstart/quickstart.sh "$(CORPUS)"

# two processes; the tests of a file run in one process, since they share fixtures. A test that takes five minutes
# hangs: its process prints where and ends, and so does the suite, with the name of the test
test: $(READY)
	python -m pytest -n 2 --dist loadfile -m "not gpu and not slow" --max-worker-restart 0 \
		-o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true

test-all: $(READY)
	python -m pytest

bench-smoke: $(READY)
	python tools/bench/smoke.py

lint: $(READY)
	ruff check .
	ruff format --check .
	mypy
	shellcheck $$(git ls-files '*.sh') .ci/run
	hadolint Dockerfile

# results: build/gpu_bench; again: what is missing
bench-gpu-parity: $(READY)
	python tools/bench/gpu.py --out build/gpu_bench --parity --minutes 8

bench-gpu: $(READY)
	python tools/bench/gpu.py --out build/gpu_bench --minutes 8

docs: $(READY)
	python tools/make_docs.py

# mkdocs is installed only here: nothing else needs it
site: $(READY)
	python -m pip install --quiet --disable-pip-version-check mkdocs-material==9.8.1
	python -m mkdocs build --strict

help:
	@sed -n '/^#/!q; s/^# //p' Makefile

# installs nothing, only reports
check:
	@$(or $(wildcard $(VENV)/bin/python),$(PYTHON)) tools/check_environment.py

# reinstalled when the pins or the C++ sources change
$(READY): requirements.txt constraints.txt setup.py pyproject.toml $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $$($(PYTHON) --version) found, expected 3.11 or newer. Run make PYTHON=python3.12." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, os, sysconfig; \
		assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null || \
		{ echo "error: $(PYTHON) lacks venv or its C headers. Run apt-get install python3-venv python3-dev." >&2; exit 1; }
	@command -v g++ >/dev/null || { echo "error: g++ not found. Run apt-get install g++." >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
# a torch that is there, for another CUDA or of another version in the bounds, is kept
	python -c 'import torch' 2>/dev/null && pins= || pins='--constraint constraints.txt'; \
		python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt $$pins
	python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info megatron/_csrc*.so
