"""The report of a run: the three files, what they say, and that they are made whatever state the run is in."""

from __future__ import annotations

import json
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from simulated_run import SimulatedRun, write_run

from steps import report
from trainer import events
from trainer.config import RunConfig
from trainer.errors import ConfigurationError
from trainer.paths import RunPaths
from trainer.records import (
    CheckpointVerdict,
    DatasetManifest,
    FileRecord,
    Outcome,
    RunReport,
    ValidationReport,
)

VOID = {"meta", "br", "path", "rect", "img", "link", "hr"}


class Page(HTMLParser):
    """Reads a page strictly: every element closed in its order; collects the elements and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID or (tag in ("path", "rect") and not self.get_starttag_text().endswith("/>")):  # type: ignore[union-attr]
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


def trained(max_steps: int = 20, **settings: object) -> tuple[SimulatedRun, RunConfig]:
    """Twenty steps with a checkpoint each five, an exception and a killed process."""
    run = SimulatedRun(**settings)  # type: ignore[arg-type]
    run.launch()
    run.begin(0, "startup", tier="none")
    while run.done < max_steps:
        if run.index == 0 and run.done == 7:
            run.fault("exception")
            run.restart("in_process", 5)
        elif run.index == 1 and run.done == 13:
            run.fault("sigkill")
            run.restart("in_job", 10)
        else:
            run.step(1.0)
            if run.done % 5 == 0:
                run.commit()
    run.emit("supervisor_end", role="supervisor", exit_code=0, message="")
    return run, RunConfig(max_steps=max_steps, warmup_steps=1, checkpoint_interval_steps=5)


def make(paths: RunPaths, *more: str) -> RunReport:
    assert report.main(["--root", str(paths.root), "--run-id", paths.run_id, *more]) == 0
    return RunReport.read(paths.report("json"))


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return write_run(trained()[0], tmp_path, trained()[1])


def test_a_complete_run(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    found = make(paths)
    assert found.complete and found.incomplete_reason == ""
    assert found.steps_completed == 20 and found.lost_steps == 5 and found.committed_steps_lost == 0
    assert found.restarts.in_process == found.restarts.in_job == 1
    parts = found.breakdown_seconds.model_dump()
    assert sum(parts.values()) == pytest.approx(found.wall_seconds, rel=0.01) and parts["other"] <= 0.02 * found.wall_seconds
    said = capsys.readouterr().out
    assert "survived 2 faults" in said and "nothing that was committed was lost" in said
    assert paths.output("report", "goodput").read_text() == f"{found.training_goodput:.4f}"
    assert paths.output("report", "faults").read_text() == "2"
    assert paths.output("report", "lost-steps").read_text() == "5"


def test_the_page_stands_alone(paths: RunPaths) -> None:
    """One well-formed file that asks the network for nothing, with a title on all that can be pointed at."""
    make(paths)
    text = paths.report("html").read_text()
    page = Page(text)
    tags = [tag for tag, _ in page.elements]
    assert not {"script", "link", "iframe", "img", "object", "embed", "base"} & set(tags)
    assert "http:" not in text and "https:" not in text and "url(" not in text and "@import" not in text
    assert all("src" not in attrs and "href" not in attrs for _, attrs in page.elements)
    assert tags.count("svg") == 4 + 2  # timeline, progress, breakdown, loss, and a bar for each fault
    bars = [attrs for tag, attrs in page.elements if tag == "rect"]
    assert tags.count("title") >= len(bars) + 1
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text


def test_the_page_and_the_markdown_say_what_the_record_says(paths: RunPaths) -> None:
    found = make(paths)
    page, markdown = Page(paths.report("html").read_text()), paths.report("md").read_text()
    for text in (page.text, markdown):
        assert report.headline(found) in text
        for name, value, _ in report.facts(found):
            assert name in text and value in text
        for fault in found.faults:
            assert fault.kind in text and fault.recovered_by.replace("_", "-") in text
    rows = [line for line in markdown.splitlines() if line.startswith("| 1 |") or line.startswith("| 2 |")]
    assert len(rows) == 2 and all(row.count("|") == rows[0].count("|") for row in rows)


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "a | b\nc", "{{ 7*7 }}", "'\"&"])
def test_text_from_a_run_cannot_break_out(tmp_path: Path, text: str) -> None:
    run, config = trained()
    run.events = [e.model_copy(update={"data": e.data | {"kind": text}}) if e.event == "fault_injected" else e for e in run.events]
    paths = write_run(run, tmp_path, config, versions={text: text})
    ValidationReport(
        run_id="run", newest_valid_step=None,
        verdicts=(CheckpointVerdict(step=5, path="x", valid=False, checks=(), reason=text),),
    ).write(paths.validation)  # fmt: skip
    make(paths)
    html = paths.report("html").read_text()
    page = Page(html)
    assert text in page.text and "<script>" not in html
    rows = [line for line in paths.report("md").read_text().splitlines() if line.startswith(("| 1 |", "| 5 |"))]
    assert [row.replace("\\|", "").count("|") for row in rows] == [16, 6]


def test_a_run_that_failed_says_why(tmp_path: Path) -> None:
    run = SimulatedRun()
    run.launch()
    run.begin(0, "startup", tier="none")
    for _ in range(4):
        run.step()
    run.fault("sigkill")
    run.emit("supervisor_end", role="supervisor", exit_code=76, message="")
    paths = write_run(run, tmp_path, RunConfig())
    Outcome(exit_code=76, message="5 restarts in a row got no further than step 4", rank=0).write(paths.outcome(1, 0, 0, 0))
    found = make(paths)
    assert not found.complete
    assert "exit code 76" in found.incomplete_reason and "no further than step 4" in found.incomplete_reason
    text = Page(paths.report("html").read_text()).text
    assert "not complete" in text and "4 of 100 steps" in text and "no further than step 4" in text


@pytest.mark.parametrize("count", [0, 1, 2, 8, 30])
def test_a_run_in_any_state_is_reported(tmp_path: Path, count: int) -> None:
    run, config = trained()
    run.events = run.events[:count]
    paths = write_run(run, tmp_path, config)
    found = make(paths)
    assert not found.complete and found.incomplete_reason
    Page(paths.report("html").read_text())
    assert sum(found.breakdown_seconds.model_dump().values()) == pytest.approx(found.wall_seconds)


def test_a_run_whose_last_step_is_not_committed_is_not_complete(tmp_path: Path) -> None:
    run, config = trained()
    run.events = [e for e in run.events if not (e.event == "commit" and e.data["step"] == 20) and e.role != "supervisor"]
    found = make(write_run(run, tmp_path, config))
    assert found.steps_completed == 20 and not found.complete and "not committed" in found.incomplete_reason


def test_a_last_commit_that_nobody_told_of_is_the_supervisors_word(tmp_path: Path) -> None:
    """Rank 0 died between the rename of its last checkpoint and the event of it; what came after had nothing left to do."""
    run, config = trained()
    run.events = [e for e in run.events if not (e.event == "commit" and e.data["step"] == 20) and e.role != "supervisor"]
    paths = write_run(run, tmp_path, config)
    paths.finished.write_text("20")
    assert make(paths).complete


def test_torn_lines_are_left_out(paths: RunPaths) -> None:
    for path in paths.events.glob("*-trainer-*"):
        path.write_bytes(path.read_bytes()[:-15])
    assert make(paths).steps_completed in (19, 20)


def test_effective_goodput_needs_a_bare_run(paths: RunPaths) -> None:
    assert make(paths).effective_goodput is None
    bare = SimulatedRun()
    bare.launch()
    bare.begin(0, "startup")
    for _ in range(9):
        bare.step(0.5)
    write_run(bare, paths.root, RunConfig(run_id="bare"))
    found = make(paths, "--bare-run", "bare")
    assert found.effective_goodput == pytest.approx(20 * 0.5 / found.wall_seconds)
    assert paths.output("report", "goodput").read_text() == f"{found.effective_goodput:.4f}"
    assert "effective goodput" in paths.report("md").read_text()


@pytest.mark.parametrize("arguments", [["--run-id", "other"], ["--run-id", "run", "--bare-run", "other"]])
def test_a_run_that_does_not_exist_is_the_users_error(paths: RunPaths, arguments: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="there is no run 'other'"):
        report.main(["--root", str(paths.root), *arguments])


def test_a_bare_run_without_steps_is_refused(paths: RunPaths) -> None:
    write_run(SimulatedRun(), paths.root, RunConfig(run_id="bare"))
    with pytest.raises(ConfigurationError, match="no completed step"):
        report.main(["--root", str(paths.root), "--run-id", "run", "--bare-run", "bare"])


def test_validation_is_counted_and_shown(paths: RunPaths) -> None:
    verdicts = (
        CheckpointVerdict(step=20, path="step-00000020", valid=True, checks=("sha256",), loss=2.5),
        CheckpointVerdict(step=15, path="step-00000015", valid=False, checks=(), reason="__0_0.distcp is missing"),
        CheckpointVerdict(step=-1, path=".tmp-1", valid=False, checks=(), reason="never finished", kind="stray"),
    )
    ValidationReport(run_id="run", verdicts=verdicts, newest_valid_step=20).write(paths.validation)
    found = make(paths)
    assert (found.validation.valid, found.validation.invalid) == (1, 1)
    assert "__0_0.distcp is missing" in paths.report("md").read_text()


def test_a_validation_that_cannot_be_read_keeps_no_report_from_being_made(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    paths.validation.write_text("{")
    assert make(paths).validation.valid == 0
    assert "validation.json" in capsys.readouterr().err


def test_the_ledger_knows_the_datasets_epochs(tmp_path: Path) -> None:
    """72 samples of a dataset of 48: without the dataset's size, an epoch's end would look like a repeat."""
    run, config = trained(max_steps=9, samples=48)
    tokens = 48 * config.sequence_length + 1  # one sample in a hundred is held out: of 48, none
    directory = tmp_path / "datasets" / "small"
    directory.mkdir(parents=True)
    (directory / "shard").write_bytes(bytes(tokens))
    DatasetManifest(
        source="", revision="", tokenizer="byte", vocabulary_size=257, dtype="uint8", documents=1, digest="",
        tokens=tokens, shards=(FileRecord(name="shard", size=tokens, sha256=""),),
    ).write(directory / "manifest.json")  # fmt: skip
    paths = write_run(run, tmp_path, config, dataset=str(directory), hardware={"peak_flops": 1e12})
    found = make(paths)
    assert (found.data_continuity.repeated, found.data_continuity.skipped) == (0, 0)
    assert found.throughput.mfu is not None and 0 < found.throughput.mfu < 1
    assert "MFU" in paths.report("md").read_text()


def test_a_large_run_is_reported_fast(tmp_path: Path) -> None:
    """500 steps on 16 ranks in a few seconds of one core, and in a page that is no burden."""
    run = SimulatedRun(nodes=2, per_node=8, batch=16)
    run.launch()
    run.begin(0, "startup", tier="none")
    for _ in range(500):
        run.step(1.0, stall=0.01)
    paths = write_run(run, tmp_path, RunConfig(nodes=2, gpus_per_node=8, global_batch_size=16, micro_batch_size=1, max_steps=500))
    assert sum(1 for _ in events.read(paths.events)) > 30_000
    began = time.process_time()
    found = make(paths)
    assert time.process_time() - began < 15
    assert found.steps_completed == 500
    assert paths.report("html").stat().st_size < 400_000
    assert json.loads(paths.report("json").read_text())["steps_completed"] == 500
