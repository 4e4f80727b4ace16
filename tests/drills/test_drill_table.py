"""The drill table is made, and every line of it is as it should be."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from steps.goodput import Expectation, analyse
from tests.drills import table
from trainer.records import Breakdown

FASTEST = {
    "exception": {"combined": "in-process", "in-process": "in-process", "in-job": "in-job", "none": "pod"},
    "sigkill": {"combined": "in-job", "in-process": "pod", "in-job": "in-job", "none": "pod"},
    "node": dict.fromkeys(table.MODES, "pod"),
}


def test_the_table(tmp_path: Path) -> None:
    trainer, before = table.Trainer.prepare(tmp_path), os.getloadavg()[0]
    try:
        rows = table.run(trainer, tmp_path, [*table.cases(table.MODES, table.KINDS, 3)])
    finally:
        trainer.end()
    output = table.REPOSITORY / "benchmarks" / "drills.md"
    output.parent.mkdir(exist_ok=True)
    output.write_text(table.document(rows, "make drills", (before, os.getloadavg()[0])))
    assert {row.verdict for row in rows} == {"equal"}, rows
    for row in rows:
        if row.case.kind in FASTEST:
            assert row.layers == FASTEST[row.case.kind][row.case.recovery], row


@pytest.mark.parametrize(
    ("case", "seconds", "within"),
    [
        (table.Case("combined", "exception", 1, 3), 2.4, "yes (2.5)"),
        (table.Case("combined", "exception", 1, 3), 2.5, "NO (2.5)"),
        (table.Case("in-job", "exception", 1, 3), 2.4, "-"),
        (table.Case("in-job", "hang", 1, 3), 7.4, "yes (7.5)"),
        (table.Case("none", "node", 2, 3), 12.0, "yes (20)"),
        (table.Case("none", "node", 1, 3), 12.0, "NO (10)"),
        (table.Case("combined", "oom", 1, 3), 1.0, "-"),
        (table.Case("combined", "sigkill", 1, 3), 0.0, "NO (2.5)"),
    ],
)
def test_seconds_are_compared_with_their_target(case: table.Case, seconds: float, within: str) -> None:
    row = table.Row(case, "-", 0.1, seconds, seconds, 0, "equal")
    assert row.within == within
    assert dict(zip(table.HEAD, row.cells(), strict=True))["within target (s)"] == within


@pytest.mark.parametrize(("wall", "other", "told"), [(100.0, 2.0, ""), (102.0, 2.0, "sum to 100.00 s"), (99.1, 0.0, ""), (98.0, 0.0, "sum"), (100.0, 2.1, "in no")])
def test_time_that_nothing_explains_is_said(wall: float, other: float, told: str) -> None:
    parts = dict.fromkeys(Breakdown.model_fields, 0.0) | {"productive": 100.0 - other, "other": other}
    analysis = replace(analyse([], Expectation(10, 8)), wall_seconds=wall, breakdown=Breakdown(**parts))
    words = table.unexplained(analysis)
    assert told in words and bool(told) == bool(words)
