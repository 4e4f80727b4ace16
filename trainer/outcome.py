"""How a worker process ends: what it leaves for the layer above, since launchers end with 1 whatever a worker said."""

from __future__ import annotations

import traceback

from trainer import environment
from trainer.errors import ExitCode, PipelineError, code_of
from trainer.events import EventLog
from trainer.paths import RunPaths
from trainer.records import Outcome


def record_outcome(
    error: BaseException | None,
    paths: RunPaths,
    env: environment.WorkerEnvironment,
    events: EventLog,
    last: int,
) -> int:
    """Write this worker's outcome file, ``last`` being its last step; returns the code to end with."""
    code, message = int(ExitCode.DONE), f"finished step {last}"
    if error is not None:
        code, message = outcome_of(error)
        events.emit("fault_detected", layer="in_job", message=message)
        if code in (ExitCode.DEFECT, ExitCode.STOPPED):
            traceback.print_exception(error)
        if code not in set(ExitCode):
            code = 1
    try:
        Outcome(exit_code=code, message=message, step=last, rank=env.rank).write(
            paths.outcome(env.attempt, env.node, env.pod, env.rank)
        )
    except OSError:  # (a full disk) What nobody can read decides nothing.
        return 1 if code else 0
    return code


def outcome_of(error: BaseException) -> tuple[int, str]:
    """Exit code and one line for what ended training.

    An error that is nobody's contract is what restarts are for (1): a peer that went away looks like any exception.
    """
    if isinstance(error, PipelineError):
        return code_of(error), str(error)
    cause: BaseException | None = error
    while cause is not None:  # the in-process Wrapper raises from the training function's own error
        if isinstance(cause, PipelineError):
            return code_of(cause), str(cause)
        cause = cause.__cause__ or cause.__context__
    return 1, f"{type(error).__name__}: {error}"[:500]
