"""What was committed and what was trained on, checked against what happened later (pure).

The promise is that nothing committed is lost: ``committed_steps_lost`` counts the steps that break it. The order of the
samples is a function of the step, so the trajectory that stood must have used each position once: ``continuity``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Literal

from steps.history import Fact, Stall, World, layer_between
from trainer.records import DataContinuity, TierReport

Tier = Literal["durable", "snapshot"]

DURABLE: Tier = "durable"
SNAPSHOT: Tier = "snapshot"


def tier_of(fact: Fact) -> str:
    """The tier an event of checkpointing speaks of; the durable one where it does not say."""
    return fact.text("tier") or DURABLE


def committed_steps_lost(executed: Sequence[World]) -> int:
    """Steps at or below a commit that a later resume went below, over all resumes of worlds that began a step.

    A snapshot counts once all ranks hold it, and for restarts by the layers that leave its memory in place (in-process
    and in-job): a pod or a node takes its own with it.
    """
    commits = whole_commits(executed)
    lost = at = 0
    held = {DURABLE: 0, SNAPSHOT: 0}
    for before, after in pairwise(executed):
        while at < len(commits) and commits[at][0] <= after.loaded_at:
            _, tier, step = commits[at]
            held[tier] = max(held[tier], step)
            at += 1
        if layer_between(before, after) in ("pod", "workflow"):
            held[SNAPSHOT] = 0
        lost += max(0, max(held.values()) - after.resumed)
        held = {tier: min(step, after.resumed) for tier, step in held.items()}
    return lost


def whole_commits(worlds: Sequence[World]) -> list[tuple[float, Tier, int]]:
    """(time, tier, step) of each checkpoint, when it became one: a snapshot is whole when the last rank has committed it."""
    found: list[tuple[float, Tier, int]] = []
    for world in worlds:
        ranks: dict[int, set[int]] = defaultdict(set)
        for fact in world.saves:
            if fact.name == "commit" and tier_of(fact) == SNAPSHOT:
                ranks[fact.whole("step")].add(fact.source.rank)
                if len(ranks[fact.whole("step")]) == world.size:
                    found.append((fact.at, SNAPSHOT, fact.whole("step")))
            elif fact.name == "commit":
                found.append((fact.at, DURABLE, fact.whole("step")))
    return sorted(found)


def tier_report(tier: str, worlds: Sequence[World], facts: Sequence[Fact]) -> TierReport:
    """Saves of one tier. A save of all ranks counts once; its stall is that of the rank that waited longest."""
    named: dict[str, set[tuple[int, int]]] = defaultdict(set)
    ranks: dict[tuple[int, int], set[int]] = defaultdict(set)
    seconds: dict[tuple[int, int], float] = defaultdict(float)
    sizes: dict[tuple[int, int], int] = defaultdict(int)
    for number, world in enumerate(worlds):
        for fact in world.saves:
            if tier_of(fact) == tier:
                key = (number, fact.whole("step"))
                named[fact.name].add(key)
                if fact.name == "commit":
                    ranks[key].add(fact.source.rank)
                    seconds[key] = max(seconds[key], fact.number("seconds"))
                    sizes[key] += fact.whole("bytes", 0)
    whole = [key for key in named["commit"] if tier != SNAPSHOT or len(ranks[key]) >= worlds[key[0]].size]
    refused = {(f.text("path"), f.text("reason")) for f in facts if f.name == "checkpoint_refused" and tier_of(f) == tier}
    begun = len(named["save_start"] or named["commit"])  # a snapshot begins and ends in one call, and tells only of its end
    return TierReport(
        committed=len(whole),
        skipped=len(named["save_skipped"]),
        failed=len(named["save_failed"]),
        refused=len(refused),
        mean_stall_seconds=waits(worlds, _tier_of_stall).get(tier, 0.0) / begun if begun else 0.0,
        mean_durable_seconds=fmean(seconds[key] for key in whole) if whole else 0.0,
        bytes=sizes[max(whole)] if whole else 0,
    )


def waits(worlds: Sequence[World], kind: Callable[[Stall], str]) -> dict[str, float]:
    """Seconds that the loop waited for saves, by ``kind`` of stall. Of the ranks that wait together the longest counts."""
    total: dict[str, float] = defaultdict(float)
    for world in worlds:
        ranks: dict[tuple[str, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for stall in world.stalls:
            ranks[kind(stall), stall.step][stall.rank] += stall.end - stall.start
        for (name, _), waited in ranks.items():
            total[name] += max(waited.values())
    return dict(total)


def _tier_of_stall(stall: Stall) -> str:
    return SNAPSHOT if stall.reason == "snapshot" else DURABLE


def trained_samples(standing: Mapping[int, World]) -> dict[int, list[int]]:
    """Step -> the samples of its execution that stood, in the order of their positions (ranks take consecutive runs)."""
    return {
        step: [i for rank in sorted(world.samples.get(step, {})) for i in world.samples[step][rank]]
        for step, world in standing.items()
    }


def continuity(trained: Mapping[int, Sequence[int]], steps: int, batch: int, samples: int | None) -> DataContinuity:
    """Samples seen twice, and samples never seen, in steps 1 to ``steps`` of ``batch`` samples each.

    Position p belongs to epoch p // ``samples``. Within an epoch no sample may come twice; a step that lacks samples
    skipped them, and so did an epoch that was gone through to its end without some. With ``samples`` unknown, only the
    repeats within a step can be told.
    """
    repeated = skipped = 0
    seen: dict[int, set[int]] = defaultdict(set)
    whole_epochs = steps * batch // samples if samples else 0
    for step in range(1, steps + 1):
        ids = trained.get(step, ())
        first = (step - 1) * batch
        repeated += max(0, len(ids) - batch)
        # In an epoch that was gone through, what is absent is counted below, whichever step it was that lacked it.
        skipped += sum(position >= whole_epochs * (samples or 0) for position in range(first + len(ids), first + batch))
        for position, sample in enumerate(ids[:batch], start=first):
            epoch = position // samples if samples else step
            repeated += sample in seen[epoch]
            seen[epoch].add(sample)
    absent = sum((samples or 0) - len(seen[epoch]) for epoch in range(whole_epochs))
    return DataContinuity(repeated=repeated, skipped=skipped + absent)
