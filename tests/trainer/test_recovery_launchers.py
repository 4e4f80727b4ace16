"""What the launchers are told: flags that their installed parsers take, and limits in the right order."""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys

import pytest
from nvidia_resiliency_ext.fault_tolerance import launcher
from torch.distributed import run as torchrun

from trainer.config import build
from trainer.errors import ConfigurationError
from trainer.recovery import Limits, nvrx

RENDEZVOUS = nvrx.Rendezvous("node-0.run", 29500, True, "run-1")


@pytest.mark.parametrize("recovery", ["none", "in-process", "in-job", "combined"])
@pytest.mark.parametrize(("nodes", "low"), [(1, 0), (2, 0), (4, 2)])
def test_the_installed_parser_takes_every_flag(recovery: str, nodes: int, low: int) -> None:
    config = build({"recovery": recovery, "nodes": nodes, "min_nodes": low, "gpus_per_node": 1, "micro_batch_size": 2, "global_batch_size": 24, "max_restarts": 7})
    argv = nvrx.launcher_arguments(config, RENDEZVOUS, "/tmp/fork")
    in_job = recovery in ("in-job", "combined")
    parser = launcher.get_args_parser() if in_job else torchrun.get_args_parser()
    options = parser.parse_args(argv)
    assert options.nnodes == (f"{low}:{nodes}" if low else str(nodes))
    assert options.training_script_args[-2:] == ["/tmp/fork", "trainer.loop:main"]
    # What a launcher does not know it takes for the program: then the program would not be what follows --no-python.
    assert options.no_python and options.training_script == sys.executable
    assert int(options.max_restarts) == (7 if in_job else 0)
    settings = dict(item.split("=") for item in options.rdzv_conf.split(","))
    assert settings["is_host"] == "true" and float(settings["join_timeout"]) > 60
    make = launcher.config_from_args if in_job else torchrun.config_from_args
    assert make(options)[0].max_nodes == nodes


def test_ft_launchers_own_flags_reach_its_configuration() -> None:
    config = build({"recovery": "combined", "heartbeat_timeout_seconds": 7, "startup_timeout_seconds": 99})
    options = launcher.get_args_parser().parse_args(nvrx.launcher_arguments(config, RENDEZVOUS, "/tmp/fork"))
    from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig

    found = FaultToleranceConfig.from_args(options)
    limits = Limits.of(config)
    assert found.initial_rank_heartbeat_timeout == 99
    assert found.rank_heartbeat_timeout == limits.in_job > limits.hard > limits.soft == 7
    assert found.workload_check_interval == 0.2
    if nvrx.version() >= (0, 6):
        assert found.gpu_memory_reclaim_timeout == 0


def test_every_watchdog_is_longer_than_what_it_watches() -> None:
    for recovery, heartbeat, save, startup in itertools.product(
        ("none", "in-process", "in-job", "combined"), (1.0, 10.0, 100.0), (10.0, 120.0, 900.0), (125.0, 600.0)
    ):
        config = build(
            {
                "recovery": recovery, "heartbeat_timeout_seconds": heartbeat, "save_timeout_seconds": save,
                "startup_timeout_seconds": startup,
            }
        )  # fmt: skip
        limits = Limits.of(config)
        if save < heartbeat:
            with pytest.raises(ConfigurationError, match="save_timeout_seconds"):
                limits.check()
            continue
        limits.check()
        assert limits.soft < limits.hard < limits.startup
        assert limits.collective > max(limits.startup, limits.save)
        # Without a watchdog a hang is noticed by the process group, after as long.
        assert limits.stepping == (limits.step if recovery == "none" else limits.collective)
        if recovery == "combined":
            assert limits.in_job > limits.hard  # the layer below is tried first


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"heartbeat_timeout_seconds": 300.0}, "startup_timeout_seconds 300 is not above heartbeat_timeout_seconds 300"),
        ({"heartbeat_timeout_seconds": 299.5}, "startup_timeout_seconds 300"),  # a rank is killed after 300.5
        ({"startup_timeout_seconds": 10.0, "heartbeat_timeout_seconds": 2.0}, "startup_timeout_seconds 10"),
        ({"heartbeat_timeout_seconds": 0.5}, "heartbeat_timeout_seconds 0.5 is below 1"),
        ({"save_timeout_seconds": 5.0}, "save_timeout_seconds 5 is below heartbeat_timeout_seconds 10"),
    ],
)
def test_limits_in_a_wrong_order_are_refused(values: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Limits.of(build(values)).check()


def test_process_groups_that_have_ended_are_not_waited_for() -> None:
    """Only a group that still has a process is signalled, and slept for, by NVRx's own function."""
    living = subprocess.Popen(["sleep", "60"], start_new_session=True)
    ended = subprocess.Popen(["true"], start_new_session=True)
    ended.wait()
    asked: list[set[int]] = []
    terminate = nvrx.if_any_is_left(lambda *, allowed_pgids: asked.append(allowed_pgids))
    try:
        terminate(allowed_pgids={ended.pid})
        assert asked == []
        terminate(allowed_pgids={ended.pid, living.pid})
        assert asked == [{living.pid}]
    finally:
        living.kill()
        living.wait()


@pytest.mark.skipif(nvrx.version() < (0, 6), reason="this NVRx has no barrier")
def test_what_is_changed_of_nvrx_is_still_there() -> None:
    from nvidia_resiliency_ext.fault_tolerance import ft_rendezvous_barrier

    state = ft_rendezvous_barrier._RendezvousBarrierState
    assert callable(state._wait_for_rendezvous_open) and callable(state._sync_from_per_round_state)
    assert "allowed_pgids" in inspect.signature(launcher.terminate_mp_processes).parameters
