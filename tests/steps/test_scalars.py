"""TensorBoard scalars: the right points, and an event file where TensorBoard is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from simulated_run import write_run
from test_report import trained

from steps import scalars
from steps.report import assemble
from trainer.errors import ConfigurationError
from trainer.paths import RunPaths


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return write_run(trained()[0], tmp_path, trained()[1])


def test_every_step_has_its_points(paths: RunPaths) -> None:
    report = assemble(paths)
    report = report.model_copy(update={"hardware": {"peak_flops": 1e9}})
    found = scalars.scalars(report, flops_per_token=1000.0)
    by_tag = {tag: [s for s in found if s.tag == f"train/{tag}"] for tag in ("loss", "tokens_per_second", "mfu", "goodput")}
    assert all([s.step for s in points] == list(range(1, 21)) for points in by_tag.values())
    assert len(found) == 80
    assert by_tag["loss"][3].value == pytest.approx(5.0 / 4)
    config = report.config
    rate = config.global_batch_size * config.sequence_length / 1.0
    assert by_tag["tokens_per_second"][6].value == pytest.approx(rate, rel=0.05)
    assert by_tag["mfu"][6].value == pytest.approx(rate / config.world_size * 1000 / 1e9, rel=0.05)
    assert by_tag["goodput"][-1].value == pytest.approx(report.training_goodput, rel=0.02)
    assert by_tag["loss"][0].time == pytest.approx(report.started + report.losses[0].time)


def test_without_a_gpu_there_is_no_mfu(paths: RunPaths) -> None:
    assert {s.tag for s in scalars.scalars(assemble(paths), None)} == {"train/loss", "train/tokens_per_second", "train/goodput"}


def test_the_event_file(paths: RunPaths) -> None:
    command = ["--root", str(paths.root), "--run-id", paths.run_id]
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(ConfigurationError, match=r"holdfast\[tensorboard\]"):
            scalars.main(command)
        return
    assert scalars.main(command) == 0
    assert list(paths.tensorboard.glob("events.out.tfevents.*"))
