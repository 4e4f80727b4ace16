"""The order of the tests where two run at once (``make test``): first those that share the machine, file by file.

Tests that start a training world, or that measure time, come last and one after another: on two cores a second test
beside them would change what they see.
"""

from __future__ import annotations

import pytest

FOLDERS = ("tests/pipeline/", "tests/drills/")
FIXTURES = {"trainer", "make_run", "forks"}
FILES = ("tests/trainer/test_gpu_training.py", "tests/workflows/local/test_local_scale.py")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.xdist_group("alone" if alone(item) else item.nodeid.partition("::")[0]))
    items.sort(key=alone)


def alone(item: pytest.Item) -> bool:
    """Whether a test has to have the machine to itself."""
    return item.nodeid.startswith(FOLDERS + FILES) or not FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
