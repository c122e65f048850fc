# Each target sets up whatever is missing first, and at once when nothing is.
# make setup PYTHON=python3.12 SETUP="--mpi system --gpu"     options are remembered; launch/setup --help lists them
# make run NP=8 RUN="--dataset digits"
# make chaos CHAOS="--attacks 200"       kill, stop, corrupt; start again; compare the bits and count the samples

PYTHON ?= $(or $(wildcard .venv/bin/python),python3)
NP ?= 2
.PHONY: setup run test test-all lint bench chaos

# Open MPI refuses root unless told twice; containers and CI are root. Nobody else gets this.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

setup:
	@$(PYTHON) launch/setup $(SETUP)

run: setup
	. .venv/bin/activate && horovodrun -np $(NP) python -m hvdtrain.mnist $(RUN)

test: setup
	. .venv/bin/activate && python -m pytest $(TEST)

test-all: setup
	. .venv/bin/activate && python -m pytest -m "" $(TEST)

lint: setup
	. .venv/bin/activate && ruff check . && ruff format --check . && mypy && MYPYPATH=launch mypy launch/*.py launch/setup

chaos: setup
	. .venv/bin/activate && python -m tests.chaos.run $(CHAOS)

bench: setup
	. .venv/bin/activate && python -m tests.bench $(BENCH)
