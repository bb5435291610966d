# make demo   from nothing: environment, then a real asynchronous run, then its report
# make test   from nothing: environment, then every test, after an installation of 2 to 4 minutes (docs/log/tests.md: what they cost)
# make check  lint, types, import rules, fast tests (files of at most 10 CPU seconds)
# make mutants  do the fast tests notice a changed line: 600 mutants by a seed; a changed file in 5 minutes: `make mutants MUTANTS="--module weights --minutes 5"`
# make shape  how much code there is and what a reader meets: tokens, lines, helpers, names, import circles; each with its limit
# make bench  every program that makes a figure of README and docs, then one table, hours in all (`make bench BENCH="--only speed engine"`)
# make gpu-check  on a machine with a CUDA GPU, at most 8 minutes: which parts work there, and how far they are from the CPU; installs nothing (`make gpu-check GPU_PYTHON=/opt/venv/bin/python`)
# make docs   docs/ as a site, in build/docs; a link that leads nowhere is an error
# make wheel  dist/asyncrl-*.whl, configs included: pip install it anywhere
# make clients  every agent of docs/clients, gem's environments, lm_eval and recipes of tinker-cookbook, which `make test` leaves out, each with its real package, in environments built from nothing (4 GB)
# make trackers  wandb, trackio and mlflow, each for real in its offline or local mode, in an environment beside the main one
# make requirements  compile requirements/cpu.txt, gpu.txt, clients.txt, more-clients.txt, gem.txt and lm-eval.txt anew
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
export OMP_NUM_THREADS ?= 1
# Modules are compiled as they are first imported, and kept: without it each process would compile them anew.
export PYTHONDONTWRITEBYTECODE :=
# $(call install,PYTHON,WHAT): by uv, in a quarter of the time of pip, which takes over where uv cannot reach the packages.
FROM := $(addprefix --find-links ,$(PIP_FIND_LINKS)) $(addprefix --default-index ,$(PIP_INDEX_URL)) $(addprefix --index ,$(PIP_EXTRA_INDEX_URL))
install = $(VENV)/bin/uv pip install --quiet $(FROM) --python $(1) $(2) || $(PY) -m pip --python $(1) install --quiet --disable-pip-version-check --no-compile $(2)

.PHONY: env demo test clients trackers check shape mutants bench gpu-check docs browser requirements wheel

# The installation takes minutes: every five seconds a line says how far it is.
$(VENV)/.demo: pyproject.toml
	test -x $(PY) || python3 -m venv $(VENV)
	@echo "installing torch and asyncrl into $(VENV), about 1 GB"; \
	(while sleep 5 && kill -0 $$$$ 2>/dev/null; do echo "... $$(du -sm $(VENV) | cut -f1) MB"; done) & progress=$$!; \
	$(PIP) uv==0.13.9 && { $(call install,$(PY),torch==2.13.0 -e .); }; code=$$?; kill $$progress; exit $$code
	touch $@

# Everything for development and both engines, at the versions of one compiled file; --no-deps keeps out what requirements/overrides.txt names.
# TARGET=gpu installs the same for a CUDA machine.
TARGET ?= cpu
$(VENV)/.env: $(VENV)/.demo requirements/$(TARGET).txt
	$(call install,$(PY),--no-deps -r requirements/$(TARGET).txt)
	touch $@

# Compile requirements/*.txt anew from pyproject.toml (needs uv).  PIP_FIND_LINKS: a directory with a CPU wheel of torch, if there is one.
COMPILE := uv pip compile -q --no-annotate --no-header --python-version 3.11 --python-platform x86_64-manylinux_2_28 --override requirements/overrides.txt
CPU_TORCH := $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--torch-backend cpu)
requirements:
	$(COMPILE) $(CPU_TORCH) --extra dev --extra engines-cpu pyproject.toml | sed 's/^\(torch==[^+]*\)+cpu/\1/' > requirements/cpu.txt.part
	$(COMPILE) --extra dev --extra engines-gpu pyproject.toml > requirements/gpu.txt.part
	$(COMPILE) requirements/clients.in > requirements/clients.txt.part
	$(COMPILE) requirements/more-clients.in > requirements/more-clients.txt.part
	$(COMPILE) requirements/gem.in > requirements/gem.txt.part
	$(COMPILE) requirements/lm-eval.in > requirements/lm-eval.txt.part
	mv requirements/cpu.txt.part requirements/cpu.txt
	mv requirements/gpu.txt.part requirements/gpu.txt
	mv requirements/clients.txt.part requirements/clients.txt
	mv requirements/more-clients.txt.part requirements/more-clients.txt
	mv requirements/gem.txt.part requirements/gem.txt
	mv requirements/lm-eval.txt.part requirements/lm-eval.txt

# The packages that people's agents use, for docs/clients: an environment of their own, without torch.
$(VENV)/clients/.env: requirements/clients.txt | $(VENV)/.demo
	test -x $(VENV)/clients/bin/python || python3 -m venv --without-pip $(VENV)/clients
	$(call install,$(VENV)/clients/bin/python,--no-deps -r requirements/clients.txt)
	touch $@

# The frameworks that only `make clients` runs: Python's pinned, Node and npm beside them, Node's as the lock file has them.
MORE := $(VENV)/more-clients
$(MORE)/.env: requirements/more-clients.txt requirements/more-clients/package.json requirements/more-clients/package-lock.json
	rm -rf $(MORE)
	python3 -m venv $(MORE)
	$(MORE)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r requirements/more-clients.txt
	cp requirements/more-clients/package.json requirements/more-clients/package-lock.json $(MORE)
	cd $(MORE) && PATH=$$PWD/bin:$$PATH npm install --no-save --no-audit --no-fund --loglevel error
	touch $@

