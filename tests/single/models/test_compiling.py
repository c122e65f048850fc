"""--compile compiles block by block, so that gradients are ready during the backward pass."""

import pytest
import torch

from hvdtrain.models.classifiers import build_model
from hvdtrain.models.compiling import blocks, compiled
from hvdtrain.models.convnet import ConvNet
from hvdtrain.models.gpt import GPT, Sizes

SMALL = Sizes(layers=3, heads=2, width=16, context=8)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("build", "count", "kind"),
    [
        (lambda: GPT(SMALL, 7), 3, "Block"),
        (lambda: build_model("resnet50", 10, 224), 16, "Bottleneck"),
        (lambda: build_model("vit_b_16", 10, 224), 12, "EncoderBlock"),
        (ConvNet, 0, ""),
    ],
    ids=["gpt", "resnet50", "vit_b_16", "convnet"],
)
def test_the_blocks_of_a_model(build, count, kind):
    found = list(blocks(build()))
    assert len(found) == count
    assert {type(block).__name__ for block in found} == ({kind} if kind else set())


def test_gradients_of_a_block_are_ready_before_the_block_below_has_run():
    """Of a model compiled as one, all would be ready at the end: none could be reduced during the backward pass."""
    from functorch.compile import make_boxed_func  # here: it imports the compiler, which takes seconds
    from torch._dynamo.backends.common import aot_autograd

    seen: list[str] = []

    def noted(graph, inputs):
        def run(*arguments):
            seen.append("backward")
            return graph.forward(*arguments)

        return make_boxed_func(run)

    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=noted)
    torch.manual_seed(1)
    model = compiled(GPT(SMALL, 7), CPU, backend)
    for number, block in enumerate(model.blocks):
        block.from_mlp.weight.register_post_accumulate_grad_hook(
            lambda _, number=number: seen.append(f"ready {number}")
        )
    model(torch.arange(7)[None]).sum().backward()
    assert seen == ["backward", "ready 2", "backward", "ready 1", "backward", "ready 0"]


def test_compiled_blocks_compute_the_same_in_training_only_and_keep_their_names():
    torch.manual_seed(1)
    model = GPT(SMALL, 7)
    tokens, names = torch.arange(7)[None], list(model.state_dict())
    expected = model(tokens)
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    compiled(model, CPU, backend)
    model.eval()
    torch.testing.assert_close(model(tokens), expected)
    assert not compilations
    model.train()
    torch.testing.assert_close(model(tokens), expected)
    assert compilations
    assert list(model.state_dict()) == names
