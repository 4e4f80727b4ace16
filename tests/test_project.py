"""Rules of the whole project that no single module can keep: imports, the environment, path names, flags, documents."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from steps.profiles import PROFILES
from trainer.config import OneLineParser, RunConfig, build, flag, from_namespace, to_text
from trainer.errors import FINAL_CODES, ExitCode
from workflows.parameters import workflow_parameters
from workflows.run import COMMANDS

PROJECT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for top in ("workflows", "steps", "trainer") for path in (PROJECT / top).rglob("*.py"))

FLAGS = """
--run-id --root --profile --nodes --min-nodes --gpus-per-node --launcher --model --init-from --dataset-uri --tokenizer
--sequence-length --global-batch-size --micro-batch-size --max-steps --learning-rate --warmup-steps --weight-decay
--gradient-clip --seed --compile --activation-checkpointing --checkpoint-mode --checkpoint-interval-steps
--storage-bytes-per-second --keep-checkpoints
--snapshot-interval-steps --snapshot-root --snapshot-replicas --recovery --max-restarts --heartbeat-timeout-seconds
--no-progress-restarts --startup-timeout-seconds --save-timeout-seconds --grace-seconds --node-lost-seconds --fault-count --fault-kinds --fault-ranks --fault-seed --fault-steps
--fault-first-step
"""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return str(path.relative_to(PROJECT))


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file it does."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def importers(package: str) -> set[str]:
    def matches(module: str) -> bool:
        return module == package or module.startswith(package + ".")

    return {name_of(path) for path in SOURCES if any(map(matches, imported(path)))}


def outside(files: set[str], *allowed: str) -> set[str]:
    return {file for file in files if not file.startswith(allowed)}


def test_a_flag_is_added_deliberately() -> None:
    assert [flag(name) for name in RunConfig.model_fields] == FLAGS.split()


def test_every_field_says_what_it_is() -> None:
    assert [name for name, field in RunConfig.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("hera", ("workflows/",)),
        ("nvidia_resiliency_ext", ("trainer/recovery/", "trainer/checkpointing/")),
        ("boto3", ("steps/", "workflows/")),
        ("kubernetes", ("steps/kubernetes_api.py", "workflows/preflight", "workflows/teardown")),
    ],
)
def test_a_client_is_imported_only_where_its_adapter_is(package: str, allowed: tuple[str, ...]) -> None:
    found = importers(package)
    assert outside(found, *allowed) == set()
    assert found, f"nothing imports {package}: the rule checks nothing"


def test_the_local_engine_sees_no_hera_and_no_step() -> None:
    engine = [path for path in SOURCES if name_of(path).startswith("workflows/local/")]
    assert engine
    for path in engine:
        foreign = [
            m
            for m in imported(path)
            if m.split(".")[0] in ("hera", "steps") or m in ("workflows.tasks", "workflows.training")
        ]
        assert foreign == [], name_of(path)


def test_dependencies_run_one_way() -> None:
    lint = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"],
        cwd=PROJECT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert lint.returncode == 0, lint.stdout + lint.stderr


def test_the_environment_is_read_in_its_own_places() -> None:
    """Besides: the stub must import nothing; who forks workers, and who starts tasks, gives each its own environment."""
    reading = {name_of(path) for path in SOURCES if re.search(r"\bos\.(environ|getenv|putenv)\b", path.read_text())}
    allowed = {"trainer/environment.py", "steps/node.py", "trainer/recovery/stub.py", "trainer/recovery/fork_server.py"}
    allowed |= {"workflows/local/pods/subreaper.py"}
    assert reading - allowed == set()


def test_path_names_are_written_in_one_place() -> None:
    """The names below a run's directory occur as strings of their own, or as a path's last part, only in paths.py."""
    names = {
        "events",
        "quarantine",
        "outcomes",
        "supervisor.lock",
        "validation.json",
        "run.json",
        "manifest.json",
        "report.json",
    }
    found = set()
    for path in SOURCES:
        if name_of(path) == "trainer/paths.py":
            continue
        for node in ast.walk(tree(path)):
            joined = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
            value = node.right if joined else node
            if isinstance(value, ast.Constant) and value.value in (names if joined else names - {"events"}):
                found.add(f"{name_of(path)}: {value.value}")
    assert found == set()


def test_no_file_names_a_machine_or_a_private_host() -> None:
    """What is committed must mean the same everywhere."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, timeout=60)
    if listed.returncode:
        pytest.skip("not a git checkout")
    home = re.compile(rb"(?<![\w.{}])/(root|home/\w+|Users/\w+|work)/[\w.]")
    found = []
    for name in listed.stdout.decode().split("\0"):
        path = PROJECT / name
        if (
            name
            and path.is_file()
            and path.suffix in (".py", ".md", ".yaml", ".toml", ".txt", ".json", ".html", "")
            and home.search(path.read_bytes())
        ):
            found.append(name)
    assert found == []


