"""Data: shards as one stream, and the order of samples as a function of seed and step."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import TokenDataset, permuted, rank_batch, sample_at, sample_ids
from trainer.errors import ConfigurationError, DataError, ExitCode
from trainer.paths import MANIFEST
from trainer.records import DatasetManifest, FileRecord

KEYS = st.integers(0, 2**64 - 1)
SLOW_MACHINE = settings(deadline=None)
SEEDS = st.integers(0, 2**31)


def write_dataset(directory: Path, shards: list[list[int]], dtype: str = "uint16", vocabulary_size: int = 1000) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    records = []
    for number, tokens in enumerate(shards):
        content = np.asarray(tokens, np.dtype(dtype).newbyteorder("<")).tobytes()
        (directory / f"shard-{number}.bin").write_bytes(content)
        records.append(
            FileRecord(name=f"shard-{number}.bin", size=len(content), sha256=hashlib.sha256(content).hexdigest())
        )
    DatasetManifest(
        source="test:", revision="1", tokenizer="byte", vocabulary_size=vocabulary_size, dtype=dtype, documents=1,
        tokens=sum(map(len, shards)), shards=tuple(records), digest="0" * 64,
    ).write(directory / MANIFEST)  # fmt: skip
    return directory


# -- the order of samples ------------------------------------------------------------------------------------------


@SLOW_MACHINE
@given(size=st.integers(1, 3000), key=KEYS)
def test_the_order_of_an_epoch_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permuted(index, size, key) for index in range(size)) == list(range(size))


@SLOW_MACHINE
@given(size=st.integers(1, 10**12), key=KEYS, data=st.data())
def test_large_datasets_need_no_table(size: int, key: int, data: st.DataObject) -> None:
    indices = data.draw(st.sets(st.integers(0, size - 1), max_size=50))
    images = {permuted(index, size, key) for index in indices}
    assert len(images) == len(indices)
    assert all(0 <= image < size for image in images)


def test_the_order_looks_random() -> None:
    size = 10_000
    order = np.array([permuted(index, size, 42) for index in range(size)])
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.05
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.01  # neighbours do not stay together
    quarters = Counter(int(4 * value / size) for value in order[: size // 4])
    assert max(quarters.values()) < 1.15 * size / 16  # a part of an epoch covers the whole dataset


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first = [sample_at(1, position, 500) for position in range(500)]
    second = [sample_at(1, position, 500) for position in range(500, 1000)]
    other = [sample_at(2, position, 500) for position in range(500)]
    assert sorted(first) == sorted(second) == list(range(500))
    for a, b in ((first, second), (first, other), (second, other)):
        assert sum(x == y for x, y in zip(a, b, strict=True)) < 10  # one is expected of two random orders


@SLOW_MACHINE
@given(seed=SEEDS, samples=st.integers(1, 60), batch=st.integers(1, 40), steps=st.integers(1, 12))
def test_steps_repeat_nothing_and_skip_nothing(seed: int, samples: int, batch: int, steps: int) -> None:
    """All that the first steps saw: every full epoch once, the rest of the last one without a repeat."""
    seen = [index for step in range(1, steps + 1) for index in sample_ids(seed, step, batch, samples)]
    assert seen == [sample_at(seed, position, samples) for position in range(steps * batch)]
    epochs, rest = divmod(len(seen), samples)
    for epoch in range(epochs):
        assert sorted(seen[epoch * samples : (epoch + 1) * samples]) == list(range(samples))
    assert len(set(seen[epochs * samples :])) == rest


def test_the_order_of_a_run_never_changes_between_versions() -> None:
    """A run that is resumed with a newer version of this program goes on in the same order."""
    assert sample_ids(42, 1, 8, 1000) == [148, 714, 306, 474, 115, 772, 48, 321]
    assert sample_ids(42, 126, 8, 1000) == [783, 862, 38, 336, 173, 226, 147, 104]


@SLOW_MACHINE
@given(
    worlds=st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=2, max_size=4),
    micro=st.integers(1, 8),
    seed=SEEDS,
    step=st.integers(1, 10**6),
)
def test_the_ranks_together_have_the_batch_at_any_world_size(
    worlds: list[int], micro: int, seed: int, step: int
) -> None:
    ids = sample_ids(seed, step, 24, 977)
    for world in worlds:
        shares = [rank_batch(ids, rank, world, micro) for rank in range(world)]
        assert [index for share in shares for part in share for index in part] == ids
        sizes = {len(part) for share in shares for part in share}
        assert len(sizes) == 1 and max(sizes) <= micro  # equal, so that a mean of means is the mean


def test_micro_batches_are_as_large_as_asked_where_that_divides() -> None:
    assert rank_batch(range(16), 1, 2, 4) == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert rank_batch(range(12), 0, 2, 4) == [[0, 1, 2], [3, 4, 5]]


def test_a_batch_that_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--global-batch-size 8 is not divisible by the 3 ranks"):
        rank_batch(range(8), 0, 3, 1)


# -- the dataset ---------------------------------------------------------------------------------------------------


@SLOW_MACHINE
@given(cuts=st.lists(st.integers(0, 200), max_size=6), length=st.integers(1, 60))
def test_shards_are_one_stream(tmp_path_factory: pytest.TempPathFactory, cuts: list[int], length: int) -> None:
    """However 200 tokens are cut into shards (some empty), sample i starts at i x length and overlaps the next by one."""
    stream = list(range(200))
    edges = [0, *sorted(cuts), 200]
    shards = [stream[a:b] for a, b in pairwise(edges)]
    dataset = TokenDataset(write_dataset(tmp_path_factory.mktemp("dataset"), shards), length)
    assert dataset.held_out.stop == (200 - 1) // length
    for index in range(dataset.held_out.stop):
        assert dataset.sample(index).tolist() == stream[index * length : index * length + length + 1]
    with pytest.raises(IndexError):
        dataset.sample(dataset.held_out.stop)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_batches_are_int64_of_any_shard_type(tmp_path: Path, dtype: str) -> None:
    dataset = TokenDataset(write_dataset(tmp_path, [[1, 2, 3, 250] * 10], dtype), 8)
    batch_BT = dataset.batch([0, 2])
    assert batch_BT.shape == (2, 9) and str(batch_BT.dtype) == "torch.int64"
    assert batch_BT[0, :4].tolist() == [1, 2, 3, 250]


def test_held_out_samples_are_never_trained_on(tmp_path: Path) -> None:
    dataset = TokenDataset(write_dataset(tmp_path, [[7] * 3001]), 10)
    assert dataset.samples == 297 and list(dataset.held_out) == [297, 298, 299]
    trained = {index for step in range(1, 80) for index in sample_ids(0, step, 8, dataset.samples)}
    assert trained == set(range(297))


def test_a_sequence_longer_than_the_dataset_is_refused(tmp_path: Path) -> None:
    directory = write_dataset(tmp_path, [[1] * 10, [2] * 6])
    assert TokenDataset(directory, 15).samples == 1
    with pytest.raises(
        ConfigurationError, match=r"--sequence-length 16 is longer than the dataset: .* has 16 tokens"
    ) as refusal:
        TokenDataset(directory, 16)
    assert refusal.value.exit_code == ExitCode.CONFIGURATION


def refused(directory: Path, *, verify_hashes: bool = False) -> str:
    with pytest.raises(DataError) as refusal:
        TokenDataset(directory, 4, verify_hashes=verify_hashes)
    assert refusal.value.exit_code == ExitCode.DATA and "\n" not in str(refusal.value)
    return str(refusal.value)


def test_a_dataset_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    directory = write_dataset(tmp_path, [[1] * 10, [2] * 10])
    shard = directory / "shard-1.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    assert "shard-1.bin has 18 bytes, its manifest says 20" in refused(directory)
    shard.unlink()
    assert "shard-1.bin is missing" in refused(directory)
    (directory / MANIFEST).write_text("{}")
    assert "not a valid DatasetManifest" in refused(directory)
    (directory / MANIFEST).unlink()
    assert "run the download step again" in refused(directory)


def test_a_changed_shard_of_the_same_size_is_found_by_its_hash(tmp_path: Path) -> None:
    directory = write_dataset(tmp_path, [[1] * 10])
    TokenDataset(directory, 4, verify_hashes=True)
    (directory / "shard-0.bin").write_bytes(b"\1\0" * 9 + b"\2\0")
    TokenDataset(directory, 4)
    assert "SHA-256 differs" in refused(directory, verify_hashes=True)


def test_a_token_outside_the_vocabulary_is_found_before_it_reaches_the_model(tmp_path: Path) -> None:
    dataset = TokenDataset(write_dataset(tmp_path, [[1] * 9 + [300]], vocabulary_size=300), 4)
    dataset.sample(0)
    with pytest.raises(DataError, match="sample 1 holds token 300, but the vocabulary has 300"):
        TokenDataset(write_dataset(tmp_path, [[1] * 8 + [300]], vocabulary_size=300), 4).sample(1)


def test_a_manifest_that_miscounts_is_refused(tmp_path: Path) -> None:
    directory = write_dataset(tmp_path, [[1] * 10])
    manifest = DatasetManifest.read(directory / MANIFEST)
    manifest.model_copy(update={"tokens": 11}).write(directory / MANIFEST)
    assert "the shards hold 10 tokens, the manifest says 11" in refused(directory)
