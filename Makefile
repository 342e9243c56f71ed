# `make demo` and `make test` set everything up by themselves; a second call installs nothing.

PYTHON ?= python3
# Arguments of `pip install` for torch alone, for machines whose index offers the CUDA build first.
TORCH_PIP_ARGS ?= torch==2.13.0
PYTEST_ARGS ?=
# Test processes; each may hold one or two engines, a GB of memory each.
TEST_PROCESSES ?= 2
# A process that is done takes over the last tests of another; tests of one file share their engine.
PARALLEL := -n $(TEST_PROCESSES) --dist worksteal

# Hypothesis draws new cases; elsewhere it draws the same ones every time.
SEARCH ?= --hypothesis-profile=search

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)

.PHONY: setup mooncake langchain demo demo-find agent test test-versions slow soak eval verify-demo quality lint format docs bench-cold match novel bench-find clean

setup: $(READY)

ifeq ($(GPU),yes)
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade "pip>=25.1"
	$(PY) -m pip install -e ".[sglang,eval,bench]" --group test --group lint --group demo --group docs
	touch $@
else
$(READY): requirements/cpu.lock pyproject.toml tools/cpu_platform/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	-$(PY) -m pip install --quiet uv
# Torch comes by pip, whose settings may name an index of CPU builds, and the rest beside it by uv, which
# takes a minute where pip takes three. Where uv cannot, pip does.
	$(PY) -m pip install --quiet --no-deps $(TORCH_PIP_ARGS) & torch=$$!; \
	{ $(PY) -m uv pip install --quiet --compile-bytecode --python $(PY) --no-deps -r requirements/cpu.lock \
	|| $(PY) -m pip install --quiet --no-deps -r requirements/cpu.lock; } && wait $$torch
	$(PY) -m pip install --quiet --no-deps -e . -e tools/cpu_platform
	echo "import torchvision_cpu_shim" > "$$($(PY) -c 'import site; print(site.getsitepackages()[0])')/torchvision_cpu_shim.pth"
	touch $@
endif

# The Mooncake store, for its tests; they are skipped without it.
mooncake: $(READY)
	tools/install_mooncake.sh

# LangChain, for the agent through it and for its test, which is skipped without it.
langchain: build/langchain/.ready

build/langchain/.ready: pyproject.toml
	$(PYTHON) -m venv build/langchain
	build/langchain/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	build/langchain/bin/python -m pip install --quiet --group agents
	touch $@

demo: $(READY)
	$(PY) -m examples.demo.run

# The same prompts without a mark, and an agent with a clock in its system prompt.
demo-find: $(READY)
	$(PY) -m examples.demo.find

agent: $(READY)
	$(PY) -m examples.agent $(AGENT_ARGS)

test: $(READY)
	$(PY) -m pytest -m "not slow" $(PARALLEL) --durations=10 $(PYTEST_ARGS)

AGENT_ARGS ?=

# Versions of SGLang, all supported ones by default.
VERSIONS ?=

test-versions: $(READY)
	$(PY) tools/test_versions.py $(VERSIONS) -- $(PARALLEL) $(SEARCH) $(PYTEST_ARGS)

SOAK_ARGS ?=

soak: $(READY)
	$(PY) -m benchmarks.soak $(SOAK_ARGS)

slow: $(READY)
	$(PY) -m pytest -m slow $(PARALLEL) $(SEARCH) $(PYTEST_ARGS)

# The test model is so small that a second thread makes it slower.
ONE_THREAD := OMP_NUM_THREADS=1
EVAL_ARGS ?=
VERIFY_ARGS ?=

eval: $(READY)
	$(ONE_THREAD) $(PY) -m examples.tinyrag.evaluate $(EVAL_ARGS)

verify-demo: $(READY)
	$(ONE_THREAD) $(PY) -m examples.tinyrag.verify_demo $(VERIFY_ARGS)

quality: $(READY)
	$(ONE_THREAD) $(PY) -m benchmarks.quality --docs docs/quality.md --plot docs/quality.png
	$(PY) -m tools.docs_pages

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(READY)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# The tables must be current, and every link must lead somewhere.
docs: $(READY)
	$(PY) -m tools.docs_pages --check
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --site-dir build/site

bench-cold: $(READY)
	$(PY) -m benchmarks.cold

MATCH_ARGS ?=

match: $(READY)
	PYTHONPATH=tests $(PY) -m benchmarks.match $(MATCH_ARGS)

NOVEL_ARGS ?=

novel: $(READY)
	PYTHONPATH=tests $(PY) -m benchmarks.novel $(NOVEL_ARGS)

FIND_ARGS ?=

# What is found in prompts without marks, and what that costs in quality.
bench-find: $(READY)
	PYTHONPATH=tests $(PY) -m benchmarks.find $(FIND_ARGS)
	$(ONE_THREAD) $(PY) -m benchmarks.find_quality

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
