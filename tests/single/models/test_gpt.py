"""The transformer against one written down independently: torch's own encoder layers, with the same weights."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain.models.gpt import GPT, GPT_SIZES, Sizes, padded

SMALL = GPT_SIZES["shakespeare-cpu"]


def batch(vocabulary: int, context: int, count: int = 3) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, vocabulary, (count, context + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


class Reference(nn.Module):
    """The same network from torch.nn.TransformerEncoderLayer, with the weights of `model`."""

    def __init__(self, model: GPT):
        super().__init__()
        sizes = model.sizes
        self.tokens = nn.Embedding(model.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                sizes.width, sizes.heads, 4 * sizes.width, dropout=0.0, activation="gelu", batch_first=True,
                norm_first=True, bias=sizes.bias,
            )
            for _ in range(sizes.layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(sizes.width, bias=sizes.bias)
        self.head = nn.Linear(sizes.width, model.vocabulary, bias=False)
        theirs = model.state_dict()
        names = dict(
            norm_attention="norm1", queries_keys_values="self_attn.in_proj", from_attention="self_attn.out_proj",
            norm_mlp="norm2", into_mlp="linear1", from_mlp="linear2",
        )  # fmt: skip
        mine = {}
        for name, value in theirs.items():
            for ours, torchs in names.items():
                name = name.replace(f".{ours}.", f".{torchs}_" if torchs.endswith("in_proj") else f".{torchs}.")
            mine[name.replace("blocks.", "layers.")] = value.clone()
        mine.setdefault("head.weight", mine["tokens.weight"])
        self.load_state_dict(mine)
        if sizes.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def parameters(sizes: Sizes, vocabulary: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(sizes, vocabulary).parameters())


def test_published_parameter_counts():
    assert parameters(SMALL, 65) == 804_096  # nanoGPT prints 0.80M for its CPU configuration
    assert parameters(GPT_SIZES["gpt2"], 50_257) == 124_439_808  # openai/gpt-2's smallest
    assert parameters(GPT_SIZES["gpt-small"], 256) == 10_818_432


@pytest.mark.parametrize("tied", [True, False])
def test_the_first_loss_is_nearly_that_of_a_uniform_guess(tied):
    torch.manual_seed(1)
    sizes = Sizes(SMALL.layers, SMALL.heads, SMALL.width, SMALL.context, tied=tied)
    loss = loss_of(GPT(sizes, 65), *batch(65, sizes.context, 12))
    # Logits start with a deviation of 0.02 * sqrt(768) = 0.55, which adds half its square: 0.15.
    assert loss.item() == pytest.approx(math.log(65) + 0.15, abs=0.04)


@pytest.mark.parametrize(("bias", "tied"), [(False, True), (True, False)])
def test_loss_and_gradients_of_a_step_are_the_reference_models(bias, tied):
    torch.manual_seed(1)
    sizes = Sizes(layers=3, heads=2, width=16, context=8, bias=bias, tied=tied)
    model = GPT(sizes, 11)
    for parameter in model.parameters():  # norms and biases away from 1 and 0
        parameter.data += 0.1 * torch.randn(parameter.shape)
    reference = Reference(model)
    inputs, targets = batch(11, 8)
    losses = []
    for one in (model, reference):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
        first = loss_of(one, inputs, targets)
        first.backward()
        optimizer.step()
        losses.append([first.item(), loss_of(one, inputs, targets).item()])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0][1] < losses[0][0]


def test_no_token_sees_a_later_one():
    torch.manual_seed(1)
    model = GPT(SMALL, 65).eval()
    inputs, _ = batch(65, 64, 1)
    changed = inputs.clone()
    changed[0, 40:] = (changed[0, 40:] + 1) % 65
    before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def test_bf16_computes_nearly_the_same_and_attends_in_float32():
    torch.manual_seed(1)
    model = GPT(SMALL, 65)
    inputs, targets = batch(65, 64)
    with torch.autocast("cpu", torch.bfloat16):
        seen = {}
        hook = model.blocks[0].from_attention.register_forward_pre_hook(
            lambda _, args: seen.update(dtype=args[0].dtype)
        )
        loss = loss_of(model, inputs, targets)
        hook.remove()
    assert seen["dtype"] == torch.float32
    assert loss.item() == pytest.approx(loss_of(model, inputs, targets).item(), abs=0.01)


@pytest.mark.parametrize("width", [768, 192])
def test_deviations_at_the_start_are_gpt2s_at_its_width_and_grow_with_the_root_of_a_smaller_one(width):
    torch.manual_seed(1)
    for name, parameter in GPT(Sizes(layers=2, heads=2, width=width, context=64), 256).named_parameters():
        if parameter.ndim > 1:
            deviation = 0.02 * math.sqrt(768 / width)
            deviation /= math.sqrt(2 * 2) if name.endswith(("from_attention.weight", "from_mlp.weight")) else 1
            assert parameter.std().item() == pytest.approx(deviation, rel=0.03), name


def test_a_continuation_repeats_and_leaves_random_numbers_and_mode_alone():
    torch.manual_seed(1)
    model = GPT(Sizes(layers=1, heads=2, width=8, context=16), 65, dropout=0.5)
    before = torch.get_rng_state()
    drawn = [list(model.continued([1, 2], 20, temperature=1.0, seed=seed)) for seed in (3, 3, 4)]  # beyond the context
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 20
    assert torch.equal(before, torch.get_rng_state())
    assert model.training
    cold = list(model.continued([1, 2], 5, temperature=1e-6, seed=1))
    assert cold == list(model.continued([1, 2], 5, temperature=1e-6, seed=2))  # always the likeliest


def test_rows_that_stand_for_no_token_are_never_sampled():
    assert [padded(count) for count in (1, 64, 65, 50_257)] == [64, 64, 128, 50_304]
    torch.manual_seed(1)
    model = GPT(Sizes(layers=1, heads=2, width=8, context=16), 7, rows=64)
    inputs, targets = batch(7, 16)
    assert torch.equal(model(inputs, targets), loss_of(model, inputs, targets))
    assert model(torch.zeros(1, 1, dtype=torch.int64)).shape == (1, 1, 64)
    assert set(model.continued([1], 100, temperature=10.0, seed=1)) == set(range(7))


def test_operations_are_counted_as_torch_counts_them():
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        model = GPT(SMALL, 65)
        tokens = torch.zeros(1, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    assert counter.get_total_flops() / 64 == pytest.approx(model.flops_per_token(), rel=0.02)
