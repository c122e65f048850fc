"""Budgets: how many lines each folder may have. They only fall, so that a concern is told once.

The aim is 17,000 lines in hvdtrain, 4,200 in launch and 24,000 in tests. Whoever needs more takes out something else, or
raises a number here and says why beside it. Whoever has taken out lines lowers it. Names that say what of are longer than
`read` and `load`: they raised some numbers by 10 or 20.
"""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SLACK = 60  # lines that a folder may be under its budget: more has been saved, and the budget falls
LONGEST, SHORTEST = 500, 60  # lines of a file: a longer one has two concerns, a shorter one is a part of another
# To become part of another, but for errors.py, which all import and which imports nothing, and what imports a trainer.
SHORTER = {
    "checkpoint/verify",
    "engines/errors",
    "integrations/lightning",
    "models/classifiers",
}
COUNTED = (".py", ".sh", ".sbatch", ".patch")
BUDGETS = {
    # With batches by the memory of the GPUs, the loader for loops of others, virtual ranks, plots of the report, lost steps.
    # And imagenet, which opens its data and counts what cannot be read, as any program does.
    # And commands in a program's parser.
    # And bf16 on CPUs, and a directory without a name, and a best checkpoint that is gone.
    # And what programs ask of the DataLoader that exact_loader has.
    # And ranks that exact_loader asks for once an epoch.
    # And batches of the loader in one tensor.
    # And modules beside who starts them by hvdtrain NAME.
    "hvdtrain/*": 3127,  # with comments that say why, and flags that a program ignores
    "hvdtrain/analysis": 462,
    # And kills between two changes of files.
    "hvdtrain/audit": 1440,  # with what the kernel tells of files under {out}, a full disk, parts of tensors, --from-step
    # With one state of many ranks, weights set after a resume, texts, and what numpy's generators spawn.
    # And what an epoch that is resumed within has gathered, such as the mean of its losses.
    # And settings of layers at a resume, registered buffers that differ between ranks.
    # And differences.py, which resume.py had: which settings the first step has.
    # And states that no checkpoint can hold, before training.
    # And what a requeued job has written, and the run that --resume PATH leaves.
    # And a thread that ends with its run.
    # And damage of a mirror.
    # And the names of many kept ones.
    # And several loops over epochs, of which a resumed run leaves out those that are over.
    "hvdtrain/checkpoint": 3636,  # with comments that say why
    "hvdtrain/checks": 443,
    "hvdtrain/datasets": 1605,  # with texts that are compressed, shards that are taken for folders
    # The reason of any error, too.
    # With the watch of scripts that do not use hvdtrain, which guards had, the memory of the smallest GPU, --virtual-ranks,
    # ranks in different collectives, and the names of buffers, which loop and checkpoint had.
    # With what --output-dir is instead. A first checkpoint is compared value by value, not by the JSON that was written.
    # With a model in another one.
    # And of many ranks, what is alike is compared and not sent.
    # And a number of processes without a rank.
    # And the threads that the user has set, what rounds differently.
    # And schedules by the length of a loader.
    # And schedules by the length of a loader, plateaus of the wrong mode.
    # And versions of hvdtrain, variables of MKL, Horovod's source.
    # And what many tensors of one memory cost.
    # And buffers of virtual ranks that grow.
    # And ddp's gradients of several models, in one order on all ranks, and deleted buffers.
    "hvdtrain/engines": 5105,  # with comments that say why
    # And small gradients, which are looked at together.
    # And predictions that only rank 0 holds.
    "hvdtrain/features": 1294,  # with --virtual-ranks, comments that say why
    # And sources that cannot be read.
    "hvdtrain/guards": 1640,  # with stop signals that are blocked at the start, comments that say why
    # With what persistent workers do not see, samplers without an engine, virtual ranks, restart, the order of an epoch in
    # checkpoints, data sets that change when they are read.
    # With the order of files at a resume, a collate_fn that changes.
    # With a cache of augmented samples, rows that are changed in place, a sampler that counts its draws.
    # And labels of which few are others, a sampler of one rank.
    # And the batch after a checkpoint of a stream, which tells whether it has ended.
    # And what tells a data set that draws no random numbers: its samples are read without a seed.
    # And test sets that differ between ranks, generators without a seed.
    # And batches of a sampler in one tensor.
    "hvdtrain/inputs": 3265,  # with comments that say why
    "hvdtrain/integrations": 40,
    # With calls that Python refuses, and an output directory that is None.
    # And Ctrl-C after a stop, what is left of a program for DDP.
    # And what a rank cannot write at its end, a process that may open no more files.
    "hvdtrain/launching": 2444,  # with the question whether forked ranks keep CUDA, a lack of memory, comments that say why
    # With --virtual-ranks, a `break`, the number of batches of an evaluation, an output directory that is a text.
    # And lists of rows, calls with a remedy.
    # And a stop that a program catches, test sets that differ between ranks.
    # And the order of rows of an evaluation, what a step before a resume had set.
    "hvdtrain/loop": 3379,  # with comments that say why
    # And files of tensors, written without a copy.
    # And a file for torch's writer, in place of one in memory.
    "hvdtrain/models": 715,  # with a loss that is compiled with the head, comments that say why
    # With --virtual-ranks, a record that is removed, where the best checkpoint and exports are.
    # And which evaluation decides.
    # And an evaluation that records after its block alone.
    "hvdtrain/output": 1700,  # with names that ranks compare, comments that say why, a summary of another tool
    # What checkpoint and loop had of it: what a program carries on in its variables and in what they hold; attributes that a
    # state lacks, of modules, optimizers and registered objects; the table of refusals; what the first loss and recorded
    # values show; the length of a loader; what only decides what is printed.
    # And what is kept of a file or a type that is asked for often.
    # And what the best epoch leaves for the end, attributes of functions, what a model gathers in an epoch, rates and times.
    # And how a program writes what it records, what freezes nothing.
    # And the order of texts in a collate_fn, in objects and in other modules.
    # And how a program writes what it records, what freezes nothing, means over what was found, optimizers in others.
    # And who else has a data set.
    # And settings of losses.
    # And threads of a program, larger arrays.
    # And what steps carry on within their epoch, comprehensions.
    # And statements without their expressions: in long programs, most of a walk.
    # And variables of a step before a resume.
    # And what is beside saved tensors.
    # And what losses are computed from, in a function for an epoch.
    "hvdtrain/program": 3001,  # with what is computed once, comments that say why
    "hvdtrain/training": 20,
    "launch": 4815,  # with --virtual-ranks, a horovodrun that is not there
    "tests/*": 609,  # with what writes a checkpoint of several ranks, the names that the oldest PyTorch has
    # With a save of two files.
    "tests/audited": 392,  # with a warm-up, the server of the peers' libraries, and what starts an audit for tests/e2e
    # And the writing of checkpoints.
    "tests/bench": 1725,  # with simulated ranks, of which tests/single had one and --virtual-ranks, speed for users
    "tests/chaos": 1640,
    "tests/device": 660,
    # And how a step ended while Slurm's script heard a signal.
    "tests/e2e": 6927,  # with lines of pages, a stop under Slurm, trainers of others, virtual ranks, a killed script
    "tests/foreign": 160,
    "tests/golden": 390,  # decodes what each rank has of its own in a checkpoint and --virtual-ranks
    "tests/gpu": 910,  # with a script that goes on, Horovod's sums three ways, GPT-2, what is fused of it
    "tests/horovod_calls": 550,
    # With rows by the rank, rates of a rank alone, values of some ranks.
    # And predictions in rounds.
    # And what is registered where a buffer was let go, an error that counts as false, exchanges after streams.
    # And optimizers that are frozen whole.
    # And programs of several loops, layers that are thawed beside local steps.
    "tests/parallel": 3602,  # a model in another, many ranks, --virtual-ranks, optimizers that share out their state
    "tests/peers": 790,  # one training under twelve trainers, six of them also with exact_loader: docs/evidence
    # With the audit's command, which tests/e2e had, CUDA in forked ranks, what a provider of a checkpoint relies on, and
    # tails of resumed epochs; the comparison in README with the page of peers; verdicts of audits on written traces.
    # What the audit reads of files where the kernel tells of changes and where it does not, and of DTensors, costs 65.
    # And what Lightning does with our callback, in Lightning; test_carried.py.
    # With what attempts found in models and data sets, and bytes of a save of many ranks.
    # And what is said of each part, and what is left alone: test_carried.py.
    # And what the eleventh series of attempts found.
    # And the twelfth.
    # And test_losses.py, test_shown.py, arrays of any kind in a data set.
    # And faults of commands: compressed texts, summaries of others, settings of a branch.
    # And what two more series found: what the best epoch leaves, what models and metrics gather in an epoch.
    # And requeued jobs, summaries beside a mirror.
    # And sums of shares, means of numpy.
    # And sums of shares, means of numpy, what freezes nothing, plateaus, steps without items, optimizers in others.
    # And the order of texts in a collate_fn, in objects and in other modules.
    # And who else has a data set.
    # And settings of losses.
    # And threads of a program, larger arrays.
    # And what the oldest PyTorch has.
    # And damage of a mirror, Ctrl-C after a stop.
    # And streams that begin anew at their end.
    # And what steps carry on within their epoch, a stop that a program catches.
    # And what a step costs, in numbers of calls.
    # And a program that prints the loss of a step before a resume.
    # And what saves, exports and samplers cost, in counts.
    # And a stream without a state, in which a checkpoint reads no further.
    # And what a function for an epoch carries on, the order that a commit draws.
    # And buffers of NaN of virtual ranks, a signal to a rank that has only been forked, two hosts of one name.
    # And signs of checksums, modes of a second loop and after a limit of steps, the best epoch's states, counts in a tensor.
    # And a stop in an evaluation after the loop, the best checkpoint of a run that trains.
    # And a second loop within an epoch, loops that are left after the last batch.
    # And parameters of virtual ranks that are empty, or frozen whole.
    # And sources that cannot be read, a process that may open no more files.
    "tests/single": 27966,  # and batches by memory, exact_loader, --virtual-ranks, modes, restart=True, test_lost.py
    "tests/twins": 1860,
}


