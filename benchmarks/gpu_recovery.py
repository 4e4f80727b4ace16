"""Parts recovery and restarts: real faults in the pipeline's own training, and plain ft_launcher for comparison."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import threading
from pathlib import Path

import gpu_runs

CASES = "combined/exception,exception,exception,sigkill,sigkill,sigkill,hang,hang plain"
HEARTBEAT = 15.0
PLAIN = Path(__file__).with_name("gpu_plain.py")


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for case in (options.cases or CASES).split():
        if case == "plain":
            rows += plain(options)
            continue
        recovery, _, kinds = case.partition("/")
        count = len(kinds.split(","))
        run = gpu_runs.train(
            f"recovery-{recovery}", options, f"--max-steps={options.steps or 30 + 12 * count}", f"--recovery={recovery}",
            f"--fault-count={count}", f"--fault-kinds={kinds}", "--fault-first-step=25", "--fault-seed=7",
            f"--heartbeat-timeout-seconds={HEARTBEAT}", "--checkpoint-interval-steps=1000", "--snapshot-interval-steps=5",
            limit=400,
        )  # fmt: skip
        rows += faults(run, json.loads((options.out / f"recovery-{recovery}.json").read_text()))
    return rows


def faults(run: Path, report: dict[str, object]) -> list[dict[str, object]]:
    """A row for each fault: from the moment it struck to the end of the first step that all ranks completed after it."""
    from trainer import events

    found = list(events.read(run / "events"))
    told = report["faults"]
    assert isinstance(told, list)
    rows: list[dict[str, object]] = []
    for fault, mine in zip([e for e in found if e.event == "fault_injected"], told, strict=False):
        struck = fault.monotonic
        entries = [e for e in found if e.event == "entry" and e.monotonic > struck]
        again = [e for e in found if entries and e.event in ("step_start", "step_end") and e.monotonic > entries[0].monotonic]
        first = min((e.data["step"] for e in again if e.event == "step_start"), default=-1)
        starts = [e.monotonic for e in again if e.event == "step_start" and e.data["step"] == first][: fault.world_size]
        ends = [e.monotonic for e in again if e.event == "step_end" and e.data["step"] == first][: fault.world_size]
        rows.append(
            {
                "fault": f"{mine['kind']} {fault.data.get('variant', '')}".strip(), "step": fault.data["step"], "recovered by": mine["recovered_by"],
                "to next completed step, s": max(ends, default=0.0) - struck, "noticed after": mine["detection_seconds"],
                **{name.replace("_", " "): seconds for name, seconds in mine["phases"].items()},
                "first step": max(ends, default=0.0) - max(starts, default=0.0), "steps lost": mine["lost_steps"], "from": mine["resumed_from"],
            }
        )  # fmt: skip
    return rows


def plain(options: argparse.Namespace) -> list[dict[str, object]]:
    """ft_launcher as it comes, its intervals set as short as ours: a rank is killed twice, the state is in memory."""
    rows: list[dict[str, object]] = []
    folder = options.root / "plain"
    folder.mkdir()
    command = [
        sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--nnodes=1", f"--nproc-per-node={options.gpus}",
        "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29611", "--rdzv-conf=is_host=true", "--max-restarts=3",
        "--monitor-interval=0.1", "--ft-workload-check-interval=0.2", "--ft-initial-rank-heartbeat-timeout=200",
        f"--ft-rank-heartbeat-timeout={HEARTBEAT}", "--ft-restart-policy=any-failed",
        str(PLAIN), str(folder), options.model, str(options.sequence_length or 2048), str(options.micro_batch_size or 8), options.compile,
    ]  # fmt: skip
    with (options.out / "recovery-plain.log").open("w") as log:
        subprocess.run(command, cwd=gpu_runs.REPOSITORY, timeout=200, stdout=log, stderr=subprocess.STDOUT, check=False)
    marks = {path.name: float(path.read_text()) for path in folder.glob("mark-*")}
    for cycle in (1, 2):
        killed, done = marks.get(f"mark-killed-{cycle - 1}"), [marks.get(f"mark-{cycle}-step-{rank}") for rank in range(options.gpus)]
        if killed is None or None in done:
            continue
        row: dict[str, object] = {"plain ft_launcher": f"SIGKILL {cycle}", "to next completed step, s": max(t for t in done if t) - killed}
        before = killed
        for name in ("start", "imports", "group", "build", "load", "step"):
            at = max(marks[f"mark-{cycle}-{name}-{rank}"] for rank in range(options.gpus))
            row[name], before = at - before, at
        rows.append(row)
    return rows


HELD = ("GPU MiB", "sockets", "listening", "descriptors", "processes", "threads", "memory MiB")
LOOKED_AT = (1, 5, 10, 15, 20)


def restarts(options: argparse.Namespace) -> list[dict[str, object]]:
    """Twenty exceptions, then twenty SIGKILLs; what the machine holds as the restarts go by."""
    rows: list[dict[str, object]] = []
    options.model = "160m" if options.model == "1b" else options.model
    options.compile = "false"
    for kind in (options.cases or "exception,sigkill").split(","):
        samples: list[dict[str, float]] = []
        ended = threading.Event()
        folder = options.root / "runs" / f"restarts-{kind}" / "events"
        watcher = threading.Thread(target=watch, args=(folder, options.gpus, samples, ended))
        watcher.start()
        try:
            run = gpu_runs.train(
                f"restarts-{kind}", options, f"--max-steps={options.steps or 420}", "--recovery=combined", "--fault-count=20",
                f"--fault-kinds={kind}", "--fault-first-step=10", "--max-restarts=25", "--checkpoint-interval-steps=100",
                "--snapshot-interval-steps=5", f"--heartbeat-timeout-seconds={HEARTBEAT}", limit=220,
            )  # fmt: skip
        finally:
            ended.set()
            watcher.join()
        (options.out / f"restarts-{kind}-samples.json").write_text(json.dumps(samples))
        report = json.loads((options.out / f"restarts-{kind}.json").read_text())
        struck = faults(run, report)
        seconds = [took for fault in struck if (took := float(str(fault["to next completed step, s"]))) > 0] or [math.nan]
        row: dict[str, object] = {
            "20 x": kind, "recovered": len(report["faults"]), "steps": report["steps_completed"],
            "to next completed step, median, longest, s": f"{statistics.median(seconds):.2f}, {max(seconds):.2f}",
            "most steps lost (snapshots each 5)": max((int(str(fault["steps lost"])) for fault in struck), default=0),
        }  # fmt: skip
        for name in HELD:
            row[f"{name} after {', '.join(map(str, LOOKED_AT))}"] = ", ".join(middle(samples, number, name) for number in LOOKED_AT)
        rows.append(row)
    return rows


def middle(samples: list[dict[str, float]], restarts: int, name: str) -> str:
    """The median of the samples between two restarts: for a moment a restart holds more, or less."""
    found = [sample[name] for sample in samples if sample["restarts"] == restarts]
    return f"{statistics.median(found):.0f}" if found else "-"


def watch(folder: Path, ranks: int, samples: list[dict[str, float]], ended: threading.Event) -> None:
    """Look a few times a second at what the machine's processes hold, until training has ended."""
    import psutil

    me = psutil.Process()
    while not ended.wait(0.2):
        told = b"".join(path.read_bytes() for path in folder.glob("*-trainer-*.jsonl"))
        if b'"event": "finished"' in told:
            return
        entries = told.count(b'"event": "entry"')
        processes = [process for process in me.children(recursive=True) if process.is_running()]
        sample = dict.fromkeys(HELD, 0.0) | {"restarts": max(0.0, entries / ranks - 1), "processes": float(len(processes)), "GPU MiB": gpu_mib()}
        for process in processes:
            try:
                sample["descriptors"] += process.num_fds()
                sample["threads"] += process.num_threads()
                connections = process.net_connections("inet")
                sample["memory MiB"] += process.memory_info().rss / 2**20
            except psutil.Error:
                continue
            sample["sockets"] += len(connections)
            sample["listening"] += sum(c.status == psutil.CONN_LISTEN for c in connections)
        samples.append(sample)


def gpu_mib() -> float:
    """What is in use of all GPUs together."""
    if not shutil.which("nvidia-smi"):
        return 0.0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(sum(int(line) for line in subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()))
