"""``report.json`` of a comparison of several runs (``steps.comparison`` makes it)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainer.config import RunConfig
from trainer.records import Breakdown, Record


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Source(Frozen):
    """An event file that an arm's numbers follow from."""

    file: str
    events: int
    unreadable: int


class Figures(Frozen):
    """What an arm was worth."""

    effective_goodput: float | None = Field(description="steps x the bare run's median step / wall; none without a bare run")
    training_goodput: float
    infrastructure_goodput: float
    wall_seconds: float
    breakdown_seconds: Breakdown
    steps: int
    step_seconds: float = Field(description="median, stalls left out")
    commits: int
    skipped: int
    faults: int
    outage_seconds: float = Field(description="mean of a fault's detection and recovery")
    lost_steps: int
    efficiency_as_published: float
    training_goodput_as_published: float


class Predicted(Frozen):
    """What the costs of other arms say of this one."""

    effective_goodput: float = Field(description="with the steps of the bare run")
    at_own_pace: float = Field(description="the same with the arm's own steps: what is left is all but the machine's pace")
    wall_seconds: float
    breakdown_seconds: Breakdown
    commits: int
    simulated_goodput: float = Field(description="at its own pace, by the simulation that plans for large clusters")
    fitted: bool = Field(description="the costs were taken from this arm, so that it tests nothing")


class PublishedFigures(Frozen):
    """The published arm that this one stands for."""

    key: str
    label: str
    efficiency: float | None
    training_goodput: float | None
    infrastructure_goodput: float | None
    recovery_seconds: float | None


class Arm(Frozen):
    """One run of the comparison."""

    run: str
    label: str
    table: Literal["bare", "checkpoints", "faults", "unknown"]
    complete: bool
    whole: bool = Field(description="its event files are; otherwise its figures are shown, and nothing is taken from them")
    problems: tuple[str, ...]
    config: RunConfig | None
    bare_runs: tuple[str, ...] = ()
    figures: Figures | None = None
    predicted: Predicted | None = None
    published: PublishedFigures | None = None
    times_recipe: float | None = Field(None, description="effective goodput over that of the published recipe's arm")
    report: str = Field("", description="the run's own report")
    sources: tuple[Source, ...] = ()

    @property
    def effective_goodput(self) -> float | None:
        return self.figures.effective_goodput if self.figures else None


class Repeated(Frozen):
    """An arm that was run several times."""

    label: str
    runs: tuple[str, ...]
    effective_goodput: tuple[float, ...]
    spread: float = Field(description="largest over smallest, less one")


class Ratio(Frozen):
    """Two repeated arms against each other, paired by the number of the repetition."""

    first: str
    second: str
    pairs: int
    ratio: float
    low: float | None = None
    high: float | None = None


class Comparison(Record):
    """``comparisons/<name>/report.json``."""

    name: str
    created: float
    hardware: dict[str, Any]
    versions: dict[str, str]
    arms: tuple[Arm, ...]
    recipe: str = Field("", description="the arm of the published recipe")
    best: str = Field("", description="the arm with faults that has the highest effective goodput")
    noise: float | None = Field(None, description="the largest spread of an arm against itself")
    repeated: tuple[Repeated, ...] = ()
    ratios: tuple[Ratio, ...] = ()
    costs: dict[str, Any] | None = Field(None, description="the costs of the parts, seconds, that predictions are made of")
    worst_prediction: float | None = Field(None, description="largest error, in goodput, on arms not used for fitting")
    worst_at_own_pace: float | None = Field(None, description="the same for the prediction at the arm's own pace")
    pace_spread: float | None = Field(None, description="slowest over fastest median step of the arms that count, less one")
    problems: tuple[str, ...] = ()

    def arm(self, run: str) -> Arm:
        return next(arm for arm in self.arms if arm.run == run)
