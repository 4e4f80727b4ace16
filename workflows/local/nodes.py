"""The nodes of a running workflow: Argo's ``status.nodes``, with the counts that parallelism and completion need."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from workflows.local.language.values import fnv32a, parse_timestamp, timestamp
from workflows.local.plan import Raw

COMPLETED = frozenset({"Succeeded", "Failed", "Error"})
FULFILLED = COMPLETED | {"Skipped", "Omitted"}
UNSUCCESSFUL = frozenset({"Failed", "Error"})
ACTIVE = frozenset({"Pending", "Running"})
_COUNTED = frozenset({"Pod", "Steps", "DAG"})


@dataclass
class Outputs:
    """What a node gave: parameters in Argo's JSON, a result (standard output), an exit code."""

    parameters: list[Raw] = field(default_factory=list)
    result: str | None = None
    exit_code: str | None = None

    def write(self) -> Raw:
        every: Raw = {"parameters": self.parameters or None, "result": self.result, "exitCode": self.exit_code}
        return {key: value for key, value in every.items() if value is not None}

    @staticmethod
    def read(raw: Raw | None) -> Outputs | None:
        return (
            None if raw is None else Outputs(list(raw.get("parameters") or ()), raw.get("result"), raw.get("exitCode"))
        )

    def copy(self) -> Outputs:
        return Outputs([dict(parameter) for parameter in self.parameters], self.result, self.exit_code)


@dataclass
class Node:
    """One node. Times are seconds since the epoch, 0 if there is none; Argo keeps whole seconds, so does ``duration``."""

    id: str
    name: str
    display_name: str
    type: str
    phase: str
    template_name: str = ""
    template_ref: Raw | None = None
    template_scope: str = ""
    boundary_id: str = ""
    message: str = ""
    started: float = 0.0
    finished: float = 0.0
    hooked: bool = False
    retried: bool = False
    flagged: bool = False
    inputs: list[Raw] = field(default_factory=list)
    outputs: Outputs | None = None
    children: list[str] = field(default_factory=list)
    outbound: list[str] = field(default_factory=list)
    waiting_for: str = ""
    """The lock it waits for."""
    progress: str = ""
    memoization: Raw | None = None

    @property
    def fulfilled(self) -> bool:
        return self.phase in FULFILLED

    @property
    def completed(self) -> bool:
        return self.phase in COMPLETED

    @property
    def unsuccessful(self) -> bool:
        return self.phase in UNSUCCESSFUL

    @property
    def duration(self) -> float:
        """Whole seconds from start to finish, 0 while it runs."""
        return float(int(self.finished) - int(self.started)) if self.finished else 0.0

    def write(self) -> Raw:
        """Argo's JSON of it."""
        raw: Raw = {
            "id": self.id,
            "name": self.name,
            "displayName": self.display_name,
            "type": self.type,
            "phase": self.phase,
        }
        optional: Raw = {
            "templateName": self.template_name,
            "templateRef": self.template_ref,
            "templateScope": self.template_scope,
            "boundaryID": self.boundary_id,
            "message": self.message,
            "startedAt": timestamp(self.started) if self.started else None,
            "finishedAt": timestamp(self.finished) if self.finished else None,
            "progress": self.progress,
            "nodeFlag": {key: True for key, on in (("hooked", self.hooked), ("retried", self.retried)) if on}
            or ({} if self.flagged else None),
            "inputs": {"parameters": self.inputs} if self.inputs else None,
            "outputs": self.outputs.write() if self.outputs is not None else None,
            "children": self.children or None,
            "outboundNodes": self.outbound or None,
            "synchronizationStatus": {"waiting": self.waiting_for} if self.waiting_for else None,
            "memoizationStatus": self.memoization,
        }
        return raw | {key: value for key, value in optional.items() if value not in (None, "")}

    @staticmethod
    def read(raw: Raw) -> Node:
        flag = raw.get("nodeFlag")
        return Node(
            id=raw["id"],
            name=raw["name"],
            display_name=raw.get("displayName", ""),
            type=raw["type"],
            phase=raw.get("phase", ""),
            template_name=raw.get("templateName", ""),
            template_ref=raw.get("templateRef"),
            template_scope=raw.get("templateScope", ""),
            boundary_id=raw.get("boundaryID", ""),
            message=raw.get("message", ""),
            started=parse_timestamp(raw["startedAt"]) if raw.get("startedAt") else 0.0,
            finished=parse_timestamp(raw["finishedAt"]) if raw.get("finishedAt") else 0.0,
            hooked=bool((flag or {}).get("hooked")),
            retried=bool((flag or {}).get("retried")),
            flagged=flag is not None,
            inputs=list((raw.get("inputs") or {}).get("parameters") or ()),
            outputs=Outputs.read(raw.get("outputs")),
            children=list(raw.get("children") or ()),
            outbound=list(raw.get("outboundNodes") or ()),
            waiting_for=(raw.get("synchronizationStatus") or {}).get("waiting", ""),
            progress=raw.get("progress", ""),
            memoization=raw.get("memoizationStatus"),
        )


