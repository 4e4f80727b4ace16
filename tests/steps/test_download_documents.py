"""Reading documents: pieces join to the text, and where they are cut follows from the text alone."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steps import documents
from steps.documents import PIECE, TextFile, pieces, split
from steps.progress import size_text
from trainer.errors import DataError


def read(path: Path, field: str = "text") -> list[str]:
    """The documents of a file, joined from their pieces."""
    found, current = [], ""
    position = 0
    for piece in pieces(TextFile(path, str(path), path.stat().st_size), field):
        assert 0 < len(piece.text) <= PIECE
        assert position <= piece.position <= path.stat().st_size
        position = piece.position
        current += piece.text
        if piece.last:
            found.append(current)
            current = ""
    assert current == ""
    return found


def in_blocks(text: str, sizes: Iterable[int]) -> Iterable[str]:
    start = 0
    for size in sizes:
        yield text[start : start + size]
        start += size
    yield text[start:]


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from(["word", "\n", " ", "é漢", "x" * 40_000, "y" * PIECE]), st.integers(1, 4)),
        max_size=12,
    ),
    sizes=st.lists(st.integers(1, 300_000), max_size=8),
)
def test_pieces_do_not_depend_on_how_the_text_was_read(parts: list[tuple[str, int]], sizes: list[int]) -> None:
    text = "".join(part * count for part, count in parts)
    whole = list(split([text]))
    assert "".join(piece for piece, _ in whole) == text
    assert [last for _, last in whole] == [False] * (len(whole) - 1) + [True] * bool(text)
    assert all(0 < len(piece) <= PIECE for piece, _ in whole)
    assert list(split(in_blocks(text, sizes))) == whole


def test_pieces_end_after_a_line_else_before_a_space() -> None:
    lines = "a line\n" * 40_000
    assert all(piece.endswith("\n") for piece, _ in split([lines]))
    words = "word " * 60_000
    cut = [piece for piece, _ in split([words])]
    assert len(cut) > 1 and all(piece.startswith(" ") for piece in cut[1:])


@settings(max_examples=40, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=300), packed=st.booleans())
def test_any_text_comes_back_from_any_format(text: str, packed: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("texts")
    suffix = ".gz" if packed else ""
    pack = gzip.compress if packed else bytes
    plain, lines = folder / f"a.txt{suffix}", folder / f"a.jsonl{suffix}"
    plain.write_bytes(pack(text.encode()))
    lines.write_bytes(pack(json.dumps({"text": text}).encode() + b"\n"))
    without_mark = text.removeprefix("\ufeff")
    assert read(plain) == [without_mark] * bool(without_mark)
    assert read(lines) == [text] * bool(text)


def test_characters_that_lie_across_two_blocks(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    text = "x" + "漢" * (2 * documents.BLOCK // 3)
    path.write_text(text, encoding="utf-8")
    assert read(path) == [text]


@pytest.mark.parametrize("offset", [0, 1, documents.BLOCK - 1, documents.BLOCK, 3 * documents.BLOCK + 7])
def test_the_offset_of_what_is_not_utf8_is_exact(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * offset + b"\xc3\x28" + b"b" * 50)
    with pytest.raises(DataError, match=rf"not UTF-8 at byte offset {offset};"):
        read(path)


def test_sizes_are_said_as_people_read_them() -> None:
    assert [size_text(size) for size in (0, 999, 1500, 2_500_000, 3_210_000_000)] == [
        "0 B", "999 B", "1.5 kB", "2.5 MB", "3.21 GB",
    ]  # fmt: skip
