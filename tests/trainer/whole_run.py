"""Whole runs through ``python -m steps.train``, as a user or Argo starts them, and what they left. Not a test."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from steps.goodput import Analysis, Expectation, analyse
from trainer import events
from trainer.config import RunConfig, flag, to_text
from trainer.data import TokenDataset, sample_ids
from trainer.events import Event
from trainer.paths import RunPaths
from trainer.records import FaultReport, RunRecord

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE = 120.0
"""Seconds that a run may take on an idle machine; beyond them it hangs, which is what no run ever does."""


HEARTBEAT = 5.0
"""Seconds after which a rank is hung, on an idle machine; on a busy one a healthy rank may need longer for a step."""
LONGEST_HEARTBEAT = 60.0


def patience(seconds: float) -> float:
    """``seconds`` of an idle machine in seconds of this one, which may be busy with other things."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def heartbeat(seconds: float = HEARTBEAT) -> float:
    """A ``heartbeat_timeout_seconds`` that takes no healthy rank of this machine for a hung one."""
    return round(min(LONGEST_HEARTBEAT, patience(seconds)), 1)


DEFAULTS: dict[str, object] = {
    "gpus_per_node": 2, "max_steps": 24, "warmup_steps": 4, "sequence_length": 32, "global_batch_size": 8, "micro_batch_size": 2,
    "checkpoint_interval_steps": 6, "snapshot_interval_steps": 1, "launcher": "local",
    "fault_first_step": 3, "grace_seconds": 20,
}  # fmt: skip


SUM_TOLERANCE = 0.01
"""Of the wall time: by how much the report's intervals may miss it."""
MOST_OTHER = 0.02
"""Of the wall time: what no other interval may explain."""


class Hung(AssertionError):
    """A run that did not end by its deadline."""


@dataclass
class Training:
    """A supervisor that was started, and the run that it works on."""

    paths: RunPaths
    process: subprocess.Popen[str]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def record(self) -> RunRecord:
        return RunRecord.read(self.paths.record)

    @property
    def config(self) -> RunConfig:
        return self.record.config

    def wait(self, seconds: float = DEADLINE) -> int:
        """Its exit code; ``Hung``, with all its processes killed, when it does not end in time."""
        limit = patience(seconds)
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            what = self.describe()
            self.kill()
            raise Hung(f"{self.paths.run_id} has not ended within {limit:g} s\n{what}") from None

    def describe(self) -> str:
        """The newest events, and the end of what it printed."""
        last = [f"{e.time:.2f} {e.role} rank {e.rank} {e.event} {str(e.data)[:120]}" for e in self.events()[-25:]]
        return "\n".join([*last, self.output[-2000:]])

    def events(self, *names: str) -> list[Event]:
        return [event for event in events.read(self.paths.events) if not names or event.event in names]

    def until(self, holds: Callable[[], bool], what: str, seconds: float = DEADLINE, *, ends: bool = False) -> None:
        """Return once it holds; the run must still be going, unless it ``ends`` by itself."""
        deadline = time.monotonic() + patience(seconds)
        while not holds():
            assert ends or self.process.poll() is None, f"it ended with {self.process.returncode} before {what}:\n{self.describe()}"
            if time.monotonic() > deadline:
                self.kill()
                raise Hung(f"in {seconds:g} s it did not happen that {what}\n{self.describe()}")
            time.sleep(0.1)

    def step(self) -> int:
        """The newest step that rank 0 has completed."""
        return max((event.data["step"] for event in self.events("step_end") if event.rank == 0), default=0)  # type: ignore[type-var, return-value]

    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def nodes(self) -> list[psutil.Process]:
        """The first process of each node, in the order of nodes."""
        found = []
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                argument = next((a for a in process.cmdline() if a.startswith("--node=")), None)
                if argument:
                    found.append((int(argument.removeprefix("--node=")), process))
        return [process for _, process in sorted(found, key=lambda pair: pair[0])]

    def pids(self, *, since: int = 0) -> dict[int, int]:
        """The newest process of each rank."""
        return {event.rank: event.pid for event in self.events("process_start")[since:]}

    def kill(self) -> None:
        """Kill the supervisor and everything below it."""
        below = self.processes()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()

    @cached_property
    def analysis(self) -> Analysis:
        """The numbers of the report."""
        config = self.config
        return analyse(self.events(), Expectation(config.max_steps, config.global_batch_size, config.gpus_per_node))

    def digest(self, step: int | None = None) -> str:
        """Of everything in a checkpoint (default: of the last step), read without any of our code."""
        return digest(self.paths.checkpoint(step or self.config.max_steps))

    def last(self) -> tuple[object, object]:
        """Loss and gradient norm of the last step, to the last bit."""
        (*_, event) = (event for event in self.events("step_end") if event.data["step"] == self.config.max_steps)
        return event.data["loss"], event.data["grad_norm"]

    def check_against(self, clean: Training, faults: int) -> None:
        """What holds after any number of faults, compared with a run without."""
        fired = self.events("fault_injected")
        assert len(fired) == faults, fired
        assert self.last() == clean.last()
        if self.config.checkpoint_mode != "off":
            assert self.digest() == clean.digest(), "the final weights, moments or steps differ"
        self.check_samples()
        analysis = self.analysis
        assert sum(fault.injected for fault in analysis.faults) == faults, analysis.faults
        assert analysis.committed_steps_lost == 0
        assert (analysis.data_continuity.repeated, analysis.data_continuity.skipped) == (0, 0)
        assert not unexplained(analysis), analysis.breakdown

    def injected(self) -> list[FaultReport]:
        """The report's faults, without what a busy machine may have added."""
        return [fault for fault in self.analysis.faults if fault.injected]

    def check_samples(self) -> None:
        """No sample of the committed trajectory is repeated or skipped, by the events alone."""
        samples = TokenDataset(Path(self.record.dataset), self.config.sequence_length).samples
        trained: dict[int, dict[int, list[int]]] = {}
        for event in self.events("samples"):
            step = int(str(event.data["step"]))
            of_step = trained.setdefault(step, {})
            if of_step and next(iter(of_step)) // 1000 != event.world_size:
                of_step.clear()  # executed again by a world of another size
            of_step[event.world_size * 1000 + event.rank] = event.data["ids"]  # type: ignore[assignment]
        for step in range(1, self.config.max_steps + 1):
            ids = [index for key in sorted(trained[step]) for index in trained[step][key]]
            expected = sample_ids(self.config.seed, step, self.config.global_batch_size, samples)
            assert ids == expected, f"step {step}: {ids} instead of {expected}"


