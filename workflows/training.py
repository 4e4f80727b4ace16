"""The training pipeline.

    check -> download -> train -> validate -> report        and, whatever happens, release

It is authored here and nowhere else: ``templates/`` holds what it compiles to, and the local engine, the tests and
Argo all read that YAML.
"""

from __future__ import annotations

from typing import Any

from hera.workflows import DAG, Parameter, Task, Workflow, WorkflowTemplate
from hera.workflows.models import (
    LabelValueFrom,
    Metadata,
    Mutex,
    PodGC,
    PodSecurityContext,
    Synchronization,
    TTLStrategy,
    WorkflowMetadata,
)

from steps.cluster import LABEL_RUN, SERVICE_ACCOUNT_STEPS, pod_security
from workflows import tasks
from workflows.parameters import reference, workflow_defaults, workflow_parameters

NAME = "holdfast-training"
TEXTS = {"title": "Fault-tolerant training", "description": "download, train through faults, validate the checkpoints, report"}
DAY = 24 * 3600


def training_pipeline(kind: type[Workflow] = Workflow) -> Workflow:
    """The pipeline as a ``Workflow`` that is ready to submit, or (``WorkflowTemplate``) as one that is kept."""
    with kind(**settings(kind, NAME, workflow_defaults(), TEXTS)) as workflow:
        made = (tasks.check(), tasks.download(), tasks.train(), tasks.validate(), tasks.report())
        steps = {step.name: step for step in made}
        workflow.on_exit = tasks.release()
        with DAG(name="training"):
            check = Task(name="check", template=steps["check"])
            download = Task(name="download", template=steps["download"])
            train = Task(
                name="train",
                template=steps["train"],
                arguments={"dataset": download.get_parameter("dataset")},
            )
            validate = Task(name="validate", template=steps["validate"])
            report = Task(name="report", template=steps["report"])
            check >> download
            download >> train
            train >> validate
            validate >> report
    return workflow


def settings(kind: type[Workflow], name: str, values: dict[str, str], texts: dict[str, str]) -> dict[str, Any]:
    """What surrounds the steps of a pipeline: parameters with their ``values``, identity, clean-up, and the lock that
    keeps two workflows off one run. ``texts`` are its title and description."""
    run_id = reference("run-id")
    labels = {"app.kubernetes.io/name": "holdfast", "app.kubernetes.io/part-of": name}
    return {
        **({"name": name} if kind is WorkflowTemplate else {"generate_name": name + "-"}),
        "entrypoint": name.removeprefix("holdfast-"),
        "arguments": [
            Parameter(name=p.name, value=values[p.name], description=p.description, enum=list(p.enum) or None)
            for p in workflow_parameters()
            if p.name in values
        ],
        "labels": labels,
        "annotations": {f"workflows.argoproj.io/{key}": text for key, text in texts.items()},
        "workflow_metadata": WorkflowMetadata(
            labels_from={LABEL_RUN: LabelValueFrom(expression="workflow.parameters['run-id']")}
        ),
        "pod_metadata": Metadata(labels=labels | {LABEL_RUN: run_id}),
        "volumes": tasks.volumes(),
        "service_account_name": SERVICE_ACCOUNT_STEPS,
        "synchronization": Synchronization(mutexes=[Mutex(name=f"holdfast-{run_id}")]),
        "ttl_strategy": TTLStrategy(seconds_after_success=3 * DAY, seconds_after_failure=14 * DAY),
        "pod_gc": PodGC(strategy="OnPodSuccess", delete_delay_duration="10m"),
        "security_context": PodSecurityContext.model_validate(pod_security()),
    }
