"""tests/bench/networks.py: what it trains is what the command trains."""

import json
import sys

import pytest
import torch

from hvdtrain import mnist
from hvdtrain.data import idx
from hvdtrain.models.convnet import ConvNet, CosineNet
from tests.bench import networks

COSINENET = "5x15s2dn-3x32s2-3x64v"


@pytest.mark.parametrize(("text", "model"), [("5x16p-5x32p", ConvNet), (COSINENET, CosineNet)])
def test_a_text_describes_the_model(text, model):
    count = [sum(p.numel() for p in net.parameters() if p.requires_grad) for net in (networks.network(text), model())]
    if model is ConvNet:  # it has biases before batch norm, which do nothing
        count[1] -= 16 + 32
    assert count[0] == count[1]


def test_one_process_reaches_what_the_command_reaches(tmp_path, monkeypatch):
    """On one rank, with the same threads: the same losses, so the same accuracy."""
    flags = f"--dataset digits --engine serial --threads 1 --epochs 2 --no-progress --output-dir {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["mnist", *flags.split()])
    threads = torch.get_num_threads()
    try:
        assert mnist.main() == 0
        text, settings = networks.parsed(f"{COSINENET}:ranks=1,batch=128,lr=0.03,epochs=2")
        reached, _ = networks.train(text, settings, 1, idx.load("digits"))
    finally:
        torch.set_num_threads(threads)
    assert json.loads((tmp_path / "summary.json").read_text())["test_accuracy"] == pytest.approx(reached, abs=1e-9)
