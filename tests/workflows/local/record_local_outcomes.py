"""Records what a real controller makes of workflows, as test data. Not a test; run by hand where a cluster answers.

    eval "$(./cluster.py env)"              # or any KUBECONFIG and ARGO_NAMESPACE with Argo Workflows 4 and an image busybox
    python tests/workflows/local/record_local_outcomes.py random --count 170   # -> data/random.jsonl
    python tests/workflows/local/record_local_outcomes.py files                # data/workflows/*.yaml -> data/outcomes.json

Each workflow runs twice; one whose two outcomes differ, or that does not end, is dropped and counted in the first line
of the file. Random workflows come from ``local_random`` with a fixed seed (``--seed``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from local_outcomes import Outcome, differences, of_workflow
from local_random import workflows

DATA = Path(__file__).with_name("data")
Raw = dict[str, Any]


def kubectl(*arguments: str, text: str = "") -> str:
    """Run kubectl in Argo's namespace; a busy API server gets a few chances."""
    command = ["kubectl", "-n", os.environ.get("ARGO_NAMESPACE", "argo"), "--request-timeout=60s", *arguments]
    for pause in (5, 20, 60, 0):
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout
        print(f"{' '.join(command)}: {done.stderr.strip()}", file=sys.stderr, flush=True)
        if "is invalid" in done.stderr:
            break
        time.sleep(pause)
    raise SystemExit("the API server does not answer")


