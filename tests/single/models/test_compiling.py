"""--compile compiles block by block, so that gradients are ready during the backward pass."""

import math
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hvdtrain.engines.errors import UserError
from hvdtrain.models import compile_cache
from hvdtrain.models.classifiers import build_model
from hvdtrain.models.compiling import compiled, repeated_blocks, require_compiler
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
    found = list(repeated_blocks(build()))
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
    model(torch.arange(7)[None], torch.arange(7)[None]).backward()
    blocks = [event for number in (2, 1, 0) for event in ("backward", f"ready {number}")]
    assert seen == ["backward", *blocks]  # the loss before all


def test_compiled_blocks_compute_the_same_in_training_only_and_keep_their_names():
    torch.manual_seed(1)
    model = GPT(SMALL, 7)
    tokens, names = torch.arange(7)[None], list(model.state_dict())
    expected = model(tokens, tokens)
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    compiled(model, CPU, backend)
    model.eval()
    torch.testing.assert_close(model(tokens, tokens), expected)
    assert not compilations
    model.train()
    torch.testing.assert_close(model(tokens, tokens), expected)
    assert compilations
    assert list(model.state_dict()) == names


@pytest.mark.slow
@pytest.mark.parametrize("rows", [None, 704])
def test_a_compiled_gpt_has_the_same_losses_and_no_logits_of_float32(rows):
    """GPT-2's take 2.5 GB for 12 sequences. Padded rows of the head add to the loss what their share of the softmax is."""
    from torch._inductor.utils import run_and_get_code  # here: it imports the compiler, which takes seconds

    def losses(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens, tokens.roll(-1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    torch.manual_seed(1)
    sizes, tokens = Sizes(layers=1, heads=2, width=32, context=32), torch.randint(0, 650, (1, 32))
    plain, model = GPT(sizes, 650), GPT(sizes, 650, rows=rows)
    with torch.no_grad():
        model.load_state_dict(plain.state_dict() | {"tokens.weight": model.tokens.weight})
        model.tokens.weight[:650] = plain.tokens.weight
    expected = list(losses(plain))
    found, code = run_and_get_code(lambda: list(losses(compiled(model, CPU))))
    assert found == pytest.approx(expected, abs=0.02 + math.log((rows or 650) / 650))
    kinds = set(re.findall(rf"\(32, {rows or 650}\), \([0-9]+, [0-9]+\), torch\.(\w+)", "".join(code)))
    assert "float32" not in kinds
    assert "bfloat16" in kinds


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    for name in compile_cache.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_gpu_needs_a_c_compiler_which_triton_would_miss_only_in_the_first_step(own_cache, tmp_path, monkeypatch):
    gpu = torch.device("cuda")  # a stand-in: nothing is compiled
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UserError, match="--compile on a GPU needs a C compiler: install gcc, set CC, or leave it out"):
        require_compiler(gpu)
    (tmp_path / "clang").touch(mode=0o755)
    require_compiler(gpu)


@pytest.mark.slow
def test_what_is_compiled_is_kept_where_nobody_else_can_write(own_cache, tmp_path):
    """torch's own place is one name in the directory for temporary files: what another user put there was executed."""
    program = """
import os
from pathlib import Path
from hvdtrain.models import compile_cache
compile_cache.use_private()
from torch._inductor import codecache  # which has looked for the place, once
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir, triton_cache_dir
from torch._inductor.cache import InductorOnDiskCache
print(cache_dir(), default_cache_dir(), triton_cache_dir(0), InductorOnDiskCache().base_dir, codecache._HEADER_DIR)
"""
    run = [sys.executable, "-c", program]
    used = subprocess.check_output(run, text=True, env=os.environ | {"TMPDIR": str(tmp_path / "tmp")}, timeout=60)
    kept = own_cache / "hvdtrain" / "code" / "compiled"
    assert all(Path(each).is_relative_to(kept) for each in used.split()), used
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700


def test_a_user_without_a_cache_gets_a_place_until_the_end(own_cache, tmp_path):
    own_cache.mkdir()
    own_cache.chmod(0o777)
    program = "import os; from hvdtrain.models import compile_cache as c; c.require_private(); print(os.environ['{}'])"
    run = [sys.executable, "-c", program.format("TORCHINDUCTOR_CACHE_DIR")]
    used = Path(subprocess.check_output(run, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}, timeout=60).strip())
    assert used.is_relative_to(tmp_path)
    assert not used.is_relative_to(own_cache)
    assert not used.parent.exists()


@pytest.mark.parametrize("name", compile_cache.VARIABLES)
@pytest.mark.parametrize("how", ["everybody", "a group", "another's", "above"])
def test_a_place_that_others_may_write_is_refused(how, name, own_cache, tmp_path, monkeypatch):
    place = tmp_path / "above" / "place"
    place.mkdir(parents=True)
    monkeypatch.setenv(name, str(place))
    require_compiler(CPU)
    if how == "everybody":
        place.chmod(0o777)
    elif how == "above":
        place.parent.chmod(0o777)
    elif os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    elif how == "a group":
        os.chown(place, -1, 12345)
        place.chmod(0o775)
    else:
        os.chown(place, 12345, -1)
    with pytest.raises(UserError, match=f"{name}=.*place: other users may write there, and what is in it is executed"):
        require_compiler(CPU)


def test_a_place_of_the_users_own_is_kept_and_made_private(own_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    before = os.umask(0)
    try:
        require_compiler(CPU)
    finally:
        os.umask(before)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine")
    assert "TRITON_CACHE_DIR" not in os.environ  # torch puts it below
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o700
