"""The training pipeline as it compiles; and every committed pipeline: equal to what compiles, valid for Argo, and with the
properties that Argo's own validation does not ask for."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hera.workflows import Workflow, WorkflowTemplate
from hypothesis import given
from hypothesis import strategies as st

from steps import cluster, kubernetes
from trainer.config import OneLineParser, RunConfig, add_flags, build, from_namespace
from trainer.errors import FINAL_CODES, ExitCode
from trainer.paths import RunPaths
from workflows.compiling import TEMPLATES, documents
from workflows.local.language.exprlang import evaluate_bool
from workflows.parameters import PLACEMENT, arguments, cluster_config, workflow_parameters
from workflows.training import training_pipeline

CRD = Path(os.environ.get("ARGO_CRD", TEMPLATES.parent.parent / "shared" / "argo" / "argoproj.io_workflows.yaml"))
STEPS = ("check", "download", "train", "validate", "report", "release")
TAG = re.compile(r"\{\{([^}]+)\}\}")
RUN_NAME = re.compile(r"\{\{workflow\.parameters\.run-id\}\}-[a-z0-9-]+(=[a-z0-9-]+)?")
"""A run of a benchmark and its published counterpart: what its report and its release take without a flag."""


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    compiled: dict[str, Any] = yaml.safe_load(documents()["training.yaml"])
    return compiled


@pytest.fixture(scope="module", params=sorted(documents()))
def committed(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each Workflow and WorkflowTemplate that is committed."""
    found: dict[str, Any] = yaml.safe_load((TEMPLATES / request.param).read_text())
    return found


def template(workflow: dict[str, Any], name: str) -> dict[str, Any]:
    return next(item for item in workflow["spec"]["templates"] if item["name"] == name)


