"""Texts as tokens: what is trained on and what is held out, three kinds of vocabulary, the cache, and what is refused."""

import bz2
import gzip
import json
import lzma
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain import lm
from hvdtrain.datasets import text
from hvdtrain.datasets.vocabularies import Bytes, Characters, restore_vocabulary
from hvdtrain.engines.errors import UserError
from tests.single.examples import tried

WORDS = "the quick brown fox jumps over the lazy dog; façade 語\n" * 40


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hvdtrain" / "datasets" / "text"


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(WORDS)
    return path


def test_nine_tenths_train_and_the_rest_is_held_out(book):
    data = text.load_tokens([book], "characters")
    assert data.vocabulary.content == "".join(sorted(set(WORDS)))
    cut = len(WORDS) * 9 // 10
    assert data.vocabulary.decode(data.train.tolist()) == WORDS[:cut]
    assert data.vocabulary.decode(data.validation.tolist()) == WORDS[cut:]
    assert data.validation_characters == len(WORDS) - cut
    assert data.train.dtype == torch.uint8


def test_several_files_are_one_text_and_their_order_counts(book, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("zebra " * 30)
    data = text.load_tokens([book, other], "characters")
    tokens = torch.cat([data.train, data.validation]).tolist()
    assert data.vocabulary.decode(tokens) == WORDS + other.read_text()
    assert data.sha256 != text.load_tokens([other, book], "characters").sha256


def test_a_name_with_a_line_feed_is_told_in_one_line(tmp_path):
    (book := tmp_path / "a\nb.txt").write_text("The fox. " * 100)
    assert text.load_tokens([book], "characters").reason.startswith("a b.txt: 900 tokens, ")


def test_blocks_may_end_inside_a_character(book, monkeypatch):
    whole = text.load_tokens([book], "characters").train.clone()
    for size in (1, 3, 7):
        monkeypatch.setattr(text, "BLOCK_BYTES", size)
        monkeypatch.setattr(text, "TOKENS_FORMAT", size + 100)  # so that the cache is not asked
        assert torch.equal(whole, text.load_tokens([book], "characters").train)


@pytest.mark.parametrize("name", ["gzip", "zip", "xz", "bzip2", "zstd"])
def test_a_compressed_text_is_to_be_unpacked(name, tmp_path):
    """It was said to be no UTF-8, to be converted with iconv."""
    path, content = tmp_path / "book", b"a text\n" * 9
    if name == "zip":  # stored as it is, it would be trained on
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("book.txt", content)
    else:
        known = {"gzip": gzip.compress, "xz": lzma.compress, "bzip2": bz2.compress}
        path.write_bytes(known[name](content) if name in known else bytes.fromhex("28b52ffd0458"))
    with pytest.raises(UserError, match=f"book: compressed by {name}: unpack it"):
        text.load_tokens([path], "characters")
    assert text.load_tokens([path], "bytes").train.numel()


def test_bytes_take_any_file(tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(bytes(range(256)) * 4)
    data = text.load_tokens([path], "bytes")
    assert torch.cat([data.train, data.validation]).tolist() == list(range(256)) * 4
    assert data.validation_characters == 103  # bytes, there


def test_byte_pairs_are_learned_from_the_training_part_and_give_the_text_back(book, tmp_path):
    pytest.importorskip("tokenizers")
    data = text.load_tokens([book], "pairs", 300)
    assert 256 < data.vocabulary.size <= 300
    cut = len(WORDS) * 9 // 10
    assert data.vocabulary.decode(data.train.tolist()) == WORDS[:cut]
    assert len(data.train) < cut / 1.2
    assert data.vocabulary.decode(data.vocabulary.encode("never seen: ß ∞").tolist()) == "never seen: ß ∞"
    assert text.load_tokens([book], "pairs", 300).vocabulary.content == data.vocabulary.content
    saved = tmp_path / "tokenizer.json"
    saved.write_text(data.vocabulary.content)
    assert torch.equal(text.load_tokens([book], "pairs", 1, saved).train, data.train)


def test_the_standard_library_is_there_where_no_text_is_given(monkeypatch, tmp_path):
    assert len(text.standard_library()) > 100
    few = text.standard_library()[:3]
    monkeypatch.setattr(text, "standard_library", lambda: few)
    data = text.load_tokens([], "bytes")
    assert data.name == "python"
    assert data.reason.startswith("3 modules of Python's standard library, because --text was not given")


def test_a_second_load_maps_what_the_first_one_kept(book, own_cache, monkeypatch):
    first = text.load_tokens([book], "characters")
    monkeypatch.setattr(text, "convert", lambda *args: pytest.fail("converted again"))
    assert torch.equal(text.load_tokens([book], "characters").train, first.train)
    assert {path.suffix for path in own_cache.iterdir()} - {""} == {".json", ".tokens"}


@pytest.mark.parametrize("spoil", ["cut", "facts", "gone", "zeros", "vocabulary"])
def test_damaged_cache_files_are_made_anew(spoil, book, own_cache):
    first = text.load_tokens([book], "characters").train.clone()
    (tokens,), (facts,) = own_cache.glob("*.tokens"), own_cache.glob("*.json")
    if spoil == "cut":
        tokens.write_bytes(tokens.read_bytes()[:-1])
    elif spoil == "facts":
        facts.write_text(json.dumps({"kind": "characters"}))
    elif spoil == "zeros":  # as after a fault of a disk
        tokens.write_bytes(bytes(tokens.stat().st_size))
    elif spoil == "vocabulary":
        content = json.loads(facts.read_text())
        facts.write_text(json.dumps(content | {"content": content["content"][::-1]}))
    else:
        tokens.unlink()
    for _ in range(2):  # at once, and from what was made anew
        again = text.load_tokens([book], "characters")
        assert torch.equal(again.train, first)
        assert again.vocabulary.decode(again.train) in book.read_text()
    assert {path.suffix for path in own_cache.iterdir()} - {""} == {".json", ".tokens"}


def test_processes_that_come_at_once_get_the_same(book, own_cache):
    with ThreadPoolExecutor(4) as pool:  # each has a lock of its own, as a process has
        loaded = list(pool.map(lambda _: text.load_tokens([book], "characters"), range(4)))
    assert len({data.train.numpy().tobytes() for data in loaded}) == 1
    assert sum(path.suffix == ".tokens" for path in own_cache.iterdir()) == 1
    assert not list(own_cache.glob(".*.partial"))


def test_a_bad_tokenizer_is_refused(book, tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, complaint in (("tokenizer.json", "not a tokenizer"), ("binary", "not text"), ("nowhere", "can be read")):
        with pytest.raises(UserError, match=complaint):
            text.load_tokens([book], "pairs", 300, tmp_path / name)


def test_unknown_characters_of_a_prompt_are_named():
    with pytest.raises(UserError, match=r"has no '!', '語': use characters of the text"):
        Characters("abc").encode("a語!b")


def test_another_vocabulary_is_refused():
    mine = Characters("abc")
    mine.load_state_dict(Characters("abc").state_dict())
    with pytest.raises(
        UserError, match=r"a different vocabulary .3 characters in the checkpoint, other 3 characters here"
    ):
        mine.load_state_dict(Characters("abd").state_dict())
    with pytest.raises(UserError, match="256 bytes in the checkpoint, 3 characters here"):
        mine.load_state_dict(Bytes().state_dict())


@tried(30)
@given(st.text(min_size=1))
def test_any_text_comes_back(some):
    kinds = [Characters("".join(sorted(set(some)))), Bytes()]
    for vocabulary in kinds:
        try:
            some.encode()
        except UnicodeEncodeError:
            return
        again = restore_vocabulary(**vocabulary.state_dict())
        assert again.decode(vocabulary.encode(some).tolist()) == some


@tried(30)
@given(st.integers(2, 60), st.integers(1, 20))
def test_each_token_but_the_first_is_a_target_once(length, context):
    tokens = torch.arange(length, dtype=torch.int32)
    _, targets = text.windows(tokens, torch.arange(text.all_windows(tokens, context)), context)
    counted = targets[targets != text.IGNORED]
    assert counted.tolist() == list(range(1, length))
    whole = text.whole_windows(tokens, context)
    inputs, targets = text.windows(tokens, torch.arange(whole), context)
    assert (targets != text.IGNORED).all()
    assert torch.equal(targets, inputs + 1)
    assert inputs.flatten().tolist() == list(range(whole * context))


def test_the_files_of_each_text_flag_are_taken():
    flags = lm.parse(["--text", "a", "b", "--text", "c"])
    assert [path.name for path in flags.text] == ["a", "b", "c"]
    assert lm.parse([]).text == []
