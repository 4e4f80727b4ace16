"""``run.py submit``: hand the pipeline to an Argo server through Hera.

``argo submit templates/training.yaml -p nodes=8 ...`` does the same without it. What this adds is that a wrong
configuration is refused here, before the cluster does anything, and that ``--wait`` ends with the failed step's code.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests
from hera.exceptions import AlreadyExists, BadRequest, Forbidden, HeraException, NotFound, Unauthorized
from hera.workflows import Parameter, Workflow, WorkflowsService
from hera.workflows.models import Workflow as WorkflowModel

from steps import cluster
from trainer import environment
from trainer.config import RunConfig, add_flags, build
from trainer.errors import ConfigurationError, DeniedError, ExitCode, UnavailableError, normalise
from workflows import arms, benchmark
from workflows.compiling import PIPELINES, author
from workflows.localrun import add_benchmark_arguments
from workflows.parameters import CLUSTER_DEFAULTS, PLACEMENT, arguments

Answer = TypeVar("Answer")

CALL_SECONDS = 30.0
POLL_SECONDS = 5.0
PATIENCE_SECONDS = 300.0
"""How long a server that does not answer is asked again while a workflow is waited for."""
WEEK = 7 * 24 * 3600
FINAL_PHASES = ("Succeeded", "Failed", "Error")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("where to")
    server.add_argument("--argo-server", metavar="URL", required=True, help="http(s) address of the Argo server")
    server.add_argument("--namespace", default="holdfast", help="namespace of the Workflow [holdfast]")
    server.add_argument(
        "--token-env", metavar="NAME", default="ARGO_TOKEN", help="variable with the token [ARGO_TOKEN]"
    )
    server.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    server.add_argument(
        "--wait",
        nargs="?",
        type=float,
        const=WEEK,
        metavar="SECONDS",
        help="wait for the end, at most that long [a week]",
    )
    what = parser.add_argument_group("what to submit")
    what.add_argument("--pipeline", choices=PIPELINES, default="training", help="pipeline to submit [training]")
    add_benchmark_arguments(what)
    placement = parser.add_argument_group("placement")
    for name, (default, text) in PLACEMENT.items():
        placement.add_argument(f"--{name}", default=default, help=f"{text} [{default}]")
    add_flags(parser)


def main(args: argparse.Namespace) -> int:
    """Submit; with ``--wait`` end with the code of the step that failed."""
    given = {name: value for name, value in vars(args).items() if name in RunConfig.model_fields}
    placement = {name: str(getattr(args, name.replace("-", "_"))) for name in PLACEMENT}
    server = Server(args.argo_server, args.namespace, environment.variable(args.token_env), verify=not args.insecure)
    if args.pipeline == "benchmark":
        run_id, workflow = authored_benchmark(args.experiments, args.repetitions, given, placement)
    else:
        config = build(CLUSTER_DEFAULTS | given)
        check(config, placement)
        run_id, workflow = config.run_id, authored(config, placement)
    for other in server.running(run_id):
        print(f"{other} is at work on run '{run_id}'; the new workflow waits for it", flush=True)
    name = server.submit(workflow)
    print(f"submitted {name} for run '{run_id}': {server.link(name)}", flush=True)
    return server.wait(name, args.wait) if args.wait is not None else 0


def check(config: RunConfig, placement: dict[str, str]) -> None:
    """Refuse what the cluster's profile cannot do, as the train step would, hours earlier."""
    try:
        memory, shm = int(placement["node-memory-gib"]), int(placement["node-shm-gib"])
    except ValueError:
        raise ConfigurationError("--node-memory-gib and --node-shm-gib are whole numbers of GiB") from None
    pod = cluster.Placement(image=placement["image"], cpus=placement["node-cpus"], memory_gib=memory, shm_gib=shm)
    cluster.check(config, pod)
    if config.model != "tiny":  # which fits anywhere
        with warnings.catch_warnings(action="ignore"):  # of torch's import, which counting parameters needs
            shape = cluster.shape_of(config.model)
        cluster.check(config, pod, shape)


def authored(config: RunConfig, placement: dict[str, str]) -> Workflow:
    """The training pipeline's Workflow with the arguments that make ``config``."""
    return _with_arguments(author("training", Workflow), arguments(config) | placement)


