"""Supervises one training run: takes an attempt's number, starts its nodes (a Kubernetes Job, or local processes),
waits, and ends with a code of the contract.

1. Check everything that can be checked before a GPU is asked for.
2. Take the run (a lock, and run.json, which must agree with what is on disk).
3. Attach to living nodes of this run, or take the next attempt's number, which fences all earlier ones, and start.
4. Wait; tell Argo and people how far the run is. A node that is lost for good is answered by the next attempt.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from steps import progress
from steps.cluster import snapshot_bytes_of_run
from steps.launcher import Launch, Launcher, NodeLost, on_kubernetes
from trainer import environment
from trainer.config import TRAJECTORY_FIELDS, OneLineParser, RunConfig, add_flags, flag, from_namespace
from trainer.errors import ConfigurationError, DeniedError, ExitCode, UnavailableError, exit_with
from trainer.events import EventLog
from trainer.paths import MANIFEST, RunPaths
from trainer.progress import read_entries, read_now
from trainer.records import DatasetManifest, RunRecord, write_whole
from trainer.recovery.base import Limits

VERSIONED = ("torch", "nvidia-resiliency-ext", "hera", "holdfast")
NARRATE_SECONDS = 0.5
PROFILE_GPUS = {"p5": "H100", "p4de": "A100", "g5": "A10G"}
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "A10G": 70e12}
"""Dense bf16, by the vendor's datasheets."""


def check(config: RunConfig, dataset: Path) -> DatasetManifest:
    """Refuse what cannot work, before anything is started; returns the dataset's manifest."""
    from trainer.model import model_config

    Limits.of(config).check()
    try:
        manifest = DatasetManifest.read(dataset / MANIFEST)
    except FileNotFoundError:
        raise ConfigurationError(f"--dataset: there is no dataset at {dataset}; run the download step first") from None
    model_config(config.model, manifest.vocabulary_size)
    if manifest.tokens < config.sequence_length + 1:
        raise ConfigurationError(
            f"--sequence-length {config.sequence_length} is longer than the dataset ({manifest.tokens} tokens); "
            "use a shorter one or more text"
        )
    if config.init_from and not Path(config.init_from).is_dir():
        raise ConfigurationError(f"--init-from: {config.init_from} is not a directory of Hugging Face weights")
    check_snapshots(config, manifest.vocabulary_size)
    return manifest


def check_snapshots(config: RunConfig, vocabulary_size: int) -> None:
    """The node-local tier must fit into this machine's memory, which all local nodes share. What an earlier attempt
    of the run left there is written over, so it counts as free."""
    if not config.snapshot_interval_steps or config.launcher == "kubernetes" or environment.in_cluster():
        return
    from trainer.model import model_config, parameter_count

    needed = snapshot_bytes_of_run(config, parameter_count(model_config(config.model, vocabulary_size)))
    try:
        system = os.statvfs(config.snapshot_root)
    except OSError as error:
        raise ConfigurationError(f"--snapshot-root {config.snapshot_root}: {error.strerror}") from None
    own = RunPaths(config.root, config.run_id).snapshots(config.snapshot_root, 0).parent
    room = system.f_bavail * system.f_frsize + sum(path.stat().st_blocks * 512 for path in own.glob("node-*/*"))
    if room < needed:
        raise ConfigurationError(
            f"--snapshot-root {config.snapshot_root} has {room / 2**30:.2f} GiB for this run, the snapshots of this model "
            f"take {needed / 2**30:.2f} GiB; make it larger or set --snapshot-interval-steps 0"
        )


def take(paths: RunPaths, *, in_cluster: bool = False) -> int:
    """Hold the run's lock for the life of this process. When another supervisor does: ``ConfigurationError``, but in a
    cluster ``UnavailableError``, which is tried again: it is our own predecessor, on a node that stopped answering."""
    try:
        paths.run.mkdir(parents=True, exist_ok=True)
        fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        kind = DeniedError if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else UnavailableError
        raise kind(f"--root {paths.root} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        if in_cluster:
            raise UnavailableError(
                f"an earlier supervisor of run {paths.run_id} still holds {paths.lock}; it ends with the run, or with its node"
            ) from None
        raise ConfigurationError(
            f"--run-id {paths.run_id} is in use: another supervisor holds {paths.lock}; wait for it or choose another id"
        ) from None
    return fd


def settle(config: RunConfig, paths: RunPaths, dataset: Path, manifest: DatasetManifest) -> RunRecord:
    """Write run.json, or agree with the one on disk: a run keeps its trajectory, whatever else changes."""
    digest = config.digest(manifest.digest)
    created = time.time()
    if paths.record.exists():
        before = RunRecord.read(paths.record)
        created = before.created
        if before.config_digest != digest:
            changed = [
                f"{flag(name)} was {getattr(before.config, name)}, is {getattr(config, name)}"
                for name in TRAJECTORY_FIELDS
                if getattr(before.config, name) != getattr(config, name)
            ]
            if before.dataset_digest != manifest.digest:
                changed.append("the dataset has other content")
            raise ConfigurationError(
                f"--run-id {paths.run_id} exists with another configuration ({'; '.join(changed)}); choose another run id"
            )
    record = RunRecord(
        config=config,
        config_digest=digest,
        dataset=str(dataset),
        dataset_digest=manifest.digest,
        versions=versions(),
        hardware=hardware(config),
        created=created,
    )
    record.write(paths.record)
    return record


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware(config: RunConfig) -> dict[str, Any]:
    """What a node is: its GPU and the peak bf16 FLOP/s of one, where there is a GPU here or the profile says."""
    gpu = PROFILE_GPUS.get(config.profile, "") or local_gpu()
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in gpu), None)
    return {"machine": platform.machine(), "cpus": os.cpu_count(), "gpu": gpu, "peak_flops": peak}


