# Two virtual environments, each made from nothing on first use and kept up to date with the pyproject files:
# .venv-demo for `make demo`, .venv for everything else. Both hold editable installs.

PYTHON ?= python3
ARGS ?=

# torch comes first and pinned, so that nothing else pulls in another build. PyPI's build for Linux brings CUDA, several
# GB; where the CPU is enough: make test TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
TORCH := torch==2.13.0
TORCH_ARGS ?=
# A pip that knows --group; numpy keeps torch from warning at import.
FIRST := pip==26.3 numpy==2.4.6

TEST_ENV := .venv
DEMO_ENV := .venv-demo
PYPROJECTS := pyproject.toml $(sort $(wildcard measure/pyproject.toml plugins/*/pyproject.toml engines/*/pyproject.toml))
PROJECTS := $(patsubst %/pyproject.toml,./%,$(filter-out pyproject.toml,$(PYPROJECTS)))
EDITABLE := -e . $(addprefix -e ,$(PROJECTS))

# What torch's build for CUDA asks for; the CPU's asks for none. Without a GPU its interpreter runs the Triton kernels
# (conftest.py turns it on), and its compiler compiles them ahead. tests/engines/run.py has the other releases.
TRITON := triton==3.7.1

# One process per core, each with one torch thread. The tests of a class or module stay in one process, which builds
# their fixtures and compiles their kernels once. conftest.py orders them: what takes long comes first.
WORKERS ?= auto
PYTEST = $(TEST_ENV)/bin/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder --ignore tests/browser

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start hundreds of interpreters: each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo site test test-ci test-all test-distributed test-browser test-engines audit check venv format docs bench-select bench-runtime dist clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(DEMO_ENV)/.installed ## Explain a real model on a GPU that is not here, then run and check one attention layer here
	@echo; echo '$$ attn-select explain --model deepseek-v3 --gpu h100 --kv-cache-dtype fp8'
	@$(DEMO_ENV)/bin/attn-select explain --model deepseek-v3 --gpu h100 --kv-cache-dtype fp8
	@echo; echo '$$ attn-select run --model llama-3-8b'
	@$(DEMO_ENV)/bin/attn-select run --model llama-3-8b

test: check ## Lint, type-check and test, without what is marked slow (ARGS="-k name -x" goes to pytest)
	$(PYTEST) -m "not slow and not distributed" --hypothesis-profile=quick $(ARGS)

test-ci: ## Test what lands, step by step, and say how long each took: 25 minutes on two cores, downloads included
	@$(PYTHON) tests/steps.py \
		"venv: make venv" \
		"engines &: $(TEST_ENV)/bin/python tests/engines/run.py --ci" \
		"lint and types: make check" \
		"browser: make test-browser" \
		"tests: $(PYTEST) -m '(not slow or slow(ci=True)) and not distributed' --hypothesis-profile=quick" \
		"distributed: make test-distributed"

test-distributed: venv ## Test context parallelism between processes, by gloo
	$(TEST_ENV)/bin/python -m pytest -m distributed tests/distributed $(ARGS)

test-all: check ## Lint, type-check and run every test: all conformance configurations, installations from wheels
	$(PYTEST) -m "not distributed" $(ARGS)

site: venv ## Build the documentation's site into build/site
	@$(TEST_ENV)/bin/python -m pip install -q --group site
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(TEST_ENV)/bin/python -m mkdocs build --quiet

test-browser: $(TEST_ENV)/.browser site ## Test the report and the site in a headless Chromium
	$(TEST_ENV)/bin/python -m pytest tests/browser $(ARGS)

test-engines: venv ## Test the adapters of engines and Triton's kernels in other releases, and FLA with fla-core, each in an environment of its own (ARGS as above)
	$(TEST_ENV)/bin/python tests/engines/run.py $(ARGS)

audit: venv ## Put drawn commands of `attn-select flags` through the engines' own code (ARGS="--engine vllm --seed 2"; 12 minutes, downloads included)
	$(TEST_ENV)/bin/python tests/engines/audit/audit.py $(ARGS)

check: venv ## Lint, type-check and hold the order of imports
	$(TEST_ENV)/bin/ruff check
	$(TEST_ENV)/bin/ruff format --check
	$(TEST_ENV)/bin/mypy --num-workers auto
	$(TEST_ENV)/bin/lint-imports --no-logo

venv: $(TEST_ENV)/.installed ## Make .venv only: the development tools and all projects, editable

format: venv ## Rewrite the sources as `make test` wants them
	$(TEST_ENV)/bin/ruff check --fix
	$(TEST_ENV)/bin/ruff format

docs: venv ## Write into the documents what their commands print now, and docs/gpu-results.md of docs/results
	$(TEST_ENV)/bin/python tests/docs/console_blocks.py --write
	$(TEST_ENV)/bin/python docs/results_page.py
	$(TEST_ENV)/bin/python tests/decision/compare_vllm.py --write

bench-select: venv ## Measure selection: cold start, cached and uncached select, a matrix
	$(TEST_ENV)/bin/python tests/bench/bench_select.py $(ARGS)

bench-runtime: venv ## Measure the runtime's host time: metadata and a layer's calls
	$(TEST_ENV)/bin/python tests/bench/bench_runtime.py $(ARGS)

dist: venv ## Build the wheels and sdists of all projects into dist/
	rm -rf dist
	@set -e; for project in . $(PROJECTS); do \
		$(TEST_ENV)/bin/python -m build --no-isolation --outdir dist $$project; \
	done

clean: ## Remove both environments, dist/ and all caches
	rm -rf $(TEST_ENV) $(DEMO_ENV) .venv-engines build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find core cli measure plugins engines tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch alone has a stamp of its own: a change to a pyproject file installs the rest anew, not torch.
%/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attn-select needs Python 3.11 or newer; $(PYTHON) is %d.%d: make PYTHON=python3.12" % sys.version_info[:2])'
	@echo "Making $* with $$($(PYTHON) --version) and $(TORCH)"
	@$(PYTHON) -m venv --clear $*
	@$*/bin/python -m pip install -q $(FIRST)
	@$*/bin/python -m pip install -q $(TORCH) $(TORCH_ARGS)
	@touch $@

$(DEMO_ENV)/.installed: $(DEMO_ENV)/.torch $(PYPROJECTS)
	@echo "Installing attn-select and its plugins into $(DEMO_ENV)"
	@$(DEMO_ENV)/bin/python -m pip install -q --group build
	@$(DEMO_ENV)/bin/python -m pip install -q --no-build-isolation $(EDITABLE)
	@touch $@

# The browser is the system's: Debian's, where there is none and the user may install it. CHROMIUM=PATH names another.
$(TEST_ENV)/.browser: $(TEST_ENV)/.installed
	@test -n "$$CHROMIUM" || command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
		{ apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends chromium; } >/dev/null
	@$(TEST_ENV)/bin/python -m pip install -q --group browser
	@touch $@

$(TEST_ENV)/.installed: $(TEST_ENV)/.torch $(PYPROJECTS)
	@echo "Installing the development tools, attn-select and its plugins into $(TEST_ENV)"
	@$(TEST_ENV)/bin/python -m pip install -q --group dev $(TRITON)
	@$(TEST_ENV)/bin/python -m pip install -q --no-build-isolation $(EDITABLE)
	@touch $@
