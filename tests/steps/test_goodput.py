"""Goodput from events: cases computed by hand, and runs with random faults whose truth is known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_run import Clock, SimulatedRun

from steps.goodput import Analysis, Expectation, analyse
from trainer.events import Event

EXPECTED = Expectation(max_steps=1000, global_batch_size=8, ranks_per_node=2, samples=10_000)


def check(run: SimulatedRun, expected: Expectation = EXPECTED, tolerance: float = 1e-4) -> Analysis:
    """Analyse ``run`` and compare all that its truth knows (a time since the epoch is good to 0.2 microseconds)."""
    found = analyse(run.events, expected)
    breakdown = found.breakdown.model_dump()
    for category, seconds in breakdown.items():
        assert seconds == pytest.approx(run.truth[category], abs=tolerance), category
    assert sum(breakdown.values()) == pytest.approx(found.wall_seconds, abs=tolerance)
    at = 0.0
    for interval in found.timeline:
        assert interval.start == pytest.approx(at, abs=tolerance) and interval.end > interval.start
        at = interval.end
    assert at == pytest.approx(found.wall_seconds, abs=tolerance)
    assert found.steps_completed == run.done
    assert found.lost_steps == run.lost
    assert found.replayed_steps == run.replayed
    standing = [point.step for point in found.losses if not point.replay]
    assert standing == list(range(1, run.done + 1))
    assert found.data_continuity.repeated == found.data_continuity.skipped == 0
    assert sum(fault.detection_seconds for fault in found.faults) == pytest.approx(breakdown["detection"], abs=tolerance)
    assert sum(fault.recovery_seconds for fault in found.faults) == pytest.approx(breakdown["recovery"], abs=tolerance)
    for fault in found.faults:
        assert sum(fault.phases.values()) == pytest.approx(fault.recovery_seconds, abs=tolerance)
    return found


def started(**settings_: object) -> SimulatedRun:
    run = SimulatedRun(**settings_)  # type: ignore[arg-type]
    run.launch()
    run.begin(0, "startup", tier="none")
    return run


def test_a_run_without_faults_is_startup_steps_and_stalls() -> None:
    run = started()
    for _ in range(10):
        run.step(1.0)
    run.step(1.5, stall=0.25)
    found = check(run)
    assert found.breakdown.startup == pytest.approx(0.5 + 0.1 + 1.5 + 0.3 + 0.2 + 0.4 + 0.05)
    assert found.breakdown.productive == pytest.approx(11.25)
    assert found.breakdown.checkpoint_stall == pytest.approx(0.25)
    assert found.training_goodput == pytest.approx(11.25 / 14.55)
    assert found.infrastructure_goodput == 1.0
    assert found.effective_goodput is None
    assert found.faults == ()
    assert found.throughput.tokens_per_second == pytest.approx(11 * 128 / 11.25)
    assert found.throughput.median_step_seconds == pytest.approx(1.0)
    assert found.final_loss == pytest.approx(5.0 / 11)


def test_one_fault_by_hand() -> None:
    """Six steps, a kill 0.4 s into the seventh, seen after 0.2 s, back from step 5 after 0.7 s of teardown."""
    run = started()
    for _ in range(6):
        run.step(1.0)
    run.fault("sigkill")
    phases = run.restart("in_job", 5)
    for _ in range(5):
        run.step(1.0)
    found = check(run)
    (fault,) = found.faults
    assert (fault.step, fault.rank, fault.kind, fault.injected) == (7, 1, "sigkill", True)
    assert (fault.recovered_by, fault.lost_steps, fault.resumed_step, fault.resumed_from) == ("in_job", 1, 5, "durable")
    assert fault.detection_seconds == pytest.approx(0.2)
    assert fault.recovery_seconds == pytest.approx(0.7 + 3.05)
    assert fault.phases == pytest.approx(phases)
    assert found.breakdown.replay == pytest.approx(1.4)  # step 6 once more, and the interrupted seventh
    assert found.breakdown.productive == pytest.approx(10.0)
    assert found.restarts.model_dump() == {"in_process": 0, "in_job": 1, "pod": 0, "workflow": 0}


@pytest.mark.parametrize("layer", ["in_process", "in_job", "pod", "workflow"])
def test_each_layer_is_told_from_the_incarnations(layer: str) -> None:
    run = started(nodes=2, per_node=2)
    run.step()
    run.fault("exception", rank=3)
    phases = run.restart(layer, 0, node=1)
    run.step()
    found = check(run)
    assert found.faults[0].recovered_by == layer
    assert found.restarts.model_dump() == {"in_process": 0, "in_job": 0, "pod": 0, "workflow": 0} | {layer: 1}
    assert found.faults[0].phases == pytest.approx(phases)


def test_the_published_schedule_replays_724_steps() -> None:
    """AWS's run: seed 42, first step 10, five faults in 2000 steps, a checkpoint each 500 steps."""
    draw = random.Random(42)
    steps = sorted(draw.sample(range(11, 2001), 5))
    assert steps == [62, 239, 574, 1320, 1529]
    run = started()
    for step in [*steps, 2001]:
        while run.done < step - 1:
            run.step(0.25)
            if run.done % 500 == 0:
                run.commit()
        if step <= 2000:
            run.fault("sigkill")
            run.restart("in_job", (step - 1) // 500 * 500)
    found = check(run, replace(EXPECTED, max_steps=2000))
    assert found.steps_completed == 2000
    assert found.replayed_steps == 724
    # An interrupted step is run again, but it was never completed and so is not lost.
    assert found.lost_steps == 724 - 5
    assert [fault.lost_steps for fault in found.faults] == [61, 238, 73, 319, 28]
    assert found.committed_steps_lost == 0
    assert found.restarts.in_job == 5


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "argo stop"])
def test_a_users_own_stop_is_left_out(how: str) -> None:
    """Another Workflow goes on with what a signal ended; or Ctrl-C or ``argo stop`` said it plainly."""
    run = started()
    run.step()
    run.stop_by_user(away=3600.0, how=how)
    run.step()
    found = check(run)
    assert found.wall_seconds == pytest.approx(2 * 3.05 + 2.0)
    assert found.faults == ()
    assert found.restarts.workflow == 1


