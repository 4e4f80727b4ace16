"""Writes benchmarks/local-engine.md: every workflow whose outcome on a real controller is known, and what becomes of it here.

    python tests/workflows/local/compare_local_outcomes.py [--argo DIRECTORY]...

A ``--argo`` directory has ``outcomes.json`` and ``examples/`` with files of Argo's own, which this project does not keep.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from local_outcomes import Outcome, differences, run_side_by_side

DATA = Path(__file__).with_name("data")
PAGE = Path(__file__).parents[3] / "benchmarks" / "local-engine.md"
HEAD = """# The local engine beside Argo's controller

Made by `python tests/workflows/local/compare_local_outcomes.py --argo DIRECTORY`. Each workflow ran on a real controller (Argo Workflows
4.0.5, Kubernetes 1.34.4) and on the local engine. *same* means: the same phase, and the same set of nodes with path, type, phase,
template, inputs, exit code, result and output parameters. Of nodes that timed out only the phase counts; of examples that
toss a coin only that they end.

The engine's own cost, on two cores beside an idle cluster (2026-11-30, one run, `test_local_scale.py`): a DAG of 1,000 `true` takes 7.6 s from
the command to the end (9.6 s of CPU time, 49 MiB of memory at most, PSS of all processes; 1,000 `true` one after another: 1.3 s), one of
5,000 takes 33.5 s (44.1 s, 103 MiB).

| workflow | nodes | on the controller | here | |
|---|---|---|---|---|
"""


def rows(expected: Mapping[str, Outcome], files: Mapping[str, Path], what: str, root: Path) -> Iterator[str]:
    """A line per workflow."""
    found = run_side_by_side(files, root)
    for name, outcome in expected.items():
        here = found[name]
        same = "by chance" if outcome.get("by_chance") else "differs" if differences(outcome, here) else "same"
        yield f"| {what}{name} | {len(outcome['nodes'])} | {outcome['phase']} | {here['phase']} | {same} |"


def random_row(root: Path) -> str:
    lines = (DATA / "random.jsonl").read_text().splitlines()
    counts: dict[str, Any] = json.loads(lines[0])
    cases = [json.loads(line) for line in lines[1:]]
    files = {str(number): root / f"{number}.json" for number in range(len(cases))}
    for name, path in files.items():
        path.write_text(json.dumps(cases[int(name)]["workflow"]))
    found = run_side_by_side(files, root / "random", at_a_time=4)
    same = sum(not differences(case["outcome"], found[str(number)]) for number, case in enumerate(cases))
    phases = [case["outcome"]["phase"] for case in cases]
    told = ", ".join(f"{phases.count(phase)} {phase}" for phase in ("Succeeded", "Failed", "Error"))
    nodes = sum(len(case["outcome"]["nodes"]) for case in cases)
    dropped = counts["generated"] - counts["kept"]
    return f"\nRandom workflows: {len(cases)} ({told}; {nodes} nodes), the same here: {same}. Dropped since two runs on the controller differed: {dropped}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--argo", type=Path, action="append", default=[], metavar="DIRECTORY")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        root, lines = Path(directory), []
        for number, argo in enumerate(args.argo):
            known = json.loads((argo / "outcomes.json").read_text())
            files = {name: argo / "examples" / f"{name}.yaml" for name in known}
            lines += rows(known, files, "Argo's ", root / str(number))
        own = json.loads((DATA / "outcomes.json").read_text())
        lines += rows(own, {name: DATA / "workflows" / f"{name}.yaml" for name in own}, "", root)
        lines.append(random_row(root))
    PAGE.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