def files(folder: str) -> list[Path]:
    """Return the source files below a folder; of "hvdtrain/*", those in it."""
    listed = subprocess.run(["git", "ls-files", folder.removesuffix("/*")], cwd=ROOT, capture_output=True, text=True)
    paths = [ROOT / name for name in listed.stdout.split() if name.endswith(COUNTED) or name == "launch/setup"]
    return [path for path in paths if path.parent == ROOT / folder[:-2]] if folder.endswith("/*") else paths


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git: only files of the repository count")
@pytest.mark.parametrize("folder", BUDGETS)
def test_a_folder_keeps_its_budget(folder):
    number = sum(map(lines, files(folder)))
    assert number <= BUDGETS[folder], (
        f"{folder} has {number} lines: say a thing once, or raise its budget with a reason"
    )
    assert number >= BUDGETS[folder] - SLACK, f"{folder} has {number} lines: lower its budget to that"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git: only files of the repository count")
def test_every_file_is_in_a_budget():
    budgeted = {path for folder in BUDGETS for path in files(folder)}
    assert {path for top in ("hvdtrain", "launch", "tests") for path in files(top)} - budgeted == set()


def test_a_file_is_one_concern():
    assert [str(path.relative_to(ROOT)) for path in files("hvdtrain") if lines(path) > LONGEST] == []
    short = [path for path in files("hvdtrain") if lines(path) < SHORTEST and path.stem != "__init__"]
    assert {str(path.relative_to(ROOT / "hvdtrain").with_suffix("")) for path in short} - SHORTER == set()