def test_modules_have_docstrings_and_no_drawer_is_called_utils() -> None:
    undocumented = [name_of(path) for path in SOURCES if path.read_text().strip() and not ast.get_docstring(tree(path))]
    assert undocumented == []
    assert [name_of(path) for path in SOURCES if path.stem in ("utils", "util", "helpers", "common")] == []


def test_what_was_tested_is_pinned() -> None:
    """Every direct dependency has a pin in constraints.txt, but NVRx, which pip chooses by glibc."""
    import tomllib

    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = {
        re.split(r"[^\w.-]", item)[0].lower() for item in [*project["dependencies"], *(i for e in extras for i in e)]
    }
    lines = (PROJECT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if "==" in line and not line.startswith("#")}
    assert wanted - pinned == {"nvidia-resiliency-ext"}
    assert "torch==2.13.0" in lines


# --- documents ---------------------------------------------------------------------------------------------------------


def flags_table() -> str:
    lines = ["| flag | default | what |", "|---|---|---|"]
    for name, field in RunConfig.model_fields.items():
        default = f"`{to_text(field.default)}`" if to_text(field.default) else ""
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        listed = f": {', '.join(f'`{choice}`' for choice in choices)}" if choices else ""
        lines.append(f"| `{flag(name)}` | {default} | {field.description}{listed} |")
    return "\n".join(lines)


def test_the_readme_lists_the_flags() -> None:
    text = (PROJECT / "README.md").read_text()
    table = re.search(r"<!-- flags -->\n(.*)\n<!-- /flags -->", text, re.DOTALL)
    assert table is not None
    assert table.group(1).strip() == flags_table(), f"put this between the marks in README.md:\n{flags_table()}"


def test_the_readme_lists_the_commands() -> None:
    text = (PROJECT / "README.md").read_text()
    assert [name for name in COMMANDS if not re.search(rf"^\|.*`{name}[` ]", text, re.MULTILINE)] == []


def test_the_events_that_are_listed_are_those_that_are_emitted() -> None:
    emitted = {
        node.args[0].value
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "emit"
        if node.args and isinstance(node.args[0], ast.Constant)
    }
    names = re.findall(r"^ {4}(\w+(?:, \w+)*)", ast.get_docstring(tree(PROJECT / "trainer" / "events.py")) or "", re.MULTILINE)
    assert {name for line in names for name in line.split(", ")} == emitted


def test_the_exit_codes_in_the_architecture_are_the_code_s() -> None:
    text = (PROJECT / "ARCHITECTURE.md").read_text()
    rows = dict(re.findall(r"^\| (\d+) \| .* \| ?(no|yes)?[^|]*\|$", text, re.MULTILINE))
    assert {int(code) for code in rows} == set(map(int, ExitCode))
    assert {int(code) for code, retried in rows.items() if retried == "no"} == FINAL_CODES


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_links_and_targets_in_documents_exist(name: str) -> None:
    text = (PROJECT / name).read_text()
    links = [link for link in re.findall(r"\]\(([^)#:]+)\)", text) if not (PROJECT / link).exists()]
    assert links == []
    targets = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)) <= targets


DOCUMENTS = [*PROJECT.glob("*.md"), *(PROJECT / "docs").glob("*.md")]
CAPITALS = re.compile(r"\b[A-Z]{3,}\b|\$\{?\w+\}?")


def commands(program: str) -> list[list[str]]:
    """The command lines of the documents that begin with ``program``, placeholders replaced, without their comments."""
    found = []
    for path in DOCUMENTS:
        for line in path.read_text().replace("\\\n", " ").splitlines():
            if line.startswith(program):
                found.append(shlex.split(CAPITALS.sub("x", line.removeprefix(program)), comments=True))
    return found


@pytest.mark.parametrize("words", commands("python workflows/run.py"), ids=" ".join)
def test_the_commands_in_the_documents_are_commands(words: list[str]) -> None:
    command = COMMANDS[words[0]]
    module = importlib.import_module(command.module)
    suffix = f"_{command.entry}" if command.entry else ""
    parser = OneLineParser(prog="run.py")
    getattr(module, f"add_arguments{suffix}")(parser)
    args = parser.parse_args(words[1:])
    if words[0] in ("local", "submit", "preflight"):
        from_namespace(args)


@pytest.mark.parametrize("words", commands("argo submit"), ids=" ".join)
def test_the_submissions_in_the_documents_are_valid(words: list[str]) -> None:
    pairs = dict(words[i + 1].split("=", 1) for i, word in enumerate(words) if word == "-p")
    known = {spec.name: spec.value for spec in workflow_parameters()}
    assert set(pairs) <= set(known)
    values = {name.replace("-", "_"): value for name, value in (known | pairs).items()}
    config = build({name: value for name, value in values.items() if name in RunConfig.model_fields})
    profile = PROFILES[config.profile]
    assert not profile.gpus or config.gpus_per_node == profile.gpus
