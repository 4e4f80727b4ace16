"""What is refused before anything runs, and how that is said: file, line, field, what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_runs import END, HEAD, run, write

from trainer.errors import ConfigurationError
from workflows import local

MAIN = "entrypoint: main\ntemplates:\n- name: main\n  "


def refusal(path: Path, parameters: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        local.load(path, parameters or {})
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("spec", "line", "words"),
    [
        ("entrypoint: main\ntemplates: [", 7, "not valid YAML"),
        ("entrypoint: main\nentrypoint: other\ntemplates: []", 6, "'entrypoint' is there twice"),
        (MAIN + "container: {image: x, comand: [true]}", 8, "unknown field 'comand' (did you mean 'command'?)"),
        (MAIN + "container: {image: x, command: [echo], args: [1]}", 8, "must be text, not the number 1"),
        (MAIN + "container: {image: x, command: ['true']}\n  daemon: true", 9, "'daemon' is not implemented here"),
        (MAIN + "container: {image: x, command: ['true']}\n  sidecars: [{name: s, image: x}]", 9, "'sidecars' is not implemented"),
        (MAIN + "inputs: {artifacts: [{name: a, path: /a}]}\n  container: {image: x, command: ['true']}", 8, "'artifacts' is not implemented"),
        (MAIN + "resource: {action: get}", 8, "'resource' is not implemented"),
        ("templates: []", 4, "spec.entrypoint is required"),
        ("entrypoint: nowhere\ntemplates: []", 5, "template 'nowhere' is not defined"),
        (MAIN + "container: {image: x, command: ['true']}\n  script: {image: x, command: [sh], source: x}", 7, "has several types"),
        (MAIN + "timeout: 5s", 7, "has no type"),
        (MAIN + "steps:\n  - - {name: a, template: lost}", 9, "template 'lost' is not defined"),
        (MAIN + "steps:\n  - - {name: a, template: end}\n    - {name: a, template: end}", 10, "not unique"),
        (MAIN + "steps:\n  - - {name: a_b, template: end}", 9, "is invalid"),
        (MAIN + "steps:\n  - - {name: a, template: main}\n    - {name: b, template: end, when: '(1 == 1'}", 10, "Unbalanced parenthesis"),
        (MAIN + "steps:\n  - - {name: a, template: end, arguments: {parameters: [{name: code, value: '{{steps.b.outputs.result}}'}]}}", 9, "failed to resolve {{steps.b.outputs.result}}"),
        (MAIN + "steps:\n  - - {name: a, template: end, arguments: {parameters: [{name: code, value: '{{workflow.parameters.none}}'}]}}", 9, "failed to resolve {{workflow.parameters.none}}"),
        (MAIN + "steps:\n  - - {name: a, template: end, arguments: {parameters: [{name: code, value: '{{=1 +}}'}]}}", 9, "expression '1 +' is not valid"),
        (MAIN + "steps:\n  - - {name: a, template: end, withItems: [1], withParam: '[]'}", 9, "only one of withItems"),
        (MAIN + "steps:\n  - - {name: a, template: end, hooks: {running: {template: end}}}", 9, "needs an expression"),
        (MAIN + "inputs: {parameters: [{name: must}]}\n  container: {image: x, command: ['true']}", 5, "inputs.parameters.must was not supplied"),
        (MAIN + "dag:\n    tasks:\n    - {name: a, template: end, depends: b}\n    - {name: b, template: end, depends: a}", 9, "cycle detected: a->b->a"),
        (MAIN + "dag:\n    tasks:\n    - {name: a, template: end, depends: z}", 10, "depends on 'z', which is not defined"),
        (MAIN + "dag:\n    tasks:\n    - {name: z, template: end}\n    - {name: a, template: end, depends: 'z &&'}", 11, "is not valid"),
        (MAIN + "dag:\n    tasks:\n    - {name: z, template: end}\n    - {name: a, template: end, depends: z.Done}", 11, "task result 'Done'"),
        (MAIN + "dag:\n    tasks:\n    - {name: z, template: end}\n    - {name: a, template: end, depends: z.AllFailed}", 11, "has no items"),
        (MAIN + "dag:\n    tasks:\n    - {name: z, template: end}\n    - {name: a, template: end, depends: z, continueOn: {failed: true}}", 11, "cannot use 'continueOn'"),
        (MAIN + "dag:\n    target: q\n    tasks:\n    - {name: z, template: end}", 9, "target 'q' is not defined"),
        (MAIN + "dag:\n    tasks:\n    - {name: z, template: end}\n    - {name: a, template: end, arguments: {parameters: [{name: code, value: '{{tasks.z.exitCode}}'}]}}", 11, "missing dependency 'z'"),
        (MAIN + "retryStrategy: {retryPolicy: Sometimes}\n  container: {image: x, command: ['true']}", 8, "'Sometimes' is not one of"),
        (MAIN + "retryStrategy: {limit: many}\n  container: {image: x, command: ['true']}", 8, "must be a whole number"),
        (MAIN + "retryStrategy: {expression: 'lastRetry. =='}\n  container: {image: x, command: ['true']}", 8, "is not valid"),
        (MAIN + "retryStrategy: {limit: 1, backoff: {duration: soon}}\n  container: {image: x, command: ['true']}", 8, "unable to parse soon as a duration"),
        (MAIN + "timeout: '30'\n  container: {image: x, command: ['true']}", 8, "needs a unit"),
        (MAIN + "container: {image: x, command: ['true']}\n  outputs: {parameters: [{name: o}]}", 9, "does not have valueFrom"),
        (MAIN + "container: {image: x, command: ['true']}\n  outputs: {parameters: [{name: o, valueFrom: {expression: '1'}}]}", 9, "needs one of: path"),
        (MAIN + "dag:\n    tasks:\n    - {name: z, template: end}\n    - {name: a, template: end, depends: z.failed}", 11, "task result 'failed' for task 'z' is invalid"),
        (MAIN + "steps:\n  - - ", 9, "must not be empty"),
        ("entrypoint: main\ntemplates: [~]", 6, "must not be empty"),
        ("entrypoint: main\nparallelism: 0\ntemplates: []", 6, "greater than 0"),
        (MAIN + "container: {image: x, command: ['true'], volumeMounts: [{name: v, mountPath: here}]}", 8, "must be an absolute path"),
        (MAIN + "steps:\n  - - {name: a, templateRef: {name: elsewhere, template: t}}", 9, "workflow template 'elsewhere' not found"),
    ],
)  # fmt: skip
def test_a_wrong_workflow_is_refused_with_its_line(tmp_path: Path, spec: str, line: int, words: str) -> None:
    path = write(tmp_path, spec, END) if "template: end" in spec else write(tmp_path, spec)
    message = refusal(path)
    assert words in message
    assert message.startswith(f"{path}:{line}: "), message


def test_a_file_that_is_no_workflow_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text("kind: ConfigMap\n")
    assert "has no Workflow (kinds: ConfigMap)" in refusal(path)
    path.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refusal(path)
    path.unlink()
    assert "cannot be read" in refusal(path)


def test_other_files_of_the_directory_may_be_anything(tmp_path: Path) -> None:
    """Workflow templates are looked for in them, those that other templates name included."""
    (tmp_path / "a.yaml").write_text("kind: [Workflow]\n---\nmetadata: 1\nkind: WorkflowTemplate\n---\n- x\n")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe")
    ref = "apiVersion: argoproj.io/v1alpha1\nkind: WorkflowTemplate\nmetadata: {name: %s}\nspec:\n  templates:\n  - name: t\n    %s\n"
    (tmp_path / "c.yaml").write_text(ref % ("second", "container: {image: x, command: ['true']}"))
    first = ref % ("first", "steps: [[{name: a, templateRef: {name: second, template: t}}]]")
    path = write(tmp_path, MAIN + "steps:\n  - - {name: a, templateRef: {name: first, template: t}}")
    path.write_text(path.read_text() + "\n---\n" + first)
    assert run(path, tmp_path).phases["[0].a[0].a"] == "Succeeded"


def test_maps_may_be_merged(tmp_path: Path) -> None:
    spec = """
    entrypoint: b
    templates:
    - &a {name: a, container: &c {image: x, command: [sh, -c, exit 1]}}
    - {<<: *a, name: b, container: {<<: [*c], command: ["true"]}}
    """
    assert run(write(tmp_path, spec), tmp_path).result.phase == "Succeeded"


def test_parameters_are_those_that_the_workflow_has(tmp_path: Path) -> None:
    spec = (
        "entrypoint: end\narguments: {parameters: [{name: code}, {name: kind, value: a, enum: [a, b]}]}\ntemplates:\n"
    )
    path = write(tmp_path, spec, END)
    assert "parameter 'code' has no value; give it one (-p code=VALUE)" in refusal(path)
    assert "-p none: the workflow has no such parameter (it has: code, kind)" in refusal(
        path, {"code": "0", "none": "1"}
    )
    assert "'c' is not one of kind's values: a, b" in refusal(path, {"code": "0", "kind": "c"})
    assert run(path, tmp_path, {"code": "0", "kind": "b"}).result.phase == "Succeeded"


def test_what_nothing_reaches_may_need_a_cluster(tmp_path: Path) -> None:
    unused = "- name: unused\n  container: {image: x, command: ['true']}\n  sidecars: [{name: s, image: x}]\n"
    assert run(write(tmp_path, "entrypoint: end\ntemplates:\n", END, unused), tmp_path).result.phase == "Succeeded"


def test_fields_of_a_cluster_are_accepted_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = """
    entrypoint: main
    serviceAccountName: someone
    nodeSelector: {disk: fast}
    podSpecPatch: '{"containers": [{"name": "main", "resources": {"limits": {"cpu": "1"}}}]}'
    templates:
    - name: main
      tolerations: [{key: gpu, operator: Exists}]
      container: {image: x, command: ["true"], resources: {limits: {cpu: 1}}}
    """
    assert run(write(tmp_path, spec), tmp_path, display="plain").result.phase == "Succeeded"
    shown = capsys.readouterr().out
    for field in ("spec.nodeSelector", "spec.podSpecPatch", "tolerations", "resources"):
        assert field in shown
    patched = spec.replace('"resources": {"limits": {"cpu": "1"}}', '"command": ["false"]')
    assert "'command' is not implemented here" in refusal(write(tmp_path, patched))


def test_a_command_that_is_not_on_this_machine_is_refused_before_anything_runs(tmp_path: Path) -> None:
    spec = MAIN + "steps:\n  - - {name: a, template: end}\n  - - {name: b, template: moo}\n"
    path = write(tmp_path, spec, END, "- name: moo\n  container: {image: x, command: [cowsay-of-nowhere]}\n")
    plan = local.load(path)
    with pytest.raises(
        ConfigurationError, match=r"workflow.yaml:15: .*templates.moo: there is no command 'cowsay-of-nowhere'"
    ):
        local.run(plan, local.Options(root=tmp_path / "root", display="quiet"))
    assert not list((tmp_path / "root" / "workflows").iterdir())


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ("{image: x}", "has no command"),
        ("{image: x, command: ['true'], volumeMounts: [{name: none, mountPath: /mnt}]}", "there is no volume 'none'"),
        (
            "{image: x, command: ['true'], env: [{name: S, valueFrom: {secretKeyRef: {name: s, key: k}}}]}",
            "env S comes from a secretKeyRef",
        ),
    ],
)
def test_what_this_machine_lacks_is_refused(tmp_path: Path, container: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        run(write(tmp_path, MAIN + f"container: {container}"), tmp_path)


def test_names_are_checked_and_not_used_twice(tmp_path: Path) -> None:
    path = write(tmp_path, "entrypoint: end\ntemplates:\n", END)
    run(path, tmp_path, name="first")
    with pytest.raises(ConfigurationError, match="workflow 'first' exists already"):
        run(path, tmp_path, name="first")
    with pytest.raises(ConfigurationError, match="is no name for a workflow"):
        run(path, tmp_path, name="Not_A_Name")


def test_yaml_scalars_are_read_as_kubernetes_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(
        HEAD
        + "  entrypoint: main\n  arguments: {parameters: [{name: date, value: 2024-01-02}, {name: time, value: 1:30}, {name: n, value: 1.0}, {name: b, value: yes}]}\n"
        "  templates:\n  - name: main\n    inputs: {parameters: [{name: date}, {name: time}, {name: n}, {name: b}]}\n    container: {image: x, command: ['true']}\n"
    )
    assert run(path, tmp_path).node("")["inputs"] == {"date": "2024-01-02", "time": "1:30", "n": "1", "b": "true"}
