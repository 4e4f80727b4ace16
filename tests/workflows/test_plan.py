"""``run.py plan``: what it prints, what it takes from a run, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from trainer.config import RunConfig
from trainer.errors import ConfigurationError
from workflows.run import main

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "steps"))
from simulated_run import SimulatedRun, write_run

QUICK = ("--simulations=4", "--days=10")


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, object]:
    assert main(["plan", *QUICK, "--json", *flags]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_it_says_what_is_worth_doing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUICK, "--gpus=16384"]) == 0
    told = capsys.readouterr().out
    for words in ("16,384 GPUs in 2,048 nodes and 128 racks", "durable saves", "snapshots", "GPU-hours", "simulated", "of storage"):
        assert words in told


def test_gpu_hours_are_accounted_for(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--gpus=16384")
    uses = found["gpu_hours_by_use"]
    assert isinstance(uses, dict)
    assert sum(uses.values()) == pytest.approx(found["gpu_hours"]) == pytest.approx(16384 * 240)
    assert uses["steps that stood"] / 16384 / 240 == pytest.approx(found["simulated_goodput"])


def test_more_gpus_are_interrupted_more_often_and_save_more_often(capsys: pytest.CaptureFixture[str]) -> None:
    small, large = (planned(capsys, f"--gpus={gpus}", "--no-snapshots", "--save-stall-seconds=30") for gpus in (1024, 65536))
    assert small["interruptions_per_day"] < large["interruptions_per_day"]  # type: ignore[operator]
    assert small["interval_steps"] > large["interval_steps"]  # type: ignore[operator]
    assert small["simulated_goodput"] > large["simulated_goodput"]  # type: ignore[operator]


def test_intervals_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--gpus=64", "--interval-steps=7", "--snapshot-interval-steps=2")
    assert (found["interval_steps"], found["interval_seconds"]) == (7, 70.0)
    assert (found["snapshot_interval_steps"], found["snapshot_interval_seconds"]) == (2, 20.0)


def test_parts_that_never_fail(capsys: pytest.CaptureFixture[str]) -> None:
    never = [f"--{part}-mtbf-hours=0" for part in ("process", "node", "rack", "storage")]
    found = planned(capsys, "--gpus=64", "--no-snapshots", "--save-stall-seconds=0", *never)
    assert found["simulated_goodput"] == 1.0 and found["interruptions_per_day"] == 0


def test_costs_can_be_those_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of two seconds with a stall of half a second every five, and a killed process."""
    run = SimulatedRun()
    run.launch()
    run.begin(0, "startup", tier="none")
    while run.done < 20:
        if run.index == 0 and run.done == 7:
            run.fault("sigkill", detection=0.25)
            run.restart("in_job", 5)
            continue
        saving = run.done % 5 == 4
        run.step(2.5 if saving else 2.0, stall=0.5 if saving else 0.0)
        if saving:
            run.commit()
    write_run(run, tmp_path, RunConfig(max_steps=20, warmup_steps=1, checkpoint_interval_steps=5))
    found = planned(capsys, "--gpus=4096", f"--root={tmp_path}", "--from-run=run", "--no-snapshots", "--interval-steps=30")
    assert found["interval_seconds"] == pytest.approx(60.0)
    given = planned(
        capsys, "--gpus=4096", "--no-snapshots", "--interval-steps=30", "--step-seconds=2", "--save-stall-seconds=0.5",
        "--save-seconds=0.5", "--detection-seconds=0.25", "--process-restart-seconds=3.65", "--load-seconds=0.45",
    )  # fmt: skip
    assert found["simulated_goodput"] == pytest.approx(given["simulated_goodput"], abs=1e-3)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "--gpus"),
        (["--gpus=0"], "--gpus"),
        (["--gpus=8", "--step-seconds=0"], "--step-seconds"),
        (["--gpus=8", "--load-seconds=-1"], "--load-seconds"),
        (["--gpus=8", "--simulations=1"], "--simulations"),
        (["--gpus=8", "--days=0"], "--days"),
        (["--gpus=8", "--days=inf"], "--days"),
        (["--gpus=8", "--seed=-1"], "--seed"),
        (["--gpus=8", "--step-seconds=inf"], "--step-seconds"),
        (["--gpus=8", "--save-seconds=nan"], "--save-seconds"),
        (["--gpus=8", "--interval-steps=-1"], "--interval-steps"),
        (["--gpus=8", "--snapshot-interval-steps=0"], "--snapshot-interval-steps"),
        (["--gpus=8", "--node-mtbf-hours=1e-9"], "too many to simulate"),
        (["--gpus=8", "--from-run=no-such-run"], "no-such-run"),
    ],
)
def test_what_cannot_be_planned_is_refused(flags: list[str], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        main(["plan", *flags])
