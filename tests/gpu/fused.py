"""What torch.compile fuses of GPT-2: kernels, and the bytes that they read and write: python -m tests.gpu.fused

Forward and backward, for 256 tokens in bf16, on a CPU. Attention computes in float32 there: a block is counted without it.
"""

from collections.abc import Callable
from types import MethodType

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hvdtrain.models.gpt import GPT, GPT_SIZES, padded

CONTEXT, WIDTH, VOCABULARY = 256, 768, 50_257


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
    torch.manual_seed(1)
    print("| part | head | kernels, eager | compiled | MB, eager | compiled |\n|---|---:|---:|---:|---:|---:|")
    targets = torch.randint(0, VOCABULARY, (1, CONTEXT))
    for rows in (VOCABULARY, padded(VOCABULARY)):
        model = GPT(GPT_SIZES["gpt2"], VOCABULARY, rows=rows)
        block = model.blocks[0]
        block.attention = MethodType(lambda self, x: self.queries_keys_values(x)[..., :WIDTH], block)
        calls = {"one block, without attention": block, "norm, head and loss": model.end}
        for name, call in calls.items():

            def step(call=call, more=(targets,) * (call is not block)):
                stream = torch.randn(1, CONTEXT, WIDTH, requires_grad=True)
                with torch.autocast("cpu", torch.bfloat16):
                    loss = call(stream, *more).mean()
                loss.backward()

            fast = torch.compile(call, dynamic=False)
            counts = eager(step), compiled(lambda: step(fast))  # noqa: B023
            kernels, sizes = zip(*counts, strict=True)
            print(
                f"| {name} | {rows:,} | {kernels[0]} | {kernels[1]} | {sizes[0] / 1e6:,.0f} | {sizes[1] / 1e6:,.0f} |"
            )


if __name__ == "__main__":
    main()
