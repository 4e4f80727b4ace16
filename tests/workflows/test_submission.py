"""``run.py submit``: what is handed over, and how an ended workflow becomes an exit code. The way through a real server
is in tests/cluster."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.errors import ConfigurationError
from workflows.parameters import PLACEMENT, arguments, cluster_config
from workflows.submission import authored, check, exit_code
from workflows.training import training_pipeline

DEFAULT_PLACEMENT = {name: value for name, (value, _) in PLACEMENT.items()}


def test_the_submitted_workflow_is_the_committed_one_but_for_its_values() -> None:
    config = cluster_config(run_id="mine", nodes=2, global_batch_size=16, max_steps=40)
    made = authored(config, DEFAULT_PLACEMENT | {"image": "repository/holdfast:1"}).to_dict()
    committed = training_pipeline().to_dict()
    values = {item["name"]: item["value"] for item in made["spec"].pop("arguments")["parameters"]}
    committed["spec"].pop("arguments")
    assert made == committed
    assert values == DEFAULT_PLACEMENT | {"image": "repository/holdfast:1"} | arguments(config)


@pytest.mark.parametrize("name", ["node-memory-gib", "node-shm-gib"])
def test_placement_is_checked_before_it_leaves(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--{name}"):
        check(cluster_config(), DEFAULT_PLACEMENT | {name: "much"})


def test_a_model_that_cannot_fit_is_refused_with_the_number_of_nodes() -> None:
    wide = {"global_batch_size": 8, "micro_batch_size": 1, "sequence_length": 32768}
    config = cluster_config(profile="g5", gpus_per_node=8, model="llama-3.1-8b", **wide)
    with pytest.raises(ConfigurationError, match=r"needs at least .* use --nodes \d+"):
        check(config, DEFAULT_PLACEMENT)


def ended(phase: str, *pods: tuple[str, str, str | None]) -> dict[str, Any]:
    """A workflow's JSON with pods as (phase, finishedAt, exit code)."""
    nodes: dict[str, Any] = {"dag": {"type": "DAG", "phase": phase, "finishedAt": "2030-01-01T00:00:00Z"}}
    for number, (pod_phase, finished, code) in enumerate(pods):
        nodes[f"pod-{number}"] = {"type": "Pod", "phase": pod_phase, "finishedAt": finished}
        if code is not None:
            nodes[f"pod-{number}"]["outputs"] = {"exitCode": code}
    return {"status": {"phase": phase, "nodes": nodes}}


@pytest.mark.parametrize(
    ("workflow", "code"),
    [
        (ended("Succeeded", ("Failed", "2026-01-01T00:00:00Z", "75"), ("Succeeded", "2026-01-01T00:01:00Z", "0")), 0),
        (ended("Failed", ("Failed", "2026-01-01T00:00:00Z", "75"), ("Failed", "2026-01-01T00:01:00Z", "76")), 76),
        (ended("Failed", ("Failed", "2026-01-01T00:00:00Z", "137")), 75),
        (ended("Error", ("Error", "2026-01-01T00:00:00Z", None)), 75),
        (ended("Failed"), 75),
    ],
)
def test_the_last_failure_is_the_exit_code(workflow: dict[str, Any], code: int) -> None:
    assert exit_code(workflow) == code
