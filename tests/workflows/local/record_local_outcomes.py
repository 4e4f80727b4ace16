"""Records what a real controller makes of workflows, as test data. Not a test; run by hand where a cluster answers.

    eval "$(./cluster.py env)"              # or any KUBECONFIG and ARGO_NAMESPACE with Argo Workflows 4 and an image busybox
    python tests/workflows/local/record_local_outcomes.py random --count 170   # -> data/random.jsonl
    python tests/workflows/local/record_local_outcomes.py files                # data/workflows/*.yaml -> data/outcomes.json

Each workflow runs twice; one whose two outcomes differ, or that does not end, is dropped and counted in the first line
of the file. Random workflows come from ``local_random`` with a fixed seed (``--seed``).
"""

from __future__ import annotations

import argparse
import json
import os
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
    """Run kubectl in Argo's namespace."""
    command = ["kubectl", "-n", os.environ.get("ARGO_NAMESPACE", "argo"), *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def generate(count: int, number: int) -> list[Raw]:
    """``count`` different random workflows."""
    found: dict[str, Raw] = {}

    @seed(number)
    @settings(
        max_examples=count * 3,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(workflows())
    def collect(workflow: Raw) -> None:
        found.setdefault(json.dumps(workflow, sort_keys=True), workflow)

    collect()
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


def run_all(listed: list[Raw], parallel: int, patience: float) -> list[Outcome | None]:
    """The outcome of each, None for one that did not end."""
    batch = f"b{int(time.time())}"
    outcomes: list[Outcome | None] = [None] * len(listed)
    waiting = list(enumerate(listed))
    running: dict[str, tuple[int, float]] = {}
    while waiting or running:
        while waiting and len(running) < parallel:
            index, workflow = waiting.pop(0)
            running[submit(workflow, batch)] = (index, time.monotonic() + patience)
        time.sleep(2)
        ended = finished(batch)
        for name, (index, deadline) in list(running.items()):
            late = time.monotonic() > deadline
            if name not in ended and not late:
                continue
            if name in ended:
                outcomes[index] = of_workflow(ended[name])
            del running[name]
            kubectl("delete", "workflow", name, "--wait=false")
            print(
                f"{len(listed) - len(waiting) - len(running)}/{len(listed)} {name} {'never ended' if late and name not in ended else ''}",
                flush=True,
            )
    return outcomes


def compact(outcome: Outcome) -> Outcome:
    """Without messages, which only the deadline ones are read of, and generated ids."""
    nodes = [
        {key: value for key, value in node.items() if key != "message" or "deadline" in value}
        for node in outcome["nodes"]
    ]
    return {"phase": outcome["phase"], "outputs": outcome["outputs"], "nodes": nodes}


def agree(first: Outcome | None, second: Outcome | None) -> bool:
    return first is not None and second is not None and not differences(first, second)


def record_random(count: int, number: int, parallel: int) -> None:
    """Write data/random.jsonl: a line of counts, then a workflow and its outcome per line."""
    listed = generate(count, number)
    first = run_all(listed, parallel, 300)
    second = run_all(listed, parallel, 300)
    kept = [(w, a) for w, a, b in zip(listed, first, second, strict=True) if agree(a, b) and a is not None]
    endless = sum(1 for a, b in zip(first, second, strict=True) if a is None or b is None)
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


def record_files(names: list[str], parallel: int) -> None:
    """Write data/outcomes.json for data/workflows/*.yaml (or those named), each run twice."""
    files = sorted((DATA / "workflows").glob("*.yaml"))
    files = [file for file in files if not names or file.stem in names]
    listed = []
    for file in files:
        documents = list(yaml.safe_load_all(file.read_text()))
        listed += [document for document in documents if document["kind"] == "Workflow"]
        for template in (document for document in documents if document["kind"] != "Workflow"):
            kubectl("apply", "-f", "-", text=json.dumps(template))
    first, second = run_all(listed, parallel, 300), run_all(listed, parallel, 300)
    path = DATA / "outcomes.json"
    known: dict[str, Outcome] = json.loads(path.read_text()) if path.exists() else {}
    for file, a, b in zip(files, first, second, strict=True):
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
    args = parser.parse_args()
    if args.what == "random":
        record_random(args.count, args.seed, args.parallel)
    else:
        record_files(args.names, args.parallel)


if __name__ == "__main__":
    sys.exit(main())
