"""The drill table: every kind of fault under every recovery mode, by what it was recovered, how fast, and what it lost.

    python -m tests.drills.table [--output benchmarks/drills.md] [--faults 3] [--modes combined,in-job] [--kinds hang]

Each line is one run of two ranks (or of two nodes with one rank each) with some faults of one kind, rank 0 included.
Seconds are medians over those faults, from the events alone: until it was detected, and from the fault to the start of
the next step. Every run has a deadline, must end with the weights of the run without faults, and its report must say where
its time went.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trainer"))

from whole_run import MOST_OTHER, REPOSITORY, SUM_TOLERANCE, Hung, Trainer, Training, unexplained

MODES = ("combined", "in-job", "in-process", "none")
KINDS = ("exception", "oom", "sigkill", "hang", "node")
HEARTBEAT = 5
TARGETS = {("exception", 1): 2.5, ("sigkill", 1): 2.5, ("hang", 1): HEARTBEAT + 2.5, ("node", 1): 10.0, ("node", 2): 20.0}
"""(Kind of fault, nodes) -> median seconds from the fault to the next step on two idle cores, for the modes of ``FASTEST``."""
FASTEST = {"exception": ("combined", "in-process"), "sigkill": ("combined", "in-job"), "hang": ("combined", "in-job"), "node": MODES}
"""Kind of fault -> the modes that answer it by the lowest layer that can."""


@dataclass(frozen=True)
class Case:
    """One run of the table."""

    recovery: str
    kind: str
    nodes: int
    faults: int

    @property
    def name(self) -> str:
        return f"{self.recovery}-{self.kind}-{self.nodes}"

    @property
    def unwatched(self) -> bool:
        """A hang that nobody watches for: it ends when a collective's time is up."""
        return self.recovery == "none" and self.kind == "hang"

    @property
    def target(self) -> float | None:
        """Seconds that its median must stay under, if it has a target."""
        return TARGETS.get((self.kind, self.nodes)) if self.recovery in FASTEST.get(self.kind, ()) else None

    def start(self, trainer: Trainer, folder: Path) -> Training:
        unwatched = {"startup_timeout_seconds": 60, "save_timeout_seconds": 20} if self.unwatched else {}
        return trainer.start(
            folder / self.name, recovery=self.recovery, nodes=self.nodes, gpus_per_node=2 // self.nodes, max_restarts=20,
            fault_count=self.faults, fault_kinds=self.kind, fault_ranks="1,0", heartbeat_timeout_seconds=HEARTBEAT,
            **unwatched,
        )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What a case came to."""

    case: Case
    layers: str
    detection: float
    seconds: float
    slowest: float
    lost_steps: int
    verdict: str

    @property
    def within(self) -> str:
        """Whether its target is met; a run that did not end well meets none."""
        if self.case.target is None:
            return "-"
        return f"{'yes' if 0 < self.seconds < self.case.target else 'NO'} ({self.case.target:g})"

    def cells(self) -> list[str]:
        where = f"{self.case.nodes} node{'s' * (self.case.nodes > 1)}"
        times = [f"{value:.1f}" for value in (self.detection, self.seconds, self.slowest)]
        lost = str(self.lost_steps)
        return [self.case.kind, self.case.recovery, where, str(self.case.faults), self.layers, *times, self.within, lost, self.verdict]


HEAD = (
    "fault", "recovery", "ranks on", "faults", "recovered by", "detected in (s)", "next step after (s)", "slowest (s)",
    "within target (s)", "most steps lost", "final weights and intervals",
)  # fmt: skip


def cases(modes: Sequence[str], kinds: Sequence[str], faults: int) -> Iterator[Case]:
    for kind in kinds:
        for mode in modes:
            for nodes in (1, 2) if kind == "node" else (1,):
                yield Case(mode, kind, nodes, 1 if (mode, kind) == ("none", "hang") else faults)


def measure(trainer: Trainer, folder: Path, case: Case, clean: Training) -> Row:
    """Run a case. A hang, a wrong end, other weights than those of the run without faults and time that nothing explains
    are said in its row."""
    training = case.start(trainer, folder)
    try:
        code = training.wait(240)
    except Hung:
        return Row(case, "-", 0.0, 0.0, 0.0, 0, "HUNG")
    if code:
        return Row(case, "-", 0.0, 0.0, 0.0, 0, f"ENDED WITH {code}")
    faults = training.injected()
    seconds = [fault.detection_seconds + fault.recovery_seconds for fault in faults]
    verdict = "equal" if training.digest() == clean.digest() else "DIFFER"
    if len(faults) != case.faults:
        verdict += f", {len(faults)} FAULTS SEEN"
    if unclear := unexplained(training.analysis):
        verdict += f", {unclear.upper()}"
    return Row(
        case, ", ".join(sorted({fault.recovered_by.replace("_", "-") for fault in faults})),
        median(fault.detection_seconds for fault in faults), median(seconds), max(seconds),
        max(fault.lost_steps for fault in faults), verdict,
    )  # fmt: skip


def run(trainer: Trainer, folder: Path, chosen: Sequence[Case]) -> list[Row]:
    """All cases, one after the other."""
    clean = trainer.run(folder / "clean", recovery="none", snapshot_interval_steps=0)
    rows = []
    for case in chosen:
        rows.append(measure(trainer, folder, case, clean))
        print(" | ".join(rows[-1].cells()), flush=True)
    return rows


def document(rows: Sequence[Row], command: str, load: tuple[float, float]) -> str:
    """The table as Markdown, with where and how it was made."""
    lines = [
        "# Drill table", "",
        f"Made on {time.strftime('%Y-%m-%d')} by `{command}` on {machine()}; load average {load[0]:.1f} before, {load[1]:.1f} after.",
        f"{versions()}. Two ranks, the tiny model, gloo, heartbeat {HEARTBEAT} s, a snapshot every step, a checkpoint every 6.", "",
        *table([HEAD, *[row.cells() for row in rows]]), "",
        "Targets are for the median on two idle cores, and for the modes that answer a fault by the lowest layer that can.",
        f"`equal`: the weights are those of the run without faults, the intervals of its report sum to its wall time within {SUM_TOLERANCE:.0%},",
        f"and at most {MOST_OTHER:.0%} of it is in none.",
        "Nobody watches `none` for hangs: they last until a collective's time is up, which is as long as a heartbeat.",
        "A node's own start is most of what a pod's restart takes: its imports, once, before the workers are forked.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = [f"| {' | '.join(cells)} |" for cells in rows]
    return [head, "|" + " --- |" * len(rows[0]), *body]


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return f"{cores} cores of {names[0] if names else platform.machine()}"


def versions() -> str:
    names = ("torch", "nvidia-resiliency-ext")
    return f"Python {platform.python_version()}, " + ", ".join(f"{name} {metadata.version(name)}" for name in names)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drills.table", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "drills.md")
    parser.add_argument("--faults", type=int, default=3)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--folder", type=Path, default=None, help="where the runs are kept (default: they are not)")
    options = parser.parse_args(argv)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="drills-") as temporary:
        folder = options.folder or Path(temporary)
        trainer = Trainer.prepare(folder)
        try:
            rows = run(trainer, folder, [*cases(options.modes.split(","), options.kinds.split(","), options.faults)])
        finally:
            trainer.end()
    words = " ".join(["python -m tests.drills.table", *(argv if argv is not None else sys.argv[1:])])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(document(rows, words, (before, os.getloadavg()[0])))
    return 0 if all(row.verdict == "equal" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