def test_a_gap_after_a_stop_by_the_infrastructure_is_recovery() -> None:
    run = started()
    for _ in range(4):
        run.step()
    run.everywhere_at("stall", run.now + 0.5, step=4, seconds=0.5, reason="drain")
    run.spend("checkpoint_stall", 0.5)
    run.commit()
    run.everywhere("stop_requested", reason="stop file")
    run.everywhere("fault_detected", layer="in_job", message="stopped after step 4 as asked")
    run.restart("workflow", 4, teardown=600.0)
    run.step()
    found = check(run)
    (fault,) = found.faults
    assert (fault.kind, fault.injected, fault.recovered_by, fault.lost_steps) == ("stop", False, "workflow", 0)
    assert fault.recovery_seconds == pytest.approx(603.05)


def test_a_fault_that_nobody_injected_is_inferred() -> None:
    run = started()
    for _ in range(5):
        run.step()
    run.fault("real", into=0.3, detection=0.0)
    run.events = [event for event in run.events if event.event != "fault_injected"]
    run.restart("in_process", 3)
    run.step()
    found = check(run)
    (fault,) = found.faults
    assert (fault.injected, fault.step, fault.recovered_by, fault.lost_steps) == (False, 6, "in_process", 2)
    assert fault.message == "a peer went away"


def test_an_uninjected_hang_is_not_taken_for_work() -> None:
    """The moment of the fault is unknown; the interrupted step counts as work for a median step, not for the whole hang."""
    run = started()
    for _ in range(5):
        run.step()
    run.fault("real", into=1.0, detection=60.0)
    run.events = [event for event in run.events if event.event != "fault_injected"]
    run.restart("in_job", 5)
    run.step()
    assert check(run).faults[0].detection_seconds == pytest.approx(60.0)


def test_a_fault_during_a_recovery_shares_its_time() -> None:
    run = started()
    for _ in range(3):
        run.step()
    run.fault("exception", rank=1)
    run.spend("recovery", 0.3)
    run.emit("fault_injected", rank=0, index=7, step=4, kind="sigkill", variant="")
    run.spend("detection", 0.5)
    run.emit("worker_stop", role="node", local_rank=1, signal=15)
    run.restart("in_job", 2)
    run.step()
    found = check(run)
    first, second = found.faults
    assert (first.detection_seconds, first.recovery_seconds) == (pytest.approx(0.2), pytest.approx(0.3))
    assert (second.detection_seconds, second.recovered_by) == (pytest.approx(0.5), "in_job")
    assert (first.lost_steps, second.lost_steps) == (0, 1)


