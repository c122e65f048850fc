"""Weights and programs for use without hvdtrain: they compute what the trained model computes."""

from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hvdtrain import export, imagenet, lm, mnist, training
from hvdtrain.engines.errors import UserError
from hvdtrain.models.convnet import MODELS
from hvdtrain.training import checkpoint, contents
from tests import image_set
from tests.single.trained import trained
from tests.single.training import small


def program(directory, path=None, model_of=lambda net: net, *example):
    """Train a small network of the author's own, and export it."""
    flags = small.flags_for("--output-dir", str(directory), epochs=1)
    x = torch.randn(16, 3)
    with training.start(flags) as run:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model, _ = run.prepare(torch.compile(net, backend="eager"), torch.optim.SGD(net.parameters(), lr=0.1))
        small.fit(run, [x], lambda step, rows: model(rows).square().mean())
        if path is not None:
            run.export(path, model_of(net), *example)
    return net


def test_weights_have_the_models_own_names(tmp_path):
    net = program(tmp_path / "run", tmp_path / "own.safetensors")
    assert export.main([str(tmp_path / "run"), "--to", str(tmp_path / "w.safetensors")]) == 0
    assert export.main([str(tmp_path / "run"), "--to", str(tmp_path / "w.pt")]) == 0
    held = [load_file(tmp_path / "own.safetensors"), load_file(tmp_path / "w.safetensors")]
    held.append(torch.load(tmp_path / "w.pt", weights_only=True))
    for state in held:
        net.load_state_dict(state)  # strict: the names are the same
        torch.testing.assert_close(state, dict(net.state_dict()))


def test_the_model_that_prepare_has_returned_is_written_under_its_own_names_too(tmp_path):
    """In DDP, its names begin with "module."."""
    with training.start(small.flags_for("--engine", "ddp", epochs=1)) as run:
        net = small.network()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        assert model is not net
        run.export(tmp_path / "w.safetensors", model)
    assert load_file(tmp_path / "w.safetensors").keys() == net.state_dict().keys()


def test_a_program_computes_what_the_model_does_for_any_batch(tmp_path):
    net = program(tmp_path / "run", tmp_path / "model.pt2", lambda net: net, torch.randn(4, 3)).eval()
    exported = torch.export.load(tmp_path / "model.pt2").module()
    for count in (2, 7):
        x = torch.randn(count, 3)
        torch.testing.assert_close(exported(x), net(x))


needs_onnx = pytest.mark.skipif(
    not (find_spec("onnx") and find_spec("onnxscript")),
    reason="onnx or onnxscript is not installed: pip install 'hvdtrain[onnx]'",
)


def computed(path, x):
    """Return what the model in an .onnx file computes, by ONNX's own reference implementation, which checks no shape."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    (batch, *_) = onnx.load(path).graph.input[0].type.tensor_type.shape.dim
    assert batch.dim_param, "the batch's size is fixed"
    evaluator = ReferenceEvaluator(str(path))
    (result,) = evaluator.run(None, {evaluator.input_names[0]: x.numpy()})
    return torch.from_numpy(result)


@needs_onnx
def test_an_onnx_program_computes_what_the_model_does_for_any_batch(tmp_path):
    net = program(tmp_path / "run", tmp_path / "model.onnx", lambda net: net, torch.randn(4, 3)).eval()
    for count in (1, 2, 7):
        x = torch.randn(count, 3)
        torch.testing.assert_close(computed(tmp_path / "model.onnx", x), net(x))


SCRIPTS = {
    "mnist": (mnist, "--dataset digits --train-samples 64 --batch-size 64 --epochs 1"),
    "imagenet": (imagenet, "--dataset synthetic --classes 5 --train-samples 4 --batch-size 2 --image-size 40 --epochs 1"
                 " --model squeezenet1_1 --workers 0"),
    "lm": (lm, "--text {text} --layers 1 --heads 2 --width 16 --context 8 --steps 1 --batch-size 4 --sample-tokens 0"),
}  # fmt: skip


@image_set.needs_torchvision
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_model_of_each_script_is_made_from_its_record(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 30)
    script, flags = SCRIPTS[name]
    seen = trained(script, flags.format(text=tmp_path / "text"), tmp_path / "run")
    facts, tensors = checkpoint.find(tmp_path / "run", "run", print)
    weights = export.weights_of(tensors)
    model, example = export.model_of(facts, weights)
    contents.load_model(model, weights)
    torch.testing.assert_close(model.eval()(example), seen.model.eval()(example))


def test_a_damaged_checkpoint_is_passed_over_and_keeps_its_name(tmp_path, capsys):
    program(tmp_path / "run")
    damaged = tmp_path / "run" / "checkpoints" / "step-99999999.safetensors"
    damaged.write_bytes(b"of another version, perhaps")
    assert export.main([str(tmp_path / "run"), "--to", str(tmp_path / "w.pt")]) == 0
    assert "trying the previous one" in capsys.readouterr().err
    assert damaged.exists()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["pt2", pytest.param("onnx", marks=needs_onnx)])
def test_a_script_of_ours_is_exported_from_its_record(ending, tmp_path):
    flags = mnist.parse([
        "--engine", "serial", "--dataset", "digits", "--train-samples", "64", "--epochs", "1", "--no-progress",
        "--output-dir", str(tmp_path / "run"), "--threads", "1",
    ])  # fmt: skip
    with training.start(flags) as run:
        mnist.train(flags, run, mnist.load(flags, run))
    path = tmp_path / f"model.{ending}"
    assert export.main([str(tmp_path / "run"), "--to", str(path)]) == 0
    net = MODELS[flags.model]().eval()
    _, tensors = checkpoint.find(tmp_path / "run", "run", print)
    net.load_state_dict(export.weights_of(tensors))
    images = torch.rand(3, 1, 28, 28)
    result = computed(path, images) if ending == "onnx" else torch.export.load(path).module()(images)
    torch.testing.assert_close(result, net(images))


class Branching(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


WRONG = {
    "an unknown ending": (["--to", "w.txt"], "its ending says what to write, and .txt is unknown"),
    "no run": (["--to", "w.pt"], "it has no valid checkpoint"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_exported_is_refused_in_one_line(case, tmp_path):
    argv, complaint = WRONG[case]
    with pytest.raises(UserError, match=complaint) as caught:
        export.main([str(tmp_path), *argv])
    assert len(str(caught.value).splitlines()) == 1


def test_a_model_that_cannot_be_followed_and_one_that_is_not_known_are_refused_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"torch\.export cannot follow the model") as caught:
        program(tmp_path / "run", tmp_path / "m.pt2", lambda net: Branching(), torch.randn(4, 3))
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(UserError, match="a program needs an example"):
        program(tmp_path / "other", tmp_path / "m.pt2")
    program(tmp_path / "mine")
    with pytest.raises(UserError, match="of a program whose model is not known here"):
        export.main([str(tmp_path / "mine"), "--to", str(tmp_path / "m.pt2")])
    with pytest.raises(UserError, match="cannot be written"):
        export.main([str(tmp_path / "mine"), "--to", str(tmp_path / "none" / "w.safetensors")])
    sizes = dict.fromkeys(("layers", "heads", "width", "context", "bias", "tied", "image_size"), 1)  # flags of its own
    with pytest.raises(UserError, match="of a program whose model is not known here"):
        export.model_of({"config": sizes, "data": {}}, {"0.weight": torch.zeros(2, 2)})
