"""Tasks as processes: none is left behind, whatever ends the engine; an engine that was killed can be followed by another."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from local_outcomes import Outcome, differences, of_workflow, run_side_by_side
from local_runs import END, processes_with, run, start, wait_until, write

from trainer.errors import ConfigurationError
from workflows import local

WORKFLOWS = Path(__file__).with_name("data") / "workflows"
STUBBORN = """
entrypoint: main
templates:
- name: main
  dag:
    tasks: [{{name: a, template: stubborn}}, {{name: b, template: stubborn}}]
- name: stubborn
  container:
    image: x
    command: [bash, -c]
    args: ["trap '' TERM; setsid sleep {mark} & (setsid bash -c 'trap \\"\\" TERM; sleep {mark}; sleep {mark}' &) ; sleep {mark}; sleep {mark}"]
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_nothing_outlives_the_engine(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Tasks that ignore SIGTERM and flee into sessions of their own are gone within five seconds."""
    mark = f"{3000 + os.getpid() % 1000}.{int(number)}{int(time.time()) % 10000}"
    engine = start(write(tmp_path, STUBBORN.format(mark=mark)), tmp_path, "stubborn")
    wait_until(lambda: len(processes_with(f"sleep\0{mark}")) == 6)
    engine.send_signal(number)
    wait_until(lambda: not processes_with(mark), seconds=5.0)
    assert engine.wait(10) == code
    assert not processes_with(str(tmp_path))


def test_what_a_task_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    mark = f"5000.{os.getpid()}"
    spec = f"""
    entrypoint: main
    templates:
    - name: main
      container: {{image: x, command: [bash, -c], args: ["(setsid sleep {mark} &); setsid nohup sleep {mark} & sleep 0.2"]}}
    """
    started = time.monotonic()
    assert run(write(tmp_path, spec), tmp_path).result.phase == "Succeeded"
    assert time.monotonic() - started < 20
    assert not processes_with(mark)


def test_a_supervisor_that_is_killed_is_a_pod_that_was_deleted(tmp_path: Path) -> None:
    """As on a cluster the node is an Error, which an Always policy retries; nothing of it is left."""
    mark = f"6000.{os.getpid()}"
    spec = f"""
    entrypoint: main
    templates:
    - name: main
      retryStrategy: {{limit: "1", retryPolicy: Always}}
      container: {{image: x, command: [bash, -c], args: ["[ {{{{retries}}}} = 1 ] || exec sleep {mark}"]}}
    """
    engine = start(write(tmp_path, spec), tmp_path, "deleted")
    wait_until(lambda: len(processes_with(f"sleep\0{mark}")) == 1)
    task = processes_with(f"sleep\0{mark}")[0]
    supervisor = int((Path(f"/proc/{task}/stat").read_text().rpartition(")")[2]).split()[1])
    os.kill(supervisor, signal.SIGKILL)
    assert engine.wait(30) == 0
    assert not processes_with(mark)
    nodes = json.loads((tmp_path / "workflows" / "deleted" / "workflow.json").read_text())["status"]["nodes"].values()
    assert {n["name"]: (n["phase"], n.get("message", "")) for n in nodes}["deleted(0)"] == ("Error", "pod deleted")


RESUMABLE = """
entrypoint: main
templates:
- name: main
  steps:
  - - {{name: first, template: note, arguments: {{parameters: [{{name: what, value: first}}]}}}}
  - - {{name: dag, template: dag}}
  - - {{name: last, template: note, arguments: {{parameters: [{{name: what, value: "{{{{steps.dag.outputs.parameters.made}}}}"}}]}}}}
- name: dag
  dag:
    tasks:
    - {{name: items, template: note, arguments: {{parameters: [{{name: what, value: "{{{{item}}}}"}}]}}, withItems: [p, q]}}
    - {{name: flaky, template: flaky, depends: items}}
    - {{name: after, template: note, depends: flaky, arguments: {{parameters: [{{name: what, value: "{{{{tasks.flaky.outputs.parameters.made}}}}"}}]}}}}
  outputs: {{parameters: [{{name: made, valueFrom: {{parameter: "{{{{tasks.flaky.outputs.parameters.made}}}}"}}}}]}}
- name: note
  inputs: {{parameters: [{{name: what}}]}}
  container: {{image: x, command: [sh, -c], args: ["echo {{{{inputs.parameters.what}}}} >> {ledger}"]}}
- name: flaky
  retryStrategy: {{limit: "2"}}
  container:
    image: x
    command: [sh, -c]
    args: ["echo try{{{{retries}}}} >> {ledger}; [ {{{{retries}}}} = 0 ] && exit 1; while [ ! -e {gate} ]; do sleep 0.05; done; echo made > /tmp/x"]
  outputs: {{parameters: [{{name: made, valueFrom: {{path: /tmp/x}}}}]}}
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_workflow_goes_on_after_its_engine_was_ended(tmp_path: Path, outside: Path, number: signal.Signals) -> None:
    """What had finished is kept; what was running runs again as the same attempt; the rest follows."""
    ledger, gate = outside / "ledger", outside / "gate"
    engine = start(write(tmp_path, RESUMABLE.format(ledger=ledger, gate=gate)), tmp_path, "again")
    wait_until(lambda: ledger.exists() and "try1" in ledger.read_text())
    engine.send_signal(number)
    engine.wait(10)
    gate.touch()
    result = local.resume(tmp_path, "again", local.Options(root=tmp_path, display="quiet"))
    assert result.phase == "Succeeded"
    lines = ledger.read_text().split()
    assert sorted(lines) == sorted(["first", "p", "q", "try0", "try1", "try1", "made", "made"])
    nodes = {n["name"]: n for n in json.loads(result.workflow_json.read_text())["status"]["nodes"].values()}
    assert nodes["again[1].dag.flaky"]["phase"] == "Succeeded"
    assert [nodes[f"again[1].dag.flaky({n})"]["phase"] for n in (0, 1)] == ["Failed", "Succeeded"]
    assert "again[1].dag.flaky(2)" not in nodes


HANDED_ON = """
entrypoint: main
templates:
- name: main
  dag:
    tasks:
    - {{name: make, template: make}}
    - name: use
      template: use
      depends: make
      arguments: {{parameters: [{{name: made, value: "{{{{tasks.make.outputs.parameters.made}}}}"}}]}}
- name: make
  container: {{image: x, command: [sh, -c], args: ["echo something > /tmp/x"]}}
  outputs: {{parameters: [{{name: made, valueFrom: {{path: /tmp/x}}}}]}}
- name: use
  inputs: {{parameters: [{{name: made}}]}}
  retryStrategy: {{limit: 2}}
  container:
    image: x
    command: [sh, -c]
    args: ["echo '{{{{inputs.parameters.made}}}}' >> {ledger}; while [ ! -e {gate} ]; do sleep 0.05; done"]
"""


def test_what_was_running_gets_the_same_arguments_again(tmp_path: Path, outside: Path) -> None:
    ledger, gate = outside / "ledger", outside / "gate"
    engine = start(write(tmp_path, HANDED_ON.format(ledger=ledger, gate=gate)), tmp_path, "handed")
    wait_until(lambda: ledger.exists() and "something" in ledger.read_text())
    engine.kill()
    engine.wait(10)
    gate.touch()
    result = local.resume(tmp_path, "handed", local.Options(root=tmp_path, display="quiet"))
    assert result.phase == "Succeeded"
    assert ledger.read_text().split() == ["something", "something"]


def test_what_was_running_does_not_stand_in_its_own_way(tmp_path: Path, outside: Path) -> None:
    """Its place among the pods that may run at a time is free until it runs again, and so is its time."""
    ledger, gate = outside / "ledger", outside / "gate"
    spec = f"""
    entrypoint: main
    parallelism: 1
    templates:
    - name: main
      dag: {{tasks: [{{name: a, template: waits}}, {{name: b, template: waits}}]}}
    - name: waits
      timeout: 4s
      container: {{image: x, command: [sh, -c], args: ["echo x >> {ledger}; while [ ! -e {gate} ]; do sleep 0.05; done"]}}
    """
    engine = start(write(tmp_path, spec), tmp_path, "crowded")
    wait_until(ledger.exists)
    engine.kill()
    engine.wait(10)
    gate.touch()
    time.sleep(4)
    assert local.resume(tmp_path, "crowded", local.Options(root=tmp_path, display="quiet")).phase == "Succeeded"
    assert ledger.read_text().split() == ["x"] * 3


def test_an_engine_that_is_killed_again_and_again_ends_where_one_does_that_is_not(tmp_path: Path) -> None:
    names = ("exit-variables", "global-outputs", "memoize", "nested-failure", "parallelism-nested", "retry-details")
    moments = random.Random(0)

    def disturbed(name: str) -> Outcome:
        engine = start(WORKFLOWS / f"{name}.yaml", tmp_path, name)
        for _ in range(4):
            time.sleep(moments.uniform(0.4, 1.0))
            if engine.poll() is None and (tmp_path / "workflows" / name / "workflow.json").exists():
                engine.kill()
                engine.wait(10)
                engine = start("--resume", tmp_path, name)
        engine.wait(60)
        return of_workflow(json.loads((tmp_path / "workflows" / name / "workflow.json").read_text()))

    with ThreadPoolExecutor(len(names)) as pool:
        found = dict(zip(names, pool.map(disturbed, names), strict=True))
    calm = run_side_by_side({name: WORKFLOWS / f"{name}.yaml" for name in names}, tmp_path / "calm")
    wrong = {name: differences(calm[name], found[name]) for name in names}
    assert not any(wrong.values()), wrong


def test_a_workflow_is_run_by_one_engine_at_a_time(tmp_path: Path, outside: Path) -> None:
    gate = outside / "gate"
    spec = f"entrypoint: main\ntemplates:\n- name: main\n  container: {{image: x, command: [sh, -c], args: ['while [ ! -e {gate} ]; do sleep 0.05; done']}}"
    path = write(tmp_path, spec)
    engine = start(path, tmp_path, "shared")
    wait_until(lambda: (tmp_path / "workflows" / "shared" / "workflow.json").exists())
    with pytest.raises(ConfigurationError, match="being run by another process"):
        local.run(local.load(path), local.Options(root=tmp_path, name="shared", display="quiet"))
    gate.touch()
    assert engine.wait(20) == 0
    with pytest.raises(ConfigurationError, match="there is no workflow 'none'"):
        local.resume(tmp_path, "none", local.Options(root=tmp_path))


def test_a_complete_workflow_is_not_run_again(tmp_path: Path, outside: Path) -> None:
    ledger = outside / "ledger"
    path = write(
        tmp_path,
        f"entrypoint: main\ntemplates:\n- name: main\n  container: {{image: x, command: [sh, -c], args: ['echo x >> {ledger}; exit 3']}}",
    )
    first = run(path, tmp_path, name="done")
    again = local.resume(tmp_path, "done", local.Options(root=tmp_path, display="quiet"))
    assert (again.phase, again.exit_code) == (first.result.phase, first.result.exit_code) == ("Failed", 75)
    assert ledger.read_text() == "x\n"


@pytest.mark.parametrize(("code", "expected"), [("0", 0), ("1", 75), ("64", 64), ("65", 65), ("76", 76), ("137", 75)])
def test_the_exit_code_is_that_of_the_step_that_failed(tmp_path: Path, code: str, expected: int) -> None:
    spec = "entrypoint: main\ntemplates:\n- name: main\n  steps:\n  - - {name: fine, template: end}\n  - - {name: s, template: end, arguments: {parameters: [{name: code, value: '%s'}]}}\n"
    assert run(write(tmp_path, spec % code, END), tmp_path).result.exit_code == expected


def test_a_step_that_waits_for_what_never_comes_ends_the_workflow(tmp_path: Path) -> None:
    spec = """
    entrypoint: main
    templates:
    - name: main
      steps:
      - - {name: fails, template: fails, continueOn: {failed: true}}
      - - {name: next, template: end, arguments: {parameters: [{name: code, value: "{{steps.fails.outputs.parameters.x}}"}]}}
    - name: fails
      container: {image: x, command: [sh, -c], args: ["exit 1"]}
      outputs: {parameters: [{name: x, valueFrom: {path: /tmp/never}}]}
    """
    found = run(write(tmp_path, spec, END), tmp_path)
    assert found.result.phase == "Error"
    assert "{{steps.fails.outputs.parameters.x}}" in found.workflow["status"]["message"]


def test_a_step_has_no_locale_but_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod: what ``sort`` or ``printf`` makes of a value is not a matter of who runs the workflow."""
    for name in ("LANG", "LANGUAGE", "LC_ALL", "LC_COLLATE", "LC_NUMERIC"):
        monkeypatch.setenv(name, "de_DE.UTF-8")
    spec = """
    entrypoint: main
    templates:
    - name: main
      dag:
        tasks: [{name: none, template: none}, {name: own, template: own}]
    - name: none
      container: {image: x, command: [sh, -c], args: ["env | grep -E '^(LANG|LC_)' || echo none"]}
    - name: own
      container:
        image: x
        command: [sh, -c]
        args: ["env | grep -E '^(LANG|LC_)' || echo none"]
        env: [{name: LC_ALL, value: C}]
    """
    done = run(write(tmp_path, spec), tmp_path)
    assert done.log(".none") == "none\n"
    assert done.log(".own") == "LC_ALL=C\n"
