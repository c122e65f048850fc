"""The script's own parts: model, recipes, flags."""

import pytest
import torch

from hvdtrain.engines.errors import UserError
from hvdtrain.mnist import parse, shared_batch
from hvdtrain.models.convnet import ConvNet, CosineNet, cosines
from hvdtrain.models.weights import load_weights


def test_convnet_is_the_tutorials():
    model = ConvNet()
    assert sum(parameter.numel() for parameter in model.parameters()) == 29_034
    assert model(torch.rand(3, 1, 28, 28)).shape == (3, 10)


def test_weights_are_those_of_a_script_that_seeds_first():
    torch.manual_seed(1)
    first = torch.nn.Conv2d(1, 16, 5, padding=2)
    torch.manual_seed(1)
    assert torch.equal(ConvNet()[0].weight, first.weight)


def test_cosinenet_has_a_fixed_first_layer():
    model = CosineNet()
    count = {True: 0, False: 0}
    for parameter in model.parameters():
        count[parameter.requires_grad] += parameter.numel()
    assert count == {True: 40_682, False: 525}
    assert torch.equal(model[0].weight, cosines(21, 5))
    logits = model(torch.rand(3, 1, 28, 28))
    assert logits.shape == (3, 10)
    logits.sum().backward()
    assert model[0].weight.grad is None


def test_cosines_are_the_transform_with_both_signs():
    filters = cosines(49, 5)[:, 0]  # the mean, and 24 waves twice
    assert torch.allclose(filters[1::2], -filters[2::2])
    waves = torch.cat([filters[:1], filters[1::2]]).reshape(25, 25)
    waves = waves / waves.norm(dim=1, keepdim=True)
    assert torch.allclose(waves @ waves.T, torch.eye(25), atol=1e-5)  # an orthonormal basis of 5 x 5 pixels
    assert torch.allclose(waves[0], torch.full((25,), 0.2))


def test_ranks_share_256_samples_of_a_step(monkeypatch):
    assert [shared_batch(ranks) for ranks in (1, 2, 3, 4, 8, 16, 100)] == [96, 96, 85, 64, 32, 16, 16]
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    assert (parse([]).batch_size, parse([]).derived) == (32, {"batch_size"})
    given = parse(["--batch-size", "128"])
    assert (given.batch_size, given.derived) == (128, frozenset())
    earlier = parse(["--model", "convnet"])
    assert (earlier.batch_size, earlier.derived) == (64, frozenset())


RECIPE_FLAGS = ("model", "batch_size", "optimizer", "lr", "momentum", "lr_schedule", "label_smoothing")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ("cosinenet", 96, "adam", 0.03, 0.85, "onecycle", 0.05)),
        ("--model convnet", ("convnet", 64, "adam", 0.01, 0.9, "onecycle", 0.05)),
        ("--model convnet --lr 0.5", ("convnet", 64, "adam", 0.5, 0.9, "onecycle", 0.05)),
        ("--recipe classic", ("convnet", 100, "sgd", 1e-4, 0.0, "constant", 0.0)),
        ("--recipe classic --model cosinenet", ("cosinenet", 100, "sgd", 1e-4, 0.0, "constant", 0.0)),
    ],
)
def test_recipes_fill_what_is_not_given(words, expected):
    flags = parse(words.split())
    assert tuple(getattr(flags, name) for name in RECIPE_FLAGS) == expected


def test_what_ddp_alone_can_do_is_taken():
    assert parse(["--engine", "ddp", "--deterministic", "--tuning", "off"]).deterministic


def only_of_matrices(change):
    return lambda states: {name: change(one) if one.dim() == 2 else one for name, one in states.items()}


def renamed(prefix):
    return lambda states: {prefix + name: one for name, one in states.items()}


WEIGHTS = {  # what is saved, of the state_dict, and what is said
    "another shape": (lambda _: {"0.weight": torch.zeros(1)},
        "does not match the model: 0.weight is (1,) in the file, (16, 1, 5, 5) in the model"),
    "nothing": (lambda _: {}, "the file lacks it"),
    "a list": (lambda _: [1, 2], "holds list, not a state_dict"),
    # load_state_dict ended in a traceback, and took the real part of complex weights.
    "sparse": (only_of_matrices(torch.Tensor.to_sparse), "9.weight is sparse: save dense tensors"),
    "without values": (only_of_matrices(lambda one: one.to("meta")), "without values (on the meta device): save dense"),
    "complex": (only_of_matrices(lambda one: one.to(torch.complex64)), "9.weight is complex: save dense"),
    "quantized": (only_of_matrices(lambda one: torch.quantize_per_tensor(one, 0.1, 0, torch.qint8)),
        "9.weight is quantized"),
    # In place of torch's long text, with escape codes, and of flags that a program of one's own lacks.
    "a whole model": (lambda _: ConvNet(),
        "(it holds a whole model, or other objects): save it with torch.save(model.state_dict())"),
    "a part": (renamed("body."), "its names begin with body.: save the state_dict of that part"),
    "DDP": (renamed("module."), "names are those of a wrapped model: save"),
    "compiled": (renamed("_orig_mod."), "names are those of a wrapped model: save"),
}  # fmt: skip


@pytest.mark.parametrize("case", WEIGHTS)
@pytest.mark.filterwarnings("ignore:.*quantize")
def test_weights_that_do_not_fit_are_refused_in_one_line(case, tmp_path):
    change, complaint = WEIGHTS[case]
    torch.save(change(ConvNet().state_dict()), tmp_path / "w.pt")
    with pytest.raises(UserError) as caught:
        load_weights(ConvNet(), tmp_path / "w.pt")
    assert complaint in str(caught.value)