def local_gpu() -> str:
    """The name of this machine's first GPU, empty where there is none. Asks the driver's own tool: no CUDA here."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""


def next_attempt(paths: RunPaths) -> int:
    """Take the next number: from now on no earlier attempt may commit."""
    try:
        newest = int(paths.fence.read_text())
    except (FileNotFoundError, ValueError):
        newest = 0
    write_whole(paths.fence, str(newest + 1).encode())
    return newest + 1


class Narrator:
    """A thread that says how far the run is: to Argo, to the local engine's display, and to people who watch the log."""

    def __init__(self, config: RunConfig, paths: RunPaths) -> None:
        self._config = config
        self._paths = paths
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="narrator", daemon=True)

    def __enter__(self) -> Narrator:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(5)

    def _run(self) -> None:
        said, last_line = -1, 0.0
        while not self._ended.wait(NARRATE_SECONDS):
            now = read_now(self._paths)
            if now.step < 0 or now.step == said:
                continue
            progress.report(now.step, self._config.max_steps)
            restarts = max(0, read_entries(self._paths) - 1)
            status = environment.status_file()
            if status is not None:
                fields = {"step": now.step, "max_steps": self._config.max_steps, "loss": now.loss}
                fields |= {"tokens_per_second": now.tokens_per_second, "restarts": restarts}
                write_whole(status, json.dumps(fields).encode())
            if time.monotonic() - last_line > 5 or now.step == self._config.max_steps:
                last_line = time.monotonic()
                print(
                    f"step {now.step}/{self._config.max_steps}  loss {now.loss:.4f}  "
                    f"{now.tokens_per_second:,.0f} tokens/s  restarts {restarts}",
                    flush=True,
                )
            said = now.step


def choose_launcher(config: RunConfig, options: Any, events: EventLog) -> Launcher:
    if on_kubernetes(config):
        from steps import kubernetes

        return kubernetes.KubernetesLauncher(config, kubernetes.options(options))
    from steps.processes import ProcessLauncher

    return ProcessLauncher(events)


class Supervisor:
    """From the lock to the exit code."""

    def __init__(
        self, config: RunConfig, paths: RunPaths, events: EventLog, launcher: Launcher, workflow: str = ""
    ) -> None:
        self._config = config
        self._paths = paths
        self._events = events
        self._launcher = launcher
        self._workflow = workflow
        self._stop: str | None = None

    def _asked_to_stop(self, number: int, frame: object) -> None:
        self._stop = signal.Signals(number).name

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._asked_to_stop)
        signal.signal(signal.SIGINT, self._asked_to_stop)
        attempt = self._launcher.attach()
        attached = attempt is not None
        while True:
            if attempt is None:
                attempt = next_attempt(self._paths)
            self._events.update(attempt=attempt)
            self._events.emit(
                "supervisor_start",
                attached=attached,
                launcher=type(self._launcher).__name__,
                workflow=self._workflow,
            )
            launch = Launch(self._config, self._paths, attempt)
            try:
                if not attached:
                    self._launcher.start(launch)
                with Narrator(self._config, self._paths):
                    code = self._launcher.wait(launch, lambda: self._stop)
                break
            except NodeLost as lost:
                self._events.emit("fault_detected", layer="workflow", message=str(lost))
                print(f"{lost}; the next attempt starts", file=sys.stderr, flush=True)
                attempt, attached = None, False
        if code == ExitCode.DONE:
            write_whole(self._paths.finished, str(self._config.max_steps).encode())
            print(f"run {self._paths.run_id} has finished all {self._config.max_steps} steps", flush=True)
        self._events.emit(
            "supervisor_end",
            exit_code=code,
            message=self._stop or "",
            workflow=self._workflow,
            by_user=self._launcher.stopped_by_user,
        )
        return code


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="steps.train", description="Supervise one training run.")
    add_flags(parser)
    parser.add_argument("--dataset", type=Path, required=True, help="directory of the dataset")
    from steps import kubernetes

    kubernetes.add_arguments(parser)
    options = parser.parse_args(argv)
    config = from_namespace(options)
    config = config.model_copy(update={"root": config.root.absolute()})
    paths = RunPaths(config.root, config.run_id)
    if not config.root.is_dir():
        raise UnavailableError(f"--root {config.root} is not there; is the file system mounted?")
    manifest = check(config, options.dataset)
    lock = take(paths, in_cluster=environment.in_cluster())
    try:
        settle(config, paths, options.dataset.absolute(), manifest)
        if paths.finished.exists():
            print(f"run {config.run_id} is complete: all {config.max_steps} steps are done", flush=True)
            return int(ExitCode.DONE)
        events = EventLog(paths.events, config.run_id, "supervisor")
        launcher = choose_launcher(config, options, events)
        return Supervisor(config, paths, events, launcher, getattr(options, "workflow", "")).run()
    finally:
        os.close(lock)


if __name__ == "__main__":
    exit_with(main)
