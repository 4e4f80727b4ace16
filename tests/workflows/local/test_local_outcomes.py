"""The engine against a real controller: Argo's own examples where they are at hand, this project's workflows, random ones.

The outcomes were recorded with ``record_local_outcomes``; phases and nodes must be the same, path by path.
"""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from local_outcomes import Outcome, differences, of_workflow
from local_runs import PROJECT

from workflows import local

DATA = Path(__file__).with_name("data")
ARGO = Path(os.environ.get("ARGO_EXAMPLES") or PROJECT.parent / "shared" / "argo")
EXAMPLES: dict[str, Any] = json.loads((ARGO / "outcomes.json").read_text()) if (ARGO / "outcomes.json").exists() else {}
RECORDED: dict[str, Outcome] = json.loads((DATA / "outcomes.json").read_text())
SLOW = {"dag-disable-failFast", "loops-param-result", "step-level-timeout"}
"""Examples that sleep: they run side by side with the others."""


def outcome_of(path: Path, root: Path) -> Outcome:
    result = local.run(local.load(path), local.Options(root=root, display="quiet"))
    return of_workflow(json.loads(result.workflow_json.read_text()))


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The outcomes of Argo's examples here."""
    if not EXAMPLES:
        pytest.skip("Argo's examples and outcomes.json are not beside the project (or where ARGO_EXAMPLES says)")
    root = tmp_path_factory.mktemp("examples")
    ordered = sorted(EXAMPLES, key=lambda name: name not in SLOW)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda name: outcome_of(ARGO / "examples" / f"{name}.yaml", root), ordered)
        return dict(zip(ordered, found, strict=True))


def test_examples_come_out_as_on_a_real_controller(examples: dict[str, Outcome]) -> None:
    wrong = {
        name: differences(expected, examples[name])
        for name, expected in EXAMPLES.items()
        if not expected.get("by_chance") and differences(expected, examples[name])
    }
    assert wrong == {}


def test_examples_of_chance_follow_from_what_they_saw(examples: dict[str, Outcome]) -> None:
    by_chance = [name for name, expected in EXAMPLES.items() if expected.get("by_chance")]
    assert by_chance
    for name in by_chance:
        check_retries(examples[name])
        check_branches(examples[name])


def check_retries(outcome: Outcome) -> None:
    """Every attempt but the last failed; the Retry node ends as its last attempt did."""
    nodes = {node["path"]: node for node in outcome["nodes"]}
    for path, node in nodes.items():
        if node["type"] != "Retry":
            continue
        attempts = [nodes[f"{path}({n})"] for n in range(len(nodes)) if f"{path}({n})" in nodes]
        assert attempts and all(attempt["phase"] == "Failed" for attempt in attempts[:-1])
        assert node["phase"] == attempts[-1]["phase"] and node["exit_code"] == attempts[-1]["exit_code"]
        if "expression" in node.get("message", ""):
            assert attempts[-1]["exit_code"] == "1", "retry-conditional goes on while the code is greater than 1"
            assert all(int(attempt["exit_code"]) > 1 for attempt in attempts[:-1])


def check_branches(outcome: Outcome) -> None:
    """A step that was skipped says which comparison was false, and it is; of a coin's two sides one ran."""
    for node in outcome["nodes"]:
        match = re.fullmatch(r"when '(\w+) (==|=~) (\w+)' evaluated false", node.get("message", ""))
        if match:
            left, operator, right = match.groups()
            assert not (left == right if operator == "==" else right in left)
    sides = [node for node in outcome["nodes"] if re.fullmatch(r"WF(\[1\]\.tails)*\[1\]\.(heads|tails)", node["path"])]
    flips = {
        node["path"][: -len("[0].flip-coin")]: node["result"]
        for node in outcome["nodes"]
        if node["path"].endswith("[0].flip-coin")
    }
    for node in sides:
        above, side = node["path"].rsplit("[1].", 1)
        assert (node["phase"] != "Skipped") == (flips[above] == side)


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_own_workflows_come_out_as_on_a_real_controller(name: str, tmp_path: Path) -> None:
    assert differences(RECORDED[name], outcome_of(DATA / "workflows" / f"{name}.yaml", tmp_path)) == []


def test_every_own_workflow_was_recorded() -> None:
    if not RECORDED:
        pytest.skip("nothing recorded yet: run record_local_outcomes.py on a cluster with Argo")
    assert {file.stem for file in (DATA / "workflows").glob("*.yaml")} == set(RECORDED)


def test_random_workflows_come_out_as_on_a_real_controller(tmp_path: Path) -> None:
    if not (DATA / "random.jsonl").exists():
        pytest.skip("nothing recorded yet: run record_local_outcomes.py random on a cluster with Argo")
    lines = (DATA / "random.jsonl").read_text().splitlines()
    counts, cases = json.loads(lines[0]), [json.loads(line) for line in lines[1:]]
    assert counts["kept"] == len(cases) >= 150

    def check(number: int) -> list[str]:
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(cases[number]["workflow"]))
        return differences(cases[number]["outcome"], outcome_of(path, tmp_path / "root"))

    with ThreadPoolExecutor(4) as pool:
        wrong = {number: found for number, found in enumerate(pool.map(check, range(len(cases)))) if found}
    assert wrong == {}
