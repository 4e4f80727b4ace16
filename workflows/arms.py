"""The experiments of a benchmark: a table in ``experiments/*.yaml`` -> its arms, each a configuration (pure but for reading).

    title: what is compared
    common:                      settings of every arm, by the names of their flags
    storage:                     emulate storage on which a save takes `save-to-interval` times the training time of
      save-to-interval: 1.5      `interval-steps` steps (left out: the storage is as it is)
      interval-steps: 40
    fit: [bare, ...]             arms that the prediction takes its costs from; it is tested on the others
    headline: [bare, ...]        arms that --repetitions repeats
    arms:                        in this order, one after another; the first is the bare run
      - name: bare               `published` names the published arm that it stands for (``steps.published``)
        recovery: none
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steps.published import PUBLISHED
from steps.repeats import repetition
from trainer.config import RunConfig, build, flag, parameter, to_text
from trainer.errors import ConfigurationError
from workflows.parameters import CLUSTER_DEFAULTS

DIRECTORY = Path(__file__).resolve().parent / "experiments"
WORDS = ("name", "published")
"""What an arm says besides its settings."""
RATE = "storage_bytes_per_second"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


class Emulated(BaseModel):
    """Storage that is slower than the machine's."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=_dashed)

    save_to_interval: float = Field(gt=0)
    interval_steps: int = Field(ge=1)


class Experiments(BaseModel):
    """A table of experiments as it is written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    common: dict[str, Any]
    storage: Emulated | None = None
    shapes: dict[str, Any] = {}
    """Settings that several arms take over with YAML's anchors; of no meaning themselves."""
    fit: tuple[str, ...] = ()
    headline: tuple[str, ...] = ()
    arms: tuple[dict[str, Any], ...] = Field(min_length=1)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(str(arm["name"]) for arm in self.arms)

    @property
    def varied(self) -> tuple[str, ...]:
        """The fields that arms set, in their order, the run's id and the storage's rate among them."""
        own = {field_name(key) for arm in self.arms for key in arm if key not in WORDS} | {"run_id"}
        own |= {RATE} if self.storage else set()
        return tuple(name for name in RunConfig.model_fields if name in own)

    def published(self, name: str) -> str:
        """The published arm that an arm stands for, or nothing."""
        return str(next(arm for arm in self.arms if arm["name"] == name).get("published", ""))

    def values(self, name: str) -> dict[str, Any]:
        """The settings of an arm: its own over those of all."""
        arm = next(arm for arm in self.arms if arm["name"] == name)
        merged = {**self.common, **{key: value for key, value in arm.items() if key not in WORDS}}
        return {field_name(key): value for key, value in merged.items()}

    def config(self, name: str, changes: dict[str, Any] | None = None) -> RunConfig:
        """The whole configuration of an arm, checked; ``changes`` are to what all arms share."""
        settings = CLUSTER_DEFAULTS | self.values(name) | (changes or {})
        run_id = run_name(str(settings.get("run_id", "benchmark")), name)
        return build({key: _spelt(value) for key, value in settings.items()} | {"run_id": run_id})

    def runs(self, benchmark: str, repetitions: int = 1) -> list[str]:
        """The ids of the runs of ``benchmark`` in their order."""
        return [run_name(benchmark, name, number) for name, number in self.order(repetitions)]

    def order(self, repetitions: int = 1) -> tuple[tuple[str, int], ...]:
        """(arm, repetition) one after another: all arms once, then the headline arms again in alternating order.

        With repetitions an arm that only repeats another one is left out: it would be in no pair.
        """
        if repetitions > 1 and not self.headline:
            raise ConfigurationError("--repetitions: this table names no headline arms to repeat")
        names = list(self.names)
        if repetitions > 1:
            names = [name for at, name in enumerate(names) if self.values(name) not in map(self.values, names[:at])]
        first = [(name, 1) for name in names]
        again = [
            (name, number)
            for number in range(2, repetitions + 1)
            for name in (self.headline if number % 2 else self.headline[::-1])
        ]
        return (*first, *again)


def tables() -> tuple[str, ...]:
    """The names of the tables that there are."""
    return tuple(sorted(path.stem for path in DIRECTORY.glob("*.yaml")))


def load(table: str) -> Experiments:
    """Read and check a table, one of ``experiments/`` by its name or any by its path (``*.yaml``)."""
    path = Path(table) if table.endswith(".yaml") else DIRECTORY / f"{table}.yaml"
    try:
        found = Experiments.model_validate(yaml.safe_load(path.read_text()))
    except FileNotFoundError:
        raise ConfigurationError(f"--experiments {table}: there is no such table; use one of {', '.join(tables())}, or the path of a YAML file") from None
    except (ValidationError, yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {str(error).splitlines()[0]}") from None
    check(found, str(path))
    return found


def check(found: Experiments, where: str) -> None:
    """Refuse a table that names arms twice, arms that are not there, settings that are none, or values that are wrong."""
    if any("name" not in arm for arm in found.arms) or len(set(found.names)) != len(found.names):
        raise ConfigurationError(f"{where}: each arm has a name of its own")
    for name in (*found.fit, *found.headline):
        if name not in found.names:
            raise ConfigurationError(f"{where}: there is no arm '{name}'")
    for name in found.names:
        if repetition(run_name("run", name)) > 1:
            raise ConfigurationError(f"{where}: {name}: a number at the end of a run's name says which repetition of its arm it is; name the arm otherwise")
        if found.published(name) not in ("", *PUBLISHED):
            raise ConfigurationError(f"{where}: {name}: there is no published arm '{found.published(name)}'")
        for field in found.values(name):
            if field not in RunConfig.model_fields:
                raise ConfigurationError(f"{where}: {name}: {parameter(field)} is not a setting")
        try:
            found.config(name)
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {name}: {error}") from None


def shared_changes(found: Experiments, given: dict[str, Any]) -> dict[str, Any]:
    """What a command line may change: the settings that all arms share. Refuses the others by name."""
    own = [flag(name) for name in given if name in found.varied and name != "run_id"]
    if own:
        raise ConfigurationError(f"{own[0]} is what the arms of this benchmark differ in; change it in their table")
    return given


def run_name(benchmark: str, arm: str, repetition: int = 1) -> str:
    """The id of an arm's run; ``steps.repeats.repetition`` reads the number from it."""
    return f"{benchmark}-{arm}" + (f"-{repetition}" if repetition > 1 else "")


def field_name(key: str) -> str:
    return key.replace("-", "_")


def _spelt(value: Any) -> Any:
    """A value of YAML as a command line would spell it."""
    return value if isinstance(value, Path) else to_text(value)