def test_a_restart_that_failed_on_its_way_belongs_to_the_same_fault() -> None:
    run = started()
    for _ in range(3):
        run.step()
    run.fault("sigkill")
    run.restart("in_job", 3)  # loads, and dies before its first step
    run.emit("fault_detected", rank=1, layer="in_job", message="address in use")
    run.restart("in_job", 3)
    run.step()
    found = check(run)
    assert len(found.faults) == 1
    assert found.restarts.in_job == 2


def test_survivors_of_an_abort_complete_nothing() -> None:
    """One rank ends two more steps on garbage after its peer has failed: neither is completed, neither is time at work."""
    run = started()
    for _ in range(4):
        run.step()
    run.fault("exception", detection=3.0, notice=False)
    for step, back in ((5, 2.0), (6, 1.0)):
        run.emit("step_end", rank=0, at=run.now - back, step=step, loss=0.0, tokens=128)
    run.emit("fault_detected", rank=0, layer="in_process", message="asked for a restart")
    run.restart("in_process", 2)
    run.step()
    found = check(run)
    assert found.faults[0].detection_seconds == pytest.approx(3.0)
    assert found.faults[0].lost_steps == 2


def test_the_end_of_a_killed_process_is_not_its_detection() -> None:
    run = started()
    run.step()
    run.fault("sigkill", detection=2.0)
    run.restart("in_job", 1)
    run.step()
    assert check(run).faults[0].detection_seconds == pytest.approx(2.0)


def test_a_hang_is_detected_when_a_layer_ends_the_process() -> None:
    run = started()
    run.step()
    run.fault("hang", detection=10.0, notice=False)
    run.emit("worker_exit", role="node", local_rank=1, exit_code=-9)
    run.restart("in_job", 1)
    run.step()
    assert check(run).faults[0].detection_seconds == pytest.approx(10.0)


def test_a_run_that_ends_in_a_fault_is_counted_as_far_as_it_got() -> None:
    run = started()
    for _ in range(3):
        run.step()
    done = dict(run.truth)
    run.fault("sigkill")
    found = analyse(run.events, EXPECTED)
    assert found.steps_completed == 3
    assert found.wall_seconds == pytest.approx(3.05 + 3.0)
    assert found.breakdown.productive == pytest.approx(done["productive"])
    assert [fault.recovered_by for fault in found.faults] == ["none"]


def test_what_ended_a_run_is_told_though_nobody_injected_it() -> None:
    run = started()
    run.step()
    run.fault("real", into=0.5, detection=0.3)
    run.events = [event for event in run.events if event.event != "fault_injected"]
    (fault,) = analyse(run.events, EXPECTED).faults
    assert (fault.step, fault.recovered_by, fault.message) == (2, "none", "a peer went away")


def test_a_run_in_the_middle_of_a_step_has_no_fault() -> None:
    """What ``status`` sees of a healthy run: some ranks have begun a step, some have ended it."""
    run = started()
    for _ in range(4):
        run.step()
    for cut in range(1, 6):
        found = analyse(run.events[:-cut], EXPECTED)
        assert found.faults == () and found.steps_completed == 3 and found.replayed_steps == 0


@pytest.mark.parametrize("events", [0, 1, 2, 5])
def test_a_run_that_never_began_a_step(events: int) -> None:
    run = started()
    found = analyse(run.events[:events], EXPECTED)
    assert found.steps_completed == 0 and found.final_loss is None and found.losses == ()
    assert sum(found.breakdown.model_dump().values()) == pytest.approx(found.wall_seconds)
    assert found.breakdown.startup == pytest.approx(found.wall_seconds)


def test_the_last_drain_is_a_stall() -> None:
    run = started()
    for _ in range(3):
        run.step()
    run.spend("checkpoint_stall", 4.0)
    run.commit()
    found = check(run, replace(EXPECTED, max_steps=3))
    assert found.breakdown.checkpoint_stall == pytest.approx(4.0)


