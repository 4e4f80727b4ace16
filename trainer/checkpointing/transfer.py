"""Copies between a GPU and mapped memory, by a few threads with a small pinned buffer and a stream each.

To pin the mapped gigabytes themselves would take seconds in which no other CUDA call of the process gets through, after
each start, and seconds more when the process ends. Through small buffers that are pinned once and used again, the copy is as
fast as the bus, and it runs beside the forward and backward passes that the GPU has been given.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

PIECE = 8 << 20
"""Bytes at a time: what all threads hold stays in a processor's cache on its way."""
THREADS = 8

Pair = tuple[Tensor, Tensor]
"""Where to, and from where: of one shape and type, one of them on a GPU."""


class Copying:
    """A copy that goes on while training does. What it reads must not change, and is kept alive, until it is waited for."""

    def __init__(self, parts: Sequence[Future[None]] = ()) -> None:
        self._parts = parts

    @property
    def done(self) -> bool:
        return not self._parts

    def wait(self) -> None:
        """Return once the copy is whole. From any thread."""
        for part in self._parts:
            part.result()
        self._parts = ()


class Transfer:
    """The threads of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="transfer", initializer=self._prepare)

    def _prepare(self) -> None:
        torch.cuda.set_device(self._device)
        self._own.buffer = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
        self._own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def start(self, pairs: Sequence[Pair]) -> Copying:
        """Begin to copy, after what the current stream has been given so far."""
        before = torch.cuda.current_stream(self._device).record_event()
        shares: list[list[Pair]] = [[] for _ in range(THREADS)]
        number = 0
        for target, source in pairs:
            flat_target, flat_source = as_bytes(target), as_bytes(source)
            for start in range(0, flat_target.numel(), PIECE):
                shares[number % THREADS].append((flat_target[start : start + PIECE], flat_source[start : start + PIECE]))
                number += 1
        return Copying([self._pool.submit(self._copy, share, before) for share in shares if share])

    def _copy(self, share: list[Pair], before: torch.cuda.Event) -> None:
        buffer, stream = self._own.buffer, self._own.stream
        with torch.cuda.stream(stream):
            stream.wait_event(before)
            for target, source in share:
                size = source.numel()
                if source.is_cuda:
                    buffer[:size].copy_(source, non_blocking=True)
                    stream.synchronize()
                    ctypes.memmove(target.data_ptr(), buffer.data_ptr(), size)
                else:
                    ctypes.memmove(buffer.data_ptr(), source.data_ptr(), size)
                    target.copy_(buffer[:size], non_blocking=True)
                    stream.synchronize()


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


@cache
def transfer(device: torch.device) -> Transfer:
    """The threads of ``device``, for the life of the process."""
    return Transfer(device)


def copy(pairs: Sequence[Pair]) -> Copying:
    """Begin to copy each pair. What no GPU takes part in is copied when this returns."""
    moving: list[Pair] = []
    for target, source in pairs:
        if target.is_cuda != source.is_cuda and target.is_contiguous() and source.is_contiguous():
            moving.append((target, source))
        else:
            target.copy_(source)
    if not moving:
        return Copying()
    device = next(tensor.device for tensor in moving[0] if tensor.is_cuda)
    try:
        return transfer(device).start(moving)
    except BrokenExecutor:  # its threads could not begin once, which they never forget
        transfer.cache_clear()
        return transfer(device).start(moving)
