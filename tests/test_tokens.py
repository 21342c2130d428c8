"""Token files come back as written, and damaged ones are refused before they are mapped."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_strategy.data import ByteTokenizer, TokenFile, write_token_file
from zero_strategy.data.build import build_token_file
from zero_strategy.data.corpus import builtin, stdlib
from zero_strategy.data.tokens import HEADER


class Wide:
    """Ids that need four bytes."""

    vocab_size = 70_000

    def encode(self, text):
        return np.arange(len(text), dtype=np.uint32) + 69_000


@given(st.text())
def test_bytes_decode_to_the_text_they_encode(text):
    text = text.encode(errors="replace").decode()
    ids = ByteTokenizer().encode(text)
    assert ids[0] == ByteTokenizer.START
    assert ByteTokenizer().decode(ids) == text


@settings(max_examples=30)
@given(st.lists(st.text(max_size=20), min_size=1).filter(any))
def test_a_written_file_holds_the_documents(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("tokens") / "a.tok"
    write_token_file(path, iter(texts), ByteTokenizer())
    tokens, memory = TokenFile.open(path), TokenFile.from_documents(texts, ByteTokenizer())
    assert tokens.num_documents == len(texts)
    assert [ByteTokenizer().decode(tokens.document(i)) for i in range(len(texts))] == texts
    assert tokens.num_bytes == len("".join(texts).encode())
    assert np.array_equal(tokens.ids, memory.ids)
    assert np.array_equal(tokens.offsets, memory.offsets)
    assert (tokens.num_bytes, tokens.vocab_size) == (memory.num_bytes, memory.vocab_size)


def test_large_vocabularies_use_four_bytes_per_id(tmp_path):
    tokens = write_token_file(tmp_path / "wide.tok", ["abc", "de"], Wide())
    assert tokens.ids.dtype == np.dtype("<u4")
    assert tokens.document(1).tolist() == [69_000, 69_001]


def test_ids_are_mapped_not_read(tmp_path):
    tokens = write_token_file(tmp_path / "a.tok", ["abc"], ByteTokenizer())
    assert isinstance(tokens.ids.base, np.memmap)
    assert not tokens.ids.flags.writeable


def damaged(path, change):
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def put(field, value):
    def change(data):
        fields = list(HEADER.unpack(data[: HEADER.size]))
        fields[field] = value
        data[: HEADER.size] = HEADER.pack(*fields)

    return change


def shorten(data):
    del data[-1:]


def lengthen(data):
    data.append(0)


def swap_offsets(data):
    data[-16:-8], data[-8:] = data[-8:], data[-16:-8]


DAMAGE = {
    "empty": lambda data: data.clear(),
    "header cut": lambda data: data.__delitem__(slice(40, None)),
    "other magic": lambda data: data.__setitem__(slice(0, 8), b"PK345678"),
    "newer version": put(1, 2),
    "odd item size": put(2, 3),
    "huge token count": put(4, 1 << 62),
    "fewer tokens": put(4, 1),
    "no tokens": put(4, 0),
    "huge document count": put(5, 1 << 61),
    "one byte short": shorten,
    "one byte long": lengthen,
    "falling offsets": swap_offsets,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_refused_with_its_path(tmp_path, kind):
    path = tmp_path / "a.tok"
    write_token_file(path, ["abc", "defg"], ByteTokenizer())
    damaged(path, DAMAGE[kind])
    with pytest.raises(ValueError, match=r"^token file = '.*a\.tok': must .*\. "):
        TokenFile.open(path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.tok"
    write_token_file(path, ["old"], ByteTokenizer())

    def texts():
        yield "new"
        raise RuntimeError("source broke")

    with pytest.raises(RuntimeError, match="source broke"):
        write_token_file(path, texts(), ByteTokenizer())
    assert list(tmp_path.iterdir()) == [path]
    assert ByteTokenizer().decode(TokenFile.open(path).ids) == "old"


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    tokenizer = Wide()
    tokenizer.vocab_size = 69_001
    with pytest.raises(ValueError, match=r"= 69001: must be below vocab_size = 69001"):
        write_token_file(tmp_path / "a.tok", ["ab"], tokenizer)


def test_text_and_json_lines_become_documents_in_order(tmp_path):
    (tmp_path / "a.txt").write_text("whole\nfile")
    rows = [{"body": "first"}, {"body": "sécond"}]
    (tmp_path / "b.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    inputs = [tmp_path / "b.jsonl", tmp_path / "a.txt"]
    tokens = build_token_file(tmp_path / "out.tok", inputs, field="body")
    texts = [ByteTokenizer().decode(tokens.document(i)) for i in range(tokens.num_documents)]
    assert texts == ["first", "sécond", "whole\nfile"]


@pytest.mark.parametrize("line", ["{", "[1]", '{"text": 3}', '{"other": "x"}', "1e999"])
def test_a_bad_json_line_is_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=r"a\.jsonl:2: must be"):
        build_token_file(tmp_path / "out.tok", [tmp_path / "a.jsonl"])
    assert not (tmp_path / "out.tok").exists()


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"a\.txt: byte 2 must be UTF-8"):
        build_token_file(tmp_path / "out.tok", [tmp_path / "a.txt"])


def test_missing_inputs_are_listed(tmp_path):
    with pytest.raises(ValueError, match=r"inputs = \['gone\.txt'\]: must be existing files"):
        build_token_file(tmp_path / "out.tok", ["gone.txt"])


def test_builtin_text_is_the_pinned_one_and_free_of_its_distributor(monkeypatch):
    (text,) = builtin()
    assert text.startswith("BOTCHAN (MASTER DARLING)")
    assert text.isascii()
    assert len(text) <= 300_000
    assert "gutenberg" not in text.lower()
    monkeypatch.setattr("zero_strategy.data.corpus.BUILTIN_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="must be 000000000000"):
        next(builtin())


def test_stdlib_yields_many_sources_and_no_tests():
    texts = list(stdlib())
    assert len(texts) > 300
    assert any('"""Abstract Base Classes (ABCs)' in text for text in texts)
    assert not any(text.startswith("# Python test set") for text in texts)


def test_a_forgotten_output_name_does_not_replace_a_text(tmp_path):
    book, more = tmp_path / "book.txt", tmp_path / "more.txt"
    book.write_text("years of work")
    more.write_text("more")
    with pytest.raises(ValueError, match="must be a token file or not exist"):
        build_token_file(book, [more])
    with pytest.raises(ValueError, match="must not be an input"):
        build_token_file(book, [more, book])
    with pytest.raises(ValueError, match="must be a token file or not exist"):
        build_token_file(tmp_path, [more])
    assert book.read_text() == "years of work"
    out = tmp_path / "a.tok"
    build_token_file(out, [book])
    assert build_token_file(out, [book, more]).num_documents == 2