def test_stalls_of_several_ranks_count_once_where_they_overlap() -> None:
    run = started()
    run.step()
    begin = run.now
    run.step(2.0)
    run.emit("stall", rank=0, at=begin + 0.5, step=2, seconds=0.5, reason="save")
    run.emit("stall", rank=1, at=begin + 0.7, step=2, seconds=0.4, reason="snapshot")
    found = analyse(run.events, EXPECTED)
    assert found.breakdown.checkpoint_stall == pytest.approx(0.7)
    assert found.breakdown.productive == pytest.approx(2.3)


def test_effective_goodput_takes_the_pace_of_a_bare_run() -> None:
    run = started()
    for _ in range(10):
        run.step(1.0)
    found = check(run, replace(EXPECTED, bare_step_seconds=0.8))
    assert found.effective_goodput == pytest.approx(10 * 0.8 / 13.05)


def test_mfu() -> None:
    run = started()
    run.step(1.0)
    found = check(run, replace(EXPECTED, flops_per_token=6e9, peak_flops=1e12))
    assert found.throughput.tokens_per_second_per_gpu == pytest.approx(64.0)
    assert found.throughput.mfu == pytest.approx(64 * 6e9 / 1e12)


def test_a_slow_rank_is_named() -> None:
    run = started(nodes=1, per_node=4)
    for _ in range(9):
        run.step(1.0)
    slow = [
        event.model_copy(update={"data": event.data | {"compute_seconds": 0.9}}) if event.rank == 2 and event.event == "step_end" else event
        for event in run.events
    ]  # fmt: skip
    (straggler,) = analyse(slow, EXPECTED).stragglers
    assert straggler.rank == 2 and straggler.ratio == pytest.approx(1.8)
    assert analyse(run.events, EXPECTED).stragglers == ()


def test_clocks_of_hosts_that_differ_and_jump_back() -> None:
    """Host 1 is ten minutes ahead, and host 0's wall clock jumps back by a minute late in the run."""
    run = started(nodes=2, clocks=[Clock(jumps=[(60.0, -60.0)]), Clock(ahead=600.0, uptime=7.0)])
    for _ in range(50):
        run.step()
    run.fault("sigkill", rank=3)
    run.restart("in_job", 40)
    while run.done < 55:
        run.step()
    # The ends of a step are told up to 10 ms apart, which is what the difference of the clocks is known to.
    check(run, tolerance=0.2)


def test_the_order_in_which_events_come_does_not_matter() -> None:
    run = started()
    for _ in range(5):
        run.step()
    run.fault("exception")
    run.restart("in_process", 4)
    run.step()
    shuffled = list(run.events)
    random.Random(3).shuffle(shuffled)
    assert analyse(shuffled, EXPECTED) == analyse(run.events, EXPECTED)


def test_losing_the_lines_of_a_killed_process_changes_little() -> None:
    """A host that loses its last lines: a later resume still proves what was completed."""
    run = started()
    for _ in range(6):
        run.step()
    run.commit()
    run.fault("node")
    last = [e for e in run.events if not (e.rank == 1 and e.event in ("step_end", "fault_injected") and e.data.get("step") in (6, 7))]
    run.events = last
    run.restart("pod", 6)
    run.step()
    found = analyse(run.events, EXPECTED)
    assert found.steps_completed == 7
    assert [point.step for point in found.losses if not point.replay] == list(range(1, 8))
    assert found.faults[0].recovered_by == "pod" and not found.faults[0].injected


def test_the_cost_of_a_broken_promise_is_counted() -> None:
    run = started()
    for _ in range(10):
        run.step()
    run.commit()
    run.fault("exception")
    run.restart("in_process", 4)
    run.step()
    assert check(run).committed_steps_lost == 6


@pytest.mark.parametrize(("layer", "lost"), [("in_process", 5), ("in_job", 5), ("pod", 0), ("workflow", 0)])
def test_a_snapshot_is_owed_to_the_layers_that_keep_memory(layer: str, lost: int) -> None:
    run = started()
    for _ in range(5):
        run.step()
    run.commit()
    for _ in range(5):
        run.step()
    run.commit("snapshot")
    run.fault("node" if layer == "pod" else "exception")
    run.restart(layer, 5)
    run.step()
    found = check(run)
    assert found.committed_steps_lost == lost
    assert found.snapshots.committed == 1 and found.snapshots.bytes == 20
    assert found.checkpoints.committed == 1 and found.checkpoints.bytes == 1000


