"""Memoized templates: outputs kept under a key in a cache, as Argo keeps them in configuration maps.

A cache lives as long as the root directory; like Argo's it is trusted blindly until its ``maxAge`` is over.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.records import write_whole
from workflows.local.execution import Execution, TemplateError
from workflows.local.language.values import go_duration, parse_timestamp, timestamp
from workflows.local.limits import NODE_TYPES
from workflows.local.nodes import Node, Outputs
from workflows.local.plan import Raw

if TYPE_CHECKING:
    from workflows.local.operator import Operator

_KEY = re.compile(r"^[a-zA-Z0-9][-a-zA-Z0-9]*$")


class Caches:
    """The caches of one root directory, one JSON file each."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def load(self, name: str, key: str) -> Raw | None:
        """The entry of a key, None if there is none. ``TemplateError`` for a key that Argo would refuse."""
        if not _KEY.match(key):
            raise TemplateError(f"invalid cache key: {key}")
        entry = self._read(name).get(key)
        return entry if isinstance(entry, dict) else None

    def save(self, name: str, key: str, entry: Raw) -> None:
        if not _KEY.match(key):
            raise TemplateError(f"invalid cache key: {key}")
        write_whole(self._path(name), json.dumps(self._read(name) | {key: entry}, indent=1).encode())

    def _path(self, name: str) -> Path:
        return self.directory / f"{re.sub(r'[^-.a-zA-Z0-9]', '_', name)}.json"

    def _read(self, name: str) -> Raw:
        try:
            entries = json.loads(self._path(name).read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}


class Memoization:
    """The memoized templates of one workflow."""

    def __init__(self, operator: Operator, caches: Caches) -> None:
        self.op = operator
        self.caches = caches

    def look_up(self, execution: Execution) -> Node | None:
        """Make the node of a memoized template that has none yet, or only waited for a lock: fulfilled if it is in the cache."""
        assert execution.template is not None
        raw = execution.template.raw.get("memoize")
        node = self.op.nodes.get(execution.name)
        if not raw or (node is not None and node.memoization is not None):
            return node
        raw = execution.substitute(raw, self.op.state.globals)
        key, name = str(raw.get("key") or ""), str(((raw.get("cache") or {}).get("configMap") or {}).get("name") or "")
        entry = self.caches.load(name, key)
        hit = entry is not None and self._is_fresh(entry, raw.get("maxAge"))
        if node is None:
            own_retry = execution.template.raw.get("retryStrategy") is not None
            kind = "Retry" if own_retry else NODE_TYPES[execution.template.type]
            node = self.op.initialize(execution, kind, "Pending")
        node.memoization = {"hit": hit, "key": key, "cacheName": name}
        if hit and entry is not None:
            node.outputs = Outputs.read(entry.get("outputs"))
            self.op.mark(node, "Succeeded")
        self.op.nodes.changed(node)
        return node

    def _is_fresh(self, entry: Raw, age: str | None) -> bool:
        if not age:
            return True
        try:
            return time.time() - parse_timestamp(str(entry.get("creationTimestamp"))) <= go_duration(age)
        except ValueError as error:
            raise TemplateError(f"invalid maxAge: {error}") from None

    def keep(self, node: Node) -> None:
        """Put the outputs of a memoized node that succeeded into its cache."""
        memo = node.memoization
        if memo is None or memo["hit"] or node.phase != "Succeeded" or node.type == "Retry":
            return
        now = timestamp(time.time())
        # Argo 4.0 saves a copy of a steps template's node that has no outputs yet
        outputs = node.outputs.write() if node.outputs is not None and node.type != "Steps" else None
        entry = {"nodeID": node.id, "outputs": outputs, "creationTimestamp": now, "lastHitTimestamp": now}
        self.caches.save(memo["cacheName"], memo["key"], entry)
