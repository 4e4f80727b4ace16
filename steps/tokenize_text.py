"""Text -> token ids: bytes, or any Hugging Face tokenizer.json through the Rust library.

Special tokens in the text are text: a document that holds "</s>" does not end there. A tokenizer's own truncation,
padding and template (a leading BOS) are switched off, for a training stream is documents joined by one end token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.errors import ConfigurationError, PipelineError

Ids = NDArray[np.unsignedinteger[Any]]
DType = Literal["uint8", "uint16", "uint32"]

END_TOKENS = (
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|endofdocument|>",
    "<|im_end|>",
    "[SEP]",
)
"""What tokenizers call their end of a document, tried in order where no tokenizer_config.json says it."""


class Tokenizer(Protocol):
    """What the pipeline needs of a tokenizer."""

    name: str
    sha256: str
    """Of the tokenizer file; empty for ``byte``."""
    vocabulary_size: int
    """One more than the largest id."""
    end_of_document: int

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, with no special tokens added."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as they are (0 to 255), and 256 for the end of a document."""

    name = "byte"
    sha256 = ""
    vocabulary_size = 257
    end_of_document = 256

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


class FileTokenizer:
    """A Hugging Face ``tokenizer.json``. Its end token is the one tokenizer_config.json beside it names, else a common one."""

    def __init__(self, path: Path, content: bytes) -> None:
        from tokenizers import Tokenizer as RustTokenizer

        try:
            self._tokenizer = RustTokenizer.from_buffer(content)
        except PipelineError:  # a stop, wherever it comes
            raise
        except Exception as error:  # the library raises plain Exception
            raise ConfigurationError(f"--tokenizer: {path} is not a tokenizer.json ({error})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = str(path)
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocabulary_size = max(vocabulary.values(), default=-1) + 1
        self.end_of_document = _end_token(path, vocabulary)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def load(name: str) -> Tokenizer:
    """``byte``, or the tokenizer.json at the path ``name`` (or in that directory). ``ConfigurationError`` says what is wrong."""
    if name == "byte":
        return ByteTokenizer()
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigurationError(
            f"--tokenizer: {path} does not exist; give 'byte' or the path of a Hugging Face tokenizer.json"
        ) from None
    return FileTokenizer(path, content)


def dtype_for(vocabulary_size: int) -> DType:
    """The smallest unsigned type that holds every id below ``vocabulary_size``."""
    if vocabulary_size <= 1 << 8:
        return "uint8"
    return "uint16" if vocabulary_size <= 1 << 16 else "uint32"


def _end_token(path: Path, vocabulary: dict[str, int]) -> int:
    config = path.with_name("tokenizer_config.json")
    named = _configured_end(config)
    if named:
        if named not in vocabulary:
            raise ConfigurationError(f"--tokenizer: {config} names eos_token '{named}', which {path} does not have")
        return vocabulary[named]
    for token in END_TOKENS:
        if token in vocabulary:
            return vocabulary[token]
    raise ConfigurationError(
        f"--tokenizer: {path} has none of the usual end-of-document tokens ({', '.join(END_TOKENS[:4])}, ...); "
        f"name it as eos_token in {config}"
    )


def _configured_end(config: Path) -> str:
    """The ``eos_token`` of a tokenizer_config.json (a string, or an object with ``content``); empty if there is none."""
    try:
        settings = json.loads(config.read_bytes())
    except FileNotFoundError:
        return ""
    except ValueError as error:
        raise ConfigurationError(f"--tokenizer: {config} is not JSON ({error})") from None
    token = settings.get("eos_token") if isinstance(settings, dict) else None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
