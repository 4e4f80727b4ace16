"""What the tasks of a DAG wait for, and when Argo would look at them.

A task may begin once everything it depends on has settled: is fulfilled, its hooks too. But a task that ends *while* it is
looked at (a loop's group, a DAG within) gets its hooks only in the controller's next pass. What depends on it goes on in
this pass already, without them; and in the next one it is looked at only if the way from the targets, which stops at tasks
that are fulfilled, leads to it. If it does not, its hooks never run.
"""

from __future__ import annotations

from collections.abc import Iterator

from workflows.local.dagorder import Order
from workflows.local.nodes import Nodes


class Waits:
    """Who waits for whom in one DAG; ``prefix`` and a task's name make its node's name."""

    def __init__(self, order: Order, nodes: Nodes, prefix: str) -> None:
        self.order = order
        self.nodes = nodes
        self.prefix = prefix
        self.count = {name: len(order.depends[name].names) for name in order.position}
        """Task -> how many of its dependencies have not settled."""
        self.owed: set[str] = set()
        """Tasks that ended while they were looked at in the pass before."""
        self._late: set[str] = set()
        self._settled: set[str] = set()

    def settle(self, name: str) -> Iterator[str]:
        """A task is fulfilled: the tasks that wait for nothing else, once its hooks are too."""
        node, by_id = self.nodes.by_name[self.prefix + name], self.nodes.by_id
        running = any(by_id[i].hooked and not by_id[i].fulfilled for i in node.children if i in by_id)
        if name not in self._settled and not running:
            self._settled.add(name)
            yield from self._release(name)

    def end_late(self, name: str) -> Iterator[str]:
        """A task ended while it was looked at, and has hooks: the tasks that go on in this pass without them."""
        self._late.add(name)
        return self._release(name)

    def _release(self, name: str) -> Iterator[str]:
        for dependent in self.order.dependents.get(name, ()):
            self.count[dependent] -= 1
            if self.count[dependent] == 0:
                yield dependent

    def end_pass(self) -> None:
        """What has not begun in this pass waits for the hooks of what ended in it."""
        for name in self._late:
            for dependent in self.order.dependents.get(name, ()):
                if self.prefix + dependent not in self.nodes.by_name:
                    self.count[dependent] += 1
        self.owed |= self._late
        self._late.clear()

    def is_reached(self, name: str) -> bool:
        """Whether the way from the targets over tasks that are not fulfilled leads to a task."""
        if name in self.order.targets:
            return True
        for dependent in self.order.dependents.get(name, ()):
            node = self.nodes.get(self.prefix + dependent)
            if (node is None or not node.fulfilled) and self.is_reached(dependent):
                return True
        return False
