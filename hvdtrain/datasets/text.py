"""A text as memory-mapped tokens: the first 90 % for training, the rest for validation.

    from hvdtrain.datasets import text
    data = text.load_tokens([Path("book.txt")], "characters")
    inputs, targets = text.windows(data.train, torch.tensor([0, 5]), context=64)

Every rank on a host calls `load_tokens` with the same arguments. The first process converts the text and stores the tokens
in the cache directory; other processes and later runs map that file. If the cache is not writable, each process converts it.
"""

import codecs
import contextlib
import hashlib
import json
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from hvdtrain.datasets.vocabularies import (
    CODE_POINTS,
    Bytes,
    Characters,
    Pairs,
    Vocabulary,
    code_points,
    restore_vocabulary,
)
from hvdtrain.engines import atomic, files
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.lock import Lock

BLOCK_BYTES = 2**22  # read and converted at a time
TOKENS_LOCK_SECONDS = 600.0  # how long to wait for another process, which may take minutes to learn byte pairs
IGNORED = -100  # the default ignore_index of torch's cross-entropy
TOKENS_FORMAT = 2  # format version of the files in the cache
COMPRESSED_TEXTS = {  # no text begins like these
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh91AY&SY": "bzip2",
}


@dataclass(frozen=True, eq=False)
class Text:
    """A text as tokens. Do not modify the tensors: they are a memory-mapped file, shared with other ranks."""

    name: str  # "text", or "python" for the standard library
    reason: str  # one line: which text this is
    sha256: str  # of the file; for several files: of their concatenated SHA-256
    train: Tensor  # uint8 or int32 [n]
    validation: Tensor  # the same type, [m]
    validation_characters: int  # number of characters, or of bytes if the tokens are bytes
    vocabulary: Vocabulary


@dataclass(frozen=True)
class TokenFacts:
    """The data stored in the cache next to the tokens."""

    kind: str
    content: str  # of the vocabulary
    train_tokens: int
    validation_tokens: int
    validation_characters: int
    crc: int = 0  # CRC-32 of the tokens, then of content


def windows(tokens: Tensor, indices: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, both int64 [b, context], of windows `indices` (int64 [b]). Window i begins at i * context.

    A target is the token after its input. After the last token, inputs are 0 and targets are IGNORED.
    """
    # [b, context + 1]: a target is the token after its input, so that a window has one more.
    at = indices.cpu()[:, None] * context + torch.arange(context + 1)
    window = tokens[at.clamp(max=len(tokens) - 1)].long()
    beyond = at[:, 1:] >= len(tokens)
    return window[:, :-1].masked_fill(beyond, 0), window[:, 1:].masked_fill(beyond, IGNORED)


def whole_windows(tokens: Tensor, context: int) -> int:
    """Return the number of full windows. A shorter rest is not used for training."""
    return max(len(tokens) - 1, 0) // context


def all_windows(tokens: Tensor, context: int) -> int:
    """Return the number of windows that cover all tokens. The last one may be shorter."""
    return -(-max(len(tokens) - 1, 0) // context)


def standard_library() -> list[Path]:
    """Return the single-file modules of Python's standard library: about 4 MB of text."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def load_tokens(paths: Sequence[Path], kind: str, size: int = 0, tokenizer: Path | None = None) -> Text:
    """Return the concatenated text of the files `paths` as tokens. Default: Python's standard library.

    kind: one of vocabularies.KINDS. For pairs: `tokenizer`, a tokenizer.json; or `size`, the number of tokens to learn.
    Raises UserError if a file cannot be read or is not UTF-8 (except for bytes), or if all are empty.
    """
    name, reason = "text", ", ".join(" ".join(path.name.splitlines()) for path in paths)
    if not paths:
        paths, name = standard_library(), "python"
        reason = f"{len(paths)} modules of Python's standard library, because --text was not given"
    given = None if tokenizer is None else read_tokenizer(tokenizer)
    sha256 = fingerprint(paths)
    recipe = [TOKENS_FORMAT, sha256, kind, 0 if given else size, given and given.content]
    stem = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:32]
    found, directory = None, files.cache_directory("text")
    if directory is not None:
        with locked(directory), contextlib.suppress(OSError):  # such as a full disk
            found = cached(directory, stem)
            if found is None:
                keep(directory, stem, paths, kind, size, given)
                found = cached(directory, stem)
        if found is not None and tokens_crc(found[0], zlib.crc32(found[1].numpy().data)) != found[0].crc:
            # A disk lost them, or someone wrote there. Otherwise as many zeros would be trained on.
            with contextlib.suppress(OSError):
                (directory / f"{stem}.json").unlink()
            found = None
    if found is None:
        parts: list[Tensor] = []
        found = convert(paths, kind, size, given, parts.append), torch.cat(parts)
    facts, tokens = found
    vocabulary = restore_vocabulary(facts.kind, facts.content)
    reason = (
        f"{reason}: {len(tokens):,} tokens, {vocabulary.size:,} different {'byte pairs' if kind == 'pairs' else kind}"
    )
    cut = facts.train_tokens
    return Text(name, reason, sha256, tokens[:cut], tokens[cut:], facts.validation_characters, vocabulary)


