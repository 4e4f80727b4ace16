"""TensorBoard scalars of a run, from its events: loss, tokens/s, MFU and goodput, step by step.

    python -m steps.scalars --root DIR --run-id ID [--out DIR]        then: tensorboard --logdir DIR

Made after the fact (and again whenever one likes), so that training pays nothing for it. Needs the package tensorboard:
``pip install 'holdfast[tensorboard]'``.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from steps.report import assemble, expectation
from steps.runs import read_run
from trainer.config import OneLineParser, add_flags, from_namespace
from trainer.errors import ConfigurationError, exit_with
from trainer.paths import RunPaths
from trainer.records import RunReport


@dataclass(frozen=True)
class Scalar:
    """One point of one curve."""

    tag: str
    step: int
    value: float
    time: float
    """Wall clock."""


def main(argv: list[str] | None = None) -> int:
    """Entry of the command."""
    parser = OneLineParser(prog="python -m steps.scalars", description="TensorBoard scalars of a run")
    add_flags(parser, ("root", "run_id"))
    parser.add_argument("--out", type=Path, help="directory of the event file [<run>/tensorboard]")
    args: argparse.Namespace = parser.parse_args(argv)
    config = from_namespace(args)
    paths = RunPaths(config.root, config.run_id)
    out = args.out or paths.tensorboard
    found = scalars(assemble(paths), expectation(read_run(paths)).flops_per_token)
    write(found, out)
    print(f"{len(found)} points in {out}")
    return 0


def scalars(report: RunReport, flops_per_token: float | None) -> list[Scalar]:
    """All points of a run. Of a step that was executed several times the last execution counts; goodput is that up to the
    step's end: productive time over all time so far."""
    config, peak = report.config, report.hardware.get("peak_flops")
    tokens = config.global_batch_size * config.sequence_length
    own: dict[int, float] = defaultdict(float)
    for piece in report.timeline:
        if piece.category == "productive":
            own[piece.step] += piece.end - piece.start
    found: list[Scalar] = []
    productive = 0.0
    for point in sorted((point for point in report.losses if not point.replay), key=lambda point: point.step):
        seconds = own.get(point.step, 0.0)
        productive += seconds
        values = {"loss": point.loss, "goodput": productive / point.time if point.time else 0.0}
        if seconds:
            values["tokens_per_second"] = tokens / seconds
            if flops_per_token and peak:
                values["mfu"] = tokens / seconds / config.world_size * flops_per_token / float(peak)
        found += [Scalar(f"train/{tag}", point.step, value, report.started + point.time) for tag, value in values.items()]
    return found


def write(found: list[Scalar], directory: Path) -> None:
    """An event file for TensorBoard; ``ConfigurationError`` where its package is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigurationError("TensorBoard is not installed here; pip install 'holdfast[tensorboard]'") from None
    with SummaryWriter(str(directory)) as writer:
        for scalar in found:
            writer.add_scalar(scalar.tag, scalar.value, scalar.step, walltime=scalar.time)


if __name__ == "__main__":
    exit_with(main)