class Nodes:
    """All nodes of one workflow by name and id. Changes go through it, so that counts and listeners stay right."""

    def __init__(self, workflow: str, changed: Callable[[Node], Any]) -> None:
        self.workflow = workflow
        self.changed = changed
        self.by_name: dict[str, Node] = {}
        self.by_id: dict[str, Node] = {}
        self.active_pods: Counter[str] = Counter()
        """Boundary id -> pods that are pending or running and do not wait for a lock; '' counts all."""
        self.active_children: Counter[str] = Counter()
        self.unsuccessful_children: Counter[str] = Counter()
        self.unfulfilled: Counter[str] = Counter()
        self.lost: set[str] = set()
        """Ids of pods that ran when an earlier engine was killed and are not asked for again yet: they take no one's place."""
        self._links: dict[str, set[str]] = {}

    def node_id(self, name: str) -> str:
        return name if name == self.workflow else f"{self.workflow}-{fnv32a(name)}"

    def get(self, name: str) -> Node | None:
        return self.by_name.get(name)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.by_name.values())

    def __len__(self) -> int:
        return len(self.by_name)

    def add(self, node: Node) -> Node:
        self.by_name[node.name] = node
        self.by_id[node.id] = node
        self._links[node.id] = set(node.children)
        self._count(node, 1)
        self.changed(node)
        return node

    def _count(self, node: Node, sign: int) -> None:
        boundary = node.boundary_id
        if not node.fulfilled:
            self.unfulfilled[boundary] += sign
        if node.type not in _COUNTED:
            return
        if node.phase in ACTIVE:
            self.active_children[boundary] += sign
            if node.type == "Pod" and not node.waiting_for and node.id not in self.lost:
                self.active_pods[""] += sign
                if boundary:
                    self.active_pods[boundary] += sign
        if node.unsuccessful:
            self.unsuccessful_children[boundary] += sign

    def mark(self, node: Node, phase: str, message: str | None = None) -> Node:
        """Set the phase, and the message unless it is None; a fulfilled node gets its time of finish."""
        changed = node.phase != phase or (message is not None and node.message != message)
        self._count(node, -1)
        node.phase = phase
        if message is not None:
            node.message = message
        if node.fulfilled and not node.finished:
            node.finished, changed = time.time(), True
        self._count(node, 1)
        if changed:
            self.changed(node)
        return node

    def take_up(self, node: Node) -> None:
        """A pod is asked for (again)."""
        if node.id in self.lost:
            self._count(node, -1)
            self.lost.discard(node.id)
            self._count(node, 1)

    def wait_for(self, node: Node, lock: str, message: str) -> None:
        """Note the lock that a node waits for ('' and '': none)."""
        if node.waiting_for == lock and node.message == message:
            return
        self._count(node, -1)
        node.waiting_for, node.message = lock, message
        self._count(node, 1)
        self.changed(node)

    def link(self, parent: Node, child_id: str) -> None:
        """Make a node a child of another, once."""
        links = self._links[parent.id]
        if child_id not in links:
            links.add(child_id)
            parent.children.append(child_id)
            self.changed(parent)

    def part_of_exit_handler(self, node: Node) -> bool:
        current: Node | None = node
        while current is not None:
            if current.display_name.endswith(".onExit"):
                return True
            current = self.by_id.get(current.boundary_id) if current.boundary_id else None
        return False
