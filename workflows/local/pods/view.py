"""What a task sees of the file system: mounts of its own, made in the subreaper before the task starts."""

# pathlib would double the time that this program takes to start:
# ruff: noqa: PTH101, PTH102, PTH103, PTH110, PTH112, PTH115, PTH116, PTH118, PTH120, PTH123, PTH211

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_SLAVE = 1, 32, 4096, 16384, 1 << 19


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    if _libc.mount(*encoded, ctypes.c_ulong(flags), None) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount on {target}: {os.strerror(code)}")


def enter_namespace() -> None:
    """Give this process mounts of its own; without root, with the help of a user namespace."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(_CLONE_NEWNS) != 0:
        if _libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"unshare: {os.strerror(code)}")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with contextlib.suppress(FileNotFoundError), open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _mount("none", "/", None, _MS_REC | _MS_SLAVE)


class View:
    """A private view of the file system: its own /tmp, volumes at their mount paths, directories that the host lacks."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.stage = request["stage"]
        self.covered: set[str] = set()
        self.handles: dict[str, int] = {}
        enter_namespace()
        keep = [path for path in request["keep"] if _is_under(path, "/tmp") and os.path.exists(path)]
        for path in [request["tmp"], *keep, *(source for source, _, _ in request["binds"])]:
            if path not in self.handles:
                self.handles[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)
        self.bind(request["tmp"], "/tmp")
        for path in sorted(keep, key=len):
            self.bind(path, path)
        for source, target, read_only in sorted(request["binds"], key=lambda bind: bind[1].count("/")):
            self.bind(source, target, read_only=read_only)
        for path in request["private"]:
            self.make_private(path)
        for handle in self.handles.values():
            os.close(handle)

    def bind(self, source: str, target: str, *, read_only: bool = False) -> None:
        handle = self.handles[source]
        self.make(target, is_file=not stat.S_ISDIR(os.fstat(handle).st_mode))
        _mount(f"/proc/self/fd/{handle}", target, None, _MS_BIND | _MS_REC)
        if read_only:
            flags = os.statvfs(target).f_flag & (2 | 4 | 8)
            # nosuid, nodev and noexec stay: a user namespace may not drop them
            _mount(None, target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | flags)

    def make(self, path: str, *, is_file: bool) -> None:
        """Make a place to mount on, in this view only unless it is in /tmp."""
        if os.path.lexists(path):
            return
        above = os.path.dirname(path)
        while not os.path.isdir(above):
            above = os.path.dirname(above)
        if not _is_under(above, "/tmp"):
            self.cover(above)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if is_file:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        else:
            os.makedirs(path, exist_ok=True)

    def make_private(self, path: str) -> None:
        """Files that the task makes in the directory ``path`` are its own."""
        if os.path.isdir(path) and not _is_under(path, "/tmp"):
            self.cover(path)
        else:
            self.make(path, is_file=False)

    def cover(self, path: str) -> None:
        """Lay a writable copy of a directory over it, whose entries are the old ones; over / by changing the root."""
        if path in self.covered:
            return
        self.covered.add(path)
        stage = os.path.join(self.stage, str(len(self.covered)))
        os.makedirs(stage, exist_ok=True)
        mode = stat.S_IMODE(os.stat(path).st_mode)
        _mount("tmpfs", stage, "tmpfs", 0)
        os.chmod(stage, mode)
        for entry in os.scandir(path):
            target = os.path.join(stage, entry.name)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), target)
                continue
            if entry.is_dir():
                os.mkdir(target)
            else:
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
            with contextlib.suppress(OSError):
                _mount(entry.path, target, None, _MS_BIND | _MS_REC)
        if path == "/":
            os.chroot(stage)
            os.chdir("/")
        else:
            _mount(stage, path, None, _MS_BIND | _MS_REC)


def _is_under(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory + "/")


def probe() -> str:
    """Try a private mount in a fork; '' if that works, else why not."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            enter_namespace()
            _mount("tmpfs", "/tmp", "tmpfs", 0)
        except OSError as error:
            os.write(write, f"{error.strerror}".encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as file:
        return file.read()
