"""``run.py local --pipeline benchmark``: a table of experiments on this machine, through the compiled YAML."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from steps.compare import headline
from steps.comparison_record import Comparison
from steps.figures import percent, seconds
from trainer import paths
from trainer.config import RunConfig
from trainer.errors import DataError, ExitCode
from trainer.paths import RunPaths
from trainer.records import write_whole
from workflows import arms, local, localrun
from workflows.arms import Experiments
from workflows.benchmark import arguments
from workflows.compiling import to_yaml


def main(args: argparse.Namespace, options: local.Options) -> int:
    """Run the arms that are not complete yet, then report; ends with 75 when one of them did not finish."""
    table = arms.load(args.experiments)
    given = {name: value for name, value in vars(args).items() if name in RunConfig.model_fields}
    changes = localrun.localised(arms.shared_changes(table, given), options.root)
    benchmark = str(given.get("run_id", "benchmark"))
    configs = [table.config(name, changes) for name in table.names]
    localrun.check_writable(options.root)
    runs = [RunPaths(options.root, run) for run in table.runs(benchmark, args.repetitions)]
    with localrun.hold(RunPaths(options.root, benchmark).pipeline_lock, benchmark):
        for run in runs:
            localrun.wait_for_release(run.lock, run.run_id)
        result = run_table(args, table, arguments(table, configs[0], benchmark), benchmark, options)
    found = read(options.root, benchmark)
    say(found, options.root, benchmark, options.display)
    if result:
        return result
    return int(ExitCode.DONE if found is not None and all(arm.complete for arm in found.arms) else ExitCode.STOPPED)


def run_table(
    args: argparse.Namespace, table: Experiments, values: dict[str, str], benchmark: str, options: local.Options
) -> int:
    """Compile the table and hand it to the local engine."""
    name = localrun.workflow_name(options.root, benchmark)
    file = paths.compiled_workflow(options.root, name)
    write_whole(file, to_yaml("benchmark", table=args.experiments, repetitions=args.repetitions).encode())
    return local.run(local.load(file, values), localrun.for_pipeline(replace(options, name=name))).exit_code


def read(root: Path, benchmark: str) -> Comparison | None:
    """The benchmark's comparison, if there is one."""
    try:
        return Comparison.read(paths.comparison(root, benchmark, "json"))
    except (FileNotFoundError, DataError):
        return None


def say(found: Comparison | None, root: Path, benchmark: str, display: str) -> None:
    """The comparison in a line for each arm (one line of JSON, one line when quiet)."""
    page = str(paths.comparison(root, benchmark, "html"))
    if display == "json":
        values = {arm.run: arm.effective_goodput for arm in found.arms} if found else {}
        print(json.dumps({"summary": benchmark, "effective_goodput": values, "report": page}))
    elif found is None:
        print(f"benchmark '{benchmark}' has no comparison yet")
    elif display == "quiet":
        print(f"{headline(found)} {page}")
    else:
        print(headline(found))
        width = max(len(arm.run) for arm in found.arms)
        for arm in found.arms:
            told = "not complete"
            if arm.figures is not None:
                told = f"{percent(arm.figures.effective_goodput):>7} effective goodput in {seconds(arm.figures.wall_seconds)}"
            print(f"{arm.run:<{width}}  {told}")
        print(page)
