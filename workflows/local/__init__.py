"""Runs a compiled Argo workflow on this machine, with Argo's semantics and no Kubernetes.

It reads YAML and nothing else: it never sees the objects the workflow was authored with.

    plan = load(path, {"message": "hello"})      # everything that can be refused is refused here
    result = run(plan, Options(root=Path("fsx"), volumes={"fsx": Path("fsx")}))

``loading`` and ``validate`` make a ``Plan``; ``operator`` walks it as Argo's controller would; ``pods`` runs containers as
processes; ``store`` keeps the state; ``engine`` is the loop around them.
"""

from __future__ import annotations

from workflows.local.engine import resume, run
from workflows.local.loading import load
from workflows.local.options import Display, Options, Result
from workflows.local.plan import Plan

__all__ = ["Display", "Options", "Plan", "Result", "load", "resume", "run"]
