"""Train a language model on text: a decoder-only transformer on characters, bytes or byte pairs.

python -m hvdtrain.lm                                     one process, on the sources of Python's standard library
horovodrun -np 2 python -m hvdtrain.lm --text book.txt    two ranks, on your text
mpirun -np 4 python -m hvdtrain.lm --text *.txt --tokens bytes --amp bf16 --output-dir OUT
python -m hvdtrain.lm --sample "First Citizen:" --output-dir OUT    text from the newest checkpoint there

--recipe shakespeare-cpu     0.8 million parameters, 2,000 steps of 12 sequences over all ranks: one minute (default)
--recipe gpt2                124 million parameters, 600,000 steps of 480 sequences of 1,024 byte pairs
--layers 6 --heads 6 --width 384 --context 256 --steps 5000 --dropout 0.2    any other configuration

Trains on the first 90 % of the text, with each sequence once per epoch, and evaluates on all of the rest (docs/training.md).
"""

from hvdtrain.launching import startup

if __name__ == "__main__":
    startup.begin()

import math
import sys
from argparse import BooleanOptionalAction
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import torch

from hvdtrain import training
from hvdtrain.checkpoint import checkpoint, contents, mirror
from hvdtrain.datasets import text, vocabularies
from hvdtrain.engines.base import AMP_DTYPES
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.engines.lines import result, warn
from hvdtrain.flags import Flags
from hvdtrain.loop import optim
from hvdtrain.models.compiling import compiled
from hvdtrain.models.gpt import GPT, GPT_SIZES, Sizes, loss_of, padded
from hvdtrain.output.clock import matrix_product_rate

METRICS = {"loss": "min", "perplexity": "min", "bits_per_character": "min"}
RECIPES: dict[str, dict[str, object]] = {
    # nanoGPT's CPU configuration.
    "shakespeare-cpu": dict(
        **asdict(GPT_SIZES["shakespeare-cpu"]), tokens="characters", steps=2000, warmup_steps=100, lr=1e-3, min_lr=1e-4,
        beta2=0.99, weight_decay=0.1, clip_norm=1.0, dropout=0.0,
    ),
    # nanoGPT's reproduction of the smallest GPT-2.
    "gpt2": dict(
        **asdict(GPT_SIZES["gpt2"]), tokens="pairs", steps=600_000, warmup_steps=2000, lr=6e-4, min_lr=6e-5,
        beta2=0.95, weight_decay=0.1, clip_norm=1.0, dropout=0.0,
    ),
}  # fmt: skip
GLOBAL_BATCH = {"shakespeare-cpu": 12, "gpt2": 480}  # windows in a step, over all ranks
LARGEST_BATCH, ON_LARGE_GPUS = 12, 32  # windows per rank in one forward pass
SIZE_FLAGS = [field.name for field in fields(Sizes)]


