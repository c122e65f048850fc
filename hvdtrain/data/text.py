"""A text as tokens that every rank maps into memory: the first 90 % to train on, the rest held out.

    from hvdtrain.data import text
    data = text.load([Path("book.txt")], "characters")
    inputs, targets = text.windows(data.train, torch.tensor([0, 5]), context=64)

Every rank of a host calls `load` at once with the same arguments. The first one converts the text and keeps the tokens in
the cache directory; the others, and later runs, map that file. Where the cache cannot be written, each converts for itself.
"""

import codecs
import contextlib
import hashlib
import json
import os
import secrets
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from hvdtrain.data import cache
from hvdtrain.data.vocabularies import CODE_POINTS, Bytes, Characters, Pairs, Vocabulary, code_points, restore
from hvdtrain.engines.errors import UserError

BLOCK_BYTES = 2**22  # read and converted at a time
LOCK_SECONDS = 600.0  # learning byte pairs can take minutes; then a process converts for itself
IGNORED = -100  # the target that torch's cross-entropy leaves out
FORMAT = 1  # of the files in the cache


@dataclass(frozen=True, eq=False)
class Text:
    """A text as tokens. Do not write into them: they are a file's pages, shared with the host's other ranks."""

    name: str  # "text", or "python" for the standard library
    reason: str  # one line: which text this is
    sha256: str  # of the file; of several: of their files' sha256, one after the other
    train: Tensor  # uint8 or int32 [n]
    validation: Tensor  # the same type, [m]
    validation_characters: int  # with bytes as tokens: bytes
    vocabulary: Vocabulary


@dataclass(frozen=True)
class Facts:
    """What the cache keeps next to the tokens."""

    kind: str
    content: str  # of the vocabulary
    train_tokens: int
    validation_tokens: int
    validation_characters: int


def windows(tokens: Tensor, indices: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, int64 [b, context], of the windows `indices` (int64 [b]); window i begins at i * context.

    A target is the token after its input. Beyond the last token inputs are 0 and targets IGNORED.
    """
    at = indices.cpu()[:, None] * context + torch.arange(context + 1)
    window = tokens[at.clamp(max=len(tokens) - 1)].long()
    beyond = at[:, 1:] >= len(tokens)
    return window[:, :-1].masked_fill(beyond, 0), window[:, 1:].masked_fill(beyond, IGNORED)


def whole_windows(tokens: Tensor, context: int) -> int:
    """Return how many windows the tokens fill. What is left, shorter than a window, is not trained on."""
    return max(len(tokens) - 1, 0) // context


def all_windows(tokens: Tensor, context: int) -> int:
    """Return in how many windows each token but the first is a target once. The last one may be short."""
    return -(-max(len(tokens) - 1, 0) // context)


def standard_library() -> list[Path]:
    """Return the modules of Python's standard library that are one file each: some 4 MB of text on every machine."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def load(paths: Sequence[Path], kind: str, size: int = 0, tokenizer: Path | None = None) -> Text:
    """Return the text in `paths` (none: the standard library), one file after the other, as tokens.

    kind: one of vocabularies.KINDS. For pairs: `tokenizer`, a tokenizer.json; or `size`, how many tokens to learn here.
    Raises UserError where a file cannot be read, is not UTF-8 (but for bytes), or all are empty.
    """
    name, reason = "text", ", ".join(path.name for path in paths)
    if not paths:
        paths, name = standard_library(), "python"
        reason = f"{len(paths)} modules of Python's standard library, as there is no --text"
    given = None if tokenizer is None else read_tokenizer(tokenizer)
    directory = cache.directory("text")
    with contextlib.ExitStack() as stack:
        if directory is not None and stack.enter_context(cache.locked(directory, LOCK_SECONDS)):
            directory = None
        sha256 = fingerprint(paths)
        recipe = [FORMAT, sha256, kind, 0 if given else size, given and given.content]
        stem = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:32]
        found = None if directory is None else cached(directory, stem)
        if found is None and directory is not None:
            with contextlib.suppress(OSError):  # a full disk, say
                keep(directory, stem, paths, kind, size, given)
                found = cached(directory, stem)
        if found is None:
            parts: list[Tensor] = []
            found = convert(paths, kind, size, given, parts.append), torch.cat(parts)
    facts, tokens = found
    vocabulary = restore(facts.kind, facts.content)
    reason = (
        f"{reason}: {len(tokens):,} tokens, {vocabulary.size:,} different {'byte pairs' if kind == 'pairs' else kind}"
    )
    cut = facts.train_tokens
    return Text(name, reason, sha256, tokens[:cut], tokens[cut:], facts.validation_characters, vocabulary)


