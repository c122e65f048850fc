"""What torch.compile fuses of GPT-2: kernels, and the bytes that they read and write: python -m tests.gpu.fused

Forward and backward, for 128 tokens in bf16, on a CPU. Attention computes in float32 there: a block is counted without it.
"""

from collections.abc import Callable
from types import MethodType

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hvdtrain.models.gpt import GPT, GPT_SIZES, padded

CONTEXT, WIDTH, VOCABULARY = 128, 768, 50_257


class Counted(TorchDispatchMode):
    """Counts operations that are not views, and the bytes of the tensors that they read and write."""

    kernels = bytes = 0

    def __torch_dispatch__(self, operation, types, inputs=(), named=None):
        outputs = operation(*inputs, **(named or {}))
        if not operation.is_view and "detach" not in str(operation):
            self.kernels += 1
            tensors = [each for each in tree_leaves((inputs, named, outputs)) if isinstance(each, Tensor)]
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return outputs


def eager(step: Callable[[], None]) -> tuple[int, int]:
    with Counted() as counted:
        step()
    return counted.kernels, counted.bytes


def compiled(step: Callable[[], None]) -> tuple[int, int]:
    """Of inductor's own count, in which a kernel that was fused reads each of its inputs once."""
    from torch._inductor import metrics

    torch._dynamo.reset()
    metrics.reset()
    step()
    nodes = [node for node, _ in metrics.nodes_num_elem if "Nop" not in type(node).__name__]
    return len(nodes), metrics.num_bytes_accessed


def main() -> None:
    torch._logging.set_logs(inductor_metrics=True)
    torch._inductor.config.force_disable_caches = True
    print("| part | kernels, eager | compiled | MB, eager | compiled |\n|---|---:|---:|---:|---:|")
    targets = torch.randint(0, VOCABULARY, (1, CONTEXT))
    plain, wide = (GPT(GPT_SIZES["gpt2"], VOCABULARY, rows=rows) for rows in (VOCABULARY, padded(VOCABULARY)))
    block = plain.blocks[0]
    block.attention = MethodType(lambda self, x: self.queries_keys_values(x)[..., :WIDTH], block)
    named = {
        "norm, head of 50,304 rows, loss": (wide.end, targets),
        "norm, head of 50,257 rows, loss": (plain.end, targets),
        "one block, without attention": (block,),
    }
    for name, (call, *more) in named.items():

        def step(call=call, more=more):
            stream = torch.randn(1, CONTEXT, WIDTH, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16):
                loss = call(stream, *more).mean()
            loss.backward()

        fast = torch.compile(call, dynamic=False)
        (before, size), (after, rest) = eager(step), compiled(lambda: step(fast))  # noqa: B023
        print(f"| {name} | {before} | {after} | {size / 1e6:,.0f} | {rest / 1e6:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