def parse(argv: Sequence[str] | None = None) -> Flags:
    """Return the parsed command line. Raises UserError on bad input."""
    parser = training.parser("hvdtrain.lm", __doc__, epochs=None, batch_size=None, accumulate=None)
    add = parser.add_argument
    add("--text", type=Path, nargs="+", action="extend", default=[], metavar="FILE",
        help="text to train on (default: the standard library's sources)")  # fmt: skip
    add("--recipe", choices=tuple(RECIPES), default="shakespeare-cpu", help="a set of values for the flags not given")
    add("--tokens", choices=vocabularies.KINDS, help="pairs: needs the package tokenizers")
    size = "pairs: number of tokens to learn from the text"
    add("--vocabulary-size", type=training.positive_int, default=50_257, help=size)
    add("--tokenizer", type=Path, help="pairs: use this tokenizer.json instead of learning one")
    add("--layers", type=training.positive_int, help="transformer blocks")
    add("--heads", type=training.positive_int, help="attention heads per layer")
    add("--width", type=training.positive_int, help="values per token")
    add("--context", type=training.positive_int, help="tokens per sequence")
    add("--tied", action=BooleanOptionalAction, help="share the token embedding's weights with the head")
    add("--bias", action=BooleanOptionalAction, help="biases in linear layers and layer norms")
    add("--dropout", type=training.fraction, help="share of activations that are zeroed in training")
    add("--steps", type=training.positive_int, help="number of steps; or give --epochs N, passes through the text")
    add("--lr", type=training.positive, help="learning rate after the warm-up")
    add("--min-lr", type=training.non_negative, help="learning rate at the end of the cosine")
    add("--warmup-steps", type=training.count, help="steps of linear warm-up")
    add("--beta2", type=training.fraction, help="AdamW's beta 2; beta 1 is 0.9")
    add("--weight-decay", type=training.non_negative, help="weight decay of matrices; vectors do not decay")
    add("--clip-norm", type=training.positive, help="clip each step's gradient to this norm")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--sample", metavar="PROMPT", help="do not train: continue PROMPT with the checkpoint --resume PATH, or "
        "the newest in --output-dir")  # fmt: skip
    length = "length of a sample, also after each epoch (default: 200)"
    add("--sample-tokens", type=training.count, default=200, help=length)
    add("--temperature", type=training.positive, default=0.8, help="sampling temperature (default: 0.8)")
    parser.set_help(
        epochs="passes through the text, instead of --steps",
        batch_size="sequences per rank and micro-batch (default: those of the recipe's step, shared by the ranks)",
        accumulate="micro-batches per step (default: at most 12 sequences in one, 32 on GPUs of 70 GiB)",
        amp="compute in this type where it is safe; auto: bf16 where possible (default: auto)",
    )
    parser.may_change_on_resume("text", "tokenizer", "compile", "sample", "sample_tokens", "temperature")
    flags = parser.parse(argv, RECIPES)
    flags.bf16_on_cpus()
    if flags.epochs is not None:
        if (steps := parser.parse(argv).steps) is not None:
            message = f"--steps {steps} cannot go with --epochs {flags.epochs}: leave one of them out"
            raise UserError(message, everywhere=True)
        flags.steps = None
    if flags.width % flags.heads:
        raise UserError(f"--width {flags.width} is not a multiple of --heads {flags.heads}", everywhere=True)
    if flags.evaluate is None:
        of_gpt2 = all(getattr(flags, name) == getattr(GPT_SIZES["gpt2"], name) for name in SIZE_FLAGS)
        automatic = flags.recipe == "gpt2" and of_gpt2 and flags.batch_size is None and flags.accumulate is None
        share_batch(flags, flags.virtual_ranks or announced().size)
        if automatic:
            share = flags.batch_size * flags.accumulate
            fewer = micro_batches(share, ON_LARGE_GPUS)
            flags.on_large_gpus(accumulate=fewer, batch_size=share // fewer)
    return flags


def micro_batches(share: int, most: int) -> int:
    """Return in how few equal micro-batches a rank takes its `share` of a step, with at most `most` windows in each."""
    return next(n for n in range(1, share + 1) if share % n == 0 and share // n <= most)


def share_batch(flags: Flags, ranks: int) -> None:
    """Without --batch-size, choose it so that a step takes the recipe's windows on any number of ranks. Raises UserError."""
    if flags.batch_size is not None:
        flags.accumulate = flags.accumulate or 1
        return
    total = GLOBAL_BATCH[flags.recipe]
    share, rest = divmod(total, ranks)
    if rest:
        fitting = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
        message = f"a step of --recipe {flags.recipe} has {total} sequences, which {ranks} ranks cannot share equally"
        raise UserError(f"{message}: give --batch-size, of each rank, or use -np {fitting}", everywhere=True)
    if flags.accumulate is None:
        flags.accumulate = micro_batches(share, LARGEST_BATCH)
    flags.batch_size, rest = divmod(share, flags.accumulate)
    if rest:
        message = f"--accumulate {flags.accumulate} does not divide a rank's {share} sequences of a step"
        raise UserError(f"{message}: give --batch-size, too", everywhere=True)


def load_text(flags: Flags, run: training.Run) -> text.Text:
    """Return the text, the same on every rank. A collective."""
    with run.raising_together("text"):
        data = text.load_tokens(flags.text, flags.tokens, flags.vocabulary_size, flags.tokenizer)
        windows, context = text.whole_windows(data.train, flags.context), flags.context
        if windows < run.size or len(data.validation) < 2:
            message = (
                f"the text is too short: {windows} sequences of --context {context} in its first 90 %, {run.size} ranks"
            )
            raise UserError(f"{message}: use a longer text, or a smaller --context")
        content = run.checkpoints.resume.content()
        if content is not None and content[1]:  # on rank 0
            there = contents.registered_state(content[1], "vocabulary")
            if there is not None:
                data.vocabulary.load_state_dict(there)  # a clearer error than one about shapes
    run.describe_data(data.name, data.reason, sha256=data.sha256, train_tokens=len(data.train))
    return data


def learning_rate(step: int, steps: int, flags: Flags) -> float:
    """Return the learning rate at `step` (from 0) of `steps`: linear warm-up, then half a cosine from --lr to --min-lr."""
    warmup: int = flags.warmup_steps
    highest: float = flags.lr
    lowest: float = flags.min_lr
    if step < warmup:
        return highest * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def adamw(net: GPT, flags: Flags) -> torch.optim.Optimizer:
    """Return AdamW for `net`, fused if this torch has the kernel."""
    settings = dict(lr=flags.lr, betas=(0.9, flags.beta2), weight_decay=flags.weight_decay)
    return optim.with_fused(torch.optim.AdamW, optim.decay_groups(net), **settings)


def train_lm(flags: Flags, run: training.Run, data: text.Text) -> None:
    """Train and evaluate for --steps or --epochs. A collective."""
    context, state = flags.context, run.state
    windows = text.whole_windows(data.train, context)
    steps = flags.steps or flags.epochs * -(-windows // run.initial.global_batch)
    bound = run.engine.sum(matrix_product_rate(run.device, AMP_DTYPES[flags.amp]), "matrix_product").item()

    torch.manual_seed(flags.seed)
    rows = padded(data.vocabulary.size) if flags.recipe == "gpt2" else data.vocabulary.size
    net = GPT(Sizes(**{name: getattr(flags, name) for name in SIZE_FLAGS}), data.vocabulary.size, flags.dropout, rows)
    model, _ = run.prepare(net, adamw(net, flags))
    run.register(vocabulary=data.vocabulary)
    if flags.compile:
        with run.raising_together("compile"):
            model = compiled(model, run.device)

    for epoch in run.epochs(flags.epochs, steps=flags.steps):
        samples, seconds = state.samples, state.train_seconds
        for step in run.steps(windows):
            step.lr = learning_rate(state.step, steps, flags)
            for batch in step.batches():
                inputs, targets = run.to_device(*text.windows(data.train, batch.indices, context))
                step.backward(model(inputs, targets))
            step.update(clip_norm=flags.clip_norm)
        count = text.all_windows(data.validation, context)
        with run.evaluating(count, prefix="validation") as mine:
            for indices in torch.arange(count)[mine].split(flags.batch_size):
                inputs, targets = run.to_device(*text.windows(data.validation, indices, context))
                run.record(loss=loss_of(net(inputs), targets, "none"), count=(targets != text.IGNORED).sum())
        loss, tokens = run.evaluation["loss"], run.evaluation["count"]
        # From nats per token to bits per character: comparable between vocabularies.
        bits = loss / math.log(2) * tokens / data.validation_characters
        # exp(710) is more than a float holds.
        run.record(perplexity=math.exp(min(loss, 700.0)), bits_per_character=bits)
        if flags.evaluate is not None:
            continue

        rate = (state.samples - samples) * context / max(state.train_seconds - seconds, 1e-9)
        flops = rate * net.flops_per_token()
        run.event("throughput", epoch=epoch + 1, tokens_per_second=rate, flops_per_second=flops)
        run.say(f"{rate:,.0f} tokens/s; {flops / 1e9:,.1f} GFLOP/s, {flops / bound:.0%} of a matrix product's")
        if run.rank == 0 and flags.sample_tokens:
            with run.autocast():
                written = continuation(net, data.vocabulary, data.validation[:1].tolist(), flags, run.heartbeat)
            run.event("sample", epoch=epoch + 1, text=written)
            run.say(printable_text(written))
    rate = state.samples * context / max(state.train_seconds, 1e-9)
    speeds = dict(tokens_per_second=rate, flops_per_second=rate * net.flops_per_token())
    run.summary(tokens=state.samples * context, **speeds, matrix_product_flops_per_second=bound)


def continuation(
    net: GPT, vocabulary: vocabularies.Vocabulary, prompt: list[int], flags: Flags, heartbeat: Callable[[], None]
) -> str:
    """Return --sample-tokens tokens that the model generates after `prompt`, as text."""
    drawn = []
    for token in net.continued(prompt, flags.sample_tokens, temperature=flags.temperature, seed=flags.seed):
        drawn.append(token)
        heartbeat()
    return vocabulary.decode(drawn)


def printable_text(written: str) -> str:
    """Return `written` with question marks for control characters and for those that the terminal cannot encode."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in written)
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, "replace").decode(encoding)


def sample(flags: Flags) -> int:
    """Print --sample and its continuation by a trained model. Raises UserError without a checkpoint."""
    if announced().size > 1:
        raise UserError("--sample is one process: start it without a launcher", everywhere=True)
    named = flags.output_dir if flags.resume in ("auto", "never") else flags.resume
    if named is None:
        raise UserError("--sample needs a checkpoint: name it with --resume PATH, or its run with --output-dir")
    with mirror.local(named, "--sample from") as path:
        facts, tensors = checkpoint.find_checkpoint(path, f"--sample from {named}", warn, keep_names=True)
    try:
        vocabulary = vocabularies.restore_vocabulary(**contents.registered_state(tensors, "vocabulary"))
        rows = tensors["model.tokens.weight"].shape[0]
        net = GPT(Sizes(**{name: facts["config"][name] for name in SIZE_FLAGS}), vocabulary.size, rows=rows)
    except (KeyError, TypeError) as error:
        raise UserError(f"--sample from {named}: not a checkpoint of hvdtrain.lm: name one that is") from error
    contents.load_model(net, {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
    asked = flags.sample.encode(errors="surrogateescape").decode(errors="replace")  # argv may hold any bytes
    prompt = vocabulary.encode(asked).tolist() or [0]
    result(printable_text(asked + continuation(net, vocabulary, prompt, flags, lambda: None)))
    return 0


def main() -> int:
    flags = parse()
    if flags.sample is not None:
        return sample(flags)
    with training.start(flags, metrics=METRICS) as run:
        train_lm(flags, run, load_text(flags, run))
    return run.exit_code


if __name__ == "__main__":
    training.main(main)
