"""Flags that a command refuses: one line, which names the flag and what is allowed."""

import pytest

from hvdtrain.engines.errors import UserError
from tests.single.commands.test_bad_settings import PARSERS

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
    },
    "imagenet": {"--track mlflow": "--track needs --output-dir", "--workers -1": "'-1' is not a whole number"},
    "lm": {"--width 17": "--width 17 is not a multiple of --heads 4",
        "--steps 5 --epochs 1": "--steps 5 cannot go with --epochs 1: leave one of them out"},
    "benchmark": {"--model convnet --image-size 32": "takes images of 28 pixels",
        "--engine serial --compression fp16": "--compression fp16 is not for --engine serial",
        "--steps 0": "'0' is not a whole number",
        "--model gpt-small --image-size 32": "--model gpt-small takes no images: leave out --image-size",
        "--model gpt2 --channels-last": "--model gpt2 takes no images: leave out --channels-last",
        "--collectives --min-bytes 8 --max-bytes 4": "--min-bytes 8 is more than --max-bytes 4",
        "--collectives --seconds-per-size 0": "'0' is not a number above 0",
        "--np 2 --engines horovod,smoke": "'smoke' is not one of horovod, horovod-gloo",
        "--np 1,x": "'x' is not a whole number", "--np 8 --hosts a:4": "--hosts is no longer a flag: --np measures",
        "--np 2 --interface eth0": "--interface is no longer a flag: --np measures this host"},
    "reduce": {"--dtype int4": "invalid choice: 'int4'"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "flags"), [(command, flags) for command, cases in REFUSED.items() for flags in cases]
)
def test_refused_in_one_line(command, flags):
    with pytest.raises(UserError) as caught:
        PARSERS[command](flags.split())
    assert REFUSED[command][flags] in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.everywhere or "--np" in flags  # said once, by rank 0
