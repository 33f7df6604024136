# Everything a newcomer types. Each target sets up .venv first where it needs one.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-ui check agent-named train ui clean mutants bench bench-peer test-all help

help:
	@echo "make demo   the whole loop, end to end, offline      make test   the test suite"
	@echo "make train AGENT=name    one turn from the feedback that is there"
	@echo "make ui     Dagster and MLflow in a browser          make check  format, lint, types, definitions"
	@echo "make test-ui   the pages in a real browser (Chromium)"
	@echo "make bench  the measured claims                      make clean  remove .venv and caches"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing (a few minutes the first time)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $(READY)

demo: $(READY)
	$(BIN)/python -m automation.demo

# As many tests at once as there are cores, up to four, each on one core; of a file in one process,
# for its tests share what is slow to make. In the order of their names, which begins with the files
# that take longest: those of most tests first would leave whole turns to one core at the end.
AT_ONCE := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile \
	--no-loadscope-reorder

test: $(READY)
	$(AT_ONCE)

test-all: $(READY)
	$(AT_ONCE) -m "not gpu"

test-ui: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,ui]"
	@command -v chromium > /dev/null || $(BIN)/playwright install chromium || { echo "needed the browser Chromium, found none; install it (apt-get install chromium) and try again"; exit 1; }
	$(BIN)/python -m pytest -m ui

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/dg check defs
	$(BIN)/dg list defs > /dev/null

agent-named:
	@test -n "$(AGENT)" || { echo "needed an agent, found none; make train AGENT=name"; exit 1; }

train: agent-named $(READY)
	$(BIN)/python -m automation.launch --agent $(AGENT) $(if $(AGAIN),--again)

ui: $(READY)
	$(BIN)/python -m automation.ui

mutants: $(READY)
	$(BIN)/python -m benchmarks.ppo_mutants

bench: $(READY)
	$(BIN)/python -m benchmarks.validation_speed
	$(BIN)/python -m benchmarks.demo_seeds

# TRL pins other versions of what we use, so it gets an environment of its own.
PEER := .venv-peer
bench-peer: $(READY)
	$(PYTHON) -m venv $(PEER)
	$(PEER)/bin/python -m pip install --quiet torch==2.13.0 trl==1.12.0 transformers==5.17.0
	$(BIN)/python -m benchmarks.ppo_throughput --peer $(PEER)/bin/python
	$(BIN)/python -m benchmarks.reward_throughput --peer $(PEER)/bin/python

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
