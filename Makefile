# make quickstart [CORPUS=...]   install what it imports, then run the whole workflow from raw text to a fitted law;
#                                CORPUS of less than 14 MB is an error
# make test                      install everything, then run the tests
# make test-all                  also run the slow tests
# make docs                      generate the pages that are derived from the code
# make check                     list what is installed, what is missing, and how to install it
# make bench-smoke               run a reduced form of every CPU bench, to show that each works
# make bench-gpu-parity          check losses, gradients and resuming on a GPU, under 10 minutes
# make bench-gpu                 measure training steps on a GPU, under 10 minutes; again: the missing cells
# make lint                      run ruff, mypy, shellcheck and hadolint
# make help                      print these lines
PYTHON ?= python3
VENV := .venv
CORPUS ?= auto
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
QUICK := $(VENV)/quickstart-ready
READY := $(VENV)/ready
PIP := python -m pip install --quiet --no-compile --disable-pip-version-check
TORCH_CPU ?= https://download.pytorch.org/whl/cpu
# bounds: a torch that is there, for another CUDA or of another version, is kept
BUILD := $(shell sed -n 's/^\(pybind11[^ ]*\)/\1/p; s/^\(setuptools[^ ]*\)/\1/p' requirements.txt)
TORCH := "$(shell sed -n 's/^\(torch[<>=][^ ]*\).*/\1/p' requirements.txt)"

.PHONY: .extension .packages quickstart test test-all bench-smoke bench-gpu-parity bench-gpu lint check docs help clean

quickstart: $(QUICK)
	bash examples_scaling/quickstart/quickstart.sh "$(CORPUS)"

# two processes, of which the first to end takes tests of the other; a fixture of a file that both run is made in
# each. A test that takes five minutes hangs: its process prints where and ends, and so does the suite, with the
# name of the test
test: $(READY)
	python -m pytest -n 2 --dist worksteal -m "not gpu and not slow" --max-worker-restart 0 \
		-o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true

test-all: $(READY)
	python -m pytest

# downstream reads SCALING_DATA; without it, it is skipped
bench-smoke: export OMP_NUM_THREADS = 1
bench-smoke: $(READY)
	python tools/prepare_corpus.py --corpus local --max-mb 4 --out build/smoke/text
	python tools/train_tokenizer.py build/smoke/text/train.jsonl --n-tokens 512 --out build/smoke/tokenizer
	python tools/bench/preprocess.py build/smoke/text/train.jsonl --tokenizer-model build/smoke/tokenizer --sides batch --repeat 1
	python tools/bench/loader.py --workers 0 2 --batches 20 --repeat 1
	python tools/bench/order.py --documents 200000 --tokens 100000000 --epochs 1 --repeat 1
	python tools/bench/train.py --dtype float32 --widths 16 --repeat 1 --steps 2 --threads 1
	python tools/bench/fit.py --starts 10 --repeat 2
	python tools/bench/mixture.py --documents 2e4 --repeat 1
	python tools/bench/generate.py --size 7M --batch 1 --new-tokens 8 --repeat 1 --threads 1
	python tools/bench/coordinate_check.py --widths 32 64 --depths 2 4 --steps 2 --seeds 1 --out build/smoke/page.html
	python tools/bench/coverage.py --designs 20 --simulations 2 --n-bootstrap 20
	python tools/bench/gpu.py --device cpu --sizes tiny --only ours/tiny/AR/default --steps 1 --out build/smoke/gpu
	test -z "$$SCALING_DATA" || python tests/task_folder.py "$$SCALING_DATA/downstream" build/smoke/tasks
	test -z "$$SCALING_DATA" || python tools/bench/downstream.py --include-path build/smoke/tasks --tasks hellaswag \
		--limit 4 --repeat 1 --threads 1
	awk 'BEGIN {print "train_flops,loss"; for (i = 0; i < 20; i++) print 1e15 * 2 ^ i "," 2 + 3 * 2 ^ (-0.15 * i)}' \
		> build/smoke/ladder.csv
	python tools/bench/extrapolate.py build/smoke/ladder.csv

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

help:
	@sed -n '/^#/!q; s/^# //p' Makefile

# installs nothing, only reports
check:
	@$(or $(wildcard $(VENV)/bin/python),$(PYTHON)) tools/check_environment.py

# reinstalled when the pins or the C++ sources change
$(QUICK): requirements.txt setup.py pyproject.toml $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $$($(PYTHON) --version) found, expected 3.11 or newer. Run make PYTHON=python3.12." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, os, sysconfig; \
		assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null || \
		{ echo "error: $(PYTHON) lacks venv or its C headers. Run apt-get install python3-venv python3-dev." >&2; exit 1; }
	@command -v g++ >/dev/null || { echo "error: g++ not found. Run apt-get install g++." >&2; exit 1; }
	@echo "installing 1.3 GB in $(VENV), more with a GPU driver: about two minutes, and the download"
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(BUILD)
	$(MAKE) --no-print-directory -j2 .extension .packages
	@touch $@

# compiles while the packages are unpacked
.extension:
	$(PIP) --no-build-isolation --no-deps -e .

# without a driver of NVIDIA or AMD torch's CPU build, 3 GB smaller, if its index answers; otherwise the build on PyPI
.packages:
	command -v nvidia-smi rocm-smi >/dev/null || python -c 'import torch' 2>/dev/null || \
		$(PIP) --retries 1 --timeout 20 --index-url $(TORCH_CPU) $(TORCH) || true
	sed '/^# .make quickstart. installs/q' requirements.txt > $(VENV)/quickstart.txt
	$(PIP) -r $(VENV)/quickstart.txt

$(READY): $(QUICK) requirements.txt
	$(PIP) -r requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info megatron/_csrc*.so