def generate(count: int, number: int) -> list[Raw]:
    """``count`` random workflows, no two alike but for their exit codes; few from each seed, since later examples resemble earlier ones."""
    found: dict[str, Raw] = {}
    while len(found) < count:

        @seed(number)
        @settings(
            max_examples=25,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(workflows())
        def collect(workflow: Raw) -> None:
            found.setdefault(re.sub(r'"(0|1|2|64)"', '"N"', json.dumps(workflow, sort_keys=True)), workflow)

        collect()
        number += 1
    return list(found.values())[:count]


def submit(workflow: Raw, batch: str) -> str:
    """Create it; the name it got. Finished pods are removed at once, to keep the cluster small."""
    metadata = {**workflow["metadata"]}
    metadata.pop("name", None)
    metadata.setdefault("generateName", "recorded-")
    metadata["labels"] = {**(metadata.get("labels") or {}), "recorded": batch}
    spec = {**workflow["spec"], "podGC": {"strategy": "OnPodCompletion", "deleteDelayDuration": "5s"}}
    made = kubectl("create", "-f", "-", "-o", "json", text=json.dumps({**workflow, "metadata": metadata, "spec": spec}))
    return str(json.loads(made)["metadata"]["name"])


def finished(batch: str) -> dict[str, Raw]:
    """The workflows of the batch that have ended."""
    listed = json.loads(kubectl("get", "workflows", "-l", f"recorded={batch}", "-o", "json"))["items"]
    return {
        w["metadata"]["name"]: w
        for w in listed
        if (w.get("status") or {}).get("phase") in ("Succeeded", "Failed", "Error")
    }


class Ledger:
    """What was recorded so far, in a file, so that a recording that is stopped goes on where it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, list[Outcome | None]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            self.found.setdefault(entry["key"], []).append(entry["outcome"])

    @staticmethod
    def key(workflow: Raw) -> str:
        return hashlib.sha256(json.dumps(workflow, sort_keys=True).encode()).hexdigest()

    def add(self, workflow: Raw, outcome: Outcome | None) -> None:
        key = self.key(workflow)
        self.found.setdefault(key, []).append(outcome)
        with self.path.open("a") as file:
            file.write(json.dumps({"key": key, "outcome": outcome}) + "\n")

    def outcomes(self, workflow: Raw) -> list[Outcome | None]:
        return self.found.get(self.key(workflow), [])


def run_twice(listed: list[Raw], parallel: int, patience: float, ledger: Ledger) -> None:
    """Run every workflow until the ledger has two outcomes of it; None stands for one that did not end."""
    batch = f"b{int(time.time())}"
    waiting = [w for times in (1, 2) for w in listed if len(ledger.outcomes(w)) < times]
    total, running = len(waiting), {}
    while waiting or running:
        while waiting and len(running) < parallel:
            workflow = waiting.pop(0)
            running[submit(workflow, batch)] = (workflow, time.monotonic() + patience)
        time.sleep(2)
        ended = finished(batch)
        for name, (workflow, deadline) in list(running.items()):
            if name not in ended and time.monotonic() < deadline:
                continue
            ledger.add(workflow, of_workflow(ended[name]) if name in ended else None)
            del running[name]
            kubectl("delete", "workflow", name, "--wait=false")
            print(
                f"{total - len(waiting) - len(running)}/{total} {name} {'' if name in ended else 'never ended'}",
                flush=True,
            )


def compact(outcome: Outcome) -> Outcome:
    """Without messages, which only the deadline ones are read of, and generated ids."""
    nodes = [
        {key: value for key, value in node.items() if key != "message" or "deadline" in value}
        for node in outcome["nodes"]
    ]
    return {"phase": outcome["phase"], "outputs": outcome["outputs"], "nodes": nodes}


def agree(first: Outcome | None, second: Outcome | None) -> bool:
    return first is not None and second is not None and not differences(first, second)


def record_random(count: int, number: int, parallel: int, ledger: Ledger) -> None:
    """Write data/random.jsonl: a line of counts, then a workflow and its outcome per line."""
    listed = generate(count, number)
    run_twice(listed, parallel, 600, ledger)
    pairs = [(w, *ledger.outcomes(w)[:2]) for w in listed]
    kept = [(w, a) for w, a, b in pairs if agree(a, b) and a is not None]
    endless = sum(1 for _, a, b in pairs if a is None or b is None)
    counts = {
        "seed": number,
        "generated": len(listed),
        "kept": len(kept),
        "never_ended": endless,
        "differed": len(listed) - len(kept) - endless,
    }
    lines = [json.dumps(counts), *(json.dumps({"workflow": w, "outcome": compact(o)}, sort_keys=True) for w, o in kept)]
    DATA.mkdir(exist_ok=True)
    (DATA / "random.jsonl").write_text("\n".join(lines) + "\n")
    print(counts)


def record_files(names: list[str], parallel: int, ledger: Ledger) -> None:
    """Write data/outcomes.json for data/workflows/*.yaml (or those named), each run twice."""
    files = sorted((DATA / "workflows").glob("*.yaml"))
    files = [file for file in files if not names or file.stem in names]
    listed = []
    for file in files:
        documents = list(yaml.safe_load_all(file.read_text()))
        listed += [document for document in documents if document["kind"] == "Workflow"]
        for template in (document for document in documents if document["kind"] != "Workflow"):
            kubectl("apply", "-f", "-", text=json.dumps(template))
    run_twice(listed, parallel, 600, ledger)
    path = DATA / "outcomes.json"
    known: dict[str, Outcome] = json.loads(path.read_text()) if path.exists() else {}
    for file, workflow in zip(files, listed, strict=True):
        a, b = ledger.outcomes(workflow)[:2]
        if a is not None and agree(a, b):
            known[file.stem] = compact(a)
        else:
            known.pop(file.stem, None)
            why = differences(a, b)[:4] if a is not None and b is not None else "it did not end"
            print(f"{file.stem}: dropped: {why}")
    path.write_text(json.dumps(dict(sorted(known.items())), indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("random", "files"))
    parser.add_argument("names", nargs="*", help="files by name, without .yaml")
    parser.add_argument("--count", type=int, default=170)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument(
        "--ledger", type=Path, default=Path("/var/tmp/recorded-outcomes.jsonl"), help="what was recorded so far"
    )
    args = parser.parse_args()
    if args.what == "random":
        record_random(args.count, args.seed, args.parallel, Ledger(args.ledger))
    else:
        record_files(args.names, args.parallel, Ledger(args.ledger))


if __name__ == "__main__":
    sys.exit(main())