def authored_benchmark(
    experiments: str, repetitions: int, given: dict[str, Any], placement: dict[str, str]
) -> tuple[str, Workflow]:
    """The id and the Workflow of a benchmark; ``given`` changes what its arms share. Each arm is checked."""
    table = arms.load(experiments)
    changes = arms.shared_changes(table, given)
    configs = [table.config(name, changes) for name in table.names]
    run_id = str(given.get("run_id", "benchmark"))
    for run in table.runs(run_id, repetitions):
        build({"run_id": run})
    for config in configs:
        check(config, placement)
    values = benchmark.arguments(table, configs[0], run_id) | placement
    return run_id, _with_arguments(author("benchmark", Workflow, experiments, repetitions), values)


def _with_arguments(workflow: Workflow, values: dict[str, str]) -> Workflow:
    workflow.arguments = [Parameter(name=name, value=value) for name, value in values.items()]
    return workflow


class Server:
    """An Argo server, its errors turned into the contract's."""

    def __init__(self, host: str, namespace: str, token: str, *, verify: bool = True) -> None:
        if not host.startswith(("http://", "https://")):
            raise ConfigurationError(f"--argo-server {host}: begin it with http:// or https://")
        try:
            named = urlsplit(host).hostname
        except ValueError:
            named = None
        if not named:
            raise ConfigurationError(f"--argo-server {host}: it names no host")
        self.host, self.namespace = host.rstrip("/"), namespace
        self._service = WorkflowsService(
            host=self.host + "/", namespace=namespace, token=token or None, verify_ssl=verify, session=_Session()
        )

    def submit(self, workflow: Workflow) -> str:
        """Create ``workflow``; returns the name that the server gave it."""
        workflow.workflows_service = self._service
        workflow.namespace = self.namespace
        created = self._call(workflow.create)
        return str(created.metadata.name)

    def running(self, run_id: str) -> list[str]:
        """Names of the workflows that are not at their end and hold, or wait for, the lock of ``run_id``."""
        selector = f"{cluster.LABEL_RUN}={run_id},workflows.argoproj.io/completed!=true"
        found = self._call(lambda: self._service.list_workflows(label_selector=selector))
        return [str(item.metadata.name) for item in found.items or ()]

    def link(self, name: str) -> str:
        return f"{self.host}/workflows/{self.namespace}/{name}"

    def wait(self, name: str, seconds: float) -> int:
        """Follow the workflow to its end, at most ``seconds``; a server that is away for a while is asked again."""
        deadline = time.monotonic() + seconds
        answered, said = time.monotonic(), ""
        while time.monotonic() < deadline:
            try:
                workflow: WorkflowModel = self._call(lambda: self._service.get_workflow(name))
            except UnavailableError:
                if time.monotonic() - answered > PATIENCE_SECONDS:
                    raise
                time.sleep(POLL_SECONDS)
                continue
            answered = time.monotonic()
            status = workflow.status
            phase = (status.phase if status else None) or "Pending"
            now = f"{phase} {(status.progress if status else None) or ''}".strip()
            if now != said:
                said = now
                print(f"{name}: {now}", flush=True)
            if phase in FINAL_PHASES:
                return exit_code(workflow.model_dump(mode="json", by_alias=True, exclude_none=True))
            time.sleep(POLL_SECONDS)
        raise UnavailableError(f"{name} has not ended after {seconds:.0f} s; it goes on: {self.link(name)}")

    def _call(self, call: Callable[[], Answer]) -> Answer:
        try:
            return call()
        except Unauthorized as error:
            raise DeniedError(f"{self.host} does not accept the token ({error}); see --token-env") from None
        except Forbidden as error:
            raise DeniedError(f"{self.host} forbids it in namespace {self.namespace}: {error}") from None
        except (BadRequest, NotFound, AlreadyExists) as error:
            raise ConfigurationError(f"{self.host} refused it: {error}") from None
        except (HeraException, requests.RequestException) as error:
            raise UnavailableError(f"{self.host} did not answer as an Argo server does: {error}") from None


def exit_code(workflow: dict[str, Any]) -> int:
    """The contract's code for how a workflow (as Argo's JSON) ended: that of the pod that failed last."""
    status = workflow.get("status") or {}
    if status.get("phase") == "Succeeded":
        return int(ExitCode.DONE)
    failed = [
        node for node in (status.get("nodes") or {}).values()
        if node.get("type") == "Pod" and node.get("phase") in ("Failed", "Error")
    ]  # fmt: skip
    last: dict[str, Any] = max(failed, key=lambda node: str(node.get("finishedAt") or ""), default={})
    code = (last.get("outputs") or {}).get("exitCode")
    return normalise(int(code)) if code is not None else int(ExitCode.STOPPED)


class _Session(requests.Session):
    """Gives every call a deadline, which Hera does not."""

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        kwargs["timeout"] = kwargs.get("timeout") or CALL_SECONDS
        return super().request(*args, **kwargs)
