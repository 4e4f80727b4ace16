"""Runs of the pipeline's own steps for the other parts, and part price."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import gpu_throughput

REPOSITORY = Path(__file__).resolve().parent.parent


def step(name: str, *arguments: str, limit: float, log: Path) -> int:
    """Run one of the pipeline's steps to its end, or to its limit (124)."""
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


def train(run_id: str, options: argparse.Namespace, *flags: str, limit: float) -> Path:
    """Train under ``run_id``; returns the run's directory. The logs of its ranks are kept in ``options.out``."""
    root, log = options.root, options.out / f"{run_id}.log"
    common = [f"--root={root}", f"--run-id={run_id}"]
    length = options.sequence_length or 2048
    batch = options.micro_batch_size or 8
    source = ["--dataset-uri=builtin:", "--tokenizer=byte", f"--sequence-length={length}"]
    code = step("download", *common, *source, limit=120, log=log)
    dataset = (root / "runs" / run_id / "outputs" / "download" / "dataset").read_text().strip()
    code = code or step(
        "train", *common, *source, f"--dataset={dataset}", "--launcher=local", f"--model={options.model}",
        f"--gpus-per-node={options.gpus}", f"--micro-batch-size={batch}", f"--global-batch-size={batch * options.gpus}",
        f"--compile={options.compile}", f"--snapshot-root={root}", "--keep-checkpoints=1", *flags, limit=limit, log=log,
    )  # fmt: skip
    run = root / "runs" / run_id
    for path in sorted((run / "logs" / "train").glob("*/rank-*.log")):
        with log.open("ab") as file:
            file.write(f"\n== {path.parent.name}/{path.name}\n".encode() + path.read_bytes()[-20000:])
    shutil.make_archive(str(options.out / f"{run_id}-events"), "gztar", run / "events")
    step("report", *common, limit=100, log=log)
    if (run / "report.json").exists():
        shutil.copy(run / "report.json", options.out / f"{run_id}.json")
    if code:
        print(f"{run_id} ended with {code}; {log} says more", flush=True)
    return run


def price(options: argparse.Namespace) -> list[dict[str, object]]:
    """Training with heartbeats, events, a snapshot each 50 steps and a durable checkpoint each 300, between two runs of the
    bare loop: a GPU that has worked for minutes is slower than a cool one."""
    from trainer import events

    steps = options.steps or 300
    options.sequence_length, options.micro_batch_size = options.sequence_length or 8192, options.micro_batch_size or 4
    case = f"{options.model}:{options.sequence_length}:{options.micro_batch_size}"

    def bare() -> float:
        [row] = gpu_throughput.bare(options.gpus, case, max(20, steps // 4), options.out, options.compile == "true", 256)
        return float(str(row["step, s"]))

    before, first = bare(), 30
    run = train(
        "price", options, f"--max-steps={steps + first + 5}", f"--checkpoint-interval-steps={min(300, steps)}",
        "--snapshot-interval-steps=50", "--recovery=combined", limit=420,
    )  # fmt: skip
    ends = {event.data["step"]: event.monotonic for event in events.read(run / "events") if event.event == "step_end" and event.rank == 0}
    each = [ends[number] - ends[number - 1] for number in range(first + 1, first + steps + 1)]
    after = bare()
    mean, alone = statistics.mean(each), (before + after) / 2
    report = json.loads((options.out / "price.json").read_text())
    return [
        {
            "model": options.model, "batch a GPU": f"{options.micro_batch_size} x {options.sequence_length}",
            "bare step before, after, s": f"{before:.4f}, {after:.4f}", "with everything, mean s": mean, "median s": statistics.median(each),
            "price %": 100 * (mean / alone - 1), "steps": steps, "durable each": min(300, steps), "snapshots": report["snapshots"]["committed"],
            "durable ones": report["checkpoints"]["committed"], "slowest three steps, s": " ".join(f"{s:.2f}" for s in sorted(each)[-3:]),
        }
    ]  # fmt: skip
