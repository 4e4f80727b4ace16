"""The engine against a real controller: Argo's own examples where they are at hand, this project's workflows, random ones.

The outcomes were recorded with ``record_local_outcomes``; phases and nodes must be the same, path by path.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from local_outcomes import Outcome, differences, run_side_by_side
from local_runs import PROJECT

DATA = Path(__file__).with_name("data")
ARGO = Path(os.environ.get("ARGO_EXAMPLES") or PROJECT.parent / "shared" / "argo")
EXAMPLES: dict[str, Any] = json.loads((ARGO / "outcomes.json").read_text()) if (ARGO / "outcomes.json").exists() else {}
RECORDED: dict[str, Outcome] = json.loads((DATA / "outcomes.json").read_text())


def test_examples_come_out_as_on_a_real_controller(tmp_path: Path) -> None:
    """One test for all, since they run side by side. Those that toss a coin must follow from what they saw."""
    if not EXAMPLES:
        pytest.skip("Argo's examples and outcomes.json are not beside the project (or where ARGO_EXAMPLES says)")
    found = run_side_by_side({name: ARGO / "examples" / f"{name}.yaml" for name in EXAMPLES}, tmp_path)
    by_chance = {name for name, expected in EXAMPLES.items() if expected.get("by_chance")}
    wrong = {name: differences(EXAMPLES[name], found[name]) for name in EXAMPLES.keys() - by_chance}
    assert {name: lines for name, lines in wrong.items() if lines} == {}
    assert by_chance
    for name in by_chance:
        check_retries(found[name])
        check_branches(found[name])


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


def test_own_workflows_come_out_as_on_a_real_controller(tmp_path: Path) -> None:
    files = {file.stem: file for file in sorted((DATA / "workflows").glob("*.yaml"))}
    assert files.keys() == RECORDED.keys(), "record_local_outcomes.py files, on a cluster with Argo"
    found = run_side_by_side(files, tmp_path)
    wrong = {name: differences(expected, found[name]) for name, expected in RECORDED.items()}
    assert {name: lines for name, lines in wrong.items() if lines} == {}


def test_random_workflows_come_out_as_on_a_real_controller(tmp_path: Path) -> None:
    lines = (DATA / "random.jsonl").read_text().splitlines()
    counts, cases = json.loads(lines[0]), [json.loads(line) for line in lines[1:]]
    assert counts["kept"] == len(cases) >= 150
    files = {str(number): tmp_path / f"{number}.json" for number in range(len(cases))}
    for name, path in files.items():
        path.write_text(json.dumps(cases[int(name)]["workflow"]))
    found = run_side_by_side(files, tmp_path / "root", at_a_time=4)
    wrong = {name: differences(cases[int(name)]["outcome"], found[name]) for name in files}
    assert {name: lines for name, lines in wrong.items() if lines} == {}
