"""The benchmark pipeline: the arms of a table of experiments one after another on the same nodes, then one report.

    check -> download -> bare run -> how slow the storage is -> arm -> ... -> report       and, whatever happens, release
                                                                train -> validate

The steps are those of the training pipeline. What the arms differ in are parameters of the template ``arm``; what they
share are the workflow's, as in the training pipeline. An arm that fails does not keep the next one from running: the
report says which did not finish, and the workflow fails.
"""

from __future__ import annotations

from hera.workflows import DAG, Parameter, Task, Workflow

from trainer.config import RunConfig, parameter, to_text
from workflows import arms, tasks
from workflows.arms import RATE, Experiments
from workflows.parameters import PLACEMENT, input_reference, reference
from workflows.training import settings

NAME = "holdfast-benchmark"


def benchmark_pipeline(kind: type[Workflow], table: Experiments, repetitions: int = 1) -> Workflow:
    """The pipeline over the arms of ``table``."""
    order = table.order(repetitions)
    runs = table.runs(reference("run-id"), repetitions)
    words = [f"{run}={key}" if (key := table.published(name)) else run for run, (name, _) in zip(runs, order, strict=True)]
    fitted = [arms.run_name(reference("run-id"), name) for name in table.fit]
    texts = {"title": table.title, "description": f"{len(order)} runs one after another, each trained and validated, then one report"}
    with kind(**settings(kind, NAME, parameters(table), texts)) as workflow:
        longest = {"run-id": max(runs, key=len)}  # what does not fit an arm's names is refused before the first one
        check = tasks.check(values_of(table, table.names[0]) | longest | ({parameter(RATE): "0"} if table.storage else {}))
        download = tasks.download()
        arm = arm_template(table)
        rate = tasks.storage_rate(table.storage) if table.storage else None
        report = tasks.compare(words, fitted)
        workflow.on_exit = tasks.release(runs)
        labels = table.runs("arm", repetitions)
        with DAG(name="benchmark", target=" ".join([*labels, "report"]), fail_fast=False):
            Task(name="check", template=check)
            first = Task(name="download", template=download, depends="check")
            dataset = first.get_parameter("dataset")
            ready, before = "download", ""
            for number, ((name, _), run, label) in enumerate(zip(order, runs, labels, strict=True)):
                values = values_of(table, name) | {"run-id": run, "dataset": dataset}
                if rate is not None:
                    values[parameter(RATE)] = "{{tasks.storage-rate.outputs.parameters.bytes-per-second}}" if number else "0"
                Task(
                    name=label,
                    template=arm,
                    arguments=values,
                    depends=f"{ready} && {whatever(before)}" if before else ready,
                )
                before = label
                if rate is not None and not number:
                    Task(name="storage-rate", template=rate, arguments={"run-id": run}, depends=label)
                    ready = "storage-rate"
            Task(name="report", template=report, depends=f"{whatever(before)} || {before}.Omitted")
    return workflow


def arm_template(table: Experiments) -> DAG:
    """One arm: train, then validate."""
    varied = table.varied
    train, validate = tasks.train(varied), tasks.validate(varied)
    names = [parameter(name) for name in varied]
    with DAG(name="arm", inputs=[Parameter(name="dataset"), *(Parameter(name=name) for name in names)]) as arm:
        given = {name: input_reference(name) for name in ("dataset", *names)}
        trained = Task(name="train", template=train, arguments=given)
        validated = Task(name="validate", template=validate, arguments={"run-id": given["run-id"]})
        trained >> validated
    return arm


def whatever(task: str) -> str:
    """Once ``task`` has run, however it ended."""
    return f"({task} || {task}.Failed || {task}.Errored)"


def values_of(table: Experiments, name: str) -> dict[str, str]:
    """The arguments of an arm: every field that some arm sets, as this one has it."""
    config = table.config(name)
    return {parameter(field): to_text(getattr(config, field)) for field in table.varied if field not in ("run_id", RATE)}


def parameters(table: Experiments, config: RunConfig | None = None) -> dict[str, str]:
    """The workflow's parameters: what all arms share (as in ``config``, if given), and where the run is placed."""
    config = config or table.config(table.names[0])
    shared = [name for name in RunConfig.model_fields if name not in table.varied]
    given = {parameter(name): to_text(getattr(config, name)) for name in shared}
    return {"run-id": "benchmark"} | given | {name: value for name, (value, _) in PLACEMENT.items()}


def arguments(table: Experiments, config: RunConfig, run_id: str) -> dict[str, str]:
    """The workflow's arguments for ``config``'s shared settings under the benchmark's own id."""
    return parameters(table, config) | {"run-id": run_id}