def test_a_snapshot_that_one_rank_lacks_is_not_owed() -> None:
    run = started()
    for _ in range(5):
        run.step()
    run.commit("snapshot")
    run.events = [e for e in run.events if not (e.event == "commit" and e.rank == 1)]
    run.fault("exception")
    run.restart("in_process", 0)
    run.step()
    found = check(run)
    assert found.committed_steps_lost == 0 and found.snapshots.committed == 0


def with_samples(run: SimulatedRun, change: dict[int, list[int]]) -> list[Event]:
    """The events with the samples of rank 0 in some steps replaced."""
    return [
        e.model_copy(update={"data": e.data | {"ids": change[int(str(e.data["step"]))]}})
        if e.event == "samples" and e.rank == 0 and e.data["step"] in change
        else e
        for e in run.events
    ]


def test_the_ledger_sees_repeats_and_gaps() -> None:
    run = started(samples=48)
    for _ in range(9):  # 72 samples: an epoch and a half
        run.step()
    expected = replace(EXPECTED, samples=48)
    check(run, expected)
    # Step 2 (samples 8-15) takes sample 0 for 8: 0 comes twice in the epoch, 8 never.
    once = analyse(with_samples(run, {2: [0, 9, 10, 11]}), expected).data_continuity
    assert (once.repeated, once.skipped) == (1, 1)
    # Step 8 is in the second epoch, where sample 8 has not been seen: it lacks one sample.
    short = analyse(with_samples(run, {8: [8, 9, 10]}), expected).data_continuity
    assert (short.repeated, short.skipped) == (0, 1)
    # Rank 1 tells nothing at all in step 1.
    silent = [e for e in run.events if not (e.event == "samples" and e.rank == 1 and e.data["step"] == 1)]
    assert analyse(silent, expected).data_continuity.skipped == 4


KINDS = st.sampled_from(["exception", "sigkill", "hang", "oom", "node"])
LAYERS = st.sampled_from(["in_process", "in_job", "pod", "workflow", "user"])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), nodes=st.integers(1, 2), snapshots=st.booleans())
def test_any_run_is_cut_into_exclusive_pieces_that_sum_to_its_wall(data: st.DataObject, nodes: int, snapshots: bool) -> None:
    run = started(nodes=nodes)
    chance = random.Random(data.draw(st.integers(0, 1000), label="chance"))
    for _ in range(data.draw(st.integers(0, 5), label="interruptions")):
        for _ in range(data.draw(st.integers(0, 12), label="steps")):
            run.step(chance.uniform(0.2, 3.0), stall=chance.choice([0.0, 0.0, 0.1]))
            if chance.random() < 0.2:
                run.commit("snapshot" if snapshots else "durable")
        layer = data.draw(LAYERS, label="layer")
        if layer == "user":
            run.step()  # ranks are asked at a step's end
            run.stop_by_user(away=data.draw(st.floats(1.0, 1e5)))
            continue
        rank = data.draw(st.integers(0, run.world - 1), label="rank")
        run.fault(data.draw(KINDS), rank, into=data.draw(st.floats(0.01, 2.0)), detection=data.draw(st.floats(0.0, 9.0)))
        if chance.random() < 0.2:
            run.fault_again("exception", chance.randrange(run.world), after=chance.uniform(0.01, 3.0), detection=chance.random())
        resume = data.draw(st.integers(0, run.done), label="resume")
        for _ in range(chance.choice([0, 0, 0, 1, 2])):  # restarts that come to nothing
            run.restart(data.draw(st.sampled_from(["in_process", "in_job"])), resume, teardown=chance.random())
            run.emit("fault_detected", rank=0, layer="in_job", message="address in use")
        run.restart(layer, resume, teardown=data.draw(st.floats(0.0, 9.0)), node=rank // run.per_node)
    run.step()
    found = check(run)
    assert len(found.faults) == run.index
    assert all(fault.recovered_by != "none" for fault in found.faults)
    assert all(fault.phases.keys() == {"teardown", "rendezvous", "import", "process_group", "build", "load"} for fault in found.faults)