def convert(paths: Sequence[Path], kind: str, size: int, given: Pairs | None, put: Callable[[Tensor], object]) -> Facts:
    """Hand the text's tokens to `put`, part by part; return what goes with them. Raises UserError."""
    total, seen = 0, torch.zeros(CODE_POINTS if kind == "characters" else 0, dtype=torch.bool)
    for block in blocks(paths, kind):
        total += len(block)
        if isinstance(block, str) and kind == "characters":
            seen.index_fill_(0, code_points(block).long(), True)
    if total == 0:
        raise UserError(f"--text {' '.join(map(str, paths))}: empty: name files that have text in them")
    cut = total * 9 // 10
    vocabulary: Vocabulary
    if kind == "characters":
        vocabulary = Characters("".join(map(chr, seen.nonzero()[:, 0].tolist())))
    elif kind == "bytes":
        vocabulary = Bytes()
    else:
        vocabulary = given or Pairs.learn(between(blocks(paths, kind), 0, cut), size)
    dtype = torch.uint8 if vocabulary.size <= 256 else torch.int32
    counts = [0, 0]
    for part, (first, last) in enumerate(((0, cut), (cut, total))):
        for block in between(blocks(paths, kind), first, last):
            tokens = vocabulary.encode(block).to(dtype)
            counts[part] += len(tokens)
            put(tokens)
    return Facts(kind, vocabulary.content, counts[0], counts[1], total - cut)


def blocks(paths: Sequence[Path], kind: str) -> Iterator[str | bytes]:
    """Yield the files' text, or their bytes where these are the tokens, in parts. Raises UserError."""
    for path in paths:
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            with path.open("rb") as file:
                while chunk := file.read(BLOCK_BYTES):
                    yield chunk if kind == "bytes" else decoder.decode(chunk)
                decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            said = f"--text {path}: not UTF-8 ({error.reason}): convert it with iconv, or use --tokens bytes"
            raise UserError(said) from error
        except OSError as error:
            raise unreadable("--text", path, error) from error


def between(parts: Iterator[str | bytes], first: int, last: int) -> Iterator:
    """Yield what stands at positions first to last - 1 of `parts`, one after the other."""
    position = 0
    for part in parts:
        if inside := part[max(first - position, 0) : max(last - position, 0)]:
            yield inside
        position += len(part)
        if position >= last:
            return


def fingerprint(paths: Sequence[Path]) -> str:
    """Return the sha256 of a file; of several, that of their sha256. Raises UserError where one cannot be read."""
    found = []
    for path in paths:
        try:
            with path.open("rb") as file:
                found.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise unreadable("--text", path, error) from error
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()


def read_tokenizer(path: Path) -> Pairs:
    try:
        content = path.read_text()
    except OSError as error:
        raise unreadable("--tokenizer", path, error) from error
    except UnicodeDecodeError as error:
        raise UserError(f"--tokenizer {path}: not text: name a tokenizer.json of the package tokenizers") from error
    return Pairs(content)


def unreadable(flag: str, path: Path, error: OSError) -> UserError:
    return UserError(f"{flag} {path}: {error.strerror or error}: name a file that can be read")


def cached(directory: Path, stem: str) -> tuple[Facts, Tensor] | None:
    """Return the tokens that are kept as `stem`, mapped; None where there are none, or not whole."""
    tokens = directory / f"{stem}.tokens"
    try:
        facts = Facts(**json.loads((directory / f"{stem}.json").read_bytes()))
        count = facts.train_tokens + facts.validation_tokens
        dtype = torch.uint8 if restore(facts.kind, facts.content).size <= 256 else torch.int32
        if tokens.stat().st_size != count * dtype.itemsize:
            return None
        return facts, torch.from_file(str(tokens), shared=False, size=count, dtype=dtype)
    except (OSError, ValueError, TypeError, RuntimeError):  # RuntimeError: torch could not map it
        return None


def keep(directory: Path, stem: str, paths: Sequence[Path], kind: str, size: int, given: Pairs | None) -> None:
    """Convert the text into files of the cache, which memory need not hold. Hold the lock. Raises OSError, UserError."""
    cache.sweep(directory)
    partial = directory / f".{stem}.{os.getpid()}-{secrets.token_hex(4)}.partial"
    try:
        with partial.open("xb") as file:
            facts = convert(paths, kind, size, given, lambda tokens: file.write(tokens.numpy().data))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(directory / f"{stem}.tokens")
    finally:
        partial.unlink(missing_ok=True)
    cache.write(directory / f"{stem}.json", json.dumps(asdict(facts)).encode())
