# A clone, Python 3.11 or 3.12, git and make are all that is needed.
#
#   make test      static checks and all tests      make demo    GPT-2 on four CPU ranks
#   make lint      static checks alone              make bench   the quick placement benchmark
#   make format    lay the code out                 make clean   remove what make made
#
# The tests by CI job:
#   make shapes    kernels as plain Python, array shapes checked
#   make jit       kernels compiled
#   make kernels   both of these
#   make torch     capture and ranks; `make ranks` and `make rest` are its halves
#   make long      tests that take minutes: recipes, kills, all layouts
#   make kill      all tests of kills and faults of whole runs: those of the next two lines, and more
#   make kills     200 kills while a checkpoint is written, 200 of ranks and launcher in training
#   make kill-matrix   each rank x phase x signal; prints what was seen
#   make soak      1,000 steps with 100 saves: nothing grows
#   make resume-matrix   stop and go on: four models, 1, 2, 3, 4 and 8 ranks, placed and cut
#   make two-nodes       torchrun on two network namespaces with a slow link (root, Linux)
#   make browser       the report in Chromium (Debian: apt-get install chromium)
#   make properties  all tests with random examples, 300 each in place of 25 (6 minutes)
#   make fuzz      10 minutes of damaged files of every kind, through every command that reads them
#   make plan-mutants   files of cut plans changed in one place: 400 that are accepted change no bit
#   make mutants   400 small faults planted one by one: which of them no test finds (an hour)
#   make site      the documentation as pages that open from disk, in site/
#   make coverage  as `shapes`, and the lines that no test runs

VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
PYTHON_CANDIDATES = $(PYTHON) python3.11 python3.12 python3
# Images for containers set it. Each process of a test would compile the package again: 0.4 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test demo bench lint format compiled kernels shapes coverage jit torch ranks rest long clean kills \
	kill kill-matrix soak resume-matrix two-nodes browser mutants plan-mutants fuzz properties site

SYNC = $(if $(filter output-sync,$(.FEATURES)),--output-sync)

# Kernels first, or jobs side by side would compile the same ones. Then three at a time for two cores, as
# `ranks` waits for its processes a third of its time, and the longest first, so that none ends alone.
test: $(STAMP)
	$(MAKE) -j2 $(SYNC) lint compiled
	$(MAKE) -j3 $(SYNC) ranks rest jit shapes

# One call of pip, so that the pinned torch is the only one that is ever considered.
$(STAMP): pyproject.toml constraints.txt
	@python=; for candidate in $(PYTHON_CANDIDATES); do \
	  if $$candidate -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; \
	  then python=$$candidate; break; fi; done; \
	if [ -z "$$python" ]; then \
	  echo "pardnn needs Python 3.11 or 3.12; name one: make PYTHON=/path/to/python3.11"; exit 1; \
	fi; \
	echo "$$python -m venv $(VENV)"; $$python -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[torch,test]'
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# A core each.
kernels: $(STAMP)
	$(MAKE) -j2 $(SYNC) jit shapes

# Fills numba's cache with the kernels of all algorithms.
compiled: $(STAMP)
	$(BIN)/python -c 'from pardnn.planner import algorithms, warm_up; \
	  warm_up.warm_up(algorithms.ALGORITHMS, polished=True)'

# Kernels as plain Python: array shapes are checked at every call.
shapes: $(STAMP)
	NUMBA_DISABLE_JIT=1 $(BIN)/python -m pytest -q --job shapes

# The same, counting lines of kernels too. Takes half as long again, so `make test` leaves it out.
coverage: $(STAMP)
	NUMBA_DISABLE_JIT=1 $(BIN)/coverage run -m pytest -q --job shapes
	$(BIN)/coverage report

# Kernels compiled, as users run them.
jit: $(STAMP)
	$(BIN)/python -m pytest -q --job jit

# Capture and ranks, and the halves to run side by side. A run in which a process crashes or prints
# a traceback fails, even if all tests pass.
torch ranks rest long: $(STAMP)
	@echo "$(BIN)/python -m pytest -q -rs --job $@"; \
	$(BIN)/python -m pytest -q -rs --job $@ > .$@.log 2>&1; status=$$?; cat .$@.log; \
	if [ $$status = 0 ] && grep -qE "Fatal Python error|Traceback" .$@.log; then \
	  echo "all passed, but a process that failed can be seen above"; status=1; \
	fi; exit $$status

# Long forms of tests of faults: 200 kills, each cell of a matrix, 1,000 steps; all models and cuts.
kills: $(STAMP)
	KILLS=200 $(BIN)/python -m pytest -q -s -k kills tests/checkpoint/test_commit.py \
	  tests/backends/torch/launch/test_training_kills.py

kill: $(STAMP)
	$(MAKE) kills kill-matrix
	$(BIN)/python -m pytest -q -s tests/backends/torch/launch/test_run_faults.py \
	  tests/backends/torch/launch/test_saved_runs.py tests/backends/torch/launch/test_launcher.py

kill-matrix: $(STAMP)
	KILL_MATRIX=1 $(BIN)/python -m pytest -q -s tests/backends/torch/test_kill_matrix.py

soak: $(STAMP)
	SOAK=1000 $(BIN)/python -m pytest -q -s tests/backends/torch/checkpoint/test_soak.py

resume-matrix: $(STAMP)
	MATRIX=1 $(BIN)/python -m pytest -q tests/backends/torch/checkpoint/test_resume.py

# Fails where nodes cannot be made, which `make long` skips and says.
two-nodes: $(STAMP)
	TWO_NODES=1 $(BIN)/python -m pytest -q tests/backends/torch/test_two_nodes.py

# Fails where there is no Chromium, which `make long` skips and says.
browser: $(STAMP)
	CHROMIUM=1 $(BIN)/python -m pytest -q tests/report/test_page_in_browser.py

# Tests with examples of hypothesis, by its mark.
properties: $(STAMP)
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -q -m hypothesis

# The seed is printed. FUZZ_CASE=SEED-NUMBER repeats one case of a run that failed.
FUZZ_SECONDS ?= 600
fuzz: $(STAMP)
	FUZZ=$(FUZZ_SECONDS) $(BIN)/python -m pytest -q -s tests/fuzz

# SEED=1 takes the mutants of a run that printed so.
plan-mutants: $(STAMP)
	PLAN_MUTANTS=400 $(BIN)/python -m pytest -q -s tests/planner/torch/test_mutants_of_plans.py

# What was found is kept in .mutants: a run that was cut goes on, and after new tests survivors alone
# are asked again. Kernels first, as plain Python, then all else. FLAGS='--only src/pardnn/sim --sample 0' takes all mutants below a path,
# FLAGS='--survivors bench/results/DATE_mutants.md' those that survived on a page, to write there what catches them now.
mutants: $(STAMP)
	NUMBA_DISABLE_JIT=1 $(BIN)/python -m bench mutants $(FLAGS)
	$(BIN)/python -m bench mutants $(FLAGS)

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# Strict: a broken link fails it. (With --quiet nothing would.)
site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -d site

# About 6 minutes on one core. Others: python -m bench NAME (bench/__main__.py lists them).
bench: $(STAMP)
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) build dist demo site .*.log .coverage* .hypothesis .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info
