"""Weights and programs for use without hvdtrain: they compute what the trained model computes."""

import re
import tracemalloc
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hvdtrain import export, imagenet, lm, mnist
from hvdtrain.checkpoint import checkpoint, contents
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.models import formats
from tests import image_set
from tests.single.trained import trained
from tests.single.training import small
from tests.single.unwritable import no_room


def program(directory, path=None, model_of=lambda net: net, *example):
    """Train a small network of the author's own, and export it."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    small.Trained(out=directory, epochs=1, net=torch.compile(net, backend="eager"), data=[torch.randn(16, 3)],
                  loss=small.squares, end=lambda t: path and t.run.export(path, model_of(net), *example))  # fmt: skip
    return net


def test_weights_have_the_models_own_names_and_the_last_line_says_where_they_are(tmp_path, capsys):
    net = program(tmp_path / "run", tmp_path / "own.safetensors")
    assert capsys.readouterr().out.splitlines()[-1] == f"exported: {tmp_path}/own.safetensors"
    assert export.main([str(tmp_path / "run"), "--to", str(tmp_path / "w.safetensors")]) == 0
    assert export.main([str(tmp_path / "run"), "--to", str(tmp_path / "w.pt")]) == 0
    held = [load_file(tmp_path / "own.safetensors"), load_file(tmp_path / "w.safetensors")]
    held.append(torch.load(tmp_path / "w.pt", weights_only=True))
    for state in held:
        net.load_state_dict(state)  # strict: the names are the same
        torch.testing.assert_close(state, dict(net.state_dict()))


needs_onnx = pytest.mark.skipif(
    not (find_spec("onnx") and find_spec("onnxscript")),
    reason="onnx or onnxscript is not installed: pip install 'hvdtrain[onnx]'",
)
PROGRAMS = ["pt2", pytest.param("onnx", marks=needs_onnx)]


def computed(path, x):
    """Return what an exported program computes. An .onnx file: by ONNX's own reference implementation, which checks no
    shape."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(x)
    import onnx
    from onnx.reference import ReferenceEvaluator

    (batch, *_) = onnx.load(path).graph.input[0].type.tensor_type.shape.dim
    assert batch.dim_param, "the batch's size is fixed"
    evaluator = ReferenceEvaluator(str(path))
    (result,) = evaluator.run(None, {evaluator.input_names[0]: x.numpy()})
    return torch.from_numpy(result)


@pytest.mark.parametrize("ending", PROGRAMS)
def test_a_program_computes_what_the_model_does_for_any_batch(ending, tmp_path):
    path = tmp_path / f"model.{ending}"
    net = program(tmp_path / "run", path, lambda net: net, torch.randn(4, 3)).eval()
    for count in (2, 7):
        x = torch.randn(count, 3)
        torch.testing.assert_close(computed(path, x), net(x))


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
    facts, tensors = checkpoint.find_checkpoint(tmp_path / "run", "run", print)
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
@pytest.mark.parametrize("ending", PROGRAMS)
def test_a_script_of_ours_is_exported_from_its_record(ending, tmp_path):
    seen = trained(mnist, SCRIPTS["mnist"][1], tmp_path / "run")
    path, images = tmp_path / f"model.{ending}", torch.rand(3, 1, 28, 28)
    assert export.main([str(tmp_path / "run"), "--to", str(path)]) == 0
    torch.testing.assert_close(computed(path, images), seen.model.eval()(images))


@pytest.mark.parametrize("ending", ["safetensors", "pt", *PROGRAMS])
def test_without_room_the_earlier_file_stays_and_one_line_says_so(ending, tmp_path):
    """A .pt2 was destroyed, and torch's library ended the process."""
    path, net = tmp_path / f"model.{ending}", nn.Sequential(nn.Linear(3, 500), nn.Linear(500, 1))
    path.write_text("of an earlier export")
    with no_room(), pytest.raises(Failure, match=f"{path} cannot be written .File too large.: free some space there; "):
        if path.suffix in formats.WEIGHTS:
            formats.write_weights(net.state_dict(), path)
        else:
            formats.write_program(net, [EXAMPLE], path)
    assert path.read_text() == "of an earlier export"
    assert list(tmp_path.iterdir()) == [path]


def allocated(call):
    """Return the bytes of tensors that a call has made, in all, and of Python's objects at most."""
    call()  # what it imports
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        tracemalloc.start()
        call()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return most + sum(max(0, one.self_cpu_memory_usage) for one in seen.events())


def test_weights_are_written_without_a_copy_of_the_model_and_of_a_part_alone(tmp_path):
    whole = torch.zeros(1000, 1000)
    state = {"whole": whole, "part": whole[:10], "turned": whole.t()[:, :10]}
    most = allocated(lambda: formats.write_weights(state, tmp_path / "w.pt"))
    assert most < 0.5 * whole.nbytes
    assert (tmp_path / "w.pt").stat().st_size < 1.1 * whole.nbytes
    assert torch.load(tmp_path / "w.pt")["turned"].shape == (1000, 10)


class Branching(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


EXAMPLE = torch.zeros(4, 3)
SIZES = dict.fromkeys(("layers", "heads", "width", "context", "bias", "tied", "image_size"), 1)  # a program's own flags
WRONG = {
    "its ending says what to write, and .txt is unknown": lambda tmp, out: export.main([str(tmp), "--to", "w.txt"]),
    "its ending says what to write, and it has none": lambda tmp, out: export.main([str(tmp), "--to", "w"]),
    "nowhere: No such file or directory: name a valid checkpoint, or the --output-dir of a run": lambda tmp, out: (
        export.main([str(tmp / "nowhere"), "--to", str(out)])
    ),
    "step-00000002.safetensors: a file: --best needs the directory of the run": lambda tmp, out: (
        program(tmp) and export.main([str(tmp / "checkpoints/step-00000002.safetensors"), "--best", "--to", "w.pt"])
    ),
    "would be among the checkpoints of a run: give a file elsewhere": lambda tmp, out: (
        program(tmp) and export.main([str(tmp), "--to", str(tmp / "checkpoints/step-00000002.safetensors")])
    ),
    "it has no valid checkpoint": lambda tmp, out: export.main([str(tmp), "--to", str(out)]),
    "torch.export cannot follow the model": lambda tmp, out: program(tmp, out, lambda net: Branching(), EXAMPLE),
    "a program needs an example": lambda tmp, out: program(tmp, out),
    "of a program whose model is not known":
        lambda tmp, out: program(tmp) and export.main([str(tmp), "--to", str(out)]),
    "a program whose model is not known":
        lambda *_: export.model_of({"config": SIZES, "data": {}}, {"0.weight": EXAMPLE}),
    "cannot be written": lambda tmp, out: program(tmp) and export.main([str(tmp), "--to", str(tmp / "none" / "w.pt")]),
}  # fmt: skip


@pytest.mark.parametrize("complaint", WRONG)
def test_what_cannot_be_exported_is_refused_in_one_line(complaint, tmp_path):
    with pytest.raises(UserError, match=re.escape(complaint)) as caught:
        WRONG[complaint](tmp_path, tmp_path / "m.pt2")
    assert len(str(caught.value).splitlines()) == 1
