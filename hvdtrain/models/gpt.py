"""A decoder-only transformer like GPT-2: pre-norm blocks, causal attention, learned positions.

    model = GPT(SIZES["shakespeare-cpu"], vocabulary=65)
    logits = model(tokens)      # int64 [b, t], t <= context  ->  [b, t, vocabulary]
    loss = model(tokens, targets)   # int64 [b, t], -100 where none counts  ->  the mean

Weights start as GPT-2's do at its width, 768: normal with deviation 0.02, and 0.02 / sqrt(2 * layers) where a block's output
joins the residual stream. At other widths these deviations are sqrt(768 / width) times as large (docs/training.md).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """The hyperparameters that determine the model's parameters, apart from the vocabulary."""

    layers: int
    heads: int
    width: int  # of the residual stream: heads * (width per head)
    context: int  # maximum number of input tokens
    bias: bool = False  # in linear layers and layer norms
    tied: bool = True  # the head shares the weights of the token embedding


GPT_SIZES = {
    "shakespeare-cpu": Sizes(layers=4, heads=4, width=128, context=64),  # 804,096 parameters with 65 characters
    "gpt-small": Sizes(layers=6, heads=6, width=384, context=256),  # 10.8 million with bytes: for the benchmarks
    # 124,439,808 parameters with GPT-2's 50,257 byte pairs
    "gpt2": Sizes(layers=12, heads=12, width=768, context=1024, bias=True),
}

VOCABULARIES = {"shakespeare-cpu": 65, "gpt-small": 256, "gpt2": 50_257}  # for benchmarks, which have no text


def padded(vocabulary: int) -> int:
    """Return the next multiple of 64: 50,304 for GPT-2's 50,257, as in nanoGPT."""
    # GPUs multiply matrices fastest whose sides are multiples of 64.
    return -(-vocabulary // 64) * 64


def loss_of(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy of logits [b, t, v] with targets [b, t], without those of -100."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)


class Block(nn.Module):
    """A transformer block: attention, then an MLP with two layers. Each reads the normalized residual stream and adds to it.

    Input and output: [b, t, width].
    """

    def __init__(self, sizes: Sizes, dropout: float) -> None:
        super().__init__()
        width, bias = sizes.width, sizes.bias
        self.heads, self.dropout = sizes.heads, dropout
        self.norm_attention = nn.LayerNorm(width, bias=bias)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=bias)
        self.from_attention = nn.Linear(width, width, bias=bias)
        self.norm_mlp = nn.LayerNorm(width, bias=bias)
        self.into_mlp = nn.Linear(width, 4 * width, bias=bias)
        self.from_mlp = nn.Linear(4 * width, width, bias=bias)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.drop(self.from_attention(self.attention(self.norm_attention(stream))))
        hidden = F.gelu(self.into_mlp(self.norm_mlp(stream)))
        return stream + self.drop(self.from_mlp(hidden))

    def attention(self, inputs: Tensor) -> Tensor:
        projected = self.queries_keys_values(inputs)  # [b, t, 3 * width]
        if projected.device.type == "cpu":
            # In bfloat16 the backward pass of CPU attention takes four times as long as in float32 (docs/training.md).
            projected = projected.float()
        # Split, then turned: the backward pass copies once instead of twice.
        parts = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in projected.chunk(3, -1))
        queries, keys, values = parts  # each [b, heads, t, width per head]
        with torch.autocast("cpu", enabled=False):  # else it would cast back
            outputs = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, dropout_p=self.dropout if self.training else 0.0
            )
        return outputs.transpose(1, 2).flatten(2)

    def drop(self, outputs: Tensor) -> Tensor:
        """Apply dropout."""
        return F.dropout(outputs, self.dropout, self.training) if self.dropout else outputs


class GPT(nn.Module):
    """A GPT model. Input: tokens, int64 [b, t] with t <= context. Output: logits of the next tokens, [b, t, rows], or their
    mean loss if targets are given.

    rows: of the token embedding, at least `vocabulary` (default): see `padded`. The logits of the rest are learned to be
    low, and never sampled.
    """

    def __init__(self, sizes: Sizes, vocabulary: int, dropout: float = 0.0, rows: int | None = None) -> None:
        super().__init__()
        rows = rows or vocabulary
        self.sizes, self.vocabulary, self.dropout = sizes, vocabulary, dropout
        self.tokens = nn.Embedding(rows, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, dropout) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width, bias=sizes.bias)
        self.head = None if sizes.tied else nn.Linear(sizes.width, rows, bias=False)
        # So what a matrix product returns has the same variance at every width; 768 is GPT-2's.
        deviation = 0.02 * math.sqrt(768 / sizes.width)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                joins_stream = name.endswith(("from_attention.weight", "from_mlp.weight"))
                # 2 * layers outputs are added to the residual stream: its variance does not grow with depth.
                nn.init.normal_(parameter, std=deviation / (math.sqrt(2 * sizes.layers) if joins_stream else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        stream = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        stream = F.dropout(stream, self.dropout, self.training) if self.dropout else stream
        for block in self.blocks:
            stream = block(stream)
        return self.end(stream, targets)

    def end(self, stream: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits or loss."""
        # Compiled as a whole, this has no logits of float32: GPT-2's take 2.5 GB for 12 sequences.
        logits = F.linear(self.norm(stream), self.tokens.weight if self.head is None else self.head.weight)
        return logits if targets is None else loss_of(logits, targets)

    def flops_per_token(self) -> int:
        """Return the number of floating-point operations per token for forward and backward, at full context.

        Counted as in arXiv:2204.02311, appendix B: 6 per weight of a matrix product, and 12 * width * context per layer for
        the two products of attention. (Causal attention needs only half of the latter.)
        """
        sizes, head = self.sizes, self.tokens.weight.numel()
        matrices = sum(weight.numel() for weight in self.blocks.parameters() if weight.ndim > 1)
        return 6 * (matrices + head) + 12 * sizes.layers * sizes.width * sizes.context

    def continued(self, tokens: list[int], count: int, *, temperature: float, seed: int) -> Iterator[int]:
        """Yield `count` tokens that continue `tokens` (at least one), sampled with a separate generator."""
        # A generator of its own: how often it samples does not change the random numbers of training.
        draw, training = torch.Generator().manual_seed(seed), self.training
        tokens = tokens[-self.sizes.context :]
        self.eval()
        for _ in range(count):
            with torch.inference_mode():
                logits = self(torch.tensor([tokens], device=self.tokens.weight.device))[0, -1].double().cpu()
                logits = logits[: self.vocabulary]
            tokens.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=draw)))
            tokens = tokens[-self.sizes.context :]
            yield tokens[-1]
        self.train(training)