def convert(
    paths: Sequence[Path], kind: str, size: int, given: Pairs | None, put: Callable[[Tensor], object]
) -> TokenFacts:
    """Convert the text, and call `put` with each part of the tokens. Return the facts about it. Raises UserError."""
    total, seen = 0, torch.zeros(CODE_POINTS if kind == "characters" else 0, dtype=torch.bool)
    for block in text_blocks(paths, kind):
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
        characters = cast("Iterator[str]", between(text_blocks(paths, kind), 0, cut))  # only kind "bytes" has bytes
        vocabulary = given or Pairs.learn(characters, size)
    dtype = torch.uint8 if vocabulary.size <= 256 else torch.int32
    counts = [0, 0]
    for part, (first, last) in enumerate(((0, cut), (cut, total))):
        for block in between(text_blocks(paths, kind), first, last):
            tokens = vocabulary.encode(block).to(dtype)
            counts[part] += len(tokens)
            put(tokens)
    return TokenFacts(kind, vocabulary.content, counts[0], counts[1], total - cut)


def text_blocks(paths: Sequence[Path], kind: str) -> Iterator[str | bytes]:
    """Yield the files' text in blocks, or their bytes if kind is "bytes". Raises UserError."""
    for path in paths:
        # A block may end within a character.
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            with files.opened_for_reading(path) as file:
                first = b"" if kind == "bytes" else file.peek(16)
                if by := next((by for begins, by in COMPRESSED_TEXTS.items() if first.startswith(begins)), None):
                    raise UserError(f"--text {path}: compressed by {by}: unpack it, and name the text that was in it")
                while chunk := file.read(BLOCK_BYTES):
                    yield chunk if kind == "bytes" else decoder.decode(chunk)
                decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            message = f"--text {path}: not UTF-8 ({error.reason}): convert it with iconv, or use --tokens bytes"
            raise UserError(message) from error
        except OSError as error:
            raise unreadable("--text", path, error) from error


def between(parts: Iterator[str | bytes], first: int, last: int) -> Iterator[str | bytes]:
    """Yield the concatenation of `parts` from position `first` to `last` - 1, in parts."""
    position = 0
    for part in parts:
        if inside := part[max(first - position, 0) : max(last - position, 0)]:
            yield inside
        position += len(part)
        if position >= last:
            return


def fingerprint(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of a file; for several files, of their SHA-256. Raises UserError if a file cannot be read."""
    found = []
    for path in paths:
        try:
            with files.opened_for_reading(path) as file:
                found.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise unreadable("--text", path, error) from error
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()


def read_tokenizer(path: Path) -> Pairs:
    """Return the vocabulary in a tokenizer.json. Raises UserError."""
    try:
        content = files.read_bytes(path).decode()
    except OSError as error:
        raise unreadable("--tokenizer", path, error) from error
    except UnicodeDecodeError as error:
        raise UserError(f"--tokenizer {path}: not text: name a tokenizer.json of the package tokenizers") from error
    return Pairs(content)


def unreadable(flag: str, path: Path, error: OSError) -> UserError:
    """Return the UserError for a file that cannot be read."""
    if path.is_dir():
        return UserError(f"{flag} {path}: a directory: name the files in it, {flag} {path / '*.txt'}")
    return UserError(f"{flag} {path}: {error.strerror or error}: name a file that can be read")


def cached(directory: Path, stem: str) -> tuple[TokenFacts, Tensor] | None:
    """Return facts and memory-mapped tokens of cache entry `stem`; None if it is missing or incomplete."""
    tokens = directory / f"{stem}.tokens"
    try:
        facts = TokenFacts(**json.loads(files.read_bytes(directory / f"{stem}.json")))
        count = facts.train_tokens + facts.validation_tokens
        dtype = torch.uint8 if restore_vocabulary(facts.kind, facts.content).size <= 256 else torch.int32
        if tokens.stat().st_size != count * dtype.itemsize:
            return None
        return facts, torch.from_file(str(tokens), shared=False, size=count, dtype=dtype)
    except (OSError, ValueError, TypeError, RuntimeError):  # RuntimeError: torch could not map it
        return None


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Context manager for work that one process of the host does, while the others wait.

    After LOCK_SECONDS, or where there are no locks, a process does it beside the others: files are replaced as a whole.
    """
    lock = None
    with contextlib.suppress(OSError):  # also TimeoutError
        lock = Lock(directory, TOKENS_LOCK_SECONDS)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def tokens_crc(facts: TokenFacts, of_tokens: int) -> int:
    """Return Facts.crc. of_tokens: the CRC-32 of the tokens."""
    return zlib.crc32(facts.content.encode(errors="surrogatepass"), of_tokens)


def keep(directory: Path, stem: str, paths: Sequence[Path], kind: str, size: int, given: Pairs | None) -> None:
    """Convert the text to files in the cache, block by block. The caller holds the lock. Raises OSError, UserError."""
    atomic.remove_partial(directory, atomic.STALE_SECONDS)
    crc = 0
    with atomic.replacing(directory / f"{stem}.tokens", "wb", sync=True) as file:

        def put(tokens: Tensor) -> None:
            nonlocal crc
            crc = zlib.crc32(tokens.numpy().data, crc)
            file.write(tokens.numpy().data)

        facts = convert(paths, kind, size, given, put)
    atomic.write_atomically(
        directory / f"{stem}.json", json.dumps(asdict(facts) | {"crc": tokens_crc(facts, crc)}).encode()
    )
