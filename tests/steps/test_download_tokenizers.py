"""tokenizer.json through the whole step, with a small BPE that the tests train themselves."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from download_support import command, documents, download, environment, made, nothing_made, refused, tokens
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from steps import tokenize_text

TEXTS = [text for _, text in sorted(topics.items())]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trains a byte-level BPE whose vocabulary has the given special tokens; the same arguments train once."""
    folder = tmp_path_factory.mktemp("tokenizers")

    def train(*special: str, vocabulary: int = 600) -> Path:
        path = folder / f"{len(list(folder.iterdir()))}" / "tokenizer.json"
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(TEXTS[:10], trainer)
        path.parent.mkdir()
        tokenizer.save(str(path))
        return path

    return train


def changed(path: Path, change: Callable[[Tokenizer], object]) -> None:
    tokenizer = Tokenizer.from_file(str(path))
    change(tokenizer)
    tokenizer.save(str(path))


def test_documents_come_back_whole(tmp_path: Path, trained: Callable[..., Path]) -> None:
    path = trained("<pad>", "</s>")
    directory, manifest = made(tmp_path, "builtin:", "--tokenizer", str(path))
    tokenizer = Tokenizer.from_file(str(path))
    assert [tokenizer.decode(ids, skip_special_tokens=False) for ids in documents(directory, end=1)] == TEXTS
    assert (manifest.vocabulary_size, manifest.dtype, manifest.end_of_document) == (600, "uint16", 1)
    assert manifest.tokenizer == str(path) and len(manifest.tokenizer_sha256) == 64
    assert manifest.tokens < sum(len(text.encode()) for text in TEXTS) * 0.6
    assert "download: found" in download(tmp_path, "builtin:", "--tokenizer", str(path.parent)).stdout


def test_each_tokenizer_has_its_own_dataset(tmp_path: Path, trained: Callable[..., Path]) -> None:
    first, _ = made(tmp_path, "builtin:", "--tokenizer", str(trained("</s>")))
    second, _ = made(tmp_path, "builtin:", "--tokenizer", str(trained("</s>", vocabulary=500)))
    third, _ = made(tmp_path, "builtin:")
    assert len({first, second, third}) == 3


def test_special_tokens_in_the_text_are_text(tmp_path: Path, trained: Callable[..., Path]) -> None:
    text = "before </s> after <pad>, and the end"
    (tmp_path / "a.txt").write_text(text)
    path = trained("<pad>", "</s>")
    directory, manifest = made(tmp_path / "fsx", f"file://{tmp_path}/a.txt", "--tokenizer", str(path))
    assert manifest.documents == 1
    (document,) = documents(directory, end=1)
    assert 0 not in document
    assert Tokenizer.from_file(str(path)).decode(document, skip_special_tokens=False) == text


def test_truncation_padding_and_template_of_the_file_are_not_applied(
    tmp_path: Path, trained: Callable[..., Path]
) -> None:
    path = trained("<s>", "</s>")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (TEXTS[0], "short")))
    plain, _ = made(tmp_path / "fsx", f"file://{tmp_path}/a.jsonl", "--tokenizer", str(path))

    def spoil(tokenizer: Tokenizer) -> None:
        tokenizer.enable_truncation(16)
        tokenizer.enable_padding(length=64, pad_id=0)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )

    changed(path, spoil)
    spoilt, _ = made(tmp_path / "fsx2", f"file://{tmp_path}/a.jsonl", "--tokenizer", str(path))
    assert tokens(spoilt) == tokens(plain)


def test_the_end_token_is_the_configured_one(tmp_path: Path, trained: Callable[..., Path]) -> None:
    path = trained("</s>", "<mine>")
    for content, end in (
        ({"eos_token": "<mine>"}, 1),
        ({"eos_token": {"content": "<mine>"}}, 1),
        ({"eos_token": None}, 0),
    ):
        path.with_name("tokenizer_config.json").write_text(json.dumps(content))
        assert tokenize_text.load(str(path)).end_of_document == end
    path.with_name("tokenizer_config.json").write_text('{"eos_token": "<none>"}')
    done = download(tmp_path, "builtin:", "--tokenizer", str(path))
    refused(done, 64, "tokenizer_config.json", "'<none>'")
    path.with_name("tokenizer_config.json").write_text("{")
    refused(download(tmp_path, "builtin:", "--tokenizer", str(path)), 64, "tokenizer_config.json is not JSON")
    nothing_made(tmp_path)


def test_no_end_token_is_refused(tmp_path: Path, trained: Callable[..., Path]) -> None:
    done = download(tmp_path, "builtin:", "--tokenizer", str(trained("<other>")))
    refused(done, 64, "end-of-document", "eos_token")
    nothing_made(tmp_path)


def test_ids_with_gaps_make_a_vocabulary_up_to_the_largest(trained: Callable[..., Path]) -> None:
    path = trained("</s>")
    content: dict[str, Any] = json.loads(path.read_text())
    renamed = next(token for token, number in content["model"]["vocab"].items() if number == 599)
    content["model"]["vocab"][renamed] = 70_000
    path.write_text(json.dumps(content))
    assert tokenize_text.load(str(path)).vocabulary_size == 70_001


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (128_256, "uint32")],
)
def test_the_type_is_the_smallest_that_holds_every_id(size: int, dtype: str) -> None:
    assert tokenize_text.dtype_for(size) == dtype


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path: Path, trained: Callable[..., Path]) -> None:
    path = trained("</s>")
    changed(path, lambda tokenizer: tokenizer.add_special_tokens([f"<extra-{number}>" for number in range(66_000)]))
    directory, manifest = made(tmp_path, "builtin:", "--tokenizer", str(path))
    assert (manifest.dtype, manifest.vocabulary_size) == ("uint32", 66_600)
    assert sum(shard.size for shard in manifest.shards) == 4 * manifest.tokens
    assert max(tokens(directory)) < 600


def test_sigterm_while_a_tokenizer_is_read_says_nothing_of_the_tokenizer(tmp_path: Path) -> None:
    """A stop is retried; a tokenizer that is none is not."""
    large = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({f"t{n}": n for n in range(300_000)} | {"</s>": 300_000}, unk_token="t0")).save(str(large))
    for wait in (0.0, 0.05, 0.1, 0.2):
        process = subprocess.Popen(
            command(tmp_path / "fsx", "builtin:", "--tokenizer", str(large)), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while "tokenizers" not in Path(f"/proc/{process.pid}/maps").read_text():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.005)
        time.sleep(wait)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 75, errors.decode()
