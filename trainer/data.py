"""Training data whose position is a function of the step: there is no loader state to save or to lose.

1. A dataset is a directory of token shards; together they are one stream of tokens. Sample i is the ``sequence_length + 1``
   tokens from ``i * sequence_length`` on (the last token of a sample is the first of the next: it is target, then input).
2. Step s (from 1) trains on the global positions (s - 1) x batch ... s x batch - 1. Position p belongs to epoch p // samples.
3. Each epoch visits all samples in its own pseudo-random order, a permutation computed per element (``permuted``).
4. The ranks share a step's samples out by rank and micro-batch; which samples a step sees does not depend on their number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.errors import ConfigurationError, DataError
from trainer.paths import MANIFEST
from trainer.records import DatasetManifest, FileRecord, file_sha256

HELD_OUT_FRACTION = 100
HELD_OUT_LIMIT = 256

MASK_64 = (1 << 64) - 1
FEISTEL_ROUNDS = 6


class TokenDataset:
    """The samples of a dataset directory, read through memory maps.

    ``samples`` is the number to train on; ``held_out`` are the indices after those, for validation: one in a hundred
    of all, from the end of the stream.
    """

    def __init__(self, directory: Path, sequence_length: int, *, verify_hashes: bool = False) -> None:
        """Open ``directory``. ``DataError`` if a shard is missing, of another size or (if asked) another hash than the manifest says;
        ``ConfigurationError`` if the dataset is shorter than one sample."""
        try:
            self.manifest = DatasetManifest.read(directory / MANIFEST)
        except FileNotFoundError:
            raise DataError(
                f"{directory} has no {MANIFEST}: it is not a finished dataset; run the download step again"
            ) from None
        self.sequence_length = sequence_length
        self.directory = directory
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self._shards = [_open_shard(directory, record, dtype, verify_hashes) for record in self.manifest.shards]
        self._ends = list(accumulate(shard.size for shard in self._shards))
        tokens = self._ends[-1] if self._ends else 0
        if tokens != self.manifest.tokens:
            raise DataError(f"{directory}: the shards hold {tokens} tokens, the manifest says {self.manifest.tokens}")
        total = (tokens - 1) // sequence_length
        if total < 1:
            raise ConfigurationError(
                f"--sequence-length {sequence_length} is longer than the dataset: {directory} has {tokens} tokens, "
                f"and a sample takes {sequence_length + 1}"
            )
        held = min(total // HELD_OUT_FRACTION, HELD_OUT_LIMIT)
        self.samples = total - held
        self.held_out = range(self.samples, total)

    def sample(self, index: int) -> NDArray[np.int64]:
        """The ``sequence_length + 1`` tokens of sample ``index``; ``DataError`` if one is outside the vocabulary."""
        start = index * self.sequence_length
        if not 0 <= index < self.held_out.stop:
            raise IndexError(f"sample {index} of {self.held_out.stop}")
        tokens = self._read(start, start + self.sequence_length + 1).astype(np.int64)
        if int(tokens.max()) >= self.manifest.vocabulary_size:
            raise DataError(
                f"{self.directory}: sample {index} holds token {tokens.max()}, but the vocabulary has {self.manifest.vocabulary_size}"
            )
        return tokens

    def batch(self, indices: Sequence[int]) -> Tensor:
        """tokens_BT: the samples ``indices``, int64, T = sequence_length + 1."""
        return torch.from_numpy(np.stack([self.sample(index) for index in indices]))

    def _read(self, start: int, end: int) -> NDArray[np.generic]:
        parts: list[NDArray[np.generic]] = []
        number = bisect_right(self._ends, start)
        while start < end:
            shard, shard_end = self._shards[number], self._ends[number]
            offset = start - (shard_end - shard.size)
            parts.append(shard[offset : offset + min(end, shard_end) - start])
            start, number = min(end, shard_end), number + 1
        return np.concatenate(parts)


def _open_shard(directory: Path, record: FileRecord, dtype: np.dtype[np.generic], verify: bool) -> NDArray[np.generic]:
    path = directory / record.name
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"{path} is missing; run the download step again") from None
    if size != record.size or size % dtype.itemsize:
        raise DataError(
            f"{path} has {size} bytes, its manifest says {record.size}; delete the dataset and download it again"
        )
    if verify and file_sha256(path) != record.sha256:
        raise DataError(
            f"{path} is not what its manifest says (SHA-256 differs); delete the dataset and download it again"
        )
    if size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r")


def sample_ids(seed: int, step: int, global_batch_size: int, samples_in_dataset: int) -> list[int]:
    """The dataset indices of the samples of step ``step`` (from 1), in the order of their global positions."""
    first = (step - 1) * global_batch_size
    return [sample_at(seed, position, samples_in_dataset) for position in range(first, first + global_batch_size)]


def sample_at(seed: int, position: int, samples_in_dataset: int) -> int:
    """The dataset index at global position ``position`` (from 0)."""
    epoch, index = divmod(position, samples_in_dataset)
    return permuted(index, samples_in_dataset, _mix(_mix(seed & MASK_64) ^ epoch))


def permuted(index: int, size: int, key: int) -> int:
    """The image of ``index`` under a pseudo-random permutation of ``range(size)`` chosen by ``key``, in constant time.

    A Feistel network permutes the smallest 2^(2k) >= size; walking its cycle until it is back inside ``range(size)``
    (fewer than four turns on average) restricts it to the range.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    value = index
    while True:
        left, right = value >> half, value & mask
        for turn in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (_mix(key ^ (turn << 56) ^ right) & mask)
        value = left << half | right
        if value < size:
            return value


def _mix(value: int) -> int:
    """Scatter 64 bits (the finaliser of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def rank_batch(ids: Sequence[int], rank: int, world_size: int, micro_batch_size: int) -> list[list[int]]:
    """The part of a step's samples that ``rank`` trains on, in equal micro-batches.

    Ranks take consecutive runs, so that all ranks together have ``ids`` at any world size. A micro-batch has at most
    ``micro_batch_size`` samples; fewer, if a world that shrank no longer divides by it.
    """
    if len(ids) % world_size:
        raise ConfigurationError(
            f"--global-batch-size {len(ids)} is not divisible by the {world_size} ranks that are left"
        )
    share = len(ids) // world_size
    size = next(size for size in range(min(micro_batch_size, share), 0, -1) if share % size == 0)
    mine = ids[rank * share : (rank + 1) * share]
    return [list(mine[start : start + size]) for start in range(0, share, size)]
