"""Retry strategies, in Argo's order: maxDuration, backoff, policy, limit, expression."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from workflows.local.execution import Blocked, Execution, TemplateError, prepare_attempt
from workflows.local.language.exprlang import evaluate_bool
from workflows.local.language.exprsyntax import ExpressionError
from workflows.local.language.tags import environment
from workflows.local.language.values import duration, go_float, timestamp
from workflows.local.nodes import Node
from workflows.local.plan import Raw, Retry

if TYPE_CHECKING:
    from workflows.local.operator import Operator

_TRANSIENT = (
    "connection reset by peer",
    "i/o timeout",
    "TLS handshake timeout",
    "connection refused",
    "transport connection broken",
    "etcdserver: leader changed",
)


class RetryBody:
    """A retried template has its attempts for children; nothing needs to be remembered of which one changed."""

    def changed(self, key: str) -> None:
        pass


class Retries:
    """The Retry nodes of one workflow."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator

    def execute(self, execution: Execution) -> Node:
        """Visit a retried template: judge the last attempt, make another one if the strategy says so."""
        op = self.operator
        if execution.body is None:
            execution.body = RetryBody()
        while True:
            node = op.nodes.get(execution.name) or op.initialize(execution, "Retry", "Running")
            if node.phase == "Pending":
                op.mark(node, "Running")
            strategy = op.retry_of(execution)
            assert strategy is not None
            try:
                proceed = self._judge(execution, node, strategy)
            except (ValueError, TemplateError) as error:
                op.mark(node, "Error", str(error))
                raise TemplateError(str(error)) from None
            attempts = self._attempts(node)
            last = attempts[-1] if attempts else None
            if not proceed:
                return node
            if node.fulfilled:
                if last is not None:
                    node.outputs = last.outputs.copy() if last.outputs is not None else None
                    op.nodes.changed(node)
                return node
            child = self._attempt(execution, node, attempts)
            if child is None or not child.fulfilled:
                return node

    def _attempts(self, node: Node) -> list[Node]:
        nodes = self.operator.nodes.by_id
        return [nodes[i] for i in node.children if i in nodes and nodes[i].retried]

    def _attempt(self, execution: Execution, node: Node, attempts: list[Node]) -> Node | None:
        """Go on with the attempt that is under way, or start the next."""
        op = self.operator
        last = attempts[-1] if attempts else None
        under_way = last is not None and not last.fulfilled
        number = len(attempts) - 1 if under_way else len(attempts)
        name = f"{execution.name}({number})"
        attempt = op.executions.get(name)
        if attempt is None:
            attempt = self._new(
                execution, name, number, last if not under_way else (attempts[-2] if len(attempts) > 1 else None)
            )
        if not under_way:
            op.link(node, name)
        attempt.deadline = execution.deadline
        if under_way and not attempt.dirty:
            return last
        attempt.dirty = False
        op.depth += 1
        try:
            return op.run(attempt)
        except Blocked:
            attempt.dirty = True
            raise
        except TemplateError:
            strategy = op.retry_of(execution)
            if strategy is None or strategy.policy == "OnFailure":
                raise
            return op.nodes.get(name)
        finally:
            op.depth -= 1

    def _new(self, execution: Execution, name: str, number: int, last: Node | None) -> Execution:
        op = self.operator
        attempt = Execution(
            name,
            execution.base,
            execution.holder,
            execution.arguments,
            execution.boundary_id,
            on_exit=execution.on_exit,
            hooked=execution.hooked,
            parent=execution,
            key=name,
            attempt_of=execution,
        )
        assert execution.template is not None
        attempt.template, attempt.inner = execution.template, execution.inner
        exit_code = last.outputs.exit_code if last is not None and last.outputs is not None else None
        local = {
            "retries": str(number),
            "lastRetry.exitCode": exit_code or "0",
            "lastRetry.duration": go_float(last.duration) if last is not None else "0",
            "lastRetry.status": last.phase if last is not None else "",
            "lastRetry.message": last.message if last is not None else "",
        }
        if execution.template.is_pod:
            local["pod.name"] = op.state.pod_name(name, execution.template.name)
        prepare_attempt(attempt, execution, op.state.globals, local)
        op.executions[name] = attempt
        return attempt

    def _judge(self, execution: Execution, node: Node, strategy: Retry) -> bool:
        """Mark the Retry node if its last attempt decides it. False: wait, the backoff is not over."""
        attempts = self._attempts(node)
        if node.fulfilled or not attempts or not attempts[-1].fulfilled:
            return True
        op, last = self.operator, attempts[-1]
        if not last.unsuccessful:
            op.mark(node, "Succeeded")
            return True
        deadline = op.state.deadline
        if deadline is not None and time.time() > deadline:
            op.mark(
                node,
                last.phase,
                f"retry exceeded workflow deadline {timestamp(deadline).replace('T', ' ').replace('Z', ' +0000 UTC')}",
            )
            return True
        if strategy.backoff is not None and not self._back_off(execution, node, strategy, attempts):
            return node.fulfilled
        message = self._refusal(node, strategy, attempts)
        if message is not None:
            op.mark(node, last.phase, message)
        return True

    def _back_off(self, execution: Execution, node: Node, strategy: Retry, attempts: list[Node]) -> bool:
        """True once the time to wait is over; the node may be failed here by maxDuration."""
        op, last, backoff = self.operator, attempts[-1], strategy.backoff or {}
        now, latest = time.time(), 0.0
        if backoff.get("maxDuration"):
            latest = attempts[0].started + duration(backoff["maxDuration"])
            if now > latest:
                op.mark(node, last.phase, "Max duration limit exceeded")
                return False
        wait = _wait(backoff, len(attempts))
        until = last.finished + wait
        if latest and until > latest:
            op.mark(node, last.phase, "Backoff would exceed max duration limit")
            return False
        limit = _number(strategy.limit)
        if now < until and limit is not None and len(attempts) <= limit:
            op.mark(node, node.phase, f"Backoff for {_humane(wait)}")
            op.wake(until + 0.001, execution)
            return False
        execution.deadline = latest
        op.mark(node, node.phase, "")
        return True

    def _refusal(self, node: Node, strategy: Retry, attempts: list[Node]) -> str | None:
        """Why there is no further attempt, None if there is one."""
        last = attempts[-1]
        on_failed, on_error = _policy(strategy.policy, last)
        if (last.phase == "Failed" and not on_failed) or (last.phase == "Error" and not on_error):
            return last.message
        limit = _number(strategy.limit)
        if limit is not None and len(attempts) > limit:
            return "No more retries left"
        if strategy.expression:
            try:
                again = evaluate_bool(strategy.expression, environment(_scope(attempts)))
            except ExpressionError as error:
                raise TemplateError(f"unable to evaluate expression '{strategy.expression}': {error}") from None
            if not again:
                return "retryStrategy.expression evaluated to false"
        return None


