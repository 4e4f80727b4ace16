"""Files -> documents, in a stream: a file of any size is read with a few megabytes of memory.

    1. a ``TextFile`` is .txt (one document), .jsonl (one a line) or .parquet (one a row); .txt.gz and .jsonl.gz too
    2. ``pieces`` yields its documents as pieces of at most ``PIECE`` characters, each saying whether it ends its document
    3. what is wrong with a file is said with its name and the place: byte offset, line or row

Pieces are cut after a line's end, else before a space. Where they are cut follows from the text alone, never from how
it was read, so that equal texts give equal tokens.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from trainer.errors import ConfigurationError, DataError

PIECE = 128 * 1024
BLOCK = 1024 * 1024
LONGEST_LINE = 256 * 1024 * 1024
ROWS = 1000
SUFFIXES = (".txt", ".jsonl", ".parquet", ".txt.gz", ".jsonl.gz")


@dataclass(frozen=True)
class TextFile:
    """A file with documents on this machine's disk; ``label`` is what the user calls it (a path, an S3 address)."""

    path: Path
    label: str
    size: int


class Piece(NamedTuple):
    text: str
    last: bool
    """Whether the document ends here."""
    position: int
    """Bytes of the file (as it lies on the disk) that have been read so far."""


def supported(name: str) -> bool:
    """Whether a file of this name can be read: see ``SUFFIXES``."""
    return name.lower().endswith(SUFFIXES)


def pieces(file: TextFile, field: str) -> Iterator[Piece]:
    """The documents of ``file``; ``field`` names the text in a JSON line or a parquet row. Empty documents are left out.

    ``DataError`` when the file is not what its name says, ``ConfigurationError`` when records have no such field.
    """
    name = file.label.lower()
    if name.endswith(".parquet"):
        yield from _parquet(file, field)
        return
    with file.path.open("rb") as raw:
        stream: IO[bytes] = raw
        if name.endswith(".gz"):
            stream = gzip.GzipFile(fileobj=raw)  # type: ignore[assignment]
        kind = name.removesuffix(".gz").rpartition(".")[2]
        with _gzip_errors(file):
            if kind == "txt":
                yield from _text(file, stream, raw)
            elif kind == "jsonl":
                yield from _json_lines(file, stream, raw, field)
            else:
                raise ConfigurationError(f"{file.label}: not one of the supported files: {', '.join(SUFFIXES)}")


def split(blocks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Cut one document, given in blocks of any size, into pieces; the flag is true for the last one."""
    rest = ""
    for block in blocks:
        rest += block
        start = 0
        while len(rest) - start > PIECE:
            end = _cut(rest, start)
            yield rest[start:end], False
            start = end
        rest = rest[start:]
    if rest:
        yield rest, True


def _cut(text: str, start: int) -> int:
    """Where the piece that begins at ``start`` ends: after the last line's end in reach, else before the last space."""
    limit = start + PIECE
    after_line = text.rfind("\n", start, limit) + 1
    if after_line > start:
        return after_line
    space = text.rfind(" ", start + 1, limit)
    return space if space > start else limit


@contextlib.contextmanager
def _gzip_errors(file: TextFile) -> Iterator[None]:
    try:
        yield
    except EOFError:
        raise DataError(f"{file.label}: the gzip file is cut short; fetch or write it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{file.label}: not a whole gzip file ({error}); fetch or write it again") from None


def _not_utf8(file: TextFile, offset: int) -> DataError:
    where = "byte offset of the unpacked text" if file.label.lower().endswith(".gz") else "byte offset"
    return DataError(f"{file.label}: not UTF-8 at {where} {offset}; convert the file, for example with iconv -t UTF-8")


def _text(file: TextFile, stream: IO[bytes], raw: IO[bytes]) -> Iterator[Piece]:
    for text, last in split(_decoded(file, stream)):
        yield Piece(text, last, raw.tell())


def _decoded(file: TextFile, stream: IO[bytes]) -> Iterator[str]:
    tail, base = b"", 0
    while True:
        block = stream.read(BLOCK)
        data = tail + block
        if base == 0 and data.startswith(codecs.BOM_UTF8):
            data, base = data[len(codecs.BOM_UTF8) :], len(codecs.BOM_UTF8)
        try:
            text, consumed = codecs.utf_8_decode(data, "strict", not block)
        except UnicodeDecodeError as error:
            raise _not_utf8(file, base + error.start) from None
        yield text
        if not block:
            return
        tail, base = data[consumed:], base + consumed


def _json_lines(file: TextFile, stream: IO[bytes], raw: IO[bytes], field: str) -> Iterator[Piece]:
    offset = number = 0
    while line := stream.readline(LONGEST_LINE):
        number += 1
        if len(line) == LONGEST_LINE:
            raise DataError(f"{file.label}:{number}: the line is longer than {LONGEST_LINE} bytes")
        if number == 1 and line.startswith(codecs.BOM_UTF8):
            line, offset = line[len(codecs.BOM_UTF8) :], len(codecs.BOM_UTF8)
        try:
            content = line.decode()
        except UnicodeDecodeError as error:
            raise _not_utf8(file, offset + error.start) from None
        offset += len(line)
        if not content.strip():
            continue
        text = _field_of(_parsed(file, number, content), field, f"{file.label}:{number}")
        if "\\u" in content:
            _refuse_surrogates(text, f"{file.label}:{number}")
        for piece, last in split((text,)):
            yield Piece(piece, last, raw.tell())


def _parsed(file: TextFile, number: int, content: str) -> dict[str, Any]:
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        what = getattr(error, "msg", str(error))
        raise DataError(f"{file.label}:{number}: not a line of JSON ({what}); mend or remove the line") from None
    if not isinstance(record, dict):
        raise DataError(f"{file.label}:{number}: a {type(record).__name__}, not a JSON object; mend or remove the line")
    return record


def _field_of(record: dict[str, Any], field: str, where: str) -> str:
    if field not in record:
        raise _missing_field(where, field, record)
    value = record[field]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: field '{field}' is a {type(value).__name__}, not text")
    return value


def _missing_field(where: str, field: str, names: Iterable[str]) -> ConfigurationError:
    there = ", ".join(list(names)[:12]) or "no fields"
    return ConfigurationError(
        f"{where}: no field '{field}' (there are: {there}); name the one with the text by ?field=NAME after the dataset URI"
    )


def _refuse_surrogates(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: half of a surrogate pair (\\u escape) at character {error.start}; mend the line"
        ) from None


def _parquet(file: TextFile, field: str) -> Iterator[Piece]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigurationError(f"{file.label}: parquet needs the extra 'hf': pip install 'holdfast[hf]'") from None
    row = 0
    try:
        with parquet.ParquetFile(file.path, pre_buffer=False, buffer_size=BLOCK) as table:
            schema = table.schema_arrow
            if field not in schema.names:
                raise _missing_field(file.label, field, schema.names)
            kind = schema.field(field).type
            kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if kind not in (pyarrow.string(), pyarrow.large_string()):
                raise DataError(f"{file.label}: field '{field}' is {kind}, not text")
            rows = max(1, table.metadata.num_rows)
            for batch in table.iter_batches(batch_size=ROWS, columns=[field]):
                for value in batch.column(0):
                    row += 1
                    for piece, last in split((value.as_py() or "",)):
                        yield Piece(piece, last, file.size * row // rows)
    except UnicodeDecodeError:
        raise DataError(f"{file.label}: row {row} is not UTF-8") from None
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(f"{file.label}: not a whole parquet file ({str(error).splitlines()[0]})") from None
