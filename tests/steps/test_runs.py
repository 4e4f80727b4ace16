"""Looking at runs: which there are, how far one is, what its processes printed."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from simulated_run import EPOCH, SimulatedRun, write_run

from steps import run_tables, runs
from trainer.config import RunConfig
from trainer.errors import ConfigurationError
from trainer.paths import RunPaths
from trainer.progress import Now
from trainer.records import Outcome


def shown(what: object) -> str:
    console = Console(width=160, record=True, force_terminal=False)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def faulted(*, ended: int | None = None, message: str = "") -> SimulatedRun:
    """Eight steps, a checkpoint at the fifth, one fault; the supervisor has ended with ``ended`` if that is given."""
    run = SimulatedRun()
    run.launch()
    run.begin(0, "startup", tier="none")
    for _ in range(5):
        run.step()
    run.commit()
    run.step()
    run.fault("sigkill")
    run.restart("in_job", 5)
    for _ in range(3):
        run.step()
    if ended is not None:
        run.emit("supervisor_end", role="supervisor", exit_code=ended, message=message)
    return run


def put(root: Path, run_id: str, run: SimulatedRun, **config: object) -> RunPaths:
    paths = write_run(run, root, RunConfig.model_validate({"run_id": run_id, "max_steps": 16} | config))
    if run.done:
        now = Now(furthest=run.done, step=run.done, loss=2.5, tokens_per_second=1234.0)
        paths.furthest.write_text(now.model_dump_json())
    return paths


def now_of(paths: RunPaths, later: float) -> float:
    return runs.last_sign(paths, 0.0) + later


def test_states(tmp_path: Path) -> None:
    running = put(tmp_path, "running", faulted())
    stopped = put(tmp_path, "stopped", faulted(ended=75, message="SIGTERM"))
    failed = put(tmp_path, "failed", faulted(ended=76))
    Outcome(exit_code=76, message="no further than step 8", rank=0).write(failed.outcome(1, 0, 0, 0))
    new = put(tmp_path, "new", SimulatedRun())
    complete = put(tmp_path, "complete", faulted(ended=0), max_steps=8, warmup_steps=1)
    complete.finished.write_text("8")
    found = {paths.run_id: runs.summarise(paths, now_of(paths, 5.0)) for paths in (running, stopped, failed, new, complete)}
    assert {run_id: run.state for run_id, run in found.items()} == {name: name for name in found}
    assert "SIGTERM" in found["stopped"].message
    assert found["failed"].message == "exit code 76: no further than step 8"
    assert (found["running"].step, found["running"].max_steps, found["running"].loss) == (8, 16, 2.5)
    late = runs.summarise(running, now_of(running, 1000.0))
    assert late.state == "silent" and "16 min 40 s" in late.message


def test_the_last_word_of_the_supervisors_counts(tmp_path: Path) -> None:
    """A run that was stopped and goes on is running."""
    run = faulted(ended=75, message="SIGTERM")
    run.now += 60
    run.launch()
    paths = put(tmp_path, "run", run)
    assert runs.summarise(paths, now_of(paths, 1.0)).state == "running"


def test_list_is_newest_first_and_bears_what_is_broken(tmp_path: Path) -> None:
    assert runs.list_runs(tmp_path) == [] and "no runs" in shown(run_tables.render_list([]))
    old = put(tmp_path, "old", faulted())
    record = json.loads(old.record.read_text()) | {"created": EPOCH - 1000}
    old.record.write_text(json.dumps(record))
    put(tmp_path, "new", faulted())
    (tmp_path / "runs" / "only-downloaded").mkdir()
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "run.json").write_text("{")
    found = runs.list_runs(tmp_path)
    assert [run.run_id for run in found] == ["new", "old", "broken"]
    assert found[-1].state == "failed" and "run.json" in found[-1].message
    text = shown(run_tables.render_list(found))
    assert "8/16" in text and "2.5000" in text and "only-downloaded" not in text
    assert json.loads(json.dumps(runs.as_plain(found)))[0]["run_id"] == "new"
    with pytest.raises(ConfigurationError, match="does not exist"):
        runs.list_runs(tmp_path / "nowhere")


def test_status(tmp_path: Path) -> None:
    paths = put(tmp_path, "run", faulted())
    paths.fence.write_text("1")
    for name in ("step-00000005", ".tmp-1", "notes"):
        (paths.checkpoints / name).mkdir(parents=True)
    found = runs.status(paths, now_of(paths, 5.0))
    assert found.checkpoints_on_disk == (5,) and found.attempts == 1 and found.reports == ()
    assert found.restarts.in_job == 1 and found.lost_steps == 1 and found.committed_steps_lost == 0
    assert [fault.kind for fault in found.faults] == ["sigkill"]
    assert found.seconds_left == pytest.approx(found.wall_seconds)  # half of the steps are done
    text = shown(run_tables.render_status(found))
    for words in ("run  running", "8 of 16", "sigkill", "in-job", "on disk: 5", "1 in-job", "left"):
        assert words in text
    plain = json.loads(json.dumps(runs.as_plain(found)))
    assert plain["summary"]["state"] == "running" and plain["faults"][0]["recovered_by"] == "in_job"


def test_status_of_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no run 'other'"):
        runs.status(RunPaths(tmp_path, "other"))


def test_looking_at_a_run_changes_nothing(tmp_path: Path) -> None:
    paths = put(tmp_path, "run", faulted())
    before = sorted((str(path), path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    runs.list_runs(tmp_path)
    runs.status(paths)
    assert sorted((str(path), path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


@pytest.fixture
def logged(tmp_path: Path) -> RunPaths:
    paths = put(tmp_path, "run", faulted())
    for attempt, rank in itertools.product((1, 2), (0, 1, 10)):
        path = paths.log("train", attempt, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"attempt {attempt} rank {rank} line {n}\n" for n in range(5)))
    other = paths.logs("download", 1)
    other.mkdir(parents=True)
    (other / "rank-0.log").write_bytes(b"one\n\xff\xfe two\nno end")
    (other / "rank-x.log").touch()
    return paths


def test_logs_are_found_by_step_attempt_and_rank(logged: RunPaths) -> None:
    found = [(log.step, log.attempt, log.rank) for log in runs.log_files(logged)]
    assert found == [("download", 1, 0), ("train", 2, 0), ("train", 2, 1), ("train", 2, 10)]
    (one,) = runs.log_files(logged, "train", 1, 10)
    assert runs.tail(one, 2) == ["attempt 1 rank 10 line 3", "attempt 1 rank 10 line 4"]
    assert len(runs.tail(one)) == 5
    with pytest.raises(ConfigurationError, match="there are: download/1/rank-0, train/1/rank-0"):
        runs.log_files(logged, rank=7)
    with pytest.raises(ConfigurationError, match="no run"):
        runs.log_files(RunPaths(logged.root, "other"))


def test_bytes_that_are_no_text_do_not_end_a_log(logged: RunPaths) -> None:
    (log,) = runs.log_files(logged, "download")
    assert runs.tail(log) == ["one", "\ufffd\ufffd two", "no end"]
    assert "download 0 | one" in shown(run_tables.render_log(log, "one", named=True))


def test_brackets_in_a_log_are_text(logged: RunPaths) -> None:
    (log,) = runs.log_files(logged, "download")
    assert "[bold]x[/] [rank0]" in shown(run_tables.render_log(log, "[bold]x[/] [rank0]", named=False))


def test_follow_gives_whole_lines_of_this_and_the_next_attempt(logged: RunPaths) -> None:
    first, second = logged.log("train", 2, 1), logged.log("train", 3, 1)

    def write() -> None:
        for path, text in ((first, "half"), (first, " of it\n"), (second, "again\n")):
            time.sleep(0.1)
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as file:
                file.write(text)

    writer = threading.Thread(target=write)
    lines = runs.follow(logged, "train", 1, poll_seconds=0.02)
    writer.start()
    try:
        found = [(log.attempt, text) for log, text in itertools.islice(lines, 2)]
    finally:
        writer.join()
        lines.close()  # type: ignore[attr-defined]
    assert found == [(2, "half of it"), (3, "again")]


def test_a_torn_line_of_a_supervisor_is_left_out(tmp_path: Path) -> None:
    paths = put(tmp_path, "run", faulted(ended=75))
    (path,) = paths.events.glob("*-supervisor-*")
    with path.open("a") as file:
        file.write('{"event": "superv')
    os.utime(path)
    assert runs.summarise(paths, now_of(paths, 1.0)).state == "stopped"
