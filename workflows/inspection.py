"""``run.py list``, ``status RUN`` and ``logs RUN``: thin shells around ``steps.runs``. Nothing here changes a run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from steps import run_tables, runs
from trainer.config import RunConfig, add_flags
from trainer.paths import RunPaths

if TYPE_CHECKING:
    from rich.console import Console


def add_arguments_list(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, ("root",))
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def add_arguments_status(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def add_arguments_logs(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--step", help="of this step [all]")
    parser.add_argument("--rank", type=int, help="of this rank [all]")
    parser.add_argument("--attempt", type=int, help="of this attempt [the newest]")
    parser.add_argument("--lines", type=int, metavar="N", help="the last N lines of each [all]")
    parser.add_argument("--follow", action="store_true", help="go on with what is printed from now on, until Ctrl-C")


def main_list(args: argparse.Namespace) -> int:
    """The runs under a root, the newest first."""
    found = runs.list_runs(_root(args))
    if args.json:
        print(json.dumps(runs.as_plain(found)))
    else:
        _console().print(run_tables.render_list(found))
    return 0


def main_status(args: argparse.Namespace) -> int:
    """How far one run is, what it survived, and where its report lies."""
    found = runs.status(RunPaths(_root(args), args.run))
    if args.json:
        print(json.dumps(runs.as_plain(found)))
    else:
        _console().print(run_tables.render_status(found))
    return 0


def main_logs(args: argparse.Namespace) -> int:
    """What the processes of a run printed, by step, attempt and rank."""
    paths = RunPaths(_root(args), args.run)
    found = runs.log_files(paths, args.step, args.attempt, args.rank)
    console = _console()
    for log in found:
        if len(found) > 1:
            print(f"--- {log.step}, attempt {log.attempt}, rank {log.rank}")
        for line in runs.tail(log, args.lines):
            sys.stdout.write(line + "\n")
    if args.follow:
        for log, line in runs.follow(paths, args.step, args.rank):
            console.print(run_tables.render_log(log, line, named=len(found) > 1), soft_wrap=True)
    return 0


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's id")
    add_flags(parser, ("root",))


def _root(args: argparse.Namespace) -> Path:
    return Path(getattr(args, "root", RunConfig.model_fields["root"].default)).absolute()


def _console() -> Console:
    """Colours on a terminal; plain text of any width where it is read by a program."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)
