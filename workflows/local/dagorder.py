"""The shape of a DAG: which tasks its targets need, in which order, and what their phases make of the whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from workflows.local.execution import TemplateError
from workflows.local.language.tags import tags_of
from workflows.local.nodes import UNSUCCESSFUL, Node, Nodes
from workflows.local.plan import Template


class Order:
    """The tasks that the targets need, every dependency before what depends on it."""

    def __init__(self, template: Template, target: str) -> None:
        self.tasks = template.tasks
        self.depends = template.depends
        self.position: dict[str, int] = {}
        self.dependents: dict[str, list[str]] = {}
        self._mentioned: dict[str, frozenset[str] | None] = {}
        if target:
            self.targets = target.split(" ")
        else:
            needed = {name for depends in self.depends.values() for name in depends.names}
            self.targets = sorted(name for name in self.tasks if name not in needed)
        for name in self.targets:
            if name not in self.tasks:
                raise TemplateError(f"target {name} does not exist")
            self._place(name)
        for name in self.position:
            for dependency in self.depends[name].names:
                self.dependents.setdefault(dependency, []).append(name)

    def _place(self, target: str) -> None:
        stack = [(target, iter(self.depends[target].names))] if target not in self.position else []
        entered = {target}
        while stack:
            name, rest = stack[-1]
            following = next(rest, None)
            if following is None:
                self.position[name] = len(self.position)
                stack.pop()
            elif following not in self.position and following not in entered:
                entered.add(following)
                stack.append((following, iter(self.depends[following].names)))

    def ancestors(self, name: str) -> set[str]:
        """All tasks that a task waits for, directly or not."""
        found: set[str] = set()
        pending = list(self.depends[name].names)
        while pending:
            current = pending.pop()
            if current not in found:
                found.add(current)
                pending += self.depends[current].names
        return found

    def mentioned(self, name: str) -> frozenset[str] | None:
        """The tasks that a task's tags name; None if expressions may name any."""
        if name not in self._mentioned:
            task = self.tasks[name]
            tags = tags_of(task.raw)
            if any(tag.startswith("=") or "{{" in tag for tag in tags) or any(
                h.expression for h in task.hooks.values()
            ):
                self._mentioned[name] = None
            else:
                named = (tag.split(".")[1] for tag in tags if tag.startswith("tasks.") and "." in tag)
                self._mentioned[name] = frozenset(named)
        return self._mentioned[name]


def verdict(
    dag: Node, targets: list[str], continues: Callable[[str, str], bool], template: Template, nodes: Nodes
) -> str:
    """Argo's verdict on a DAG: Running, or what its targets' phases come to.

    A target that was omitted inherits the phase of the branch it is on, failures first. ``targets`` are node names;
    ``continues`` says whether a target's ``continueOn`` forgives a phase.
    """
    phases: dict[str, str] = {nodes.node_id(name): "" for name in targets}
    queue = deque((child, "Succeeded") for child in dag.children)
    seen = set(queue)
    while queue:
        node_id, branch = queue.popleft()
        node = nodes.by_id.get(node_id)
        if node is None or not node.fulfilled:
            return "Running"
        if node.completed:
            branch = node.phase
        if node_id in phases and phases[node_id] not in UNSUCCESSFUL:
            phases[node_id] = branch
        for child in _children(node, nodes):
            if (child, branch) not in seen:
                seen.add((child, branch))
                queue.append((child, branch))
    result, fail_fast = "Succeeded", template.dag_fail_fast
    for name in targets:
        phase = phases[nodes.node_id(name)]
        if phase == "":
            result = "Running"
            if not fail_fast:
                break
        elif phase in UNSUCCESSFUL and not continues(name, phase):
            result = phase
            if fail_fast:
                break
    return result


def _children(node: Node, nodes: Nodes) -> list[str]:
    """Where the branch goes on; a Retry node stands for its attempts, so their children count, and its own hooks."""
    if node.type != "Retry":
        return node.children
    out: list[str] = []
    for child_id in reversed(node.children):
        child = nodes.by_id[child_id]
        out += [child.id] if child.hooked else child.children
    return out
