"""The builtin and file:// sources: what comes out, twice, at once, and after a kill."""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow
import pytest
from download_support import as_bytes, command, documents, download, environment, made, nothing_made, refused, tokens
from pyarrow import parquet


def text_file(path: Path, megabytes: int) -> str:
    """A text file of that size, in lines; returns its URI."""
    line = "the quick brown fox jumps over the lazy dog, and on it goes: é ß 漢字 " * 3 + "\n"
    with path.open("w", encoding="utf-8") as file:
        for _ in range(megabytes):
            file.write(line * (1_000_000 // len(line.encode())))
    return f"file://{path}"


def wait_for(path: Path, pattern: str, process: subprocess.Popen[bytes]) -> Path:
    """The first file that fits ``pattern`` below ``path`` and has content, while ``process`` runs."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "ended too early for this test"
        for found in path.glob(pattern):
            if found.stat().st_size > 0:
                return found
        time.sleep(0.002)
    raise AssertionError(f"no {pattern}")


def test_builtin_is_the_documentation_of_python_one_document_a_topic(tmp_path: Path) -> None:
    directory, manifest = made(tmp_path, "builtin:")
    assert [bytes(document).decode() for document in documents(directory)] == [
        text for _, text in sorted(topics.items())
    ]
    assert (manifest.dtype, manifest.vocabulary_size, manifest.end_of_document) == ("uint16", 257, 256)
    assert manifest.documents == len(topics)
    assert manifest.source == "builtin:" and "Python 3." in manifest.revision
    assert directory.name == f"builtin-{manifest.digest[:12]}" and directory.parent == tmp_path / "datasets"


def test_a_second_call_verifies_and_tokenises_nothing(tmp_path: Path) -> None:
    directory, _ = made(tmp_path, "builtin:")
    before = [(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted(directory.iterdir())]
    shutil.rmtree(tmp_path / "runs")
    done = download(tmp_path, "builtin:")
    assert done.returncode == 0 and "download: found" in done.stdout and "made" not in done.stdout
    assert [(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted(directory.iterdir())] == before
    assert (tmp_path / "runs/test/outputs/download/dataset").read_text() == str(directory)


@pytest.mark.parametrize("how", ["flipped", "cut", "removed", "manifest"])
def test_a_damaged_dataset_is_made_again(tmp_path: Path, how: str) -> None:
    directory, _ = made(tmp_path, "builtin:")
    right = tokens(directory)
    shard = directory / "shard-00000.bin"
    if how == "flipped":
        with shard.open("r+b") as file:
            file.seek(1000)
            file.write(b"\xee")
    elif how == "cut":
        os.truncate(shard, 1000)
    elif how == "removed":
        shard.unlink()
    else:
        (directory / "manifest.json").write_text("{}")
    done = download(tmp_path, "builtin:")
    assert done.returncode == 0 and "is damaged" in done.stdout
    assert tokens(directory) == right
    assert {entry.name for entry in (tmp_path / "datasets").iterdir()} == {".index", ".staging", directory.name}


def test_a_lost_index_costs_a_rebuild_and_no_second_directory(tmp_path: Path) -> None:
    directory, _ = made(tmp_path, "builtin:")
    shutil.rmtree(tmp_path / "datasets/.index")
    assert made(tmp_path, "builtin:")[0] == directory
    assert [entry.name for entry in (tmp_path / "datasets").iterdir() if not entry.name.startswith(".")] == [
        directory.name
    ]


def test_a_folder_of_all_formats_is_read_in_sorted_order(tmp_path: Path) -> None:
    folder = tmp_path / "texts with space"
    (folder / "c").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / ".hidden/x.txt").write_text("hidden")
    (folder / "README.md").write_text("no")
    (folder / "empty.txt").write_text("")
    (folder / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two \\u00e9"}\n{"text": null}\n{"text": ""}')
    (folder / "b.txt").write_bytes("\ufefffirst\r\nsecond\n".encode())
    with gzip.open(folder / "c/d.jsonl.gz", "wt") as file:
        file.write('{"id": 3, "text": "packed"}\n')
    with gzip.open(folder / "c/e.txt.gz", "wt") as file:
        file.write("packed text")
    parquet.write_table(pyarrow.table({"n": [1, 2, 3], "text": ["row", None, "other"]}), folder / "f.parquet")
    directory, manifest = made(tmp_path / "fsx", f"file://{folder}".replace(" ", "%20"))
    expected = ("one", "two é", "first\r\nsecond\n", "packed", "packed text", "row", "other")
    assert tokens(directory) == as_bytes(*expected)
    assert manifest.documents == len(expected)
    assert directory.name.startswith("texts-with-space-")


def test_the_field_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "no", "content": "yes, with enough"}\n')
    parquet.write_table(pyarrow.table({"content": ["row"]}), tmp_path / "b.parquet")
    directory, _ = made(tmp_path / "fsx", f"file://{tmp_path}?field=content")
    assert tokens(directory) == as_bytes("yes, with enough", "row")
    default = download(tmp_path / "fsx", f"file://{tmp_path}/a.jsonl")
    refused(default, 64, "--sequence-length", "the 3 of")


def test_a_change_of_same_size_and_time_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old text of some length")
    stat = path.stat()
    first, _ = made(tmp_path / "fsx", f"file://{path}")
    path.write_text("new text of some length")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second, _ = made(tmp_path / "fsx", f"file://{path}")
    assert tokens(first) == as_bytes("old text of some length")
    assert tokens(second) == as_bytes("new text of some length")


def test_a_large_file_is_one_document_over_several_shards_in_bounded_memory(tmp_path: Path) -> None:
    uri = text_file(tmp_path / "large.txt", 150)
    root = tmp_path / "fsx"
    report = tmp_path / "rss"
    script = (
        "import pathlib, sys, steps.download as d; d.main(sys.argv[2:]);"
        # not ru_maxrss: that begins with what the process had before its exec, pytest's own memory
        "status = pathlib.Path('/proc/self/status').read_text();"
        "open(sys.argv[1], 'w').write(status.split('VmHWM:')[1].split()[0])"
    )
    full = command(root, uri)
    done = subprocess.run(
        [full[0], "-c", script, str(report), *full[3:]], env=environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert int(report.read_text()) * 1024 < 250e6
    directory = Path((root / "runs/test/outputs/download/dataset").read_text())
    shards = sorted(directory.glob("shard-*.bin"))
    assert len(shards) == 2
    size = (tmp_path / "large.txt").stat().st_size
    assert sum(shard.stat().st_size for shard in shards) == 2 * (size + 1)
    assert shards[-1].read_bytes()[-2:] == (256).to_bytes(2, "little")


def test_many_at_once_make_one_whole_dataset(tmp_path: Path) -> None:
    uri = text_file(tmp_path / "some.txt", 5)
    root = tmp_path / "fsx"
    processes = [
        subprocess.Popen(command(root, address), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for address in (uri, uri, uri, "builtin:", "builtin:")
    ]
    for process in processes:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors.decode()
    names = sorted(entry.name.rpartition("-")[0] for entry in (root / "datasets").iterdir() if entry.name[0] != ".")
    assert names == ["builtin", "some"]
    assert not list((root / "datasets").glob(".tmp-*"))
    assert not list((root / "datasets/.staging").iterdir())
    for address in (uri, "builtin:"):
        assert "download: found" in download(root, address).stdout


def test_kill_in_the_middle_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    uri = text_file(tmp_path / "large.txt", 80)
    root = tmp_path / "fsx"
    process = subprocess.Popen(command(root, uri), env=environment(), stdout=subprocess.DEVNULL)
    partial = wait_for(root, "datasets/.tmp-*/shard-00000.bin", process).parent
    process.kill()
    process.wait()
    assert partial.exists() and not (partial / "manifest.json").exists()
    assert not [entry for entry in (root / "datasets").iterdir() if not entry.name.startswith(".")]
    assert not (root / "runs").exists()
    done = download(root, "builtin:")  # whoever comes next cleans up
    assert done.returncode == 0 and f"removed {partial.name}" in done.stdout
    assert not partial.exists()


def test_a_living_download_is_not_cleaned_away_by_another(tmp_path: Path) -> None:
    uri = text_file(tmp_path / "large.txt", 80)
    root = tmp_path / "fsx"
    process = subprocess.Popen(command(root, uri), env=environment(), stdout=subprocess.DEVNULL)
    wait_for(root, "datasets/.tmp-*/shard-00000.bin", process)
    os.kill(process.pid, signal.SIGSTOP)
    done = download(root, "builtin:")
    os.kill(process.pid, signal.SIGCONT)
    assert done.returncode == 0 and "removed" not in done.stdout
    assert process.wait(timeout=100) == 0


def test_what_other_machines_left_is_removed_only_when_long_idle(tmp_path: Path) -> None:
    fresh, idle = (tmp_path / f"datasets/.tmp-0123456789ab-1-5-0000000{n}" for n in (1, 2))
    resumable, forgotten = (tmp_path / f"datasets/.staging/{n}" for n in (1, 2))
    for directory, hours in ((fresh, 0.5), (idle, 2), (resumable, 6 * 24), (forgotten, 8 * 24)):
        directory.mkdir(parents=True)
        (directory / "file").write_text("x")
        then = time.time() - hours * 3600
        for path in (directory / "file", directory):
            os.utime(path, (then, then))
    made(tmp_path, "builtin:")
    assert fresh.exists() and not idle.exists()
    assert resumable.exists() and not forgotten.exists()


def test_sigterm_ends_with_75_and_leaves_nothing(tmp_path: Path) -> None:
    uri = text_file(tmp_path / "large.txt", 80)
    root = tmp_path / "fsx"
    process = subprocess.Popen(command(root, uri), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_for(root, "datasets/.tmp-*/shard-00000.bin", process)
    process.terminate()
    process.send_signal(signal.SIGTERM)  # Argo sends it more than once
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 75
    assert errors.decode().splitlines() == [
        "error: stopped by SIGTERM; a new attempt goes on from what has been fetched"
    ]
    nothing_made(root)


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    uri = text_file(tmp_path / "large.txt", 80)
    root = tmp_path / "fsx"
    process = subprocess.Popen(command(root, uri), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_for(root, "datasets/.tmp-*/shard-00000.bin", process)
    with (tmp_path / "large.txt").open("r+b") as file:
        file.write(b"THE")
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 69
    assert b"changed while it was read" in errors
    nothing_made(root)


def test_progress_is_reported_to_argo(tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    made(tmp_path / "fsx", text_file(tmp_path / "some.txt", 3), env={"ARGO_PROGRESS_FILE": str(progress)})
    done, _, total = progress.read_text().strip().partition("/")
    assert int(done) == int(total) > 0


def test_a_full_quota_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    uri = text_file(tmp_path / "some.txt", 3)
    root = tmp_path / "fsx"
    limit = 2_000_000

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = subprocess.run(
        command(root, uri), env=environment(), capture_output=True, text=True, timeout=60, preexec_fn=limited
    )
    refused(done, 69, "no space left under", str(root))
    nothing_made(root)


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    uri = text_file(tmp_path / "some.txt", 5)
    root = tmp_path / "fsx"
    root.mkdir()
    listing = tmp_path / "listing"
    inside = f'mount -t tmpfs -o size=4m tmpfs "{root}" || exit 200; "$@"; code=$?; find "{root}/datasets" > "{listing}"; exit $code'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", inside, "sh", *command(root, uri)],
        env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if done.returncode == 200 or "unshare" in done.stderr:
        pytest.skip("this machine allows no private mounts: " + done.stderr.strip())
    refused(done, 69, "no space left under", str(root))
    names = {Path(line).name for line in listing.read_text().splitlines()}
    assert not [name for name in names if name.startswith((".tmp-", "some-"))]


def test_the_manifest_names_what_it_was_made_of(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text, long enough")
    uri = f"file://{tmp_path}/a.txt"
    directory, manifest = made(tmp_path / "fsx", uri)
    raw = json.loads((directory / "manifest.json").read_text())
    assert raw["source"] == uri and raw["revision"].startswith("1 file, sha256:")
    assert raw["tokens"] == len("some text, long enough") + 1 and raw["documents"] == 1
    assert manifest.shards[0].size == 2 * raw["tokens"]
