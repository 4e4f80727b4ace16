"""Host memory that owns a copy of the state: what is saved is never what training goes on changing.

A buffer is a mapped file, anonymous (memfd, for the durable tier's writer, which opens it through /proc) or in
memory-backed storage (for the node-local tier). Its layout follows from the tensors' names, shapes and types.

From a GPU the copy (``transfer``) runs beside the forward and backward passes that follow; before anything changes the
state again, the loop waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.checkpointing.transfer import Copying, copy
from trainer.optim import local

ALIGNMENT = 64
BLOCK = 64 << 20
POPULATED = 4 << 20
"""Bytes whose pages are mapped at a time: meanwhile no thread of the process maps or unmaps anything, as ending a process group
does again and again (64 MiB take 20 ms)."""
CHECKSUM_THREADS = 16
MADV_POPULATE_WRITE = 23
MFD_CLOEXEC = 1


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in a buffer."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    def view(self, flat: Tensor) -> Tensor:
        """The tensor in ``flat``, the buffer's bytes; shares its memory."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        count = 1
        for length in self.shape:
            count *= length
        size = count * dtype.itemsize
        return flat[self.offset : self.offset + size].view(dtype).view(self.shape)


Layout = dict[str, Slot]


def layout_of(tensors: Mapping[str, Tensor]) -> tuple[Layout, int]:
    """Slots for this rank's part of each tensor, and the bytes they take."""
    layout: Layout = {}
    offset = 0
    for name, tensor in tensors.items():
        part = local(tensor)
        layout[name] = Slot(offset, tuple(part.shape), str(part.dtype).removeprefix("torch."))
        offset += (part.numel() * part.itemsize + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    return layout, max(offset, ALIGNMENT)


class HostBuffer:
    """A mapped file of ``size`` bytes."""

    def __init__(self, fd: int, size: int, *, offset: int = 0) -> None:
        self.size = size
        self._map = mmap.mmap(fd, size + offset)
        self._offset = offset
        self.flat: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)[offset:]

    def populate(self) -> None:
        """Map its pages, a part at a time: a copy that has to do it page by page takes twice as long. Does nothing on kernels
        before 5.14."""
        libc = ctypes.CDLL(None)
        start = self.flat.data_ptr() - self._offset
        for offset in range(0, self.size + self._offset, POPULATED):
            length = min(POPULATED, self.size + self._offset - offset)
            if libc.madvise(ctypes.c_void_p(start + offset), ctypes.c_size_t(length), MADV_POPULATE_WRITE):
                return

    def store(self, tensors: Mapping[str, Tensor], layout: Layout) -> Copying:
        """Begin to copy every tensor's local part in; they must not change before the copy has been waited for."""
        return copy([(slot.view(self.flat), local(tensors[name]).detach()) for name, slot in layout.items()])

    def load(self, tensors: Mapping[str, Tensor], layout: Layout) -> None:
        """Copy every tensor's local part out, into the live tensors."""
        copy([(local(tensors[name]).detach(), slot.view(self.flat)) for name, slot in layout.items()]).wait()

    def checksum(self) -> int:
        """CRC-32 over the CRC-32s of the tensors' bytes in blocks, which several threads compute: a node has many cores
        to a GPU, and one core needs seconds for what a GPU copies in a tenth of one."""
        with memoryview(self._map) as whole, whole[self._offset :] as content:
            blocks = range(0, self.size, BLOCK)
            if len(blocks) == 1:
                sums = [zlib.crc32(content)]
            else:
                with ThreadPoolExecutor(CHECKSUM_THREADS) as pool:
                    sums = list(pool.map(lambda start: zlib.crc32(content[start : start + BLOCK]), blocks))
        return zlib.crc32(struct.pack(f"!{len(sums)}I", *sums))

    def close(self) -> None:
        self.flat = torch.empty(0, dtype=torch.uint8)
        with contextlib.suppress(BufferError):  # a view may still be alive; the mapping then goes with it
            self._map.close()


class Warming:
    """Memory that is made in the background, once: the kernel takes seconds to clear gigabytes, which no save should wait for, and
    neither should a recovery, so it begins once training is under way."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def begun(self) -> bool:
        return self._thread is not None

    def begin(self, make: Callable[[], None]) -> None:
        """Call ``make`` in a thread, if that was not done before; whoever needs what it makes says why it could not."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(make,), name="warm", daemon=True)
            with contextlib.suppress(RuntimeError):  # no room for a thread
                self._thread.start()

    @staticmethod
    def _run(make: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            make()

    def wait(self) -> None:
        """Return when it has ended. A restart may have come before it began."""
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()


class AnonymousBuffer:
    """A buffer that no path names: it is gone with the last process that maps it, whatever kills the owner. Raises ``OSError``
    when there is no memory for it."""

    def __init__(self, size: int) -> None:
        self._fd = anonymous_file("holdfast-staging")
        try:
            os.posix_fallocate(self._fd, 0, size)  # (a GPU's copy of gigabytes is to find its pages there)
            self.buffer = HostBuffer(self._fd, size)
        except OSError:
            os.close(self._fd)
            raise

    @property
    def path(self) -> str:
        """How another process of the same user opens it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        self.buffer.close()
        os.close(self._fd)


def anonymous_file(name: str) -> int:
    """A descriptor of a file in memory, closed on exec. Raises ``OSError``."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    # A Python built for a C library of before 2018, as those that uv installs, which runs with a newer one.
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.memfd_create(name.encode(), MFD_CLOEXEC))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def open_buffer(path: str, size: int) -> Any:
    """Map another process's buffer; returns its bytes as a uint8 tensor of ``size`` elements."""
    with open(path, "rb+") as file:  # noqa: PTH123 - a path under /proc, not a file of ours
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
