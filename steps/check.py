"""Refuses what cannot work before anything is downloaded: ``python -m steps.check``, with the flags of ``steps.train``.

On a cluster: the configuration fits its profile, and the namespace has the claim, the service account and the rights that
training needs. It mounts nothing itself: a pod whose claim is missing waits for ever, and says nothing. What it finds,
``steps.train`` would find as well, after the download.
"""

from __future__ import annotations

from steps import kubernetes
from steps.launcher import on_kubernetes
from trainer.config import OneLineParser, add_flags, from_namespace
from trainer.errors import exit_with
from trainer.recovery.base import Limits


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="steps.check", description=__doc__.splitlines()[0])
    add_flags(parser)
    kubernetes.add_arguments(parser)
    args = parser.parse_args(argv)
    config = from_namespace(args)
    Limits.of(config).check()
    if on_kubernetes(config):
        kubernetes.KubernetesLauncher(config, kubernetes.options(args)).check()
    print("check: nothing speaks against this run", flush=True)
    return 0


if __name__ == "__main__":
    exit_with(main)
