"""A process without a model that walks through steps as the training loop does, for test_faults. Not a test.

fault_worker.py train CONFIG_JSON    step by step through maybe_fire; prints what it survived, one line each
fault_worker.py node CONFIG_JSON     a node: launcher, two workers, a daemon, an orphan, a process that keeps forking
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil

from trainer.config import RunConfig, build
from trainer.events import EventLog
from trainer.faults import InjectedFault, Injector
from trainer.paths import RunPaths

LIFETIME = 60  # seconds after which whatever a failed test has left ends by itself


def train(config: RunConfig, rank: int) -> None:
    paths = RunPaths(config.root, config.run_id)
    injector = Injector(config, paths, rank, EventLog(paths.events, config.run_id, "trainer", rank=rank))
    for step in range(1, config.max_steps + 1):
        try:
            injector.maybe_fire(step)
        except InjectedFault as fault:
            print(f"caught {fault}", flush=True)
        except MemoryError as error:
            limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
            grown = psutil.Process().memory_info().rss >> 20
            big = len(b"\1" * (400 << 20)) >> 20  # what was refused is possible again
            print(f"caught {error} limited={limited} rss={grown < 1000} big={big}", flush=True)
        print(f"step {step}", flush=True)


def orphan() -> None:
    """A process that no parent knows any more, in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", f"import time; time.sleep({LIFETIME})", "orphan"])
        os._exit(0)
    os.wait()


FORKER = f"""
import os, time
end = time.time() + {LIFETIME}
while time.time() < end:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:  # every 20 ms another process that no parent knows
            time.sleep(2)
        os._exit(0)
    os.wait()
    time.sleep(0.02)
"""


def node(config_json: str) -> None:
    """First process of a node. It marks its children with its process id, as steps.node does."""
    os.environ["HOLDFAST_NODE_PID"] = str(os.getpid())
    launcher = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:], start_new_session=True); time.sleep(60)"
    idle = [sys.executable, "-c", f"import time; time.sleep({LIFETIME})"]
    orphan()
    subprocess.Popen(idle, start_new_session=True)
    subprocess.Popen([sys.executable, "-c", FORKER], start_new_session=True)
    time.sleep(0.5)
    worker = [sys.executable, __file__, "train", config_json]
    subprocess.Popen([sys.executable, "-c", launcher, *worker], start_new_session=True)
    time.sleep(LIFETIME)


if __name__ == "__main__":
    if sys.argv[1] == "node":
        node(sys.argv[2])
    else:
        values = json.loads(sys.argv[2])
        rank = values.pop("rank", 1)
        train(build(values | {"root": Path(values["root"])}), rank)