def unexplained(analysis: Analysis) -> str:
    """What is wrong with the intervals that the wall time is cut into, or nothing."""
    wall, other = analysis.wall_seconds, analysis.breakdown.other
    total = sum(analysis.breakdown.model_dump().values())
    if abs(total - wall) > SUM_TOLERANCE * wall:
        return f"intervals sum to {total:.2f} s of {wall:.2f} s"
    if other > MOST_OTHER * wall:
        return f"{other:.2f} s of {wall:.2f} s in no interval"
    return ""


def digest(checkpoint: Path) -> str:
    """SHA-256 over all tensors of a DCP checkpoint, by name."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=FileSystemReader(checkpoint), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    total = hashlib.sha256()
    for name, tensor in sorted(flat(state)):
        total.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


def flat(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@dataclass
class Trainer:
    """Starts runs on one dataset; ends what is left of them."""

    folder: Path
    dataset: Path
    started: list[Training]

    @classmethod
    def prepare(cls, folder: Path) -> Trainer:
        """Download the dataset that comes with the project."""
        command = [sys.executable, "-m", "steps.download", "--root", str(folder), "--run-id", "data", "--dataset-uri", "builtin:"]
        command += ["--tokenizer", "byte", "--sequence-length", "128"]
        subprocess.run(command, cwd=REPOSITORY, check=True, timeout=120, stdout=subprocess.DEVNULL)
        return cls(folder, Path(RunPaths(folder, "data").output("download", "dataset").read_text()), [])

    def start(self, folder: Path, run_id: str = "drill", **values: object) -> Training:
        """A supervisor in a session of its own; its root and its snapshots are under ``folder`` unless said otherwise."""
        command = [sys.executable, "-m", "steps.train", *self.arguments(folder, run_id, **values)]
        log = folder / f"{run_id}-{len(self.started)}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
        training = Training(RunPaths(Path(str(values.get("root", folder))), run_id), process, log)
        self.started.append(training)
        return training

    def arguments(self, folder: Path, run_id: str = "drill", **values: object) -> list[str]:
        """What ``steps.train`` is told."""
        folder.mkdir(parents=True, exist_ok=True)
        chosen = DEFAULTS | {"root": folder, "run_id": run_id, "snapshot_root": folder / "memory"}
        chosen |= {"heartbeat_timeout_seconds": heartbeat(), "save_timeout_seconds": 30 + heartbeat()} | values
        if "snapshot_root" not in values:
            (folder / "memory").mkdir(exist_ok=True)
        argv = ["--dataset", str(self.dataset)]
        for name, value in chosen.items():
            argv += [flag(name), to_text(value)]
        return argv

    def run(self, folder: Path, run_id: str = "drill", *, deadline: float = DEADLINE, code: int = 0, **values: object) -> Training:
        """A run to its end, which must come in time and with ``code``."""
        training = self.start(folder, run_id, **values)
        ended = training.wait(deadline)
        assert ended == code, f"ended with {ended}, not {code}:\n{training.describe()}"
        return training

    def end(self) -> None:
        """Kill what tests have left."""
        for training in self.started:
            if training.process.poll() is None:
                training.kill()
        self.started.clear()
