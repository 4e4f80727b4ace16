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


def source(options: argparse.Namespace) -> list[str]:
    return ["--dataset-uri=builtin:", "--tokenizer=byte", f"--sequence-length={options.sequence_length or 2048}"]


def download(run_id: str, options: argparse.Namespace) -> tuple[int, str]:
    """Make the dataset of ``run_id``, or find it made; returns the exit code and where it is."""
    code = step("download", f"--root={options.root}", f"--run-id={run_id}", *source(options), limit=120, log=options.out / f"{run_id}.log")
    return code, (options.root / "runs" / run_id / "outputs" / "download" / "dataset").read_text().strip()


def train(run_id: str, options: argparse.Namespace, *flags: str, limit: float) -> Path:
    """Train under ``run_id``; returns the run's directory. The logs of its ranks are kept in ``options.out``."""
    root, log = options.root, options.out / f"{run_id}.log"
    common, batch = [f"--root={root}", f"--run-id={run_id}"], options.micro_batch_size or 8
    code, dataset = download(run_id, options)
    code = code or step(
        "train", *common, *source(options), f"--dataset={dataset}", "--launcher=local", f"--model={options.model}",
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
    """Training with heartbeats, events, a snapshot each 50 steps and a durable checkpoint each 300, after a bare loop over the
    same data: step by step the same work, for a GPU that has worked for half a minute is slower than a cool one."""
    from trainer import events

    steps, first = options.steps or 300, 30
    options.sequence_length, options.micro_batch_size = options.sequence_length or 8192, options.micro_batch_size or 4
    case = f"{options.model}:{options.sequence_length}:{options.micro_batch_size}"
    _, dataset = download("price", options)
    [bare] = gpu_throughput.bare(options.gpus, case, steps, options.out, options.compile == "true", dataset=dataset, warm_up=first)
    run = train(
        "price", options, f"--max-steps={first + steps + gpu_throughput.AFTER}", f"--checkpoint-interval-steps={min(300, steps)}",
        "--snapshot-interval-steps=50", "--recovery=combined", limit=420,
    )  # fmt: skip
    ended = {event.data["step"]: event for event in events.read(run / "events") if event.event == "step_end" and event.rank == 0}
    each = [ended[number].monotonic - ended[number - 1].monotonic for number in range(first + 1, first + steps + 1)]
    mean, alone = statistics.mean(each), float(str(bare["step, s"]))
    report = json.loads((options.out / "price.json").read_text())
    return [
        {
            "model": options.model, "batch a GPU": f"{options.micro_batch_size} x {options.sequence_length}",
            "bare step: mean, median, s": f"{alone:.4f}, {bare['median, s']:.4f}",
            "with everything: mean, median, s": f"{mean:.4f}, {statistics.median(each):.4f}",
            "price %": 100 * (mean / alone - 1), "steps": steps, "durable each": min(300, steps), "snapshots": report["snapshots"]["committed"],
            "durable ones": report["checkpoints"]["committed"], "slowest three steps, s": " ".join(f"{s:.2f}" for s in sorted(each)[-3:]),
            "last loss: bare, with everything": f"{bare['loss']:.4f}, {ended[first + steps].data['loss']:.4f}",
        }
    ]  # fmt: skip
