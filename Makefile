# Every target makes what it needs; a second run finds it there.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Two workers. Files stay whole, since their tests share servers.
PYTEST := $(BIN)/pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder
SEED ?= 0
STEPS ?= 50000
CYCLES ?= 20
LOADED ?= 60
MINUTES ?= 30
N ?= 1000000
CASES ?= 10000

.PHONY: demo test lint types pytest test-all bench bench-gpu bench-trl curves chaos queue-model api-test load soak fuzz docker-test clean

demo: $(STAMP)  ## train a tiny model on this machine; SEED=n, RESUME=1
	$(BIN)/policy-trainer demo --seed $(SEED) $(if $(RESUME),--resume)

test: lint  ## ruff, then pyright beside pytest: five minutes
	$(MAKE) --no-print-directory --jobs 2 types pytest

test-all: $(STAMP)  ## the tests that `make test` leaves out, marked slow: twenty minutes more
	$(PYTEST) -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

pytest: $(STAMP)
	$(PYTEST) -m "not slow"

bench: $(STAMP)  ## speed and memory as ratios, both sides in one run
	$(BIN)/python -m tests.bench

bench-gpu: $(STAMP)  ## every figure of a GPU, or small ones of a CPU: ARGS="--sizes 3B --json gpu.json"
	$(BIN)/python -m tests.bench.gpu $(ARGS)

bench-trl: $(STAMP)  ## a training step and the demo beside TRL's GRPOTrainer
	$(BIN)/python -m tests.bench.trl_step
	$(BIN)/python -m tests.bench.trl_demo

curves: $(STAMP)  ## learning curves of every preset: ARGS="--presets dapo gspo --seeds 0 --steps 50"
	$(BIN)/python -m tests.bench.curves $(ARGS)

chaos: $(STAMP)  ## kills, faults, full disks: CYCLES=n, SEED=n, BACKEND=sqlite|postgresql, ONLY="kill network"
	$(BIN)/python -m tests.chaos $(ONLY) --cycles $(CYCLES) --seed $(SEED) $(if $(BACKEND),--backend $(BACKEND))

queue-model: $(STAMP)  ## both stores of the queue beside a model of it, 50,000 operations each
	QUEUE_MODEL_STEPS=$(STEPS) $(BIN)/pytest -q -s tests/ref_server/queue/test_model.py

docker-test: $(STAMP)  ## builds the image and runs compose.yaml with a real engine; BUILD_NETWORK=host if need be
	DOCKER_TEST=1 $(BIN)/pytest -q -s --durations 0 tests/docker

api-test: $(STAMP)  ## requests from the OpenAPI page: CASES=n, SEED=n
	$(BIN)/python -m tests.api --cases $(CASES) --seed $(SEED)

load: $(STAMP)  ## slow clients, and ten times too much: LOADED=seconds of each
	$(BIN)/python -m tests.load slow overload --seconds $(LOADED)

soak: $(STAMP)  ## a mixed load for MINUTES=n: nothing may grow
	$(BIN)/python -m tests.load soak --seconds $$(($(MINUTES) * 60))

fuzz: $(STAMP)  ## N=n changed uploads for each decoder, SEED=n
	$(BIN)/python -m tests.fuzz --inputs $(N) --seed $(SEED)

clean:
	rm -rf .venv

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt 'torch==2.13.0'
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@
