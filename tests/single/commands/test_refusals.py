"""What commands refuse before they train: one line, which names what is wrong and what is allowed.

Flags that any command may get: test_bad_settings.py. Mistakes in a program: tests/single/training/test_mistakes.py.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from hvdtrain import benchmark, imagenet, lm, mnist, reduce, starter
from hvdtrain.checkpoint import checkpoint
from hvdtrain.datasets import make_shards
from hvdtrain.engines.errors import UserError
from hvdtrain.models import classifiers
from tests import image_set
from tests.facts import sound_facts

COMMANDS = {
    "mnist": mnist,
    "imagenet": imagenet,
    "lm": lm,
    "benchmark": benchmark,
    "reduce": reduce,
    "starter": starter,
}
OUT = "--output-dir HERE/out"
FIRST = {  # flags before those of a row, which count; what is not refused ends soon
    "mnist": "--engine serial --no-progress --dataset digits --epochs 1 --train-samples 64",
    "imagenet": "--engine serial --no-progress --workers 0 --epochs 1 --batch-size 4 --image-size 33 --model squeezenet1_1",
    "lm": "--engine serial --no-progress --layers 1 --heads 2 --width 16 --context 8 --sample-tokens 0",
}
# Command -> flags -> what the line has.
REFUSED = {
    "mnist": {
        "--epoch 1": "unrecognized arguments: --epoch",
        "--lr -1": "argument --lr: '-1' is not a number above 0",
        "--lr nan": "argument --lr: 'nan' is not a number above 0",
        "--momentum 1": "argument --momentum: '1' is not a number of at least 0 and below 1",
        "--batch-size 0": "argument --batch-size: '0' is not a whole number of at least 1 (--help lists every flag)",
        "--batch-size 1.5": "'1.5' is not a whole number",
        "--seed -1": "'-1' is not a whole number of at least 0",
        "--engine smoke": "invalid choice: 'smoke'",
        "--epochs": "expected one argument",
        "--engine serial --compression fp16": "--compression fp16 is not for --engine serial: leave it out, or use",
        "--engine dataparallel --reduction sum": "--reduction sum is not for --engine dataparallel",
        "--engine serial --gradient-predivide-factor 2": "--gradient-predivide-factor 2.0 is not for --engine serial",
        "--engine serial --compression bf16": "--compression bf16 is not for --engine serial: leave it out, or use",
        "--sync-within host": "--sync-within host is for weights: give --sync-every, of at least 2",
        "--engine horovod --deterministic --tuning off":
            "--deterministic cannot go with --tuning off, with which Horovod sums gradients",
        "--checkpoint-steps 5": "--checkpoint-steps needs --output-dir",
        "--profile 5": "--profile needs --output-dir",
        "--tensorboard": "--tensorboard needs --output-dir",
        "--track mlflow": "--track needs --output-dir",
        "--memory": "--memory is no longer a flag: read cuda_bytes and resident_bytes in the ranks events",
        "--energy --epochs 2": "--energy is no longer a flag: run nvidia-smi --query-gpu=power.draw",
        "--debug-page 25999": "--debug-page is no longer a flag: call torch.distributed.debug.start_debug_server",
        "--debug-page=25999": "--debug-page is no longer a flag: call torch.distributed.debug.start_debug_server",
        # argparse takes two dashes away: --epochs had its default, --data-dir was a list.
        **{f"{flag}=--": f"argument {flag}: expected one argument" for flag in ("--engine", "--epochs", "--data-dir")},
        "--virtual-ranks 2 --engine dataparallel":
            "--virtual-ranks 2 cannot go with --engine dataparallel: use --engine horovod, ddp or",
        "--virtual-ranks 2 --engine ddp --sync-every 2":
            "--virtual-ranks 2 cannot go with --sync-every 2: leave one of them out",
        "--virtual-ranks 2 --engine ddp --compression fp16":
            "--virtual-ranks 2 cannot go with --compression fp16: leave one of",
        "--virtual-ranks 2 --evaluate x": "--virtual-ranks 2 cannot go with --evaluate: leave --virtual-ranks out",
        f"{OUT} --mirror file://HERE/empty/run": "cannot be used",
        f"{OUT} --mirror nosuch://bucket/run": "cannot be used",
        f"{OUT} --resume file://HERE/nothing": "has no run: name another place",
        f"{OUT} --mirror bucket/run": "is not a URL such as",
        f"{OUT} --mirror file://host/run": "is not a URL such as",  # it was a directory of the working directory
        f"{OUT} --mirror file://HERE/out": "is the run's own place: name another",  # which removed the checkpoints
        f"{OUT} --mirror file://HERE/out/checkpoints": "is the run's own place: name another",
        f"{OUT} --mirror sftp://me:secret@host/run": "a password in the URL",
        f"{OUT} --mirror s3://bucket/run --evaluate y": "leave it out with --evaluate",
        "--mirror s3://bucket/run": "--mirror needs --output-dir",
        "--resume s3://bucket/run": "--resume URL needs --output-dir",
        "--dataset mnist --data-dir HERE/nowhere": "HERE/nowhere",
        "--dataset mnist --data-dir HERE/book": "HERE/book",
        "--output-dir HERE/book/out": "--output-dir HERE/book/out cannot be written",
        "--weights HERE/nowhere": "No such file",
        "--weights HERE/book": "not a file of weights",
    },
    "imagenet": {
        "--track mlflow": "--track needs --output-dir",
        "--workers -1": "'-1' is not a whole number of at least 0",
        "": "--dataset folder needs --data-dir",
        "--data-dir HERE/nowhere": "HERE/nowhere does not exist: name the directory",
        "--data-dir HERE/images/train": "HERE/images/train/train does not exist",
        "--data-dir HERE/without": "Found no valid file for the classes white",
        "--data-dir HERE/other": "train/ has 6 classes, val/ has 5: 'yellow' is only in train/",
        "--data-dir HERE/images --weights HERE/w.pt --model shufflenet_v2_x0_5":
            "fc.weight is (1000, 1024) in the file, (6, 1024) in the model: make the model, with as many",
        "--dataset synthetic --model resnet51": "--model resnet51: torchvision has no such classifier",
        "--dataset synthetic --model vit_b_16 --image-size 33": "--image-size 33",
        "--dataset shards --data-dir HERE/nowhere": "HERE/nowhere does not exist",
        "--dataset shards --data-dir HERE/images": "has neither train/*.tar nor train-*.tar",
        "--dataset shards --data-dir HERE/shards --classes 7": "--classes 7, but",
    },
    "lm": {
        "--width 17": "--width 17 is not a multiple of --heads 2",
        "--steps 5 --epochs 1": "--steps 5 cannot go with --epochs 1: leave one of them out",
        "--text HERE/book --context 1000": "too short: 0 sequences of --context 1000 in its first 90 %, 1 rank",
        "--text HERE/empty": "empty: name files that have text in them",
        "--text HERE/empty --tokens bytes": "empty: name files that have text in them",
        "--text HERE/nowhere": "name a file that can be read",
        "--text HERE/latin": "not UTF-8 (invalid continuation byte)",
        "--text HERE/cut": "not UTF-8 (unexpected end of data)",
        "--text HERE/pipe": "pipe: a pipe or a device, not a file: name a file that can be read",  # it is read twice
        "--text HERE/images": "images: a directory: name the files in it, --text HERE/images/*.txt",
        "--text HERE/book --compile": "--compile on a CPU needs a C++ compiler: install g++, or leave it out",
        "--sample x": "--sample needs a checkpoint: name it with --resume PATH, or its run with --output-dir",
        "--sample x --resume HERE/nowhere": "name a valid checkpoint",
        "--sample x --output-dir HERE": "it has no valid checkpoint",
        "--sample x --resume HERE/other.safetensors": "not a checkpoint of hvdtrain.lm: name one that is",
    },
    "benchmark": {"--model convnet --image-size 32": "takes images of 28 pixels",
        "--engine serial --compression fp16": "--compression fp16 is not for --engine serial",
        "--steps 0": "'0' is not a whole number",
        "--model gpt-small --image-size 32": "--model gpt-small takes no images: leave out --image-size",
        "--model gpt2 --channels-last": "--model gpt2 takes no images: leave out --channels-last",
        "--collectives --min-bytes 8 --max-bytes 4": "--min-bytes 8 is more than --max-bytes 4",
        "--collectives --seconds-per-size 0": "'0' is not a number above 0",
        "--np 2 --engines horovod,smoke": "'smoke' is not one of horovod, horovod-gloo",
        "--np 1,x": "'x' is not a whole number", "--np 8 --hosts a:4": "--hosts is no longer a flag: --np measures",
        "--np 2 --interface eth0": "--interface is no longer a flag: --np measures this host",
        **{f"--np 1,2 {flag}": f"{flag.partition(' ')[0].partition('=')[0]} is not for --np, which compares --engines"
           for flag in ("--engine ddp", "--engine=ddp", "--no-communication", "--collectives")},
        "--np 1,2 --rounds 0": "argument --rounds: '0' is not a whole number of at least 1",
        "--np 1,2 --no-such-flag": "unrecognized arguments: --no-such-flag"},
    "reduce": {"--dtype int4": "invalid choice: 'int4'"},
    "starter": {
        "--local-ranks 0 x.py": "argument --local-ranks: '0' is not a whole number",
        "--local-ranks x x.py": "argument --local-ranks: 'x' is not a whole number",
        "--oversubscribe x.py": "--oversubscribe and --import need --local-ranks",
        "--import a x.py": "--oversubscribe and --import need --local-ranks",
        "--port 99999 x.py": "argument --port: '99999' is more than 65535",  # it was an OverflowError of bind()
    },
}  # fmt: skip
CASES = [(command, flags) for command, cases in REFUSED.items() for flags in cases]


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """Files that are wrong in one way each."""
    root = tmp_path_factory.mktemp("here")
    (root / "book").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    (root / "empty").touch()
    (root / "latin").write_bytes(b"caf\xe9 au lait " * 20)
    (root / "cut").write_bytes(b"cut off: \xe8\xaa")
    os.mkfifo(root / "pipe")
    checkpoint.write_checkpoint(root / "other.safetensors", sound_facts(), {"model.x": torch.zeros(1)})
    return root


@pytest.fixture(scope="module")
def images(here):
    folder = image_set.write(here / "images", train=12, test=6)
    for split in ("train", "val"):
        make_shards.make_shards(folder / split, here / "shards" / split, per_shard=12, seed=1)
    without, other = (Path(shutil.copytree(folder, here / name)) for name in ("without", "other"))
    (without / "train" / "white").mkdir()
    shutil.rmtree(other / "val" / "yellow")
    torch.save(classifiers.build_model("shufflenet_v2_x0_5", 1000, 224).state_dict(), here / "w.pt")


@pytest.mark.parametrize(("command", "flags"), CASES)
def test_refused_in_one_line(command, flags, here, request, monkeypatch):
    if command == "imagenet" or "images" in flags:
        request.getfixturevalue("images")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    words = f"{FIRST.get(command, '')} {flags}".replace("HERE", str(here)).split()
    monkeypatch.setattr(sys, "argv", [str(COMMANDS[command].__file__), *words])
    with pytest.raises(UserError) as caught:
        COMMANDS[command].main()
    said = str(caught.value)
    assert REFUSED[command][flags].replace("HERE", str(here)) in said
    assert len(said.splitlines()) == 1
    of_flags = any(entry.name == "parse" for entry in caught.traceback)  # which all ranks have: said once, by rank 0
    assert caught.value.everywhere or not of_flags or "--np" in flags
    assert not list(here.rglob("metrics.jsonl"))
