"""The exit handler: ``python -m steps.release --root R --run-id X --launcher L --status S --workflow W``.

Whatever a workflow ended with, afterwards

1. nothing of the run goes on: on a cluster its Jobs and its Service are gone (locally they ended with their supervisor);
2. a run that is complete has no snapshots left in this machine's memory;
3. a run that failed before its report has one;
4. the webhook, where there is one, knows.

Each is tried whatever became of the one before. Only the first can fail the step: GPUs that go on cost money, the rest
is a courtesy.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import sys
import urllib.request

from steps.runs import read_report
from trainer import environment
from trainer.config import OneLineParser, RunConfig, add_flags, from_namespace
from trainer.errors import PipelineError, exit_with
from trainer.paths import RunPaths
from trainer.records import RunRecord

WEBHOOK_VARIABLE = "HOLDFAST_WEBHOOK"
WEBHOOK_SECONDS = 10.0
SUCCEEDED = "Succeeded"


def main(argv: list[str] | None = None) -> int:
    """Release what the run holds. The error of step 1 is raised after the others were tried."""
    parser = OneLineParser(prog="steps.release", description="End what a run left behind, whatever happened.")
    add_flags(parser, ("root", "run_id", "launcher"))
    parser.add_argument("--status", default="", help="how the workflow ended: Succeeded, Failed or Error")
    parser.add_argument("--workflow", default="", help="name of the workflow")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="the runs of a benchmark, to be released with it")
    args = parser.parse_args(argv)
    config = from_namespace(args)
    root = config.root.absolute()
    run = RunPaths(root, config.run_id)
    trouble: PipelineError | None = None
    for name in (config.run_id, *args.runs):  # before anything is asked of the shared file system, which may be what failed
        try:
            end_nodes(config.model_copy(update={"root": root, "run_id": name}))
        except PipelineError as error:
            trouble = error
    for name in (config.run_id, *args.runs):
        try:
            tidy(RunPaths(root, name), main=name == config.run_id, failed=args.status != SUCCEEDED)
        except OSError as error:
            say(f"the files of run '{name}' cannot be read: {error}")
    notify(environment.variable(WEBHOOK_VARIABLE).strip(), message(run, args))
    if trouble is not None:
        raise trouble
    return 0


def end_nodes(config: RunConfig) -> None:
    """Delete the Jobs of the run where Kubernetes runs them, and wait until their pods are gone."""
    from steps.kubernetes_api import IN_CLUSTER_NAMESPACE

    if config.launcher == "local" or (config.launcher == "auto" and not IN_CLUSTER_NAMESPACE.exists()):
        say("the nodes of a local run ended with their supervisor")
        return
    from steps.kubernetes import KubernetesLauncher, KubernetesOptions

    KubernetesLauncher(config, KubernetesOptions()).release()
    say(f"no Job, pod or Service of run '{config.run_id}' is left")


def tidy(run: RunPaths, *, main: bool, failed: bool) -> None:
    """Steps 2 and 3; the runs of a benchmark have their reports made together."""
    record = _record(run) if main or run.record.exists() else None
    if record is not None:
        remove_snapshots(run, record.config)
        if main and failed:
            report_failed(run)


def remove_snapshots(run: RunPaths, config: RunConfig) -> None:
    """A complete run needs no snapshot; an incomplete one may be resumed on this machine from them."""
    report = read_report(run)
    directory = run.snapshots(config.snapshot_root, 0).parent
    if report is not None and report.complete and directory.exists():
        shutil.rmtree(directory, ignore_errors=True)
        say(f"removed {directory}")


def report_failed(run: RunPaths) -> None:
    """Make the report that a failed workflow did not come to. What cannot be reported is said, no more."""
    from steps import report

    try:
        report.main(["--root", str(run.root), "--run-id", run.run_id])
    except (PipelineError, OSError, ValueError) as error:
        say(f"no report: {error}")


def message(run: RunPaths, args: argparse.Namespace) -> dict[str, object]:
    """What the webhook is told. ``text`` is the field that Slack shows; the others are for programs."""
    report = read_report(run)
    facts: dict[str, object] = {"run_id": run.run_id, "workflow": args.workflow, "status": args.status}
    text = f"run {run.run_id}: {args.status or 'ended'}"
    if report is not None:
        facts |= {
            "steps_completed": report.steps_completed,
            "training_goodput": report.training_goodput,
            "faults": len(report.faults),
            "lost_steps": report.lost_steps,
        }
        text += (
            f", {report.steps_completed} of {report.config.max_steps} steps, goodput {report.training_goodput:.1%}, "
            f"{len(report.faults)} faults, {report.lost_steps} steps trained again"
        )
    return {"text": text, **facts}


def notify(url: str, facts: dict[str, object]) -> None:
    """POST ``facts`` as JSON to ``url``; without one nothing happens. The URL is a secret and is never printed."""
    if not url:
        return
    if not url.startswith(("http://", "https://")):
        say("the webhook is not an http(s) URL; nobody was told")
        return
    headers = {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(url, json.dumps(facts).encode(), headers)
        with urllib.request.urlopen(request, timeout=WEBHOOK_SECONDS) as answer:
            say(f"the webhook answered {answer.status}")
    except (OSError, ValueError, http.client.HTTPException) as error:
        say(f"the webhook did not answer: {type(error).__name__}")


def say(text: str) -> None:
    print(f"release: {text}", flush=True)


def _record(run: RunPaths) -> RunRecord | None:
    try:
        return RunRecord.read(run.record)
    except FileNotFoundError:
        say(f"run '{run.run_id}' never began")
    except PipelineError as error:
        print(f"release: {error}", file=sys.stderr)
    return None


if __name__ == "__main__":
    exit_with(main)
