"""``run.py local``: the whole pipeline on this machine, through the compiled YAML that Argo would get.

What is wrong with the command is said before anything starts. A run is known by its id: a second call with the same
id goes on where the first one was stopped, or says that the run is complete.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from steps.runs import read_report
from trainer import environment, paths
from trainer.config import TRAJECTORY_FIELDS, RunConfig, add_flags, flag, from_namespace
from trainer.errors import ConfigurationError, DeniedError
from trainer.paths import RunPaths
from trainer.records import RunRecord, RunReport, write_whole
from workflows import local
from workflows.parameters import arguments
from workflows.summary import summary_line, summary_table

PROJECT = Path(__file__).resolve().parent.parent
PATHS = ("snapshot_root", "tokenizer", "init_from")
"""Settings that are paths, if they are set (the tokenizer ``byte`` is none)."""
LOCK_SECONDS = 10.0
"""A supervisor whose engine was killed is gone within five seconds: wait that long before refusing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to run")
    what.add_argument("--pipeline", choices=("training", "benchmark"), default="training", help="pipeline to run [training]")
    add_benchmark_arguments(what)
    what.add_argument("--file", type=Path, metavar="YAML", help="run this Argo workflow instead of a pipeline")
    what.add_argument(
        "-p", dest="parameters", action="append", default=[], metavar="NAME=VALUE", help="set a parameter of --file"
    )
    what.add_argument("--resume", metavar="NAME", help="go on with a workflow whose engine was killed")
    what.add_argument("--volume", action="append", default=[], metavar="CLAIM=DIR", help="directory for a volume claim")
    what.add_argument("--quiet", action="store_true", help="print only how it ended")
    what.add_argument("--json", action="store_true", help="print one JSON object per line")
    add_flags(parser)


def add_benchmark_arguments(parser: argparse._ArgumentGroup) -> None:
    """What a benchmark is made of."""
    parser.add_argument("--experiments", default="laptop", metavar="TABLE", help="a benchmark's experiments: headline, laptop, p5 or a YAML file [laptop]")
    parser.add_argument("--repetitions", type=int, default=1, metavar="N", help="runs of a benchmark's headline arms [1]")


def main(args: argparse.Namespace) -> int:
    """Run, resume or refuse; the exit code is that of the step that failed, 0 if none did."""
    default_root = RunConfig.model_fields["root"].default
    options = local.Options(
        root=Path(getattr(args, "root", default_root)).absolute(),
        volumes={claim: Path(directory).absolute() for claim, directory in _pairs(args.volume, "--volume")},
        display="json" if args.json else "quiet" if args.quiet else "auto",
    )
    if args.resume and args.file:
        raise ConfigurationError("--resume goes on with a workflow of an earlier call; leave --file out")
    if args.parameters and not args.file:
        raise ConfigurationError("-p sets a parameter of --file; the pipeline's parameters are flags (see --help)")
    if args.resume:
        return local.resume(options.root, args.resume, for_pipeline(options)).exit_code
    if args.file:
        return run_file(args.file, dict(_pairs(args.parameters, "-p")), options)
    if args.pipeline == "benchmark":
        from workflows import benchmarkrun

        return benchmarkrun.main(args, options)
    return run_pipeline(args.pipeline, resolve(from_namespace(args), chosen="launcher" in args), options)


def resolve(config: RunConfig, *, chosen: bool = False) -> RunConfig:
    """``config`` as this machine runs it; its launcher was ``chosen``, or is this machine's."""
    names = [*PATHS, "launcher"] if chosen else PATHS
    return config.model_copy(update=localised({name: getattr(config, name) for name in names}, config.root))


