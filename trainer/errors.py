"""The exit codes between layers, and the exceptions that carry them.

Nobody parses logs to decide what to do: a step raises one of these, its entry prints one line and ends with the code,
and the layer above (a Job's pod failure policy, an Argo retry expression) reads only that.

    PipelineError
    |-- ConfigurationError   64  the user's configuration is wrong
    |-- DataError            65  data or checkpoint is corrupt and there is no older one
    |-- UnavailableError     69  a service did not answer (S3, hub, API server, mount), or a disk is full
    |-- DefectError          70  a defect of ours
    |-- StoppedError         75  stopped by the infrastructure after progress; a new attempt resumes
    |-- NoProgressError      76  restarts in a row advanced nothing
    `-- DeniedError          77  permission denied, or a read-only file system
"""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Callable
from enum import IntEnum
from typing import NoReturn


class ExitCode(IntEnum):
    """What a step ends with; ARCHITECTURE.md says who reads it."""

    DONE = 0
    CONFIGURATION = 64
    DATA = 65
    UNAVAILABLE = 69
    DEFECT = 70
    STOPPED = 75
    NO_PROGRESS = 76
    DENIED = 77


FINAL_CODES: frozenset[int] = frozenset(
    {ExitCode.CONFIGURATION, ExitCode.DATA, ExitCode.DEFECT, ExitCode.NO_PROGRESS, ExitCode.DENIED}
)
"""Codes that no layer retries: another attempt would end the same way."""


def normalise(code: int) -> int:
    """The contract's code for what a process ended with: a signal or an unknown code counts as 75."""
    return code if code in set(ExitCode) else int(ExitCode.STOPPED)


class PipelineError(Exception):
    """An error with a one-line message for the user and an exit code for the layer above."""

    exit_code = ExitCode.DEFECT


class ConfigurationError(PipelineError):
    exit_code = ExitCode.CONFIGURATION


class DataError(PipelineError):
    exit_code = ExitCode.DATA


class UnavailableError(PipelineError):
    exit_code = ExitCode.UNAVAILABLE


class DefectError(PipelineError):
    exit_code = ExitCode.DEFECT


class StoppedError(PipelineError):
    exit_code = ExitCode.STOPPED


class NoProgressError(PipelineError):
    exit_code = ExitCode.NO_PROGRESS


class DeniedError(PipelineError):
    exit_code = ExitCode.DENIED


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
AWAY = frozenset({errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.EHOSTDOWN})
"""What a mount says whose server does not answer."""


def foreseen(error: BaseException) -> PipelineError | None:
    """``error`` in the contract's words: one of ours, or what a file system says that is full, away or not ours to write.
    ``None`` for anything else, which is a defect."""
    if isinstance(error, PipelineError):
        return error
    if not isinstance(error, OSError):
        return None
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if error.errno in FULL:
        return UnavailableError(f"{what}; make room or raise the quota, and the same command goes on")
    if error.errno in AWAY:
        return UnavailableError(f"{what}; see that its server answers and it is mounted, and the same command goes on")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return DeniedError(f"permission denied: {what}; see who may write there, and how it is mounted")
    return None


def says_nothing_of_data(error: BaseException) -> bool:
    """Whether ``error``, raised while something was read, is a stop or the storage's trouble, and no verdict on what was read."""
    return not isinstance(error, DataError) and foreseen(error) is not None


def code_of(error: BaseException) -> int:
    """The exit code that stands for ``error``; what is not ours and not foreseen is a defect (70)."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    return int((foreseen(error) or DefectError()).exit_code)


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Run a process entry: its exceptions become one line on standard error and the contract's exit code."""
    try:
        code = main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except Exception as error:
        message = foreseen(error)
        if message is None:
            traceback.print_exc()
            message = DefectError(f"a defect in this program ({type(error).__name__}: {error}); please report it")
        print(f"error: {message}", file=sys.stderr)
        code = int(message.exit_code)
    sys.exit(code)
