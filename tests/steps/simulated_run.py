"""A run that never was: it emits the events that a real one would, and keeps the true times by category as it goes.

The truth is kept by what happens, not by reading events: a step is productive until a resume goes below it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

from trainer.config import RunConfig
from trainer.events import Event
from trainer.paths import RunPaths
from trainer.records import RunRecord

EPOCH = 1_700_000_000.0
LOAD_PHASES = (("process_group_ready", 0.3), ("model_ready", 0.2), ("loaded", 0.4))


@dataclass
class Clock:
    """A host's clocks: how far its wall clock is ahead, and jumps of it as (true time, seconds)."""

    ahead: float = 0.0
    uptime: float = 1000.0
    jumps: list[tuple[float, float]] = field(default_factory=list)

    def wall(self, true: float) -> float:
        return EPOCH + true + self.ahead + sum(by for at, by in self.jumps if true >= at)


@dataclass
class SimulatedRun:
    """Nodes with ``per_node`` ranks each; ``now`` is true time in seconds, and all methods move it on."""

    nodes: int = 1
    per_node: int = 2
    batch: int = 8
    samples: int = 10_000
    clocks: list[Clock] = field(default_factory=lambda: [Clock()])
    events: list[Event] = field(default_factory=list)
    now: float = 5.0
    truth: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    standing: dict[int, float] = field(default_factory=dict)
    done: int = 0
    """The highest completed step of the current trajectory."""
    attempt: int = 0
    workflow: str = "run-1"
    pods: list[int] = field(default_factory=list)
    cycles: list[int] = field(default_factory=list)
    iteration: int = 0
    pids: list[int] = field(default_factory=list)
    next_pid: int = 100
    lost: int = 0
    replayed: int = 0
    index: int = 0

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    def emit(self, name: str, *, rank: int = -1, node: int = 0, role: str = "trainer", at: float | None = None, **data: JsonValue) -> None:
        true = self.now if at is None else at
        clock = self.clocks[node % len(self.clocks)]
        trainer = role == "trainer"
        self.events.append(
            Event(
                event=name, time=clock.wall(true), monotonic=clock.uptime + true, boot_id=f"boot-{node % len(self.clocks)}",
                run_id="run", host=f"host-{node}", role=role,  # type: ignore[arg-type]
                pid=self.pids[rank] if trainer else 1, attempt=self.attempt, node=node if role != "supervisor" else -1,
                pod=self.pods[node] if self.pods else 0, cycle=self.cycles[node] if trainer else 0,
                iteration=self.iteration if trainer else 0, rank=rank, world_size=self.world if trainer else 0, data=data,
            )
        )  # fmt: skip

    def everywhere(self, name: str, **data: JsonValue) -> None:
        for rank in range(self.world):
            self.emit(name, rank=rank, node=rank // self.per_node, **data)

    def spend(self, category: str, seconds: float) -> None:
        self.now += seconds
        self.truth[category] += seconds

    # -- beginnings

    def launch(self) -> None:
        """A new attempt of the supervisor, and its launchers."""
        self.attempt += 1
        self.pods, self.cycles, self.iteration = [0] * self.nodes, [0] * self.nodes, 0
        self.emit("supervisor_start", role="supervisor", attached=False, workflow=self.workflow)
        for node in range(self.nodes):
            self.emit("launcher_start", role="node", node=node, nodes=self.nodes)

    def begin(self, resume: int, category: str, *, processes: bool = True, tier: str = "durable") -> dict[str, float]:
        """All ranks go from nothing (or from their entry) to the first step; returns the seconds of each phase."""
        spent = dict.fromkeys(("rendezvous", "import", "process_group", "build", "load"), 0.0)
        if processes:
            self.spend(category, 0.5)
            spent["rendezvous"] += 0.5
            self.pids = list(range(self.next_pid, self.next_pid + self.world))
            self.next_pid += self.world
            self.iteration = 0
            asked = self.clocks[0].wall(self.now)
            self.spend(category, 0.1)
            for rank in range(self.world):
                node = rank // self.per_node
                offset = self.clocks[node % len(self.clocks)].wall(self.now) - self.clocks[0].wall(self.now)
                self.emit("process_start", rank=rank, node=node, spawned_at=asked + offset)
            self.spend(category, 1.5)
            spent["import"] += 1.6
            self.everywhere("imports_done")
        self.everywhere("entry")
        names = {"process_group_ready": "process_group", "model_ready": "build", "loaded": "load"}
        for name, seconds in LOAD_PHASES:
            self.spend(category, seconds)
            spent[names[name]] += seconds
            self.everywhere(name, **({"step": resume, "tier": tier} if name == "loaded" else {}))
        self.spend(category, 0.05)
        spent["load"] += 0.05
        rolled_back = [step for step in self.standing if step > resume]
        self.lost += len(rolled_back)
        self.replayed += len(rolled_back)
        for step in rolled_back:
            seconds = self.standing.pop(step)
            self.truth["productive"] -= seconds
            self.truth["replay"] += seconds
        self.done = resume
        return spent

    # -- steps

    def step(self, seconds: float = 1.0, *, stall: float = 0.0, spread: float = 0.01, late: bool = True) -> None:
        """The next step: all ranks start, wait ``stall`` (of ``seconds``) for a save, and end ``spread`` apart."""
        step = self.done + 1
        self._start(step)
        if stall:
            self.everywhere_at("stall", self.now + stall, step=step, seconds=stall, reason="save")
        end = self.now + seconds
        for rank in range(self.world):
            self.emit(
                "step_end", rank=rank, node=rank // self.per_node, at=end - spread * (self.world - 1 - rank) / self.world,
                step=step, loss=5.0 / step, tokens=self.batch * 16, compute_seconds=seconds / 2,
            )  # fmt: skip
        self.spend("checkpoint_stall", stall)
        self.spend("productive", seconds - stall)
        self.standing[step] = seconds - stall
        self.done = step

    def everywhere_at(self, name: str, at: float, **data: JsonValue) -> None:
        for rank in range(self.world):
            self.emit(name, rank=rank, node=rank // self.per_node, at=at, **data)

    def _start(self, step: int) -> None:
        share = self.batch // self.world
        ids = [((step - 1) * self.batch + i) % self.samples for i in range(self.batch)]
        self.everywhere("step_start", step=step)
        for rank in range(self.world):
            mine: list[JsonValue] = [*ids[rank * share : (rank + 1) * share]]
            self.emit("samples", rank=rank, node=rank // self.per_node, step=step, ids=mine)

    def commit(self, tier: str = "durable") -> None:
        """What is done is saved: durable ones are told by rank 0, snapshots by every rank."""
        if tier == "durable":
            self.emit("save_start", rank=0, step=self.done, mode="async", tier=tier)
            self.emit("commit", rank=0, step=self.done, tier=tier, bytes=1000, seconds=0.5)
        else:
            self.everywhere("commit", step=self.done, tier=tier, bytes=10, seconds=0.1)

    # -- ends

    def fault(self, kind: str, rank: int = 1, *, into: float = 0.4, detection: float = 0.2, layer: str = "in_job", notice: bool = True) -> None:
        """A fault in the next step, ``into`` seconds after its start, noticed after ``detection``; nobody goes on."""
        step = self.done + 1
        self._start(step)
        self.spend("replay", into)
        self.replayed += 1
        node = rank // self.per_node
        self.emit("fault_injected", rank=rank, node=node, index=self.index, step=step, kind=kind, variant="")
        self.index += 1
        if kind == "sigkill":  # its parent sees it end, which is no detection by a layer
            self.emit("worker_exit", role="node", node=node, local_rank=rank % self.per_node, exit_code=-9)
        self.spend("detection", detection)
        if notice:
            self.emit("fault_detected", rank=0, node=0, layer=layer, message="a peer went away")

    def fault_again(self, kind: str, rank: int, *, after: float, detection: float) -> None:
        """Another fault ``after`` the detection of one, before training went on."""
        self.spend("recovery", after)
        node = rank // self.per_node
        self.emit("fault_injected", rank=rank, node=node, index=self.index, step=self.done + 1, kind=kind, variant="")
        self.index += 1
        self.spend("detection", detection)
        self.emit("fault_detected", rank=rank, node=node, layer="in_job", message="once more")

    def restart(self, layer: str, resume: int, teardown: float = 0.7, *, node: int = 0, tier: str = "durable") -> dict[str, float]:
        """What a layer does from the detection on; returns the true phases."""
        self.spend("recovery", teardown)
        if layer == "in_process":
            self.iteration += 1
            return {"teardown": teardown, **self.begin(resume, "recovery", processes=False, tier=tier)}
        for rank in range(self.world):
            self.emit("worker_exit", role="node", node=rank // self.per_node, local_rank=rank % self.per_node, exit_code=-15)
        if layer == "in_job":
            self.cycles = [cycle + 1 for cycle in self.cycles]
        elif layer == "pod":
            # The nodes that live on count a cycle; the one that is new begins at zero.
            self.cycles = [0 if n == node else cycle + 1 for n, cycle in enumerate(self.cycles)]
            self.pods[node] += 1
            self.emit("pod_restart", role="supervisor", node_index=node, pod=self.pods[node], exit_code=1)
        else:
            self.emit("supervisor_end", role="supervisor", exit_code=75, message="SIGTERM", workflow=self.workflow)
            self.launch()
        return {"teardown": teardown, **self.begin(resume, "recovery", tier=tier)}

    def stop_by_user(self, away: float, *, how: str = "SIGTERM") -> None:
        """The user stops the run at the end of a step and starts it again ``away`` seconds later, time that does not count."""
        self.commit()
        self.everywhere("stop_requested", reason="stop file")
        self.everywhere("fault_detected", layer="in_job", message="stopped as asked")
        argo_stop = how == "argo stop"
        self.emit(
            "supervisor_end", role="supervisor", exit_code=75, message="SIGTERM" if argo_stop else how,
            workflow=self.workflow, by_user=argo_stop, at=self.now + 0.5,
        )  # fmt: skip
        self.now += away
        if not argo_stop:  # (`argo retry` goes on with the same Workflow)
            self.workflow = f"run-{self.attempt + 1}"
        self.launch()
        self.begin(self.done, "startup")


def write_run(run: SimulatedRun, root: Path, config: RunConfig, **record: object) -> RunPaths:
    """Leave the records of ``run`` on disk, an event file per process, as a real run would."""
    paths = RunPaths(root, config.run_id)
    paths.events.mkdir(parents=True)
    files: dict[str, list[str]] = defaultdict(list)
    for event in run.events:
        files[f"{event.host}-{event.role}-{event.pid}-1.jsonl"].append(event.model_dump_json() + "\n")
    for name, lines in files.items():
        (paths.events / name).write_text("".join(lines))
    values: dict[str, object] = {
        "config": config, "config_digest": "c" * 64, "dataset": str(root / "datasets" / "none"), "dataset_digest": "d" * 64,
        "versions": {"torch": "2.13.0"}, "hardware": {"cpus": 2}, "created": EPOCH,
    }  # fmt: skip
    RunRecord.model_validate(values | record).write(paths.record)
    return paths
