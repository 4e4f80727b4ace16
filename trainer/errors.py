"""The exit codes between layers, and the exceptions that carry them.

Nobody parses logs to decide what to do: a step raises one of these, its entry prints one line and ends with the code,
and the layer above (a Job's pod failure policy, an Argo retry expression) reads only that.

    PipelineError
    |-- ConfigurationError   64  the user's configuration is wrong
    |-- DataError            65  data or checkpoint is corrupt and there is no older one
    |-- UnavailableError     69  a service did not answer (S3, hub, API server, mount)
    |-- DefectError          70  a defect of ours
    |-- StoppedError         75  stopped by the infrastructure after progress; a new attempt resumes
    |-- NoProgressError      76  restarts in a row advanced nothing
    `-- DeniedError          77  permission denied
"""

from __future__ import annotations

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


def code_of(error: BaseException) -> int:
    """The exit code that stands for ``error``; what is not ours and not foreseen is a defect (70)."""
    if isinstance(error, PipelineError):
        return int(error.exit_code)
    if isinstance(error, PermissionError):
        return int(ExitCode.DENIED)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return int(ExitCode.DEFECT)


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Run a process entry: its exceptions become one line on standard error and the contract's exit code."""
    try:
        code = main()
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        code = code_of(error)
    except PermissionError as error:
        print(f"error: permission denied: {error.filename or error}", file=sys.stderr)
        code = code_of(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except Exception as error:
        traceback.print_exc()
        print(f"error: a defect in this program ({type(error).__name__}: {error}); please report it", file=sys.stderr)
        code = code_of(error)
    sys.exit(code)
