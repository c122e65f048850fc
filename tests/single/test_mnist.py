"""The script's own parts: model, recipes, flags."""

import pytest
import torch

from hvdtrain.errors import UserError
from hvdtrain.mnist import RECIPES, ConvNet, parse


def test_convnet_is_the_tutorials():
    model = ConvNet()
    assert sum(parameter.numel() for parameter in model.parameters()) == 29_034
    assert model(torch.rand(3, 1, 28, 28)).shape == (3, 10)


def test_weights_are_those_of_a_script_that_seeds_first():
    torch.manual_seed(1)
    first = torch.nn.Conv2d(1, 16, 5, padding=2)
    torch.manual_seed(1)
    assert torch.equal(ConvNet()[0].weight, first.weight)


def test_classic_is_plain_sgd_at_a_constant_rate():
    flags = parse(["--recipe", "classic"])
    assert (flags.optimizer, flags.lr, flags.batch_size, flags.lr_schedule) == ("sgd", 1e-4, 100, "constant")
    assert (flags.momentum, flags.weight_decay, flags.label_smoothing, flags.warmup_epochs) == (0, 0, 0, 0)
    assert flags.lr_scaling == "none"


def test_flags_override_the_recipe_one_by_one():
    flags = parse(["--recipe", "classic", "--lr", "0.5", "--epochs", "3"])
    assert (flags.lr, flags.epochs, flags.batch_size) == (0.5, 3, 100)


def test_recipes_fill_every_training_flag():
    names = set(RECIPES["fast"])
    assert names == set(RECIPES["classic"])
    assert all(getattr(parse([]), name) is not None for name in names)


def test_horovods_own_flag_name_works():
    assert parse(["--fp16-allreduce"]).compression == "fp16"
    assert parse([]).compression == "none"


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--epoch", "1"], "unrecognized arguments: --epoch"),
        (["--lr", "-1"], "argument --lr: '-1' is not a number above 0"),
        (["--lr", "nan"], "argument --lr: 'nan' is not a number above 0"),
        (["--momentum", "1"], "argument --momentum: '1' is not a number from 0 to below 1"),
        (["--batch-size", "0"], "argument --batch-size: '0' is not a whole number of at least 1"),
        (["--batch-size", "1.5"], "'1.5' is not a whole number"),
        (["--seed", "-1"], "'-1' is not a whole number from 0"),
        (["--engine", "smoke"], "invalid choice: 'smoke'"),
        (["--epochs"], "expected one argument"),
    ],
)
def test_bad_flags_are_one_line_with_the_remedy(argv, complaint):
    with pytest.raises(UserError) as caught:
        parse(argv)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "--help" in str(caught.value)
