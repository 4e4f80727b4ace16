"""The few calls to the Kubernetes API that this project makes, with its errors turned into the contract's.

The official client does the talking; objects come back as plain dictionaries, as they are in YAML. A refusal names the
verb and the resource that the role lacks (77). A server that does not answer is asked again with growing pauses for a
bounded time, then the caller gets an ``UnavailableError`` (69). What does not exist is None.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from steps import job_state
from trainer.errors import ConfigurationError, DefectError, DeniedError, UnavailableError

Manifest = dict[str, Any]

IN_CLUSTER_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
CALL_SECONDS = (5, 30)
"""To connect, and between two bytes of an answer."""
PATIENCE_SECONDS = 180.0
"""How long one call is tried again before the API server counts as unavailable."""
LONGEST_PAUSE_SECONDS = 10.0
AGAIN = frozenset({408, 429, 500, 502, 503, 504})


def lacking(verb: str, resource: str, namespace: str) -> str:
    """The message for a role without a verb."""
    return (
        f"the service account's role lacks the verb '{verb}' on {resource} in namespace {namespace}; "
        "kubectl apply -f templates/cluster/rbac.yaml"
    )


class ApiServer:
    """One namespace of one cluster. Safe to use from several threads."""

    def __init__(self, namespace: str = "", patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Connect as the pod's service account, or with the kubeconfig outside a cluster (``ConfigurationError``)."""
        import kubernetes
        import urllib3

        self._client = kubernetes.client
        self._transport_error: type[Exception] = urllib3.exceptions.HTTPError
        config: Any = kubernetes.config  # without types of its own
        configuration = kubernetes.client.Configuration()
        self.patience_seconds = patience_seconds
        found = namespace
        try:
            config.load_incluster_config(client_configuration=configuration)
            found = found or IN_CLUSTER_NAMESPACE.read_text().strip()
        except config.ConfigException:
            try:
                config.load_kube_config(client_configuration=configuration)
                context = config.list_kube_config_contexts()[1]
            except config.ConfigException as error:
                raise ConfigurationError(
                    f"no Kubernetes to talk to: {error}; run in a pod, or set KUBECONFIG (aws eks update-kubeconfig)"
                ) from None
            found = found or context["context"].get("namespace", "default")
        self.namespace = found
        configuration.retries = False  # a pause that we do not know of would break our own bounds
        self.host: str = configuration.host
        self._api = kubernetes.client.ApiClient(configuration)
        self.core = kubernetes.client.CoreV1Api(self._api)
        self.batch = kubernetes.client.BatchV1Api(self._api)
        self.custom = kubernetes.client.CustomObjectsApi(self._api)

    def client(self, name: str) -> Any:
        """Another part of the official client ("StorageV1Api"), for ``call``."""
        return getattr(self._client, name)(self._api)

    # --- jobs, services, pods, nodes, workflows ---

    def jobs(self, selector: str) -> list[Manifest]:
        return self._items("list jobs", self.batch.list_namespaced_job, self.namespace, label_selector=selector)

    def job(self, name: str) -> Manifest | None:
        return self.call("get jobs", self.batch.read_namespaced_job, name, self.namespace)

    def create_job(self, body: Manifest) -> bool:
        """False if a Job of that name exists."""
        return self.call("create jobs", self.batch.create_namespaced_job, self.namespace, body) is not None

    def patch_job(self, name: str, body: Manifest) -> Manifest | None:
        return self._patch("patch jobs", self.batch.patch_namespaced_job, name, body)

    def delete_job(self, name: str) -> None:
        """The Job goes at once, its pods after it as fast as they end."""
        self.call(
            "delete jobs", self.batch.delete_namespaced_job, name, self.namespace, propagation_policy="Background"
        )

    def services(self, selector: str) -> list[Manifest]:
        return self._items("list services", self.core.list_namespaced_service, self.namespace, label_selector=selector)

    def create_service(self, body: Manifest) -> bool:
        return self.call("create services", self.core.create_namespaced_service, self.namespace, body) is not None

    def patch_service(self, name: str, body: Manifest) -> Manifest | None:
        return self._patch("patch services", self.core.patch_namespaced_service, name, body)

    def delete_service(self, name: str) -> None:
        self.call("delete services", self.core.delete_namespaced_service, name, self.namespace)

    def pods(self, selector: str) -> list[Manifest]:
        return self._items("list pods", self.core.list_namespaced_pod, self.namespace, label_selector=selector)

    def node(self, name: str) -> Manifest | None:
        return self.call("get nodes", self.core.read_node, name)

    def reachable(self, pods: list[Manifest]) -> list[Manifest]:
        """Those pods whose end can be waited for: not on a node that has gone silent."""
        silent = {
            node for node in {pod["spec"].get("nodeName", "") for pod in pods} - {""}
            if (item := self.node(node)) is not None and job_state.seconds_not_ready(item, time.time())
        }  # fmt: skip
        return [pod for pod in pods if pod["spec"].get("nodeName") not in silent]

    def workflow(self, name: str) -> Manifest | None:
        return self.call(
            "get workflows.argoproj.io", self.custom.get_namespaced_custom_object,
            "argoproj.io", "v1alpha1", self.namespace, "workflows", name,
        )  # fmt: skip

    def workflows(self, *, completed: bool = False) -> list[Manifest]:
        """Those that Argo has not called completed, of this project or not; with ``completed`` those too."""
        selector = "" if completed else "workflows.argoproj.io/completed!=true"
        return self._items(
            "list workflows.argoproj.io", self.custom.list_namespaced_custom_object,
            "argoproj.io", "v1alpha1", self.namespace, "workflows", label_selector=selector,
        )  # fmt: skip

    def claim(self, name: str) -> Manifest | None:
        return self.call(
            "get persistentvolumeclaims", self.core.read_namespaced_persistent_volume_claim, name, self.namespace
        )

    def volume(self, name: str) -> Manifest | None:
        return self.call("get persistentvolumes", self.core.read_persistent_volume, name)

    def service_account(self, name: str) -> Manifest | None:
        return self.call("get serviceaccounts", self.core.read_namespaced_service_account, name, self.namespace)

    def may(self, verb: str, group: str, resource: str, subresource: str = "", *, namespaced: bool = True) -> bool:
        """Whether whoever we are may do this. Every authenticated user may ask."""
        attributes = {"verb": verb, "group": group, "resource": resource, "subresource": subresource}
        if namespaced:
            attributes["namespace"] = self.namespace
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        authorization = self.client("AuthorizationV1Api")
        answer = self.call("review selfsubjectaccessreviews", authorization.create_self_subject_access_review, review)
        return bool(answer and answer["status"]["allowed"])

    def follow(self, pod: str, container: str, since_seconds: int | None, idle_seconds: float) -> Iterator[bytes]:
        """Lines of a container's log with their time stamps, as they come. Ends when the container ends or when nothing
        came for ``idle_seconds``. Raises nothing for a log that cannot be had (yet): it is simply empty."""
        options: dict[str, Any] = {"since_seconds": since_seconds} if since_seconds else {}
        try:
            response: Any = self.core.read_namespaced_pod_log(
                pod, self.namespace, container=container, follow=True, timestamps=True, _preload_content=False,
                _request_timeout=(CALL_SECONDS[0], idle_seconds), **options,
            )  # fmt: skip
        except (self._client.ApiException, self._transport_error, OSError):
            return
        rest = b""
        try:
            while chunk := response.read1(65536):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines
        except (self._transport_error, OSError, ValueError):
            pass
        finally:
            response.close()
        if rest:
            yield rest

    # --- how every call is made ---

    def call(self, action: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Manifest | None:
        """The answer of ``function`` as a dictionary; None for 404 and, when something is created, for 409.

        ``action`` is "<verb> <resource>", for the message. Errors: ``DeniedError``, ``UnavailableError`` once the
        server has not answered for ``patience_seconds``, ``ConfigurationError`` for an object that it will not have.
        """
        deadline = time.monotonic() + self.patience_seconds
        pause = 0.5
        while True:
            try:
                response = function(*args, _preload_content=False, _request_timeout=CALL_SECONDS, **kwargs)
                answer: Manifest = json.loads(response.data)
                return answer
            except self._client.ApiException as error:
                if error.status == 404 or (error.status == 409 and action.startswith("create ")):
                    return None
                self._refused(action, error)
                reason = f"{error.status} {error.reason}"
            except (self._transport_error, OSError) as error:
                reason = str(error)
            if time.monotonic() + pause > deadline:
                raise UnavailableError(
                    f"{action}: the API server at {self.host} did not answer for {self.patience_seconds:.0f} s ({reason}); "
                    "a retry goes on from here"
                )
            time.sleep(pause)
            pause = min(LONGEST_PAUSE_SECONDS, 2 * pause)

    def _refused(self, action: str, error: Any) -> None:
        """Raise what no second try would change."""
        message = str(error.reason)
        with contextlib.suppress(ValueError):
            message = json.loads(error.body or "{}").get("message", message)
        if error.status == 403 and " cannot " in message:
            verb, resource = action.split(maxsplit=1)
            raise DeniedError(f"{lacking(verb, resource, self.namespace)} ({message})")
        if error.status in (401, 403):
            raise DeniedError(f"{action}: refused by the API server ({error.status}): {message}")
        if error.status in (400, 422):
            raise ConfigurationError(f"{action}: the API server does not accept the object: {message}")
        if error.status not in AGAIN and error.status not in (0, 409):
            raise DefectError(f"{action}: unexpected answer {error.status} of the API server: {message}")

    def _patch(self, action: str, function: Callable[..., Any], name: str, body: Manifest) -> Manifest | None:
        content_type = "application/merge-patch+json"
        return self.call(action, function, name, self.namespace, body, _content_type=content_type)

    def _items(self, action: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Manifest]:
        found = self.call(action, function, *args, **kwargs) or {}
        return list(found.get("items", []))
