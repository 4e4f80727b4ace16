"""Checkpoints that are not what they should be: refused by name, quarantined, and an older one is used, or none (65)."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tier_world import RankError, Run

MakeRun = Callable[..., Run]


def first_shard(checkpoint: Path) -> Path:
    return sorted(checkpoint.glob("__*"))[0]


def flip_a_bit(checkpoint: Path) -> None:
    shard = first_shard(checkpoint)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def truncate(checkpoint: Path) -> None:
    shard = first_shard(checkpoint)
    shard.write_bytes(shard.read_bytes()[:-100])


def change_manifest(checkpoint: Path, **values: Any) -> None:
    path = checkpoint / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def name_file(checkpoint: Path, name: str) -> None:
    """Let the manifest call its first file something else."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    change_manifest(checkpoint, files=[files[0] | {"name": name}, *files[1:]])


def forget_file(checkpoint: Path, prefix: str) -> None:
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    change_manifest(checkpoint, files=[file for file in files if not file["name"].startswith(prefix)])


def tear_manifest(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_text(path.read_text()[:200])


def pickle_bomb(checkpoint: Path) -> None:
    """Metadata that runs code when it is loaded, under a manifest that does not know it."""
    (checkpoint / ".metadata").write_bytes(b"cos\nsystem\n(S'touch " + str(checkpoint.parent).encode() + b"/pwned'\ntR.")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped bit": (flip_a_bit, "does not have the SHA-256 of its manifest"),
    "truncated shard": (truncate, "its manifest says"),
    "missing shard": (lambda path: first_shard(path).unlink(), "is missing"),
    "torn manifest": (tear_manifest, "is not a valid CheckpointManifest"),
    "empty manifest": (lambda path: (path / "manifest.json").write_text(""), "is not a valid CheckpointManifest"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "it has no manifest"),
    "another run": (lambda path: change_manifest(path, run_id="other"), "it belongs to run other"),
    "another configuration": (lambda path: change_manifest(path, config_digest="0" * 64), "another configuration"),
    "another step": (lambda path: change_manifest(path, step=3), "its manifest is of step 3"),
    "a later version": (lambda path: change_manifest(path, schema_version=2), "schema_version"),
    "absolute path": (lambda path: name_file(path, "/etc/passwd"), "names a foreign path /etc/passwd"),
    "path upwards": (lambda path: name_file(path, "../../run.json"), "names a foreign path ../../run.json"),
    "shard not in manifest": (lambda path: forget_file(path, "__"), "is not in its manifest"),
    "metadata not in manifest": (lambda path: forget_file(path, ".metadata"), "is not in its manifest"),
    "swapped metadata": (pickle_bomb, ".metadata has"),
    "empty directory": (lambda path: [child.unlink() for child in path.iterdir()], "it has no manifest"),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(forks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    """A run with checkpoints of steps 5 and 10 that two ranks wrote, and the digest of step 5."""
    run = Run.make(forks, tmp_path_factory.mktemp("whole"), checkpoint_interval_steps=5)
    with run.world(2) as world:
        world.all("train", first=1, last=5)
        digest = world.one("digest")
        world.all("train", first=6, last=10)
    assert run.committed() == [5, 10]
    return run, digest


def copy_of(whole: Run, folder: Path) -> Run:
    """The run's record and checkpoints in a folder of their own."""
    shutil.copytree(whole.paths.checkpoints, folder / "runs" / "drill" / "checkpoints")
    return Run.make(whole.forks, folder, checkpoint_interval_steps=5)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_older_one_used(
    whole: tuple[Run, str], tmp_path: Path, damage: str
) -> None:
    run = copy_of(whole[0], tmp_path)
    spoil, reason = DAMAGES[damage]
    spoil(run.paths.checkpoint(10))
    with run.world(1) as world:
        assert world.one("resume") == [5, "durable"]
        assert world.one("digest") == whole[1]
        refused = run.events("checkpoint_refused")
        assert refused and all(reason in event.data["reason"] for event in refused), [e.data for e in refused]
        (quarantined,) = run.paths.quarantine.iterdir()
        assert quarantined.name.startswith("step-00000010-")
        assert reason in (quarantined / "refused.txt").read_text()
        world.all("train", first=6, last=10)  # the step that was refused can be committed again
        assert run.committed() == [5, 10]
    assert not (run.paths.quarantine / "pwned").exists() and not (run.paths.checkpoints / "pwned").exists()


def test_when_all_are_damaged_the_run_ends_naming_each(whole: tuple[Run, str], tmp_path: Path) -> None:
    run = copy_of(whole[0], tmp_path)
    flip_a_bit(run.paths.checkpoint(10))
    (run.paths.checkpoint(5) / "manifest.json").unlink()
    for _ in range(2):  # asked again, it does not begin from scratch
        with run.world(2) as world:
            with pytest.raises(RankError) as raised:
                world.all("resume")
            assert raised.value.code == 65
            for said in ("step-00000010", "SHA-256", "step-00000005", "no manifest"):
                assert said in str(raised.value), raised.value
    assert run.committed() == []


def test_what_is_no_fault_of_a_checkpoint_leaves_it_where_it_is(whole: tuple[Run, str], tmp_path: Path) -> None:
    """A rank whose descriptors have run out cannot read, and says so after some patience; the next one can."""
    run = copy_of(whole[0], tmp_path)
    with run.world(1) as world:
        with pytest.raises(RankError, match="the file system does not give") as raised:
            world.all("load_without_descriptors", step=10)
        assert raised.value.code == 69
    assert not run.paths.quarantine.exists() and run.committed() == [5, 10]
    with run.world(1) as world:
        assert world.one("resume") == [10, "durable"]


def test_one_that_cannot_be_moved_away_is_replaced_by_the_next_save(whole: tuple[Run, str], tmp_path: Path) -> None:
    """There is no room for a quarantine: a file is in its place."""
    run = copy_of(whole[0], tmp_path)
    flip_a_bit(run.paths.checkpoint(10))
    run.paths.quarantine.write_text("in the way")
    with run.world(2) as world:
        assert world.one("resume") == [5, "durable"]
        world.all("train", first=6, last=10)
    with run.world(2, cycle=1) as world:
        assert world.one("resume") == [10, "durable"]


def test_names_that_are_nothing_of_ours_are_left_alone(whole: tuple[Run, str], tmp_path: Path) -> None:
    run = copy_of(whole[0], tmp_path)
    for name in ("step-99", "step-00000020.bak", "notes"):
        (run.paths.checkpoints / name).mkdir()
    (run.paths.checkpoints / ".tmp-00000015-1-abc-1").mkdir()
    with run.world(1) as world:
        assert world.one("resume") == [10, "durable"]
        world.all("train_on", first=11, last=20)
    names = {path.name for path in run.paths.checkpoints.iterdir()}
    assert names >= {"step-99", "step-00000020.bak", "notes"} and not any(name.startswith(".tmp") for name in names)
    assert {name for name in names if len(name) == 13} == {"step-00000010", "step-00000015", "step-00000020"}


def test_a_clock_that_jumps_back_changes_no_order(whole: tuple[Run, str], tmp_path: Path) -> None:
    """The newer step has the older date, in the manifest and on its files, as when the clock was set back meanwhile."""
    run = copy_of(whole[0], tmp_path)
    future = time.time() + 10_000_000
    change_manifest(run.paths.checkpoint(5), created=future)
    change_manifest(run.paths.checkpoint(10), created=1.0)
    os.utime(run.paths.checkpoint(5), (future, future))
    os.utime(run.paths.checkpoint(10), (1, 1))
    with run.world(1) as world:
        assert world.one("resume") == [10, "durable"]
        world.all("train_on", first=11, last=25)
    assert run.committed() == [15, 20, 25]  # retention goes by step too
