"""Runs the pipeline's steps on this machine's GPUs through real faults, and prints one short table.

    python benchmarks/gpu.py [--model 160m] [--out DIR] CASE...

A case is ``recovery/kinds``, such as ``combined/exception,sigkill,hang`` or ``none/`` (a clean run). Each is a run of
its own: download (once), train, validate, report. The table is made from the runs' report.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def step(name: str, *arguments: str, limit: float, log: Path) -> int:
    with log.open("ab") as file:
        started = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", f"steps.{name}", *arguments],
                cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT, timeout=limit,
            )  # fmt: skip
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = 124
        file.write(f"\n-- {name}: {code} after {time.monotonic() - started:.1f} s\n".encode())
    return code


def run(case: str, options: argparse.Namespace) -> dict[str, object]:
    """One case; returns a row of the table."""
    recovery, _, kinds = case.partition("/")
    run_id = f"{recovery}-{kinds.replace(',', '-') or 'clean'}"
    root, log = options.root, options.out / f"{run_id}.log"
    common = [f"--root={root}", f"--run-id={run_id}"]
    source = [f"--dataset-uri={options.dataset_uri}", "--tokenizer=byte", f"--sequence-length={options.sequence_length}"]
    code = step("download", *common, *source, limit=120, log=log)
    dataset = (root / "runs" / run_id / "outputs" / "download" / "dataset").read_text().strip()
    count = len([kind for kind in kinds.split(",") if kind])
    code = code or step(
        "train", *common, *source, f"--dataset={dataset}", "--launcher=local", f"--recovery={recovery}",
        f"--model={options.model}", f"--gpus-per-node={options.gpus}", f"--max-steps={options.steps}",
        f"--micro-batch-size={options.micro_batch_size}",
        f"--global-batch-size={options.micro_batch_size * options.gpus}",
        f"--checkpoint-interval-steps={options.interval}", f"--snapshot-interval-steps={options.snapshot_interval}",
        "--heartbeat-timeout-seconds=15", f"--fault-count={count}", f"--fault-kinds={kinds or 'exception'}",
        "--fault-first-step=10", f"--compile={options.compile}", limit=options.limit, log=log,
    )  # fmt: skip
    row: dict[str, object] = {"case": case, "train": code}
    row["validate"] = step("validate", *common, limit=200, log=log)
    row["report"] = step("report", *common, limit=100, log=log)
    report = root / "runs" / run_id / "report.json"
    if report.exists():
        shutil.copy(report, options.out / f"{run_id}.json")
        row |= figures(json.loads(report.read_text()))
    for path in sorted((root / "runs" / run_id / "logs" / "train").glob("*/rank-*.log")):
        with log.open("ab") as file:
            file.write(f"\n== {path.parent.name}/{path.name}\n".encode() + path.read_bytes()[-20000:])
    return row


def figures(report: dict[str, object]) -> dict[str, object]:
    """What the table shows of a report."""
    faults = report["faults"]
    assert isinstance(faults, list)
    return {
        "steps": report["steps_completed"],
        "wall": report["wall_seconds"],
        "tokens/s/GPU": report["throughput"]["tokens_per_second_per_gpu"],  # type: ignore[index]
        "mfu": report["throughput"]["mfu"],  # type: ignore[index]
        "stall": report["checkpoints"]["mean_stall_seconds"],  # type: ignore[index]
        "durable": report["checkpoints"]["mean_durable_seconds"],  # type: ignore[index]
        "bytes": report["checkpoints"]["bytes"],  # type: ignore[index]
        "snapshot stall": report["snapshots"]["mean_stall_seconds"],  # type: ignore[index]
        "committed lost": report["committed_steps_lost"],
        "faults": [
            f"{f['kind']}@{f['step']} by {f['recovered_by']}: detect {f['detection_seconds']:.2f} recover "
            f"{f['recovery_seconds']:.2f} lost {f['lost_steps']} from {f['resumed_from']} "
            + " ".join(f"{k}={v:.2f}" for k, v in f["phases"].items())
            for f in faults
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--root", type=Path, default=Path("/tmp/holdfast-gpu"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    parser.add_argument("--dataset-uri", default="builtin:")
    parser.add_argument("--model", default="160m")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--interval", type=int, default=20)
    parser.add_argument("--snapshot-interval", type=int, default=5)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--compile", default="false")
    parser.add_argument("--limit", type=float, default=240)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.root.mkdir(parents=True, exist_ok=True)
    options.root = options.root.absolute()
    os.environ["PYTHONPATH"] = f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"
    for case in options.cases:
        for key, value in run(case, options).items():
            if isinstance(value, list):
                for line in value:
                    print(f"    {line}")
            else:
                print(f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}", end="\n" if key == "case" else "  ")
        print(flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