def _scope(attempts: list[Node]) -> dict[str, str]:
    last = attempts[-1]
    code = last.outputs.exit_code if last.outputs is not None else None
    return {
        "retries": str(len(attempts) - 1),
        "lastRetry.exitCode": code if code is not None else "-1",
        "lastRetry.status": last.phase,
        "lastRetry.duration": go_float(last.duration),
        "lastRetry.message": last.message,
    }


def _policy(policy: str, last: Node) -> tuple[bool, bool]:
    if policy == "Always":
        return True, True
    if policy == "OnError":
        return False, True
    if policy == "OnFailure":
        return True, False
    if policy == "OnTransientError":
        transient = any(text in last.message for text in _TRANSIENT)
        return transient, transient
    raise TemplateError(f"{policy} is not a valid RetryPolicy")


def _wait(backoff: Raw, attempts: int) -> float:
    base = duration(backoff["duration"])
    factor = _number(backoff.get("factor"))
    wait = base
    if factor is not None and factor > 0:
        power = math.pow(factor, attempts - 1)
        wait = base * power if base * power < 9.2e9 else 9.2e9
    return min(wait, duration(backoff["cap"])) if backoff.get("cap") else wait


def _number(value: object) -> int | None:
    if value is None:
        return None
    try:
        return int(str(value))
    except ValueError:
        raise TemplateError(f"'{value}' is not a whole number") from None


def _humane(seconds: float) -> str:
    """A duration in Argo's words: ``5 seconds``, ``2 minutes 5 seconds``."""
    whole, parts = int(seconds), []
    for name, size in (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)):
        count, whole = divmod(whole, size)
        if count:
            parts.append(f"{count} {name}{'s' if count > 1 else ''}")
    return " ".join(parts) or "0 seconds"
