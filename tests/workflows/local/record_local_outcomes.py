"""Records what a real controller makes of workflows, as test data. Not a test; run by hand where a cluster answers.

    eval "$(./cluster.py env)"              # or any KUBECONFIG and ARGO_NAMESPACE with Argo Workflows 4 and an image busybox
    python tests/workflows/local/record_local_outcomes.py random --count 170   # -> data/random.jsonl
    python tests/workflows/local/record_local_outcomes.py files                # data/workflows/*.yaml -> data/outcomes.json

Random workflows come from ``local_random`` with a fixed seed (``--seed``) and run twice; one whose two outcomes differ, or that
does not end, is dropped and counted in the first line of the file. What was recorded is in the ledger: a recording that is
stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from kubernetes import client, config
from local_outcomes import Outcome, differences, of_workflow
from local_random import workflows
from urllib3.exceptions import HTTPError

DATA = Path(__file__).with_name("data")
PATIENCE = 600.0
"""Seconds that a workflow may take."""
Raw = dict[str, Any]


class Cluster:
    """The workflows of one namespace. A busy API server gets a few chances."""

    def __init__(self) -> None:
        config.load_kube_config()
        self.api = client.CustomObjectsApi()
        self.place = {
            "group": "argoproj.io",
            "version": "v1alpha1",
            "namespace": os.environ.get("ARGO_NAMESPACE", "argo"),
        }

    def ask(self, call: Callable[..., Any], **arguments: Any) -> Any:
        for pause in (5, 20, 60):
            try:
                return call(**arguments, _request_timeout=60)
            except (client.ApiException, HTTPError) as error:
                if isinstance(error, client.ApiException) and error.status in (400, 404, 409, 422):
                    raise
                print(f"{error}", file=sys.stderr, flush=True)
                time.sleep(pause)
        return call(**arguments, _request_timeout=60)

    def create(self, workflow: Raw) -> str:
        made = self.ask(self.api.create_namespaced_custom_object, **self.place, plural="workflows", body=workflow)
        return str(made["metadata"]["name"])

    def listed(self, label: str) -> list[Raw]:
        call = self.api.list_namespaced_custom_object
        found: list[Raw] = self.ask(call, **self.place, plural="workflows", label_selector=label)["items"]
        return found

    def delete(self, name: str) -> None:
        self.ask(self.api.delete_namespaced_custom_object, **self.place, plural="workflows", name=name)

    def replace_template(self, template: Raw) -> None:
        """Create a WorkflowTemplate or ClusterWorkflowTemplate anew."""
        name, cluster = template["metadata"]["name"], template["kind"].startswith("Cluster")
        plural = "clusterworkflowtemplates" if cluster else "workflowtemplates"
        kind = "cluster" if cluster else "namespaced"
        place = {key: value for key, value in self.place.items() if not (cluster and key == "namespace")}
        with contextlib.suppress(client.ApiException):
            self.ask(getattr(self.api, f"delete_{kind}_custom_object"), **place, plural=plural, name=name)
        self.ask(getattr(self.api, f"create_{kind}_custom_object"), **place, plural=plural, body=template)


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


def labelled(workflow: Raw, batch: str) -> Raw:
    """What is submitted for it. Finished pods are removed at once, to keep the cluster small."""
    metadata = {key: value for key, value in workflow["metadata"].items() if key != "name"}
    metadata = {
        "generateName": "recorded-",
        **metadata,
        "labels": {**(metadata.get("labels") or {}), "recorded": batch},
    }
    spec = {**workflow["spec"], "podGC": {"strategy": "OnPodCompletion", "deleteDelayDuration": "5s"}}
    return {**workflow, "metadata": metadata, "spec": spec}


def finished(cluster: Cluster, batch: str) -> dict[str, Raw]:
    """The workflows of the batch that have ended."""
    return {
        w["metadata"]["name"]: w
        for w in cluster.listed(f"recorded={batch}")
        if (w.get("status") or {}).get("phase") in ("Succeeded", "Failed", "Error")
    }


class Ledger:
    """What was recorded so far, in a file."""

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


def run(cluster: Cluster, listed: list[Raw], times: int, parallel: int, ledger: Ledger) -> None:
    """Run every workflow until the ledger has ``times`` outcomes of it; None stands for one that did not end."""
    batch = f"b{int(time.time())}"
    waiting = [w for done in range(times) for w in listed if len(ledger.outcomes(w)) <= done]
    total, running = len(waiting), {}
    while waiting or running:
        while waiting and len(running) < parallel:
            workflow = waiting.pop(0)
            running[cluster.create(labelled(workflow, batch))] = (workflow, time.monotonic() + PATIENCE)
        time.sleep(2)
        ended = finished(cluster, batch)
        for name, (workflow, deadline) in list(running.items()):
            if name not in ended and time.monotonic() < deadline:
                continue
            ledger.add(workflow, of_workflow(ended[name]) if name in ended else None)
            del running[name]
            cluster.delete(name)
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


def record_random(cluster: Cluster, count: int, number: int, parallel: int, ledger: Ledger) -> None:
    """Write data/random.jsonl: a line of counts, then a workflow and its outcome per line."""
    listed = generate(count, number)
    run(cluster, listed, 2, parallel, ledger)
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


def record_files(cluster: Cluster, names: list[str], parallel: int, ledger: Ledger) -> None:
    """Write data/outcomes.json for data/workflows/*.yaml (or those named)."""
    files = sorted((DATA / "workflows").glob("*.yaml"))
    files = [file for file in files if not names or file.stem in names]
    listed = []
    for file in files:
        documents = list(yaml.safe_load_all(file.read_text()))
        listed += [document for document in documents if document["kind"] == "Workflow"]
        for template in (document for document in documents if document["kind"] != "Workflow"):
            cluster.replace_template(template)
    run(cluster, listed, 1, parallel, ledger)
    path = DATA / "outcomes.json"
    known: dict[str, Outcome] = json.loads(path.read_text()) if path.exists() else {}
    for file, workflow in zip(files, listed, strict=True):
        outcome = ledger.outcomes(workflow)[0]
        if outcome is not None:
            known[file.stem] = compact(outcome)
        else:
            known.pop(file.stem, None)
            print(f"{file.stem}: it did not end")
    lines = [f"{json.dumps(name)}: {json.dumps(known[name], sort_keys=True)}" for name in sorted(known)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


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
        record_random(Cluster(), args.count, args.seed, args.parallel, Ledger(args.ledger))
    else:
        record_files(Cluster(), args.names, args.parallel, Ledger(args.ledger))


if __name__ == "__main__":
    sys.exit(main())
