# make quickstart [CORPUS=...]   set up, then the whole walk from raw text to a fitted law
# make test                      set up, then the tests
# make test-all                  the slow ones too
# make docs                      write the pages that follow from the code
# make check                     what this machine has, what is missing for what, how to get it
# make lint                      ruff, shellcheck and hadolint
PYTHON ?= python3
VENV := .venv
CORPUS ?= auto
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
READY := $(VENV)/ready

.PHONY: quickstart test test-all lint check docs clean

quickstart: $(READY)
	bash examples_scaling/quickstart/quickstart.sh "$(CORPUS)"

# two files at a time: each file's tests stay together, with what they share
test: $(READY)
	python -m pytest -n 2 --dist loadfile -m "not gpu and not slow"

test-all: $(READY)
	python -m pytest

lint: $(READY)
	ruff check .
	ruff format --check .
	shellcheck $$(git ls-files '*.sh') .ci/run
	hadolint Dockerfile

docs: $(READY)
	python tools/config_reference.py

# sets nothing up: it says what there is
check:
	@$(or $(wildcard $(VENV)/bin/python),$(PYTHON)) tools/check_environment.py

# remade when the pins or the C++ sources change
$(READY): requirements.txt setup.py pyproject.toml $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $$($(PYTHON) --version) found, 3.11 or newer wanted: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, os, sysconfig; \
		assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null || \
		{ echo "error: $(PYTHON) lacks venv or its C headers: apt-get install python3-venv python3-dev" >&2; exit 1; }
	@command -v g++ >/dev/null || { echo "error: no g++: apt-get install g++" >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info megatron/_csrc*.so