# The trackers of record.trackers that the environment lacks, and what they need beyond it; the rest comes from $(VENV).
TRACKERS := $(VENV)/trackers
$(TRACKERS)/.env: requirements/trackers.txt $(VENV)/.env
	test -x $(TRACKERS)/bin/python || python3 -m venv --without-pip $(TRACKERS)
	$(call install,$(TRACKERS)/bin/python,--no-deps -r requirements/trackers.txt)
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(TRACKERS)/lib/python3.*/site-packages)/environment.pth
	touch $@

trackers: $(TRACKERS)/.env
	$(TRACKERS)/bin/python -m pytest tests/records/test_trackers.py

$(VENV)/gem/.env: requirements/gem.txt | $(VENV)/.demo
	test -x $(VENV)/gem/bin/python || python3 -m venv --without-pip $(VENV)/gem
	$(call install,$(VENV)/gem/bin/python,--no-deps -r requirements/gem.txt)
	touch $@

# lm_eval, for docs/evaluation.md, apart from the frameworks: both pin much.
$(VENV)/lm-eval/.env: requirements/lm-eval.txt | $(VENV)/.demo
	test -x $(VENV)/lm-eval/bin/python || python3 -m venv --without-pip $(VENV)/lm-eval
	$(call install,$(VENV)/lm-eval/bin/python,--no-deps -r requirements/lm-eval.txt)
	touch $@

# tinker-cookbook, and what it needs beyond $(VENV), as the trackers have it.
COOKBOOK := $(VENV)/cookbook
$(COOKBOOK)/.env: requirements/cookbook.txt $(VENV)/.env
	test -x $(COOKBOOK)/bin/python || python3 -m venv --without-pip $(COOKBOOK)
	$(call install,$(COOKBOOK)/bin/python,--no-deps -r requirements/cookbook.txt)
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(COOKBOOK)/lib/python3.*/site-packages)/environment.pth
	touch $@

# verifiers 0.4, and what it needs beyond $(VENV)/clients, where 0.1 is.
VERIFIERS := $(VENV)/verifiers
$(VERIFIERS)/.env: requirements/verifiers.txt $(VENV)/clients/.env
	test -x $(VERIFIERS)/bin/python || python3 -m venv --without-pip $(VERIFIERS)
	$(call install,$(VERIFIERS)/bin/python,--no-deps -r requirements/verifiers.txt)
	$(VENV)/clients/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(VERIFIERS)/lib/python3.*/site-packages)/environment.pth
	touch $@

# tinker-cookbook 0.6 with the server's own client; the rest comes from the two environments above.
COOKBOOK_NEW := $(VENV)/cookbook-0.6
$(COOKBOOK_NEW)/.env: requirements/cookbook-0.6.txt $(COOKBOOK)/.env
	test -x $(COOKBOOK_NEW)/bin/python || python3 -m venv --without-pip $(COOKBOOK_NEW)
	$(call install,$(COOKBOOK_NEW)/bin/python,--no-deps -r requirements/cookbook-0.6.txt)
	for python in $(COOKBOOK)/bin/python $(PY); do $$python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; done > $$(echo $(COOKBOOK_NEW)/lib/python3.*/site-packages)/environment.pth
	touch $@

env: $(VENV)/.env $(VENV)/clients/.env $(COOKBOOK)/.env $(COOKBOOK_NEW)/.env $(VERIFIERS)/.env

# The report's test opens it in a headless browser.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || \
	  { echo "the report's test needs Chromium: install it (Debian: apt-get install chromium)"; exit 1; }

demo: $(VENV)/.demo
	$(PY) -m asyncrl.cli run configs/demo.toml

# CPU seconds by file are printed at the end of every run.  A file above 10 carries the marker `slow`, which `make check` leaves out.
# Four workers for two cores, as many tests wait for processes; six at most.
WORKERS ?= $(shell w=$$(($$(nproc) * 2)); echo $$((w < 6 ? w : 6)))
TESTS := $(PY) -m pytest -n $(WORKERS) --dist worksteal

test: env browser
	$(TESTS)

clients: $(VENV)/.env $(MORE)/.env $(VENV)/gem/.env $(VENV)/lm-eval/.env $(COOKBOOK_NEW)/.env
	$(PY) -m pytest -s --durations=0 tests/support/more_clients.py tests/support/lm_eval_client.py tests/support/cookbook_client.py

check: env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(PY) benchmarks/shape.py
	$(TESTS) -m "not slow"

# build/lib goes first: setuptools would pack modules from it that are gone.
wheel: $(VENV)/.demo
	rm -rf build/lib build/bdist.* dist
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

shape:
	python3 benchmarks/shape.py --where

docs: env
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

MUTANTS ?= --sample 600 --seed 0
mutants: env
	nice $(PY) benchmarks/mutants.py $(MUTANTS)

bench: env
	$(PY) benchmarks/table.py --run $(BENCH)

# The machine's own Python, with its torch: nothing is installed, and asyncrl runs from this directory.
GPU_PYTHON ?= $(if $(wildcard $(PY)),$(PY),python3)
gpu-check:
	$(GPU_PYTHON) benchmarks/gpu_check.py $(GPU_CHECK)