def localised(settings: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """``settings`` with absolute paths, since steps run in directories of their own, and a launcher of this machine
    where they name none."""
    found = {"launcher": "local"} | dict(settings) | {"root": root.absolute()}
    for name in PATHS:
        if found.get(name) not in (None, "", "byte"):
            found[name] = type(found[name])(Path(found[name]).absolute())
    return found


def run_file(file: Path, parameters: dict[str, str], options: local.Options) -> int:
    """Run any workflow file, as ``argo submit`` would."""
    if not file.is_file():
        raise ConfigurationError(f"--file {file}: there is no such file")
    plan = local.load(file, parameters)
    check_writable(options.root)
    return local.run(plan, options).exit_code


def run_pipeline(pipeline: str, config: RunConfig, options: local.Options) -> int:
    """Run ``pipeline`` under ``config``, whose root is absolute, and say what the run was worth."""
    run = RunPaths(config.root, config.run_id)
    check_writable(config.root)
    check_same_run(run, config)
    with hold(run.pipeline_lock, config.run_id):
        finished = complete_report(run, config)
        if finished is not None:
            _say(f"run '{config.run_id}' is complete; give another --run-id to train again", finished, run, options)
            return 0
        wait_for_release(run.lock, config.run_id)
        name = workflow_name(config.root, config.run_id)
        file = paths.compiled_workflow(config.root, name)
        write_whole(file, _compiled(pipeline).encode())
        result = local.run(local.load(file, arguments(config)), for_pipeline(replace(options, name=name)))
    failed = f"failed with exit code {result.exit_code}; each step's words are beside {result.workflow_json}"
    _say(failed if result.exit_code else "", read_report(run), run, options)
    return result.exit_code


def check_writable(root: Path) -> None:
    """Refuse a root that nothing can be written to (77) or that is no directory (64)."""
    probe = root / f".probe-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except (FileExistsError, NotADirectoryError):
        raise ConfigurationError(f"--root {root} is not a directory; name one that is, or one to be made") from None
    except OSError as error:
        raise DeniedError(f"--root {root} is not writable ({error.strerror}); name a directory of yours") from None


def check_same_run(run: RunPaths, config: RunConfig) -> None:
    """Refuse a run id that stands for another run on disk: two trajectories must not be mixed."""
    if not run.record.exists():
        return
    before = RunRecord.read(run.record).config
    for name in TRAJECTORY_FIELDS:
        was, is_now = getattr(before, name), getattr(config, name)
        if was != is_now:
            raise ConfigurationError(
                f"run '{config.run_id}' in {run.run} has {flag(name)} {was}, not {is_now}; "
                "give another --run-id, or the flags it was started with"
            )


@contextmanager
def hold(lock: Path, run_id: str) -> Iterator[None]:
    """Keep a second pipeline off the run for as long as this one works on it."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        if not _try_lock(file.fileno()):
            raise ConfigurationError(
                f"run '{run_id}' is being worked on by another process; wait, or give another --run-id"
            )
        yield


def wait_for_release(lock: Path, run_id: str, seconds: float = LOCK_SECONDS) -> None:
    """Wait until no supervisor holds the run: one that was left behind by a killed engine is about to end."""
    if not lock.exists():
        return
    deadline = time.monotonic() + seconds
    with lock.open("r") as file:
        while not _try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"run '{run_id}' is being trained by another process; wait, or give another --run-id"
                )
            time.sleep(0.2)


def complete_report(run: RunPaths, config: RunConfig) -> RunReport | None:
    """The report of a run that has nothing left to do under ``config``, else None."""
    report = read_report(run)
    if report is None or not report.complete or not _valid(run, report.config):
        return None
    same = all(getattr(report.config, name) == getattr(config, name) for name in ("dataset_uri", "tokenizer"))
    return report if same else None


def _valid(run: RunPaths, config: RunConfig) -> bool:
    """Whether the run's checkpoints were validated, and one of them is whole where there should be any."""
    from steps.report import validation_of

    found = validation_of(run)
    return found is not None and (found.newest_valid_step is not None or config.checkpoint_mode == "off")


def _say(message: str, report: RunReport | None, run: RunPaths, options: local.Options) -> None:
    """How it ended: a message, and the report as a short table (one line of JSON, one line when quiet)."""
    if options.display == "json":
        print(summary_line(report, run, message))
        return
    if message:
        print(message, file=sys.stderr if report is None else sys.stdout)
    if report is not None:
        print(summary_table(report, run, short=options.display == "quiet"))


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _compiled(pipeline: str) -> str:
    from workflows.compiling import to_yaml

    return to_yaml(pipeline)


def workflow_name(root: Path, run_id: str) -> str:
    """``<run id>-<n>``, the first that is free: like Argo, every call makes a Workflow of its own."""
    number = 1
    while paths.workflow(root, f"{run_id}-{number}").exists():
        number += 1
    return f"{run_id}-{number}"


def for_pipeline(options: local.Options) -> local.Options:
    """``options`` with what the pipelines need: the root in place of the claim, and this project, installed or not."""
    from steps.cluster import CLAIM

    search = os.pathsep.join(filter(None, (str(PROJECT), environment.variable("PYTHONPATH"))))
    return replace(
        options,
        volumes={CLAIM: options.root} | dict(options.volumes),
        environment={"PYTHONPATH": search, "PYTHONUNBUFFERED": "1"},
    )


def _pairs(items: list[str], what: str) -> list[tuple[str, str]]:
    pairs = []
    for item in items:
        key, separator, value = item.partition("=")
        if not (key and separator):
            raise ConfigurationError(f"{what} {item}: write NAME=VALUE")
        pairs.append((key, value))
    return pairs
