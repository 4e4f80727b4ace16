"""The drill table is made, and every line of it is as it should be."""

from __future__ import annotations

from pathlib import Path

from tests.drills import table

FASTEST = {
    "exception": {"combined": "in-process", "in-process": "in-process", "in-job": "in-job", "none": "pod"},
    "sigkill": {"combined": "in-job", "in-process": "pod", "in-job": "in-job", "none": "pod"},
    "node": dict.fromkeys(table.MODES, "pod"),
}


def test_the_table(tmp_path: Path) -> None:
    trainer = table.Trainer.prepare(tmp_path)
    try:
        rows = table.run(trainer, tmp_path, [*table.cases(table.MODES, table.KINDS, 3)])
    finally:
        trainer.end()
    output = table.REPOSITORY / "benchmarks" / "drills.md"
    output.parent.mkdir(exist_ok=True)
    output.write_text(table.document(rows, "make drills", (0.0, 0.0)))
    assert {row.verdict for row in rows} == {"equal"}, rows
    for row in rows:
        if row.case.kind in FASTEST:
            assert row.layers == FASTEST[row.case.kind][row.case.recovery], row
