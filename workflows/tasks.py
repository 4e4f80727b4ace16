"""One template per step, each with its own retry policy.

A step is a container that runs ``python -m steps.<name>``: no shell, no inline script. Its exit code decides whether
Argo tries again; the codes that no attempt can change (``FINAL_CODES``) are never retried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hera.workflows import (
    Container,
    EmptyDirVolume,
    ExistingVolume,
    Gauge,
    Label,
    Parameter,
    Resources,
    RetryStrategy,
    SecretEnv,
)
from hera.workflows.models import Backoff, Capabilities, SecurityContext, ValueFrom, VolumeMount

from steps.cluster import CLAIM, HUB_SECRET, SERVICE_ACCOUNT_SUPERVISOR, WEBHOOK_SECRET
from steps.release import WEBHOOK_VARIABLE
from trainer.config import flag, parameter
from trainer.errors import FINAL_CODES
from trainer.paths import RunPaths
from workflows.arms import Emulated
from workflows.parameters import (
    DOWNLOAD_FIELDS,
    PLACEMENT,
    RECORD_FIELDS,
    RUN_FIELDS,
    flags,
    input_reference,
    reference,
)

VOLUME = "root"
TEMPORARY = "tmp"

FINAL = ", ".join(f"'{int(code)}'" for code in sorted(FINAL_CODES))
RETRY_EXPRESSION = f"lastRetry.status == 'Error' || !(lastRetry.exitCode in [{FINAL}])"
"""Argo reads it after a failed attempt. 'Error' is a lost pod, whose exit code is nobody's statement."""

DOWNLOAD_RETRIES = 8
TRAIN_RETRIES = 20
RECORD_RETRIES = 3


def retry(limit: int, *, first: str = "2s", cap: str = "1m") -> RetryStrategy:
    """Retry what may end differently, ``limit`` times, waiting ``first``, then twice as long up to ``cap``.

    The policy is spelt out since Argo's default depends on whether there is an expression, and the limit is always
    given since Argo ignores the backoff without one. No ``maxDuration``: it would become the running pod's deadline.
    """
    return RetryStrategy(
        limit=limit,
        retry_policy="Always",
        expression=RETRY_EXPRESSION,
        backoff=Backoff(duration=first, factor=2, cap=cap),
    )


def check(constants: Mapping[str, str] | None = None) -> Container:
    """Refuses what cannot work, a missing claim included, which is why it mounts none.

    ``constants``: values of the parameters that are not the workflow's (a benchmark's arms differ in them).
    """
    constants = constants or {}
    fixed = [f"{flag(name)}={value}" for name, value in constants.items()]
    words = [*flags(name for name in (*RUN_FIELDS, *PLACEMENT) if parameter(name) not in constants), *fixed]
    return _step(
        "check",
        words,
        mounts=False,
        retry_strategy=retry(RECORD_RETRIES),
        service_account_name=SERVICE_ACCOUNT_SUPERVISOR,
        resources=Resources(cpu_request="100m", memory_request="256Mi"),
    )


def download() -> Container:
    """Dataset -> token shards and manifest. The only step that sees the hub's token."""
    return _step(
        "download",
        flags(DOWNLOAD_FIELDS),
        retry_strategy=retry(DOWNLOAD_RETRIES),
        outputs=[_output("download", "dataset")],
        env=[SecretEnv(name="HF_TOKEN", secret_name=HUB_SECRET, secret_key="token", optional=True)],
        resources=Resources(cpu_request="500m", memory_request="1Gi"),
    )


def train(varied: Collection[str] = ()) -> Container:
    """Supervises the training pods. Needs no GPU itself, and outlives none of its retries: a new one attaches.

    The fields in ``varied`` are the template's own parameters: a benchmark gives each of its arms other values.
    """
    return _step(
        "train",
        [
            *flags((*RUN_FIELDS, *PLACEMENT), varied),
            "--workflow={{workflow.name}}",
            "--dataset={{inputs.parameters.dataset}}",
        ],
        inputs=[Parameter(name="dataset"), *inputs(varied)],
        retry_strategy=retry(TRAIN_RETRIES, cap="5m"),
        resources=Resources(cpu_request="100m", memory_request="256Mi"),
        service_account_name=SERVICE_ACCOUNT_SUPERVISOR,
    )


def validate(varied: Collection[str] = ()) -> Container:
    """Reads every checkpoint as a resume would and says which are whole."""
    own = [name for name in RECORD_FIELDS if name in varied]
    return _step(
        "validate",
        flags(RECORD_FIELDS, own),
        inputs=inputs(own),
        retry_strategy=retry(RECORD_RETRIES),
        resources=Resources(cpu_request="500m", memory_request="2Gi"),
    )


