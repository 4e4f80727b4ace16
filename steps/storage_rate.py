"""How fast the emulated storage of a benchmark is, from the pace of its bare run.

    python -m steps.storage_rate --root DIR --run-id BARE --save-to-interval 1.5 --interval-steps 40

A save of all state is to take ``save-to-interval`` times the training time of ``interval-steps`` steps, whatever the
machine's pace. Leaves the output parameter ``bytes-per-second``, which all arms of the benchmark are given.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from steps.report import bare_step_seconds
from steps.runs import read_run
from trainer.config import OneLineParser, add_flags, from_namespace
from trainer.errors import exit_with
from trainer.paths import MANIFEST, RunPaths
from trainer.records import DatasetManifest, RunRecord, write_whole

BYTES_PER_PARAMETER = 12
"""A parameter and its two moments in float32."""


def main(argv: list[str] | None = None) -> int:
    """Entry of the step."""
    parser = OneLineParser(prog="python -m steps.storage_rate", description="how fast a benchmark's emulated storage is")
    add_flags(parser, ("root", "run_id"))
    parser.add_argument("--save-to-interval", type=float, required=True, help="time of a save over that of the interval")
    parser.add_argument("--interval-steps", type=int, required=True, help="steps of the interval")
    args: argparse.Namespace = parser.parse_args(argv)
    config = from_namespace(args)
    paths = RunPaths(config.root, config.run_id)
    step = bare_step_seconds(paths)
    seconds = args.save_to_interval * args.interval_steps * step
    size = checkpoint_bytes(read_run(paths))
    rate = size / seconds
    write_whole(paths.output("storage_rate", "bytes-per-second"), f"{rate:.0f}".encode())
    print(f"{size:,} bytes in {seconds:.1f} s ({args.save_to_interval:g} x {args.interval_steps} steps of {step:.3f} s): {rate:,.0f} bytes/s")
    return 0


def checkpoint_bytes(record: RunRecord) -> int:
    """The state of a run's model and optimizer."""
    from trainer.model import model_config, parameter_count

    vocabulary = DatasetManifest.read(Path(record.dataset) / MANIFEST).vocabulary_size
    return BYTES_PER_PARAMETER * parameter_count(model_config(record.config.model, vocabulary))


if __name__ == "__main__":
    exit_with(main)
