"""Runs a plan to its end on this machine: one loop around the operator, the pods, the state on disk and the display."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer import environment, paths
from trainer.errors import ConfigurationError, ExitCode, StoppedError, normalise
from workflows.local.display import Display, choose, failed_pods
from workflows.local.document import Where, line_of, path_text
from workflows.local.language.tags import Substitution
from workflows.local.memo import Caches
from workflows.local.nodes import Node
from workflows.local.operator import Operator
from workflows.local.options import Options, Result
from workflows.local.plan import Plan, Raw, Template
from workflows.local.pods import sandbox
from workflows.local.pods.launcher import Launcher
from workflows.local.pods.runner import Runner
from workflows.local.state import WorkflowState
from workflows.local.store import LOCK_PATIENCE, Store
from workflows.local.suspension import Suspensions

_FRAMES = 20_000
"""Python frames allowed: templates within templates, a hundred deep, take about ten each."""
STOP_GRACE = 3.0
"""Seconds that tasks get between SIGTERM and SIGKILL when the engine itself is told to stop."""


def run(plan: Plan, options: Options) -> Result:
    """Run ``plan`` to its end. ``ConfigurationError`` before anything starts if this machine cannot run it.

    Told to stop (Ctrl-C, SIGTERM) it ends every task and raises ``KeyboardInterrupt`` or ``StoppedError``; the workflow can
    be gone on with afterwards.
    """
    name = _name(plan, options)
    store = Store(paths.workflow(options.root, name))
    try:
        if store.workflow_json.exists():
            raise ConfigurationError(
                f"workflow '{name}' exists already; give another name, or go on with --resume {name}"
            )
        engine = Engine(plan, options, store, name, str(uuid.uuid4()), time.time())
        engine.check_machine()
        engine.state.begin()
        store.begin(plan, engine.state)
        return engine.loop()
    except ValueError as error:
        raise ConfigurationError(f"{plan.file}: {error}") from None
    finally:
        store.close()


def resume(root: Path, name: str, options: Options) -> Result:
    """Go on with a workflow whose engine was killed: what had finished stays, what was running runs again as the same attempt."""
    directory = paths.workflow(root, name)
    if not (directory / "workflow.json").exists():
        raise ConfigurationError(f"there is no workflow '{name}' under {directory.parent} to go on with")
    store = Store(directory, patience=LOCK_PATIENCE)
    try:
        plan, metadata = store.read_plan(), store.read_metadata()
        from workflows.local.language.values import parse_timestamp

        engine = Engine(plan, options, store, name, metadata["uid"], parse_timestamp(metadata["creationTimestamp"]))
        engine.check_machine()
        store.restore(engine.state)
        engine.state.begin()
        if engine.state.fulfilled:
            engine.display.note(f"workflow '{name}' is complete")
        return engine.loop()
    except ValueError as error:
        raise ConfigurationError(f"{name}: {error}") from None
    finally:
        store.close()


def _name(plan: Plan, options: Options) -> str:
    name = (
        options.name
        or plan.name
        or f"{plan.metadata.get('generateName') or 'workflow-'}{''.join(secrets.choice('bcdfghjklmnpqrstvwxz2456789') for _ in range(5))}"
    )
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name):
        raise ConfigurationError(f"'{name}' is no name for a workflow: lower-case letters, digits, '-' and '.'")
    if len(name) > 63:
        raise ConfigurationError(
            f"workflow name '{name}' must not be more than 63 characters long (it has {len(name)})"
        )
    return name


class Engine:
    """One run of one workflow."""

    def __init__(self, plan: Plan, options: Options, store: Store, name: str, uid: str, created: float) -> None:
        self.plan = plan
        self.options = options
        self.store = store
        self.state = WorkflowState(plan, name, uid, created, self._changed)
        self.launcher = Launcher([store.lock_handle])
        self.environment = _without_locale(environment.mapping()) | dict(options.environment or {})
        claims = {claim: Path(directory).absolute() for claim, directory in options.volumes.items()}
        self.places = sandbox.Places(
            store.directory.absolute(), claims | self._made_claims(name), (options.root / "volumes").absolute()
        )
        self.runner = Runner(self.launcher, self.places, self._volumes(name), self.environment)
        caches = Caches(store.directory.absolute().parent / ".memoized")
        self.operator = Operator(self.state, self.runner, caches)
        self.runner.operator = self.operator
        self.display: Display = choose(options.display, self.runner.training_status)
        self.suspensions = Suspensions(self.state, self.operator, self.places, self.display)
        self.stopped_by = 0
        self.stop_by = math.inf

    def _changed(self, node: Node) -> None:
        self.store.record(node)
        self.display.changed(node)
        if node.type == "Suspend":
            self.suspensions.changed(node)

    def _made_claims(self, name: str) -> dict[str, Path]:
        """``volumeClaimTemplates``: a directory of the workflow's own for each."""
        made = {}
        for raw in self.plan.spec.get("volumeClaimTemplates") or ():
            claim = (raw.get("metadata") or {}).get("name") or ""
            made[f"{name}-{claim}"] = self.store.directory.absolute() / "claims" / claim
        return made

    def _volumes(self, name: str) -> list[Raw]:
        volumes: list[Raw] = list(self.plan.spec.get("volumes") or ())
        for raw in self.plan.spec.get("volumeClaimTemplates") or ():
            claim = (raw.get("metadata") or {}).get("name") or ""
            volumes.append({"name": claim, "persistentVolumeClaim": {"claimName": f"{name}-{claim}"}})
        return volumes

    # --- before anything starts ----------------------------------------------------------------------------------

    def check_machine(self) -> None:
        """Refuse a workflow whose commands or mounts this machine does not have."""
        scope = {
            f"workflow.parameters.{p['name']}": str(p.get("value", ""))
            for p in (self.plan.spec.get("arguments") or {}).get("parameters") or ()
        }
        self.runner.volumes = Substitution(scope).apply(self.runner.volumes)
        try:
            for raw, where in self.plan.reached:
                self._check_template(Template(Substitution(scope).apply(raw)), where)
        except ConfigurationError:
            self.launcher.close()
            raise

    def _check_template(self, template: Template, where: Where) -> None:
        if not template.is_pod:
            return
        container, place = template.container, (*where, template.type)
        command = list(container.get("command") or ())
        if not command and not (self.state.spec.get("templateDefaults") or {}).get(template.type):
            self._refuse(
                (*place, "command"),
                f"{template.label} has no command, and the entrypoint of an image is not known here; give it one",
            )
        self._check_command(template, command, place)
        self._check_environment(template, place)
        mounts = [
            (mount, self._volume_named(template, mount.get("name"), place))
            for mount in container.get("volumeMounts") or ()
        ]
        if not self.launcher.namespaces_refused:
            return
        binds = [
            [
                str(sandbox.volume_directory(volume, "node", self.places) / (m.get("subPath") or "")),
                m.get("mountPath") or "/",
                False,
            ]
            for m, volume in mounts
        ]
        outputs = [str((p.value_from or {}).get("path")) for p in template.outputs if (p.value_from or {}).get("path")]
        for path in sandbox.needed(binds, outputs):
            if "{{" not in path:
                self._refuse(
                    place,
                    f"{template.label} needs {path} for itself, but this kernel refuses private mounts ({self.launcher.namespaces_refused}); map the claim to that very directory, or run where mounts are allowed",
                )

    def _volume_named(self, template: Template, name: Any, where: Where) -> Raw:
        for volume in [*self.runner.volumes, *(template.raw.get("volumes") or ())]:
            if volume.get("name") == name:
                found: Raw = volume
                return found
        self._refuse((*where, "volumeMounts"), f"{template.label}: there is no volume '{name}'")
        raise AssertionError

    def _check_command(self, template: Template, command: list[str], where: Where) -> None:
        if not command or "{{" in command[0] or "$(" in command[0]:
            return
        own = {raw.get("name"): raw.get("value") for raw in template.container.get("env") or ()}
        search = own.get("PATH") or os.pathsep.join(
            [str(Path(sys.executable).parent), self.environment.get("PATH") or os.defpath]
        )
        if any(
            command[0].startswith(str(mount.get("mountPath"))) for mount in template.container.get("volumeMounts") or ()
        ):
            return
        if "/" in command[0] and not command[0].startswith("/"):
            return
        if shutil.which(command[0], path=search) is None:
            self._refuse(
                (*where, "command"),
                f"{template.label}: there is no command '{command[0]}' on this machine; install it, or run on a cluster",
            )

    def _check_environment(self, template: Template, where: Where) -> None:
        for index, raw in enumerate(template.container.get("env") or ()):
            source = raw.get("valueFrom") or {}
            for kind in ("secretKeyRef", "configMapKeyRef"):
                if source.get(kind) is not None and not source[kind].get("optional"):
                    self._refuse(
                        (*where, "env", index),
                        f"{template.label}: env {raw.get('name')} comes from a {kind}, which only a cluster has; make it optional, or run there",
                    )

    def _refuse(self, where: Where, message: str) -> None:
        place = path_text(where)
        line = ""
        with contextlib.suppress(Exception):
            from workflows.local.document import parse, read_text
            from workflows.local.loading import _choose

            text = read_text(Path(self.plan.file))
            line = f":{line_of(text, _choose(parse(text, self.plan.file), Path(self.plan.file)), where)}"
        raise ConfigurationError(f"{self.plan.file}{line}: {place}: {message}")

    # --- the loop ------------------------------------------------------------------------------------------------

    def loop(self) -> Result:
        """Until the workflow has ended, or this process is told to stop."""
        if self.plan.ignored:
            self.display.note(f"ignored here, a cluster's concern: {_summary(self.plan.ignored)}")
        try:
            sys.setrecursionlimit(max(sys.getrecursionlimit(), _FRAMES))
            with self._signals() as wake:
                self.runner.selector.register(wake, 1, "wake")
                self.suspensions.listen(self.runner.selector)
                while not self.state.fulfilled or self.runner.running:
                    self._turn()
        finally:
            self.suspensions.close()
            self.runner.selector.close()
            self.launcher.close()
            self.store.write(self.state)
        if self.stopped_by and not self.state.fulfilled:
            self._raise_stop()
        self.display.finish(self.state, self.store.directory)
        return Result(self.state.phase, self._exit_code(), self.store.workflow_json)

    def _turn(self) -> None:
        self.suspensions.hold_back()
        if not self.runner.stopping and not self.suspensions.whole_workflow:
            self.operator.operate()
            self.runner.start_queued()
            self.operator.operate()  # what could not be started has ended already
        if self._is_stuck():
            self.operator.give_up()
        self.store.flush(self.state)
        self.display.refresh(self.state)
        if self.state.fulfilled and not self.runner.running:
            return
        for key, _ in self.runner.selector.select(self._patience()):
            if key.data == "wake":
                self._woken(key.fileobj)
            elif key.data == "terminal":
                self.suspensions.read_terminal()
            else:
                self.runner.handle(str(key.data))
        self.runner.enforce_deadlines()
        for node in self.runner.poll_progress():
            self._changed(node)
        self.suspensions.look()
        if self.runner.stopping and (not self.runner.running or time.monotonic() > self.stop_by):
            raise _Stopped

    def _is_stuck(self) -> bool:
        if self.state.fulfilled or self.runner.stopping or self.runner.running or self.runner.queue:
            return False
        return (
            self.operator.next_timer() is None and not self.suspensions.waiting and not self.suspensions.whole_workflow
        )

    def _patience(self) -> float:
        due = [when for when in (self.operator.next_timer(), self.runner.next_deadline()) if when is not None]
        return max(0.0, min([0.25 if self.runner.running else 1.0, *(when - time.time() for when in due)]))

    def _woken(self, wake: Any) -> None:
        number = max(wake.recv(64))
        if self.runner.stopping:
            self.runner.stop(0.0)
            return
        self.stopped_by = number
        self.stop_by = time.monotonic() + STOP_GRACE + 1.0
        self.runner.stop(STOP_GRACE)
        if not self.runner.running:
            raise _Stopped

    @contextlib.contextmanager
    def _signals(self) -> Iterator[socket.socket]:
        """Ctrl-C and SIGTERM as bytes on a socket, in the main thread; elsewhere nothing."""
        read, write = socket.socketpair()
        read.setblocking(False)
        write.setblocking(False)
        if threading.current_thread() is not threading.main_thread():
            try:
                yield read
            finally:
                read.close()
                write.close()
            return
        before = {
            number: signal.signal(number, lambda number, frame: None) for number in (signal.SIGINT, signal.SIGTERM)
        }
        wakeup = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        try:
            yield read
        except _Stopped:
            pass
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            read.close()
            write.close()

    def _raise_stop(self) -> None:
        self.display.note(f"stopped; go on with --resume {self.state.name}")
        if self.stopped_by == signal.SIGINT:
            raise KeyboardInterrupt
        raise StoppedError(
            f"workflow '{self.state.name}' was stopped by a signal; go on with --resume {self.state.name}"
        )

    def _exit_code(self) -> int:
        """0, or the code of the step that failed, as the contract between layers maps it."""
        if self.state.phase == "Succeeded":
            return 0
        for node in failed_pods(self.state):
            code = node.outputs.exit_code if node.outputs is not None else None
            if code not in (None, "0"):
                return normalise(int(code))
        return int(ExitCode.DEFECT)


class _Stopped(Exception):
    """Everything has ended because the engine was told to stop."""


def _without_locale(variables: dict[str, str]) -> dict[str, str]:
    """What a step inherits. A pod has no locale unless its image or template sets one, and ``sort`` depends on it."""
    return {name: value for name, value in variables.items() if not re.match(r"LANG$|LANGUAGE$|LC_", name)}


def _summary(fields: tuple[str, ...]) -> str:
    """Field names without their indexes, each once."""
    names = dict.fromkeys(re.sub(r"\[\d+\]", "[]", name) for name in fields)
    listed = list(names)
    return ", ".join(listed[:6]) + (f" and {len(listed) - 6} more" if len(listed) > 6 else "")
