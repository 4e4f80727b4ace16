"""The benchmark pipeline as it compiles: every arm a valid run, one after another, whatever became of the one before."""

from __future__ import annotations

import argparse
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hera.workflows import Workflow

from steps.repeats import repetition
from trainer.config import RunConfig, build
from trainer.errors import ConfigurationError
from trainer.faults import schedule
from trainer.paths import RunPaths
from workflows import arms, benchmark, benchmarkrun, local, localrun
from workflows.compiling import TEMPLATES, author, to_yaml
from workflows.local import Options
from workflows.submission import authored_benchmark

PLACEMENT = {"image": "i", "queue": "", "node-cpus": "", "node-memory-gib": "0", "node-shm-gib": "0"}
TAG = re.compile(r"\{\{([^}]+)\}\}")


def committed(table: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((TEMPLATES / f"benchmark-{table}.yaml").read_text())
    return found


def template(workflow: dict[str, Any], name: str) -> dict[str, Any]:
    return next(item for item in workflow["spec"]["templates"] if item["name"] == name)


def values(task: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["value"] for item in task.get("arguments", {}).get("parameters", [])}


@pytest.mark.parametrize("table", arms.tables())
def test_names_arguments_and_tags_fit_together(table: str) -> None:
    workflow = committed(table)
    shared = {item["name"] for item in workflow["spec"]["arguments"]["parameters"]}
    for item in workflow["spec"]["templates"]:
        own = {one["name"] for one in item.get("inputs", {}).get("parameters", [])}
        for task in item.get("dag", {}).get("tasks", []):
            wanted = template(workflow, task["template"]).get("inputs", {}).get("parameters", [])
            assert set(values(task)) == {one["name"] for one in wanted}, task["name"]
        for tag in TAG.findall(yaml.safe_dump(item)):
            scope, _, rest = tag.partition(".parameters.")
            assert scope not in ("workflow", "inputs") or rest in (shared if scope == "workflow" else own), tag


@pytest.mark.parametrize("table", arms.tables())
def test_a_step_gets_every_flag_once_and_its_arm_s_values(table: str) -> None:
    """The train step's arguments, with an arm's parameters filled in, make the configuration of the arm's table."""
    workflow, experiments = committed(table), arms.load(table)
    shared = {item["name"]: str(item["value"]) for item in workflow["spec"]["arguments"]["parameters"]}
    words = template(workflow, "train")["container"]["args"]
    tasks = {task["name"]: values(task) for task in template(workflow, "benchmark")["dag"]["tasks"]}
    for name in experiments.names:
        filled = {f"inputs.parameters.{key}": value for key, value in tasks[f"arm-{name}"].items()}
        filled |= {f"workflow.parameters.{key}": value for key, value in shared.items()}
        made = {}
        for word in words:
            flag, _, text = word.removeprefix("--").partition("=")
            for _ in range(2):  # an argument may itself hold a tag
                for tag in TAG.findall(text):
                    text = text.replace(f"{{{{{tag}}}}}", filled.get(tag, f"{{{{{tag}}}}}"))
            if flag.replace("-", "_") in RunConfig.model_fields:
                assert flag not in made
                made[flag] = text
        rate = made.pop("storage-bytes-per-second")
        assert experiments.storage is None or rate in ("0", "{{tasks.storage-rate.outputs.parameters.bytes-per-second}}")
        config = build({key.replace("-", "_"): text for key, text in made.items()})
        assert config == experiments.config(name)


def test_the_arms_run_one_after_another_whatever_becomes_of_one() -> None:
    tasks = template(committed("laptop"), "benchmark")["dag"]["tasks"]
    order = [task["name"] for task in tasks if task["template"] == "arm"]
    assert order[0] == "arm-bare" and len(order) == len(arms.load("laptop").arms)
    depends = {task["name"]: task.get("depends", "") for task in tasks}
    assert depends["storage-rate"] == "arm-bare"
    for before, after in pairwise(order):
        assert depends[after] == f"storage-rate && ({before} || {before}.Failed || {before}.Errored)"
    assert f"{order[-1]}.Omitted" in depends["report"]


def test_the_faults_are_the_published_ones() -> None:
    """On p5 by the seed's own schedule; in small the same steps, scaled; in every arm the same."""
    wide = arms.load("p5")
    published = [fault.step for fault in schedule(wide.config("in-process"))]
    assert published == [62, 239, 574, 1320, 1529]
    for table in map(arms.load, arms.tables()):
        recipe = table.config("in-process")
        assert [fault.step for fault in schedule(recipe)] == [round(step * recipe.max_steps / 2000) for step in published]
        assert recipe.checkpoint_interval_steps == recipe.max_steps // 4
        plans = {schedule(table.config(name)) for name in table.names if table.config(name).fault_count}
        assert len(plans) == 1
        assert table.storage is None or table.storage.interval_steps == recipe.checkpoint_interval_steps


def test_repetitions_alternate() -> None:
    table = arms.load("laptop")
    assert ("best-again", 1) in table.order() and ("best-again", 1) not in table.order(3)
    again = table.order(3)[len(table.arms) - 1 :]
    assert [name for name, _ in again] == ["best", "in-process", "in-process", "best"]
    assert [number for _, number in again] == [2, 2, 3, 3]
    names = [task["name"] for task in template(yaml.safe_load(to_yaml("benchmark", repetitions=3)), "benchmark")["dag"]["tasks"]]
    assert names[-5:] == ["arm-best-2", "arm-in-process-2", "arm-in-process-3", "arm-best-3", "report"]


@pytest.mark.parametrize("table", arms.tables())
def test_what_a_snapshot_costs_is_measured_where_one_is_taken(table: str) -> None:
    experiments = arms.load(table)
    taking = {name for name in experiments.names if experiments.config(name).snapshot_interval_steps}
    assert not taking or taking & set(experiments.fit)


def test_the_report_and_the_release_know_every_run() -> None:
    workflow = committed("laptop")
    names = [f"{{{{workflow.parameters.run-id}}}}-{name}" for name in arms.load("laptop").names]
    words = template(workflow, "report")["container"]["args"]
    assert [word.partition("=")[0] for word in words if not word.startswith("--")] == names
    assert template(workflow, "release")["container"]["args"][-len(names) :] == names


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arms": [{"name": "bare", "recovery": "magic"}]}, "--recovery"),
        ({"arms": [{"name": "bare", "colour": "red"}]}, "colour is not a setting"),
        ({"arms": [{"name": "sync-100"}]}, "which repetition of its arm"),
        ({"arms": [{"name": "bare"}, {"name": "bare"}]}, "name of its own"),
        ({"fit": ["other"]}, "no arm 'other'"),
        ({"arms": [{"name": "bare", "published": "other"}]}, "no published arm 'other'"),
        ({"arms": []}, "validation error"),
        ({"arms": [{"name": "a-name-that-makes-run-ids-longer-than-forty"}]}, "--run-id"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(yaml.safe_dump({"title": "t", "common": {}, "arms": [{"name": "bare"}]} | change))
    with pytest.raises(ConfigurationError, match=reason):
        arms.load(str(path))


def test_a_table_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigurationError, match="headline, laptop, p5"):
        arms.load("other")


def test_what_arms_differ_in_is_no_flag_of_the_benchmark() -> None:
    with pytest.raises(ConfigurationError, match="--recovery is what the arms"):
        authored_benchmark("laptop", 1, {"recovery": "none"}, PLACEMENT)
    run_id, workflow = authored_benchmark("laptop", 1, {"run_id": "b7", "seed": "7"}, PLACEMENT)
    given = {item["name"]: item["value"] for item in workflow.to_dict()["spec"]["arguments"]["parameters"]}
    assert (run_id, given["run-id"], given["seed"], given["image"]) == ("b7", "b7", "7", "i")
    assert "recovery" not in given


def test_an_id_that_only_a_repetition_makes_too_long_is_refused_before_the_first_arm() -> None:
    longest = max(len(name) for name in arms.load("headline").names)
    run_id = "b" * (40 - longest - 1)
    authored_benchmark("headline", 1, {"run_id": run_id}, PLACEMENT)
    with pytest.raises(ConfigurationError, match="--run-id"):
        authored_benchmark("headline", 5, {"run_id": run_id}, PLACEMENT)


def test_a_local_benchmark_refuses_before_it_begins(tmp_path: Path) -> None:
    args = argparse.Namespace(experiments="laptop", repetitions=1, max_steps="9")
    with pytest.raises(ConfigurationError, match="--max-steps"):
        benchmarkrun.main(args, Options(root=tmp_path / "fsx"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("table", arms.tables())
def test_the_local_engine_takes_it(tmp_path: Path, table: str) -> None:
    experiments = arms.load(table)
    changes = localrun.localised({}, tmp_path)
    config = experiments.config("bare", changes)
    file = tmp_path / "workflow.yaml"
    file.write_text(to_yaml("benchmark", table=table))
    plan = local.load(file, benchmark.arguments(experiments, config, "bench"))
    assert plan is not None


def test_hera_builds_what_is_committed() -> None:
    assert author("benchmark", Workflow, "laptop").to_dict() == committed("laptop")


def test_run_ids_are_paths_below_the_root() -> None:
    assert RunPaths(Path("fsx"), arms.run_name("benchmark", "best", 2)).run == Path("fsx/runs/benchmark-best-2")
    assert [repetition(arms.run_name("sets-3", "best", number)) for number in range(1, 12)] == [*range(1, 12)]
