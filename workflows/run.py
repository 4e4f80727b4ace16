"""The command line: ``python workflows/run.py COMMAND``, also installed as ``holdfast``.

Each command is a module with ``add_arguments(parser)`` and ``main(args) -> exit code``, imported when it is used:
``compile`` must not wait for torch, nor ``status`` for Hera.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # run as a script: what is beside this file is not what modules are to be found in
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

try:
    from trainer.config import OneLineParser
    from trainer.errors import ConfigurationError, exit_with
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing.name} is not installed here; run `make setup`, then use .venv/bin/python")


class Command(NamedTuple):
    module: str
    help: str
    entry: str = ""
    """Suffix of the module's functions where it serves several commands: ``main_list``, ``add_arguments_list``."""


COMMANDS = {
    "local": Command("workflows.localrun", "compile, then run the whole pipeline on this machine; no Kubernetes"),
    "compile": Command("workflows.compiling", "write the Argo YAML (--check: fail when a committed file differs)"),
    "submit": Command("workflows.submission", "submit the pipeline to an Argo server"),
    "plan": Command("workflows.plan", "predict goodput for a cluster, and how often to save"),
    "list": Command("workflows.inspection", "the runs under a root", "list"),
    "status": Command("workflows.inspection", "how far a run is and what it survived", "status"),
    "logs": Command("workflows.inspection", "a run's logs by step and rank", "logs"),
    "preflight": Command("workflows.preflight", "check the AWS account and the cluster before money is spent"),
    "teardown": Command("workflows.teardown", "remove what a run left, in the order that does not hang"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command. Raises ``trainer.errors`` for what is wrong; ``console`` turns them into exit codes."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    name, rest = words[0], words[1:]
    command = COMMANDS.get(name)
    if command is None:
        raise ConfigurationError(f"unknown command '{name}'; use one of {', '.join(COMMANDS)}")
    module = importlib.import_module(command.module)
    suffix = f"_{command.entry}" if command.entry else ""
    parser = OneLineParser(prog=f"run.py {name}", description=command.help)
    getattr(module, f"add_arguments{suffix}")(parser)
    args: argparse.Namespace = parser.parse_args(rest)
    return int(getattr(module, f"main{suffix}")(args))


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: run.py COMMAND [--help]", "", *lines])


def console() -> None:
    """The entry of the installed script."""
    exit_with(_until_nobody_reads)


def _until_nobody_reads() -> int:
    """``main``, ended quietly once its output is closed, as by ``run.py logs RUN | head``."""
    try:
        code = main()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    console()
