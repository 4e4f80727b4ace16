"""Lifecycle hooks: templates that run beside a node when a condition holds, or after it when it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from workflows.local.execution import Execution, Holder, TemplateError
from workflows.local.language.exprlang import evaluate_bool
from workflows.local.language.exprsyntax import ExpressionError
from workflows.local.language.tags import Substitution, TagError, environment
from workflows.local.nodes import Node, Outputs
from workflows.local.plan import Base, Hook, Raw
from workflows.local.scopes import last_attempt

if TYPE_CHECKING:
    from workflows.local.operator import Operator


class Hooks:
    """The hooks of one workflow."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator

    def run_workflow_hooks(self) -> bool:
        """Run the workflow's own hooks, ``exit`` aside; whether all that were triggered are done."""
        op, done = self.operator, True
        for event, raw in (op.state.spec.get("hooks") or {}).items():
            hook = Hook.read(raw or {})
            name = f"{op.state.name}.hooks.{event}"
            if event == "exit" or not (op.nodes.get(name) is not None or self._holds(hook, op.state.globals)):
                continue
            node = op.execute(self._execution(name, hook, hook.arguments, op.plan.local, ""))
            entry = op.nodes.get(op.state.name)
            if entry is not None and op.nodes.get(name) is not None:
                op.link(entry, name)
            done = done and node is not None and node.fulfilled
        return done

    def run_conditional(
        self,
        hooks: Mapping[str, Hook],
        node: Node,
        scope: dict[str, str],
        base: Base,
        prefix: str,
        owner: Execution,
        key: str,
    ) -> bool:
        """Run the hooks of a step or task whose condition holds, or held; whether all that were triggered are done."""
        op, done = self.operator, True
        for event, hook in hooks.items():
            name = f"{node.name}.hooks.{event}"
            if op.nodes.get(name) is None and not self._holds(hook, {**op.state.globals, **scope}):
                continue
            outputs = self._outputs(node)
            arguments = hook.arguments
            if arguments.get("parameters") and outputs is not None and name not in op.executions:
                arguments = self._resolve(arguments, outputs, scope, prefix)
            made = op.execute(self._execution(name, hook, arguments, base, node.boundary_id, owner=owner, key=key))
            if op.nodes.get(name) is not None:
                op.link(node, name)
            done = done and made is not None and made.fulfilled
        return done

    def run_exit(
        self, hook: Hook | None, node: Node, scope: dict[str, str], base: Base, prefix: str, owner: Execution, key: str
    ) -> bool:
        """Run the exit hook of a step or task that has ended; whether there is none, or it is done too."""
        op = self.operator
        if hook is None:
            return True
        name = f"{node.name}.onExit"
        if op.nodes.get(name) is None and hook.expression and not self._holds(hook, {**op.state.globals, **scope}):
            return True
        arguments = hook.arguments
        if arguments.get("parameters") and name not in op.executions:
            arguments = self._resolve(arguments, self._outputs(node), scope, prefix)
        execution = self._execution(name, hook, arguments, base, node.boundary_id, owner=owner, key=key, on_exit=True)
        try:
            made = op.execute(execution)
        finally:
            if op.nodes.get(name) is not None:
                op.link(node, name)
        return made is not None and made.fulfilled

    def _outputs(self, node: Node) -> Outputs | None:
        return (last_attempt(node, self.operator.nodes) or node).outputs

    def _holds(self, hook: Hook, scope: Mapping[str, str]) -> bool:
        try:
            return evaluate_bool(hook.expression, environment(scope))
        except ExpressionError as error:
            raise TemplateError(str(error)) from None

    def _resolve(self, arguments: Raw, outputs: Outputs | None, scope: dict[str, str], prefix: str) -> Raw:
        for raw in outputs.parameters if outputs is not None else ():
            scope[f"{prefix}.outputs.parameters.{raw['name']}"] = raw.get("value") or ""
        try:
            resolved: Raw = Substitution({**self.operator.state.globals, **scope}).apply(arguments)
        except TagError as error:
            raise TemplateError(str(error)) from None
        return resolved

    def _execution(
        self,
        name: str,
        hook: Hook,
        arguments: Raw,
        base: Base,
        boundary_id: str,
        *,
        owner: Execution | None = None,
        key: str = "",
        on_exit: bool = False,
    ) -> Execution:
        execution = self.operator.executions.get(name)
        if execution is None:
            execution = Execution(
                name,
                base,
                Holder(hook.template, hook.template_ref),
                arguments,
                boundary_id,
                on_exit=on_exit,
                hooked=True,
                parent=owner,
                key=key,
            )
            self.operator.executions[name] = execution
        return execution