def containers(workflow: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for item in workflow["spec"]["templates"]:
        for kind in ("container", "script"):
            if kind in item:
                yield item["name"], item[kind]


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, value
    if isinstance(value, dict):
        for key, inside in value.items():
            yield from walk(inside, f"{path}.{key}")
    elif isinstance(value, list):
        for inside in value:
            yield from walk(inside, path)


# --- golden ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(documents()))
def test_what_is_committed_is_what_compiles(name: str) -> None:
    assert (TEMPLATES / name).read_text() == documents()[name], "run `make compile` and commit"


@pytest.mark.parametrize(("name", "kind"), [("training.yaml", Workflow), ("training-template.yaml", WorkflowTemplate)])
def test_the_yaml_says_what_hera_built(name: str, kind: type[Workflow]) -> None:
    assert yaml.safe_load((TEMPLATES / name).read_text()) == training_pipeline(kind).to_dict()


def test_workflow_and_template_differ_only_in_their_names() -> None:
    first, second = training_pipeline(Workflow).to_dict(), training_pipeline(WorkflowTemplate).to_dict()
    assert first["spec"] == second["spec"]
    assert first["metadata"].pop("generateName") == "holdfast-training-"
    assert second["metadata"].pop("name") == "holdfast-training"
    assert first["metadata"] == second["metadata"]


# --- Argo accepts it ---------------------------------------------------------------------------------------------------


def strict(schema: Any) -> Any:
    """The CRD's schema made to refuse unknown fields, with int-or-string as both types."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made = {key: strict(value) for key, value in schema.items() if not key.startswith("x-") and key != "format"}
    if isinstance(made.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


@pytest.fixture(scope="module")
def argo() -> jsonschema.Draft202012Validator:
    if not CRD.exists():
        pytest.skip(f"no Argo CRD at {CRD}; set ARGO_CRD to argoproj.io_workflows.yaml of an Argo release")
    crd = yaml.load(CRD.read_text(), Loader=yaml.CSafeLoader)
    schema: dict[str, Any] = strict(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", sorted(documents()))
def test_argo_knows_every_field(name: str, argo: jsonschema.Draft202012Validator) -> None:
    argo.validate(yaml.safe_load((TEMPLATES / name).read_text()))


def test_the_schema_refuses_what_hera_lets_through(
    workflow: dict[str, Any], argo: jsonschema.Draft202012Validator
) -> None:
    broken = json.loads(json.dumps(workflow))
    broken["spec"]["templates"][0]["retryStrategy"]["retries"] = 3
    with pytest.raises(jsonschema.ValidationError, match="retries"):
        argo.validate(broken)


def test_every_name_it_uses_is_there(workflow: dict[str, Any]) -> None:
    """Hera builds an unknown entrypoint and missing arguments without a word."""
    spec = workflow["spec"]
    names = [item["name"] for item in spec["templates"]]
    assert sorted(names) == sorted((*STEPS, "training"))
    assert spec["entrypoint"] == "training"
    assert spec["onExit"] == "release"
    tasks = template(workflow, "training")["dag"]["tasks"]
    assert {task["template"] for task in tasks} <= set(names)
    for task in tasks:
        wanted = {item["name"] for item in template(workflow, task["template"]).get("inputs", {}).get("parameters", [])}
        given = {item["name"] for item in task.get("arguments", {}).get("parameters", [])}
        assert given == wanted
    known = {f"workflow.parameters.{item['name']}" for item in spec["arguments"]["parameters"]}
    known |= {
        "workflow.status",
        "workflow.name",
        "inputs.parameters.dataset",
        "tasks.download.outputs.parameters.dataset",
    }
    known |= {"status", *(f"outputs.parameters.{name}" for name in ("goodput", "faults", "lost-steps"))}
    used = {tag for _, text in walk(spec) if isinstance(text, str) for tag in TAG.findall(text)}
    assert used <= known


# --- the order ---------------------------------------------------------------------------------------------------------


def test_each_step_waits_for_the_one_before(workflow: dict[str, Any]) -> None:
    tasks = template(workflow, "training")["dag"]["tasks"]
    assert [(task["name"], task.get("depends")) for task in tasks] == [
        ("check", None),
        ("download", "check"),
        ("train", "download"),
        ("validate", "train"),
        ("report", "validate"),
    ]


def test_two_workflows_of_one_run_exclude_each_other(committed: dict[str, Any]) -> None:
    assert committed["spec"]["synchronization"]["mutexes"] == [{"name": "holdfast-{{workflow.parameters.run-id}}"}]


# --- retries -----------------------------------------------------------------------------------------------------------


def test_a_step_is_retried_within_limits(committed: dict[str, Any]) -> None:
    for name, _ in containers(committed):
        strategy = template(committed, name)["retryStrategy"]
        assert 3 <= int(strategy["limit"]) <= 20, name
        assert strategy["retryPolicy"] == "Always"
        assert set(strategy["backoff"]) == {"duration", "factor", "cap"}, "maxDuration would become the pod's deadline"


def test_nothing_multiplies_the_retries(committed: dict[str, Any]) -> None:
    """A retry of a DAG or of the whole workflow would run every step again."""
    spec = committed["spec"]
    steps = {name for name, _ in containers(committed)}
    assert {item["name"] for item in spec["templates"] if "retryStrategy" in item} == steps
    assert [item["name"] for item in spec["templates"] if item["name"] not in steps and "dag" not in item] == []
    assert "retryStrategy" not in spec
    assert "templateDefaults" not in spec


@pytest.mark.parametrize("code", [*map(int, ExitCode), 1, 2, 137, 143, -1])
def test_the_exit_code_decides_on_a_retry(committed: dict[str, Any], code: int) -> None:
    seen = {"exitCode": str(code), "status": "Failed", "duration": "3", "message": ""}
    for name, _ in containers(committed):
        expression = template(committed, name)["retryStrategy"]["expression"]
        assert evaluate_bool(expression, {"lastRetry": seen}) == (code not in FINAL_CODES), name
        assert evaluate_bool(expression, {"lastRetry": seen | {"status": "Error"}}), "a lost pod, whatever its code"


# --- what a manifest must not hold -------------------------------------------------------------------------------------


def test_no_shell_no_host_path_no_privilege(committed: dict[str, Any]) -> None:
    assert "hostPath" not in json.dumps(committed)
    several = "benchmark" in committed["metadata"]["labels"]["app.kubernetes.io/part-of"]
    for name, container in containers(committed):
        assert container["command"] == ["python", "-m", f"steps.{name.replace('-', '_')}"]
        bare = [argument for argument in container["args"] if not argument.startswith("--")]
        assert all(RUN_NAME.fullmatch(argument) for argument in bare), name
        assert bool(bare) == (several and name in ("report", "release")), name
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
    assert committed["spec"]["securityContext"]["runAsNonRoot"] is True


def test_secrets_are_referred_to_and_reach_one_step_each(committed: dict[str, Any]) -> None:
    found = {}
    for name, container in containers(committed):
        for variable in container.get("env", []):
            assert "value" not in variable, "a literal in the environment"
            reference = variable["valueFrom"]["secretKeyRef"]
            assert reference["optional"] is True
            found[variable["name"]] = (name, reference["name"])
    assert found == {
        "HF_TOKEN": ("download", cluster.HUB_SECRET),
        "HOLDFAST_WEBHOOK": ("release", cluster.WEBHOOK_SECRET),
    }


def test_only_the_steps_that_act_on_the_cluster_may(committed: dict[str, Any]) -> None:
    for item in committed["spec"]["templates"]:
        acts = item["name"] in ("check", "train", "release")
        assert item.get("serviceAccountName") == (cluster.SERVICE_ACCOUNT_SUPERVISOR if acts else None), item["name"]
    assert committed["spec"]["serviceAccountName"] == cluster.SERVICE_ACCOUNT_STEPS


def test_arguments_are_far_below_what_a_process_can_take(committed: dict[str, Any]) -> None:
    """Argo hands the template to a pod in one variable, which Linux limits to 128 KiB."""
    for item in committed["spec"]["templates"]:
        assert len(json.dumps(item)) < 64 * 1024, item["name"]
    assert len(json.dumps(committed)) < 256 * 1024


def test_a_failed_run_leaves_something_to_look_at(committed: dict[str, Any]) -> None:
    spec = committed["spec"]
    assert spec["podGC"]["strategy"] == "OnPodSuccess"
    assert spec["ttlStrategy"]["secondsAfterFailure"] > spec["ttlStrategy"]["secondsAfterSuccess"] >= 24 * 3600


def test_the_report_feeds_three_gauges(workflow: dict[str, Any]) -> None:
    metrics = template(workflow, "report")["metrics"]["prometheus"]
    assert {metric["name"]: metric["gauge"]["value"] for metric in metrics} == {
        "holdfast_goodput": "{{outputs.parameters.goodput}}",
        "holdfast_faults": "{{outputs.parameters.faults}}",
        "holdfast_lost_steps": "{{outputs.parameters.lost-steps}}",
    }
    outputs = {item["name"] for item in template(workflow, "report")["outputs"]["parameters"]}
    assert outputs == {"goodput", "faults", "lost-steps"}


# --- parameters --------------------------------------------------------------------------------------------------------


def test_parameters_are_the_configuration_and_the_placement(workflow: dict[str, Any]) -> None:
    listed = {item["name"]: item for item in workflow["spec"]["arguments"]["parameters"]}
    assert list(listed) == [*(name.replace("_", "-") for name in RunConfig.model_fields), *PLACEMENT]
    assert all(isinstance(item["value"], str) and item["description"] for item in listed.values())
    assert listed["recovery"]["enum"] == ["none", "in-process", "in-job", "combined"]
    assert [spec.name for spec in workflow_parameters()] == list(listed)


def test_the_defaults_make_a_run(workflow: dict[str, Any]) -> None:
    values = {item["name"]: item["value"] for item in workflow["spec"]["arguments"]["parameters"]}
    config = build({name.replace("-", "_"): value for name, value in values.items() if name not in PLACEMENT})
    assert config == cluster_config()
    assert (config.root, config.launcher) == (Path("/fsx"), "kubernetes")


@given(st.data())
def test_what_goes_in_as_arguments_comes_out_in_the_step(workflow: dict[str, Any], data: st.DataObject) -> None:
    """Configuration -> arguments -> the train step's command line -> the same configuration, odd values included."""
    config = cluster_config(
        run_id=data.draw(st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)),
        nodes=data.draw(st.sampled_from([1, 2, 4])),
        global_batch_size=32,
        micro_batch_size=data.draw(st.sampled_from([1, 2, 4])),
        dataset_uri=data.draw(
            st.sampled_from(["builtin:", "s3://bucket/a b/", "file:///data/x=y", "hf://org/name@main"])
        ),
        tokenizer=data.draw(st.sampled_from(["byte", "-odd", "--seed", ""])),
        learning_rate=data.draw(st.floats(1e-9, 10)),
        compile=data.draw(st.booleans()),
        recovery=data.draw(st.sampled_from(["none", "in-process", "in-job", "combined"])),
        fault_ranks=data.draw(st.sampled_from(["", "all", "0,1"])),
    )
    values = {name: value for name, (value, _) in PLACEMENT.items()} | arguments(config)

    def fill(match: re.Match[str]) -> str:
        return values.get(match.group(1).removeprefix("workflow.parameters."), "X")

    argv = [TAG.sub(fill, item) for item in template(workflow, "train")["container"]["args"]]
    parser = OneLineParser()
    add_flags(parser)
    kubernetes.add_arguments(parser)
    parser.add_argument("--dataset")
    assert from_namespace(parser.parse_args(argv)) == config


@pytest.mark.parametrize(("step", "name"), [("download", "dataset"), ("report", "goodput"), ("report", "lost-steps")])
def test_outputs_lie_where_the_steps_leave_them(workflow: dict[str, Any], step: str, name: str) -> None:
    declared = {item["name"]: item["valueFrom"]["path"] for item in template(workflow, step)["outputs"]["parameters"]}
    path = (
        declared[name]
        .replace("{{workflow.parameters.root}}", "/data")
        .replace("{{workflow.parameters.run-id}}", "mine")
    )
    assert Path(path) == RunPaths(Path("/data"), "mine").output(step, name)


def test_every_step_is_there_to_be_run(committed: dict[str, Any]) -> None:
    for _, container in containers(committed):
        assert (TEMPLATES.parent / Path(*container["command"][-1].split("."))).with_suffix(".py").exists()
