# Each target sets up whatever is missing first, and at once when nothing is. `exec`: make hands on SIGTERM to what it started, and
# a shell in between would end without its program.
# make setup PYTHON=python3.12 SETUP="--mpi system --gpu"     options are remembered; launch/setup --help lists them
# make run NP=8 RUN="--dataset digits"
# make chaos CHAOS="--attacks 200"       kill, stop, corrupt; start again; compare the bits and count the samples
# make chaos EXAMPLES=20000              so many bad inputs of each kind afterwards
# make chaos ENVIRONMENTS=--co         without the attempts of tests/chaos/test_environments.py: ten minutes
# make docs                              the documentation as a site in site/: open site/index.html
# make matrix MATRIX=--list              other versions of Python, PyTorch and MPI: each set up and tested; hours
# make soak SOAK="--ranks 8"             an hour of training, in which nothing may grow

# A set-up that was killed may leave a .venv/bin/python that does not run.
PYTHON ?= $(shell .venv/bin/python -c "import venv" 2>/dev/null && echo .venv/bin/python || echo python3)
NP ?= 2
EXAMPLES ?= 5000
ENVIRONMENTS ?= --jobs 2
BAD := tests/single/commands/test_refusals.py tests/single/test_bad_files.py
.PHONY: setup run test test-slow test-all lint docs dist bench gpu chaos chaos-attacks chaos-environments chaos-examples matrix soak flaky mutants peers

setup:
	@$(PYTHON) launch/setup $(SETUP)

run: setup
	. .venv/bin/activate && exec horovodrun -np $(NP) python -m hvdtrain.mnist $(RUN)

# What a user relies on; then all the rest; both. JOBS files at a time, at most 8 if you do not say: three more than cores, because
# many tests wait for a launcher or for a time limit; of the rest, two.
# TEST="FILE -k NAME -s" is pytest's, and one at a time.
CORES := $(shell nproc)
at_once = -n $(or $(JOBS),$(shell echo $$(($(CORES) + $(1) < 8 ? $(CORES) + $(1) : 8)))) --dist loadfile --no-loadscope-reorder
test: setup
	. .venv/bin/activate && exec python -m pytest $(or $(TEST),$(call at_once,3))

test-slow: setup
	. .venv/bin/activate && exec python -m pytest -m slow $(or $(TEST),$(call at_once,2))

test-all: setup
	. .venv/bin/activate && exec python -m pytest -m "" $(or $(TEST),$(call at_once,2))

lint: setup
	. .venv/bin/activate && ruff check . && ruff format --check . && mypy && MYPYPATH=launch mypy launch/*.py launch/setup

# With what pyproject.toml calls docs, which is no part of a plain set-up. A warning, such as a broken
# anchor, ends it, and so does what docs/site/readability.py finds.
docs:
	@$(PYTHON) launch/setup $(SETUP) --with docs
	. .venv/bin/activate && exec python docs/site/reference.py
	. .venv/bin/activate && exec python docs/site/messages.py
	. .venv/bin/activate && exec python docs/site/readability.py
	. .venv/bin/activate && exec python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going -c docs/site . site
	@echo "site/index.html: open it in a browser"

# The wheel and the source distribution for a package index, checked: also that the wheel trains in an environment with nothing but
# what it depends on. Both land in dist/.
dist:
	@$(PYTHON) launch/setup $(SETUP) --with dist
	rm -rf dist
	. .venv/bin/activate && exec python -m build --no-isolation --outdir dist .
	. .venv/bin/activate && exec python -m twine check --strict dist/*
	. .venv/bin/activate && exec python -m pytest -q -m "" tests/e2e/launch/test_wheel.py tests/e2e/launch/test_pip_install.py

chaos: setup
	@$(MAKE) --keep-going chaos-attacks chaos-environments chaos-examples
chaos-attacks:
	. .venv/bin/activate && exec python -m tests.chaos.run $(CHAOS)
chaos-environments:
	. .venv/bin/activate && exec python -m pytest -q tests/chaos $(ENVIRONMENTS)
chaos-examples:
	. .venv/bin/activate && exec env HVDTRAIN_EXAMPLES=$(EXAMPLES) python -m pytest --timeout 7200 $(BAD)

matrix:
	@$(PYTHON) -m tests.matrix $(MATRIX)

soak: setup
	. .venv/bin/activate && exec python -m tests.chaos.soak $(SOAK)

bench: setup
	. .venv/bin/activate && exec python -m tests.bench $(BENCH)

# make gpu      on a node with GPUs: what only they can show, and rates beside plain PyTorch, into runs/gpu
gpu: setup
	exec bash tests/gpu/eight.sh

# Break the source at random in sixty places, one at a time; the tests must notice.  make mutants MUTANTS="--count 5 --seed 7"
mutants: setup
	. .venv/bin/activate && exec python -m tests.mutants $(MUTANTS)

# make flaky FILE=tests/e2e/training/test_guard.py N=50     one file, again and again, beside two busy loops, each time in another order
flaky: setup
	. .venv/bin/activate && exec python -m tests.flaky $(FILE) --times $(or $(N),20) $(FLAKY)

# The same training under other trainers, audited in the same way: environments of their own (8 GB), then the table of docs/evidence/peers.md.
# make peers PEERS="--only Lightning"
peers: setup
	. .venv/bin/activate && exec python -m tests.peers $(PEERS)
