"""Where everything lives under the root (``/fsx`` on the cluster, ``./fsx`` on a laptop). The only place with path names."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

CHECKPOINT_NAME = re.compile(r"^step-(\d{8})$")
MANIFEST = "manifest.json"
DATASET_TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class RunPaths:
    """The files of one run. ``root`` is the shared file system, ``run_id`` names the run."""

    root: Path
    run_id: str

    @property
    def run(self) -> Path:
        return self.root / "runs" / self.run_id

    @property
    def record(self) -> Path:
        """run.json: the resolved configuration, versions and hardware."""
        return self.run / "run.json"

    @property
    def events(self) -> Path:
        return self.run / "events"

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The directory whose existence under this very name means: committed."""
        return self.checkpoints / f"step-{step:08d}"

    @property
    def quarantine(self) -> Path:
        """Checkpoints that failed to load, kept for a person to look at; never read again."""
        return self.run / "quarantine"

    def logs(self, step: str, attempt: int) -> Path:
        return self.run / "logs" / step / str(attempt)

    def outcome(self, attempt: int, node: int, pod: int, rank: int) -> Path:
        """What a worker says of its own end, since launchers report 1 whatever their workers' codes were."""
        return self.outcomes / f"{attempt}-{node}-{pod}-{rank}.json"

    @property
    def outcomes(self) -> Path:
        return self.run / "outcomes"

    @property
    def faults_fired(self) -> Path:
        """One empty file per injected fault, made just before it fires, so that each fires once."""
        return self.run / "faults"

    @property
    def fence(self) -> Path:
        """The number of the newest attempt; an older one must not commit."""
        return self.run / "attempt"

    @property
    def progress(self) -> Path:
        """How far the run ever was, and how many starts in a row did not get it further."""
        return self.run / "progress.json"

    @property
    def furthest(self) -> Path:
        """The furthest and the newest completed step and its figures, rewritten in place by rank 0 at every step."""
        return self.run / "furthest"

    @property
    def finished(self) -> Path:
        """Exists once the last step is done and durable: there is nothing left to train."""
        return self.run / "finished"

    def log(self, step: str, attempt: int, rank: int) -> Path:
        return self.logs(step, attempt) / f"rank-{rank}.log"

    def stop_file(self, attempt: int, node: int, pod: int) -> Path:
        """Asks the ranks of a pod, and so all, to save and stop at the end of a step. The pod that follows is not asked."""
        return self.run / f"stop-{attempt}-{node}-{pod}"

    def closed_file(self, attempt: int) -> Path:
        """Written by a node that was turned away from the rendezvous of an attempt; its host makes a new one."""
        return self.run / f"closed-{attempt}"

    @property
    def storage_bucket(self) -> Path:
        """Until when the emulated storage is taken; one for all ranks of the run."""
        return self.run / "storage"

    @property
    def lock(self) -> Path:
        """Held (flock) by the supervisor of the run; tells two supervisors apart on one machine."""
        return self.run / "supervisor.lock"

    @property
    def pipeline_lock(self) -> Path:
        """Held (flock) by ``run.py local`` from the first step to the last; tells two pipelines of one run apart."""
        return self.run / "pipeline.lock"

    @property
    def validation(self) -> Path:
        return self.run / "validation.json"

    def report(self, kind: str) -> Path:
        """``kind`` is json, md or html."""
        return self.run / f"report.{kind}"

    @property
    def tensorboard(self) -> Path:
        return self.run / "tensorboard"

    def output(self, step: str, name: str) -> Path:
        """Where a step leaves an output parameter for Argo (or the local engine) to read."""
        return self.run / "outputs" / step / name

    def peer(self, attempt: int, node: int) -> Path:
        """Where the replica server of a node says how to reach it."""
        return self.run / "peers" / f"{attempt}-{node}"

    def snapshots(self, snapshot_root: Path, attempt_node: int) -> Path:
        """The node-local tier of one node of this run (memory-backed storage, which all roots of a machine share)."""
        root = hashlib.sha256(str(self.root.absolute()).encode()).hexdigest()[:8]
        return snapshot_root / f"holdfast-{self.run_id}-{root}" / f"node-{attempt_node}"


def datasets(root: Path) -> Path:
    return root / "datasets"


def dataset(root: Path, name: str, digest: str) -> Path:
    return datasets(root) / f"{name}-{digest[:12]}"


def dataset_index(root: Path, key: str) -> Path:
    """Says which dataset a source and a tokenizer (``key``) became, so that it is not tokenised twice."""
    return datasets(root) / ".index" / f"{key}.json"


def dataset_stagings(root: Path) -> Path:
    """Downloaded source files, one directory per source revision; they outlive a killed download and are resumed."""
    return datasets(root) / ".staging"


def dataset_temporary(root: Path, owner: str) -> Path:
    """A dataset being built by the process ``owner``; nobody takes it for a dataset."""
    return datasets(root) / f"{DATASET_TEMPORARY}{owner}"


def dataset_shard(number: int) -> str:
    return f"shard-{number:05d}.bin"


def runs(root: Path) -> Path:
    return root / "runs"


def comparison(root: Path, name: str, kind: str) -> Path:
    """The comparative report ``name`` of several runs; ``kind`` is json, md or html."""
    return root / "comparisons" / name / f"report.{kind}"


def workflow(root: Path, name: str) -> Path:
    """What the local engine leaves of one workflow: workflow.json and a directory per node."""
    return root / "workflows" / name


def compiled_workflow(root: Path, name: str) -> Path:
    """The YAML that ``run.py local`` compiled and handed to the local engine."""
    return workflow(root, name) / "workflow.yaml"
