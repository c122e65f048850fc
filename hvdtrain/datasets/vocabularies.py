"""Converts text to tokens and back: characters, bytes, or byte pairs learned from the text."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import ModuleType

import torch
from torch import Tensor

from hvdtrain.engines.errors import UserError

KINDS = ("characters", "bytes", "pairs")
CODE_POINTS = 0x110000


class Vocabulary(ABC):
    """A vocabulary with tokens 0 to size - 1. `kind` (one of KINDS) and `content` define it; checkpoints contain both."""

    kind: str
    size: int
    content: str

    @abstractmethod
    def encode(self, text: str | bytes) -> Tensor:
        """Return the tokens of `text` as int64 [n]. Raises UserError for a character that is not in the vocabulary."""

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`."""

    def state_dict(self) -> dict[str, str]:
        """Return kind and content."""
        return {"kind": self.kind, "content": self.content}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Compare with a saved vocabulary. Raises UserError if it differs, because the model's tokens would not match."""
        if dict(state) != self.state_dict():
            there = restore_vocabulary(state["kind"], state["content"])
            other = "other " if (there.kind, there.size) == (self.kind, self.size) else ""
            message = f"{there.size} {there.kind} in the checkpoint, {other}{self.size} {self.kind} here"
            remedy = "give the --text and --tokens that it was trained with, or --resume never"
            raise UserError(f"the checkpoint has a different vocabulary ({message}): {remedy}", everywhere=True)


class Characters(Vocabulary):
    """One token for each distinct character of the text, ordered by code point."""

    kind = "characters"

    def __init__(self, characters: str) -> None:
        self.content, self.size = characters, len(characters)
        # [code points]: a table, so that a text is encoded without a loop over its characters.
        self._token_of = torch.full((CODE_POINTS,), -1, dtype=torch.int32)
        self._token_of.index_copy_(0, code_points(characters).long(), torch.arange(self.size, dtype=torch.int32))

    def encode(self, text: str | bytes) -> Tensor:
        assert isinstance(text, str)
        tokens = self._token_of.index_select(0, code_points(text)).long()
        if len(tokens) and int(tokens.min()) < 0:
            missing = ", ".join(repr(c) for c in sorted({c for c in text if c not in self.content})[:5])
            raise UserError(
                f"the vocabulary has no {missing}: use characters of the text, or train with --tokens bytes"
            )
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(self.content[token] for token in tokens)


class Bytes(Vocabulary):
    """The 256 bytes. Any text in any encoding can be represented."""

    kind, size, content = "bytes", 256, ""

    def encode(self, text: str | bytes) -> Tensor:
        text = text.encode() if isinstance(text, str) else text
        if not text:  # which torch.frombuffer refuses
            return torch.zeros(0, dtype=torch.int64)
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class Pairs(Vocabulary):
    """Byte-pair encoding (arXiv:1508.07909, on bytes as in GPT-2), with the package `tokenizers`. Can represent any text."""

    kind = "pairs"

    def __init__(self, content: str) -> None:
        """content: the tokenizer in the package's JSON format (tokenizer.json). Raises UserError if it is invalid."""
        tokenizers = package()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the package raises Exception itself
            raise UserError(f"not a tokenizer ({error}): name a tokenizer.json of the package tokenizers") from error
        self.content, self.size = content, self._tokenizer.get_vocab_size()

    @classmethod
    def learn(cls, texts: Iterable[str], size: int) -> "Pairs":
        """Return a vocabulary of `size` tokens learned from `texts`, or fewer if there are not enough pairs."""
        tokenizers = package()
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes, so that no byte is unknown
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer.to_str())

    def encode(self, text: str | bytes) -> Tensor:
        assert isinstance(text, str)
        return torch.tensor(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=torch.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text


def package() -> ModuleType:
    """Return the package `tokenizers`. Raises UserError if it is not installed."""
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        message = (
            f"--tokens pairs needs the package tokenizers ({error}): pip install tokenizers, or use --tokens bytes"
        )
        raise UserError(message) from error
    return tokenizers


def restore_vocabulary(kind: str, content: str) -> Vocabulary:
    """Return the vocabulary defined by kind and content."""
    return Bytes() if kind == "bytes" else {"characters": Characters, "pairs": Pairs}[kind](content)


def code_points(text: str) -> Tensor:
    """Return the Unicode code points of `text` as int32 [n]."""
    data = bytearray(text.encode("utf-32-le", "surrogatepass"))  # command-line arguments may contain surrogates
    return torch.frombuffer(data, dtype=torch.int32) if data else torch.zeros(0, dtype=torch.int32)
