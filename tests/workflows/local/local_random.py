"""Random small workflows (hypothesis): dag and steps, depends, when, retries with exit codes, failFast, continueOn, loops, hooks.

Every leaf is one `sh -c` that ends with a chosen code, at once. Nothing depends on time, so two runs of the real
controller agree (those that do not are dropped when outcomes are recorded, see ``record_local_outcomes``).
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Raw = dict[str, Any]
IMAGE = "busybox:1"
CODES = st.sampled_from(["0", "0", "0", "1", "2", "64"])
NAMES = ["a", "b", "c", "d"]


def parameters(**values: str) -> Raw:
    return {"parameters": [{"name": name, "value": value} for name, value in values.items()]}


def container(script: str) -> Raw:
    return {"image": IMAGE, "command": ["sh", "-c"], "args": [script]}


def leaf_templates() -> list[Raw]:
    """Leaves that need no choice: end with a code; print a value and leave it in a file."""
    return [
        {
            "name": "leaf",
            "inputs": {"parameters": [{"name": "code"}]},
            "container": container("exit {{inputs.parameters.code}}"),
        },
        {
            "name": "value",
            "inputs": {"parameters": [{"name": "text", "default": "x"}]},
            "container": container("echo {{inputs.parameters.text}}; echo {{inputs.parameters.text}} > /tmp/text"),
            "outputs": {"parameters": [{"name": "text", "valueFrom": {"path": "/tmp/text", "default": "none"}}]},
        },
    ]


@st.composite
def retried(draw: st.DrawFn) -> Raw:
    """A leaf that fails in its first attempts, under a random retry strategy."""
    strategy: Raw = {"limit": draw(st.sampled_from(["0", "1", "2"]))}
    policy = draw(st.sampled_from([None, None, "Always", "OnFailure", "OnError"]))
    if policy:
        strategy["retryPolicy"] = policy
    expression = draw(
        st.sampled_from(
            [
                None,
                None,
                "lastRetry.exitCode != '2'",
                "asInt(lastRetry.exitCode) < 2",
                "lastRetry.status == 'Error' || !(lastRetry.exitCode in ['64', '65'])",
                "asInt(retries) < 1",
            ]
        )
    )
    if expression:
        strategy["expression"] = expression
    failures, code = draw(st.integers(0, 3)), draw(st.sampled_from(["1", "2", "64"]))
    return {
        "name": "flaky",
        "retryStrategy": strategy,
        "container": container(f"[ {{{{retries}}}} -lt {failures} ] && exit {code}; exit 0"),
    }


@st.composite
def call(draw: st.DrawFn, kind: str, name: str, before: list[str], values: list[str], inner: str | None) -> Raw:
    """A step or task: which template, with what, whether it loops, when it runs, what it goes on after."""
    template = draw(st.sampled_from(["leaf", "leaf", "value", "value", "flaky"] + ([inner] * 2 if inner else [])))
    raw: Raw = {"name": name, "template": template}
    loop = template in ("leaf", "value") and draw(st.integers(0, 4)) == 0
    if template == "leaf":
        code = draw(CODES)
        raw["arguments"] = parameters(code="{{item}}" if loop else code)
        if loop:
            raw["withItems"] = draw(st.lists(CODES, min_size=2, max_size=2))
    elif template == "value":
        source = draw(st.sampled_from([*values, *values, None]))
        text = f"{{{{{kind}.{source}.outputs.parameters.text}}}}y" if source else draw(st.sampled_from(["p", "q"]))
        raw["arguments"] = parameters(text="{{item}}" if loop else text)
        if loop:
            raw["withParam"] = draw(st.sampled_from(['["p", "q"]', "[1, 2]", "[]"]))
    when = draw(_when(kind, before, values))
    if when:
        raw["when"] = when
    hook = draw(st.integers(0, 9))
    if hook == 0:
        raw["hooks"] = {"exit": {"template": "leaf", "arguments": parameters(code=draw(CODES))}}
    return raw


@st.composite
def _when(draw: st.DrawFn, kind: str, before: list[str], values: list[str]) -> str | None:
    choices = [None, None, None, "1 == 1", "1 == 2", "'a' =~ '[ab]' && 2 > 1"]
    if before:
        earlier = draw(st.sampled_from(before))
        choices += [f"{{{{{kind}.{earlier}.status}}}} == Succeeded", f"{{{{{kind}.{earlier}.status}}}} != Succeeded"]
    if values:
        choices.append(f"{{{{{kind}.{draw(st.sampled_from(values))}.outputs.parameters.text}}}} == p")
    return draw(st.sampled_from(choices))


@st.composite
def steps(draw: st.DrawFn, name: str, inner: str | None, size: int) -> Raw:
    """A steps template of at most ``size`` steps in groups of one or two."""
    groups: list[list[Raw]] = []
    before: list[str] = []
    values: list[str] = []
    names = NAMES[: draw(st.integers(2, size))]
    while names:
        group, rest = names[: draw(st.integers(1, 2))], names
        names = rest[len(group) :]
        made = [draw(call("steps", step, before, values, inner)) for step in group]
        for step in made:
            if draw(st.integers(0, 2)) == 0:
                step["continueOn"] = draw(
                    st.sampled_from([{"failed": True}, {"error": True}, {"failed": True, "error": True}])
                )
        groups.append(made)
        before += [s["name"] for s in made if not _loops(s)]
        values += [s["name"] for s in made if s["template"] == "value" and not _loops(s) and "when" not in s]
    return {"name": name, "steps": groups}


def _loops(raw: Raw) -> bool:
    return "withItems" in raw or "withParam" in raw


@st.composite
def dag(draw: st.DrawFn, name: str, inner: str | None, size: int) -> Raw:
    """A dag template of at most ``size`` tasks, with ``depends`` or with ``dependencies``."""
    tasks: list[Raw] = []
    use_depends = draw(st.sampled_from([True, True, False]))
    for task_name in NAMES[: draw(st.integers(2, size))]:
        earlier = [task["name"] for task in tasks]
        least = draw(st.sampled_from([0, 1, 1, 1]))
        chosen = draw(st.lists(st.sampled_from(earlier), min_size=least, max_size=2, unique=True)) if earlier else []
        loops = {t["name"] for t in tasks if _loops(t)}
        values = [
            t["name"] for t in tasks if t["name"] in chosen and t["template"] == "value" and t["name"] not in loops
        ]
        task = draw(call("tasks", task_name, [c for c in chosen if c not in loops], values, inner))
        if chosen and use_depends:
            task["depends"] = draw(_depends(chosen, loops))
        elif chosen:
            task["dependencies"] = chosen
        if not use_depends and draw(st.integers(0, 2)) == 0:
            task["continueOn"] = draw(st.sampled_from([{"failed": True}, {"error": True}]))
        tasks.append(task)
    raw: Raw = {"tasks": tasks}
    fail_fast = draw(st.sampled_from([None, None, True, False]))
    if fail_fast is not None:
        raw["failFast"] = fail_fast
    if draw(st.integers(0, 7)) == 0:
        raw["target"] = draw(st.sampled_from([task["name"] for task in tasks]))
    return {"name": name, "dag": raw}


@st.composite
def _depends(draw: st.DrawFn, names: list[str], loops: set[str]) -> str:
    parts = []
    for name in names:
        results = ["", "", ".Succeeded", ".Failed", ".Skipped", ".Omitted", ".Errored"] + (
            [".AnySucceeded", ".AllFailed"] if name in loops else []
        )
        part = name + draw(st.sampled_from(results))
        if "." in part and draw(st.integers(0, 4)) == 0:
            part = f"!{part}"
        if draw(st.integers(0, 3)) == 0:
            part = f"({part} || {name}.Failed)"
        parts.append(part)
    return draw(st.sampled_from([" && ", " || "])).join(parts)


@st.composite
def workflows(draw: st.DrawFn) -> Raw:
    """A whole Workflow."""
    templates = [*leaf_templates(), draw(retried())]
    inner: str | None = None
    if draw(st.booleans()):
        inner = "inner"
        templates.append(draw(st.one_of(dag("inner", None, 2), steps("inner", None, 2))))
    size = 3 if inner else 4
    templates.append(draw(st.one_of(dag("main", inner, size), steps("main", inner, size))))
    spec: Raw = {"entrypoint": "main", "templates": templates}
    if draw(st.integers(0, 7)) == 0:
        spec["onExit"] = "farewell"
        templates.append(
            {"name": "farewell", "container": container("[ {{workflow.status}} = Succeeded ] || exit " + draw(CODES))}
        )
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"generateName": "random-"},
        "spec": _used(spec),
    }


def _used(spec: Raw) -> Raw:
    """Without the templates that nothing refers to."""
    text = repr([template for template in spec["templates"] if template["name"] in ("main", "inner", "farewell")])
    kept = [
        t
        for t in spec["templates"]
        if t["name"] in ("main", "inner", "farewell") or f"'template': '{t['name']}'" in text
    ]
    kept = [t for t in kept if t["name"] != "inner" or "'template': 'inner'" in text]
    return {**spec, "templates": kept}
