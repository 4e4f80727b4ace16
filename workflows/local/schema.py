"""Which fields a Workflow may have: implemented, a cluster's concern, not implemented, or unknown.

Every known field is in one of three lists per object. *Implemented* ones have a type. *Cluster* fields concern only a
cluster (placement, identity, clean-up, metrics, resources): they are accepted and reported. *Refused* ones would change
the outcome and are not implemented: a workflow that uses one in a template it reaches does not start.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from workflows.local.document import Problem, Where

PATCH, TEXT, ANY, INT, POSITIVE, INT_OR_TEXT, BOOL, FREE, TEXT_MAP = (
    "patch",
    "text",
    "any scalar",
    "whole number",
    "whole number greater than 0",
    "whole number or text",
    "true or false",
    "free",
    "map of text",
)


@dataclass(frozen=True)
class Kind:
    """An object: field -> type, where a type is a scalar's name, another kind's name, or a list of one."""

    implemented: dict[str, Any]
    cluster: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()


@dataclass
class Findings:
    """What a walk over a document found besides errors."""

    cluster: list[Where] = field(default_factory=list)
    refused: list[Where] = field(default_factory=list)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CALL = {
    "name": TEXT, "template": TEXT, "templateRef": "TemplateRef", "inline": "Template", "arguments": "Arguments",
    "withItems": FREE, "withParam": TEXT, "withSequence": "Sequence", "when": TEXT, "continueOn": "ContinueOn",
    "onExit": TEXT, "hooks": "Hooks",
}  # fmt: skip

_CONTAINER = {
    "name": TEXT, "image": TEXT, "command": [TEXT], "args": [TEXT], "workingDir": TEXT, "env": ["Env"], "volumeMounts": ["VolumeMount"],
}  # fmt: skip
_CONTAINER_CLUSTER = _words(
    "imagePullPolicy ports resources resizePolicy securityContext terminationMessagePath terminationMessagePolicy "
    "readinessProbe startupProbe stdin stdinOnce tty"
)
_CONTAINER_REFUSED = _words("envFrom lifecycle livenessProbe restartPolicy restartPolicyRules volumeDevices")

_PLACEMENT = _words(
    "affinity nodeSelector tolerations schedulerName securityContext automountServiceAccountToken executor serviceAccountName"
)

KINDS: dict[str, Kind] = {
    "Workflow": Kind({"apiVersion": TEXT, "kind": TEXT, "metadata": "Metadata", "spec": "Spec"}, _words("status")),
    "Metadata": Kind(
        {"name": TEXT, "generateName": TEXT, "labels": TEXT_MAP, "annotations": TEXT_MAP, "namespace": TEXT, "uid": TEXT, "creationTimestamp": FREE},
        _words("finalizers ownerReferences resourceVersion generation managedFields selfLink deletionTimestamp deletionGracePeriodSeconds"),
    ),
    "Spec": Kind(
        {
            "entrypoint": TEXT, "arguments": "Arguments", "templates": ["Template"], "volumes": ["Volume"],
            "volumeClaimTemplates": ["ClaimTemplate"], "parallelism": POSITIVE, "suspend": BOOL, "onExit": TEXT, "hooks": "Hooks",
            "activeDeadlineSeconds": INT, "priority": INT, "retryStrategy": "RetryStrategy", "templateDefaults": "Template",
            "workflowTemplateRef": "WorkflowTemplateRef", "workflowMetadata": "WorkflowMetadata", "synchronization": "Synchronization",
            "serviceAccountName": TEXT, "podSpecPatch": PATCH,
        },
        (_PLACEMENT - {"serviceAccountName"}) | _words(
            "imagePullSecrets hostNetwork dnsPolicy dnsConfig ttlStrategy podGC podPriority podPriorityClassName podDisruptionBudget "
            "metrics podMetadata archiveLogs artifactGC artifactRepositoryRef volumeClaimGC"
        ),
        _words("shutdown hostAliases"),
    ),
    "Template": Kind(
        {
            "name": TEXT, "inputs": "Inputs", "outputs": "Outputs", "steps": [["Step"]], "dag": "DAG", "container": "Container",
            "script": "Script", "suspend": "Suspend", "volumes": ["Volume"], "retryStrategy": "RetryStrategy", "timeout": TEXT,
            "activeDeadlineSeconds": INT_OR_TEXT, "parallelism": INT, "failFast": BOOL, "synchronization": "Synchronization",
            "annotations": TEXT_MAP, "podSpecPatch": PATCH, "memoize": "Memoize",
        },
        _PLACEMENT | _words("metadata metrics archiveLocation priorityClassName"),
        _words("containerSet data http plugin resource daemon sidecars initContainers hostAliases"),
    ),
    "Step": Kind(_CALL),
    "Task": Kind(_CALL | {"depends": TEXT, "dependencies": [TEXT]}),
    "DAG": Kind({"tasks": ["Task"], "target": TEXT, "failFast": BOOL}),
    "Container": Kind(_CONTAINER, _CONTAINER_CLUSTER, _CONTAINER_REFUSED),
    "Script": Kind(_CONTAINER | {"source": TEXT}, _CONTAINER_CLUSTER, _CONTAINER_REFUSED),
    "Env": Kind({"name": TEXT, "value": TEXT, "valueFrom": "EnvSource"}),
    "EnvSource": Kind({"fieldRef": "FieldRef", "secretKeyRef": "KeyRef", "configMapKeyRef": "KeyRef"}, frozenset(), _words("resourceFieldRef fileKeyRef")),
    "FieldRef": Kind({"fieldPath": TEXT}, _words("apiVersion")),
    "KeyRef": Kind({"name": TEXT, "key": TEXT, "optional": BOOL}),
    "VolumeMount": Kind({"name": TEXT, "mountPath": TEXT, "subPath": TEXT, "readOnly": BOOL}, _words("mountPropagation recursiveReadOnly"), _words("subPathExpr")),
    "Volume": Kind(
        {"name": TEXT, "emptyDir": "EmptyDir", "persistentVolumeClaim": "Claim", "hostPath": "HostPath"},
        frozenset(),
        _words(
            "configMap secret downwardAPI projected nfs csi ephemeral iscsi fc cephfs rbd glusterfs gitRepo image flexVolume flocker azureDisk azureFile "
            "awsElasticBlockStore gcePersistentDisk cinder photonPersistentDisk portworxVolume quobyte scaleIO storageos vsphereVolume"
        ),
    ),
    "EmptyDir": Kind({}, _words("medium sizeLimit")),
    "Claim": Kind({"claimName": TEXT, "readOnly": BOOL}),
    "HostPath": Kind({"path": TEXT, "type": TEXT}),
    "ClaimTemplate": Kind({"metadata": "Metadata"}, _words("spec apiVersion kind status")),
    "Suspend": Kind({"duration": ANY}),
    "Inputs": Kind({"parameters": ["Parameter"]}, frozenset(), _words("artifacts")),
    "Outputs": Kind({"parameters": ["Parameter"], "exitCode": TEXT, "result": TEXT}, frozenset(), _words("artifacts")),
    "Arguments": Kind({"parameters": ["Parameter"]}, frozenset(), _words("artifacts")),
    "Parameter": Kind(
        {"name": TEXT, "value": ANY, "default": ANY, "valueFrom": "ValueFrom", "globalName": TEXT, "enum": [ANY], "description": ANY}
    ),
    "ValueFrom": Kind(
        {"path": TEXT, "parameter": TEXT, "expression": TEXT, "default": ANY, "supplied": FREE},
        frozenset(),
        _words("configMapKeyRef event jqFilter jsonPath"),
    ),
    "Hooks": Kind({}),
    "Hook": Kind({"template": TEXT, "templateRef": "TemplateRef", "arguments": "Arguments", "expression": TEXT}),
    "TemplateRef": Kind({"name": TEXT, "template": TEXT, "clusterScope": BOOL}),
    "WorkflowTemplateRef": Kind({"name": TEXT, "clusterScope": BOOL}),
    "Sequence": Kind({"count": INT_OR_TEXT, "start": INT_OR_TEXT, "end": INT_OR_TEXT, "format": TEXT}),
    "ContinueOn": Kind({"failed": BOOL, "error": BOOL}),
    "RetryStrategy": Kind({"limit": INT_OR_TEXT, "retryPolicy": TEXT, "backoff": "Backoff", "expression": TEXT}, _words("affinity")),
    "Backoff": Kind({"duration": TEXT, "factor": INT_OR_TEXT, "maxDuration": TEXT, "cap": TEXT}),
    "Synchronization": Kind({"mutex": "Mutex", "mutexes": ["Mutex"]}, frozenset(), _words("semaphore semaphores")),
    "Mutex": Kind({"name": TEXT, "namespace": TEXT, "database": BOOL}),
    "Memoize": Kind({"key": TEXT, "cache": "Cache", "maxAge": TEXT}),
    "Cache": Kind({"configMap": "KeyRef"}),
    "PodPatch": Kind(
        {"containers": ["ContainerPatch"], "initContainers": ["ContainerPatch"]},
        _PLACEMENT | _words(
            "priorityClassName priority preemptionPolicy terminationGracePeriodSeconds topologySpreadConstraints runtimeClassName "
            "imagePullSecrets dnsPolicy dnsConfig hostNetwork overhead enableServiceLinks nodeName"
        ),
        _words("volumes activeDeadlineSeconds restartPolicy hostAliases hostPID hostIPC shareProcessNamespace hostname subdomain setHostnameAsFQDN"),
    ),
    "ContainerPatch": Kind({"name": TEXT}, _CONTAINER_CLUSTER | {"image"}, _CONTAINER_REFUSED | (frozenset(_CONTAINER) - {"name", "image"})),
    "WorkflowMetadata": Kind({"labels": TEXT_MAP, "annotations": TEXT_MAP, "labelsFrom": FREE}),
}  # fmt: skip


def check(document: Any, kind: str, where: Where = ()) -> Findings:
    """Walk ``document`` as a ``kind``. ``Problem`` for an unknown field or a value of the wrong type."""
    findings = Findings()
    _check(document, kind, where, findings)
    return findings


def _check(value: Any, kind: Any, where: Where, findings: Findings) -> None:
    if value is None:
        return
    if isinstance(kind, list):
        if not isinstance(value, list):
            raise Problem(where, f"must be a list, not {_name(value)}")
        for index, item in enumerate(value):
            if item is None:
                raise Problem((*where, index), "must not be empty")
            _check(item, kind[0], (*where, index), findings)
    elif kind == PATCH:
        _check_patch(value, where, findings)
    elif kind in _SCALARS:
        if not _SCALARS[kind](value):
            raise Problem(
                where,
                f"must be {kind}, not {_name(value)}"
                + (" (quote it)" if kind == TEXT and isinstance(value, (int, float, bool)) else ""),
            )
    elif not isinstance(value, dict):
        raise Problem(where, f"must be an object, not {_name(value)}")
    elif kind == "Hooks":
        for event, hook in value.items():
            _check(hook, "Hook", (*where, event), findings)
    else:
        _object(value, KINDS[kind], where, findings)


def _check_patch(value: Any, where: Where, findings: Findings) -> None:
    """A patch of the pod's specification: all in it must be a cluster's concern."""
    _check(value, TEXT, where, findings)
    try:
        patch = yaml.safe_load(re.sub(r"{{.*?}}", "tag", value))
        inside = check(patch, "PodPatch")
    except (yaml.YAMLError, Problem) as error:
        raise Problem(where, f"the patch cannot be read: {' '.join(str(error).split())}") from None
    if inside.refused:
        findings.refused.append((*where, *inside.refused[0]))
    findings.cluster.append(where)


def _object(value: dict[str, Any], kind: Kind, where: Where, findings: Findings) -> None:
    for name, inside in value.items():
        here = (*where, name)
        if name in kind.implemented:
            _check(inside, kind.implemented[name], here, findings)
        elif name in kind.cluster:
            findings.cluster.append(here)
        elif name in kind.refused:
            if not _harmless(inside):
                findings.refused.append(here)
        else:
            known = [*kind.implemented, *kind.cluster, *kind.refused]
            close = difflib.get_close_matches(name, known, 1)
            raise Problem(here, f"unknown field '{name}'" + (f" (did you mean '{close[0]}'?)" if close else ""))


def _harmless(value: Any) -> bool:
    """A refused field with nothing in it changes nothing."""
    return value is None or value is False or value == [] or value == ""


_SCALARS: dict[str, Callable[[Any], bool]] = {
    TEXT: lambda value: isinstance(value, str),
    ANY: lambda value: isinstance(value, (str, int, float, bool)),
    INT: lambda value: isinstance(value, int) and not isinstance(value, bool),
    POSITIVE: lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0,
    INT_OR_TEXT: lambda value: isinstance(value, (int, str)) and not isinstance(value, bool),
    BOOL: lambda value: isinstance(value, bool),
    FREE: lambda value: True,
    TEXT_MAP: lambda value: isinstance(value, dict) and all(isinstance(inside, str) for inside in value.values()),
}


def _name(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    return {"str": "text", "list": "a list", "dict": "an object"}.get(type(value).__name__, type(value).__name__)
