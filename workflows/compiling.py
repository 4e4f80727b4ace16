"""``run.py compile``: the committed YAML, which is what Argo, the local engine and the tests consume."""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from hera.workflows import Workflow, WorkflowTemplate

from trainer.errors import ConfigurationError
from trainer.records import write_whole
from workflows import arms
from workflows.benchmark import benchmark_pipeline
from workflows.training import training_pipeline

PROJECT = Path(__file__).resolve().parent.parent
TEMPLATES = PROJECT / "templates"
PIPELINES = ("training", "benchmark")
DEFAULT_TABLE = "laptop"


def author(pipeline: str, kind: type[Workflow], table: str = DEFAULT_TABLE, repetitions: int = 1) -> Workflow:
    """The pipeline as a Hera object; ``table`` and ``repetitions`` are a benchmark's."""
    if pipeline == "benchmark":
        return benchmark_pipeline(kind, arms.load(table), repetitions)
    return training_pipeline(kind)


def documents() -> dict[str, str]:
    """File name under ``templates/`` -> its YAML: training as a Workflow to submit and a WorkflowTemplate to keep, a
    benchmark as a Workflow for each table of experiments."""
    compiled = {
        "training.yaml": to_yaml("training", Workflow),
        "training-template.yaml": to_yaml("training", WorkflowTemplate),
    }
    for table in arms.tables():
        compiled[f"benchmark-{table}.yaml"] = to_yaml("benchmark", Workflow, table)
    return compiled


def to_yaml(pipeline: str, kind: type[Workflow] = Workflow, table: str = DEFAULT_TABLE, repetitions: int = 1) -> str:
    """The compiled pipeline, headed by a line that says where it comes from."""
    sources = f"workflows/{pipeline}.py" + (f" and experiments/{Path(table).stem}.yaml" if pipeline == "benchmark" else "")
    origin = f"# Made from {sources} by `python workflows/run.py compile`; change it there.\n"
    return origin + str(author(pipeline, kind, table, repetitions).to_yaml(width=120))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a committed file differs")
    parser.add_argument("--directory", type=Path, default=TEMPLATES, help="where the files are [templates]")


def main(args: argparse.Namespace) -> int:
    """Write the files, or with ``--check`` print how they differ and end with 64."""
    differing = []
    for name, text in documents().items():
        path: Path = args.directory / name
        before = path.read_text() if path.exists() else ""
        if before == text:
            continue
        differing.append(name)
        if args.check:
            old, new = before.splitlines(keepends=True), text.splitlines(keepends=True)
            sys.stdout.writelines(difflib.unified_diff(old, new, f"committed {name}", f"compiled {name}"))
        else:
            write_whole(path, text.encode())
            path.chmod(0o644)
            print(f"wrote {path}")
    if args.check and differing:
        raise ConfigurationError(f"{', '.join(differing)} differ from what compiles; run `make compile` and commit")
    if not differing:
        print(f"{len(documents())} files in {args.directory} are what compiles")
    return 0
