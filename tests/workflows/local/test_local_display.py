"""What a person or a program sees of a running workflow."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import sys
import time
from pathlib import Path
from threading import Thread

import pytest
from local_runs import END, PROJECT, run, wait_until, write

from workflows.local.display import describe_training

FAILING = """
entrypoint: main
templates:
- name: main
  steps:
  - - {name: fine, template: end}
  - - {name: bad, template: bad}
- name: bad
  retryStrategy: {limit: "1"}
  container: {image: x, command: [sh, -c], args: ["for i in 1 2 3; do echo line $i; done; exit 3"]}
"""
TRAINING = """
entrypoint: main
templates:
- name: main
  container:
    image: x
    command: [sh, -c]
    args:
    - >-
      echo 4/9 > $ARGO_PROGRESS_FILE;
      echo '{"step": 4, "max_steps": 9, "loss": 2.5, "tokens_per_second": 1234.5, "restarts": 2}' > $HOLDFAST_STATUS_FILE;
      sleep 2
"""


def test_plain_lines_end_with_the_log_of_the_step_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(write(tmp_path, FAILING, END), tmp_path, display="plain", name="shown")
    lines = [line.partition("  ")[2] or line for line in capsys.readouterr().out.splitlines()]
    assert "Running   shown[0].fine" in lines
    assert any(
        re.fullmatch(r"Failed    shown\[1\]\.bad\(1\) \(\d+\.\d s\): main: Error \(exit code 3\)", line)
        for line in lines
    )
    text = "\n".join(lines)
    assert "| line 1\n| line 2\n| line 3\n" in text.replace("  | ", "| ")
    assert f"the whole log: {tmp_path}" in text


def test_json_is_one_object_per_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(write(tmp_path, FAILING, END), tmp_path, display="json", name="shown")
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    phases = [event["phase"] for event in events if event.get("node") == "shown[1].bad(0)"]
    assert phases == ["Pending", "Running", "Failed"]
    last = events[-1]
    assert (last["workflow"], last["phase"]) == ("shown", "Failed")
    assert len(
        {json.dumps({k: v for k, v in event.items() if k != "time"}, sort_keys=True) for event in events}
    ) == len(events)


def test_quiet_says_only_what_went_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(write(tmp_path, "entrypoint: end\ntemplates:\n", END), tmp_path)
    assert capsys.readouterr() == ("", "")
    run(write(tmp_path, FAILING, END), tmp_path)
    shown = capsys.readouterr()
    assert shown.out == "" and "exit code 3" in shown.err


def test_training_is_described_by_what_it_reports() -> None:
    status = {"step": 4, "max_steps": 9, "loss": 2.5, "tokens_per_second": 12345.6, "restarts": 1}
    assert describe_training(status) == "step 4/9  loss 2.500  12,346 tokens/s  1 restart"
    assert describe_training({"step": 1}) == "step 1/?"
    assert describe_training(None) == describe_training({}) == ""


def on_a_terminal(path: Path, root: Path, keys: list[tuple[str, str]] | None = None, seconds: float = 40.0) -> str:
    """What a terminal shows of a run; ``keys`` are typed when their text has been seen."""
    code = "import sys; from pathlib import Path; from workflows import local; local.run(local.load(Path(sys.argv[1])), local.Options(root=Path(sys.argv[2])))"
    pid, handle = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": "140", "LINES": "40", "PYTHONPATH": str(PROJECT)}
        os.execv(sys.executable, [sys.executable, "-c", code, str(path), str(root)])
    shown, deadline, waiting = "", time.monotonic() + seconds, list(keys or [])
    while time.monotonic() < deadline:
        if select.select([handle], [], [], 0.2)[0]:
            try:
                shown += os.read(handle, 65536).decode(errors="replace")
            except OSError:
                break
        if waiting and waiting[0][0] in shown:
            os.write(handle, waiting.pop(0)[1].encode())
    os.close(handle)
    os.waitpid(pid, 0)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)


def test_a_terminal_gets_a_live_tree(tmp_path: Path) -> None:
    shown = on_a_terminal(write(tmp_path, TRAINING), tmp_path)
    assert re.search(r"● \S+  Running  \d+\.\d s  step 4/9  loss 2\.500  1,234 tokens/s  2 restarts", shown)
    assert re.search(r"✔ \S+  Succeeded", shown)
    failed = on_a_terminal(write(tmp_path, FAILING, END), tmp_path)
    assert re.search(r"✖ bad  Failed  \d+\.\d s  attempt 2  No more retries left", failed)
    assert re.search(r"│?\s+├── ✖ bad\(0\)  Failed", failed)
    assert "| line 3" in failed


def test_a_suspended_step_is_resumed_from_the_terminal(tmp_path: Path) -> None:
    spec = """
    entrypoint: main
    templates:
    - name: main
      steps:
      - - {name: ask, template: ask}
      - - {name: told, template: end, arguments: {parameters: [{name: code, value: "{{steps.ask.outputs.parameters.code}}"}]}}
    - name: ask
      suspend: {}
      outputs: {parameters: [{name: code, valueFrom: {supplied: {}}}]}
    """
    keys = [("ask is suspended and wants code; press Enter", "\n"), ("still wants code", "code=5\n\n")]
    shown = on_a_terminal(write(tmp_path, spec, END), tmp_path, keys)
    assert "main: Error (exit code 5)" in shown


@pytest.mark.parametrize("what", ["step", "workflow"])
def test_what_is_suspended_is_resumed_by_a_file(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    step = "entrypoint: main\ntemplates:\n- name: main\n  suspend: {}\n"
    whole = "entrypoint: end\nsuspend: true\ntemplates:\n"
    path = write(tmp_path, step) if what == "step" else write(tmp_path, whole, END)
    file = tmp_path / "workflows" / "wait" / ("wait/resume" if what == "step" else "resume")

    def go_on() -> None:
        wait_until(lambda: (tmp_path / "workflows" / "wait" / "workflow.json").exists() and file.parent.exists(), 60)
        file.touch()

    thread = Thread(target=go_on)
    thread.start()
    assert run(path, tmp_path, name="wait", display="plain").result.phase == "Succeeded"
    thread.join()
    assert f"to go on: touch {file}" in capsys.readouterr().out