def report() -> Container:
    """Events and records -> report.json, report.md, report.html and three metrics."""
    return _step(
        "report",
        flags(RECORD_FIELDS),
        retry_strategy=retry(RECORD_RETRIES),
        outputs=[_output("report", name, default="0") for name in ("goodput", "faults", "lost-steps")],
        metrics=[
            _gauge("goodput", "productive time over wall time of a run"),
            _gauge("faults", "faults that a run went through"),
            _gauge("lost-steps", "steps that had to be trained again, over all faults of a run"),
        ],
        resources=Resources(cpu_request="200m", memory_request="512Mi"),
    )


def storage_rate(emulated: Emulated) -> Container:
    """How fast the emulated storage of a benchmark is, from the pace of its bare run."""
    own = ["run_id"]
    run = RunPaths(Path(reference("root")), input_reference("run-id"))
    path = str(run.output("storage_rate", "bytes-per-second"))
    return _step(
        "storage_rate",
        [
            *flags(RECORD_FIELDS, own),
            f"--save-to-interval={emulated.save_to_interval:g}",
            f"--interval-steps={emulated.interval_steps}",
        ],
        inputs=inputs(own),
        retry_strategy=retry(RECORD_RETRIES),
        outputs=[Parameter(name="bytes-per-second", value_from=ValueFrom(path=path))],
        resources=Resources(cpu_request="200m", memory_request="1Gi"),
    )


def compare(runs: Sequence[str], fitted: Sequence[str]) -> Container:
    """The comparative report of a benchmark, and the report of each of its runs."""
    return _step(
        "report",
        [
            *flags(("root",)),
            f"--name={reference('run-id')}",
            f"--fit={','.join(fitted)}",
            *runs,
        ],
        retry_strategy=retry(RECORD_RETRIES),
        resources=Resources(cpu_request="200m", memory_request="512Mi"),
    )


def release(runs: Sequence[str] = ()) -> Container:
    """The exit handler: whatever happened, nothing of the run (or of the ``runs`` of a benchmark) goes on costing money;
    the webhook hears of it."""
    words = [*flags((*RECORD_FIELDS, "launcher")), "--status={{workflow.status}}", "--workflow={{workflow.name}}", *runs]
    return _step(
        "release",
        words,
        timeout="10m",  # (counted from when it is due: a pod that cannot be placed, its claim missing, must not wait for ever)
        retry_strategy=retry(RECORD_RETRIES),
        service_account_name=SERVICE_ACCOUNT_SUPERVISOR,
        env=[SecretEnv(name=WEBHOOK_VARIABLE, secret_name=WEBHOOK_SECRET, secret_key="url", optional=True)],
        resources=Resources(cpu_request="100m", memory_request="512Mi"),
    )


def volumes() -> list[ExistingVolume | EmptyDirVolume]:
    """The claim, which steps mount where the ``root`` parameter says (the directory every path of a run begins with), and
    a /tmp for each pod, all else of whose file system is read-only."""
    return [ExistingVolume(name=VOLUME, claim_name=CLAIM), EmptyDirVolume(name=TEMPORARY)]


def inputs(fields: Iterable[str]) -> list[Parameter]:
    """The input parameters that stand for ``fields``."""
    return [Parameter(name=parameter(name)) for name in fields]


def _step(name: str, args: list[str], *, mounts: bool = True, **options: Any) -> Container:
    mounted = [VolumeMount(name=TEMPORARY, mount_path="/tmp")]
    if mounts:
        mounted.insert(0, VolumeMount(name=VOLUME, mount_path=reference("root")))
    return Container(
        name=parameter(name),
        image=reference("image"),
        command=["python", "-m", f"steps.{name}"],
        args=args,
        volume_mounts=mounted,
        security_context=SecurityContext(
            allow_privilege_escalation=False, read_only_root_filesystem=True, capabilities=Capabilities(drop=["ALL"])
        ),
        **options,
    )


def _output(step: str, name: str, default: str | None = None) -> Parameter:
    """An output parameter is a file below the root, so that Argo and the local engine read the same thing."""
    tagged = RunPaths(Path(reference("root")), reference(parameter("run_id")))
    return Parameter(name=name, value_from=ValueFrom(path=str(tagged.output(step, name)), default=default))


def _gauge(name: str, text: str) -> Gauge:
    return Gauge(
        name=f"holdfast_{name.replace('-', '_')}",
        help=text,
        value="{{outputs.parameters.%s}}" % name,  # noqa: UP031 -- braces
        when="{{status}} == Succeeded",
        realtime=False,
        labels=[
            Label(key="run_id", value=reference(parameter("run_id"))),
            Label(key="model", value=reference("model")),
        ],
    )
