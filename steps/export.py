"""Write a checkpoint's weights as a Hugging Face directory: safetensors and config.json, in the names of LLaMA 3.

    python -m steps.export --root DIR --run-id ID --output DIR [--step N] [--dtype float32|bfloat16]

1. Take the checkpoint of ``--step``, or the newest one; its manifest, files and hashes are checked as validation does.
2. Read the parameters a few gigabytes at a time (no GPU and no process group is needed), and write each lot as one file.
3. Write the index, config.json, and the tokenizer if the run has a file of one; then give the directory its name.

As float32, the default, what is written has the bits of the checkpoint: ``--init-from`` of the directory starts from them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steps.runs import checkpoints_on_disk, read_run
from steps.validate import Examination, Invalid, check_files, check_manifest, check_shapes, load
from trainer.config import OneLineParser, add_flags, from_namespace
from trainer.errors import ConfigurationError, DataError, ExitCode, exit_with
from trainer.paths import RunPaths

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.checkpoint.metadata import Metadata

FILE_BYTES = 4 << 30
"""Bytes of a file, and so of what is in memory at a time; one tensor may be larger."""


def main(argv: list[str] | None = None) -> int:
    """Entry of the step."""
    parser = OneLineParser(prog="python -m steps.export", description="write a checkpoint as Hugging Face weights")
    add_flags(parser, ("root", "run_id"))
    parser.add_argument("--output", type=Path, required=True, help="directory to make")
    parser.add_argument("--step", type=int, default=0, help="step of the checkpoint (0: the newest)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the weights")
    options = parser.parse_args(argv)
    config = from_namespace(options)
    step = export(RunPaths(config.root, config.run_id), options.output, options.step, options.dtype)
    print(f"step {step} of run {config.run_id} is in {options.output}", flush=True)
    return int(ExitCode.DONE)


def export(paths: RunPaths, output: Path, step: int, dtype: str, file_bytes: int = FILE_BYTES) -> int:
    """Make ``output``; returns the step that it is of. ``DataError`` when the checkpoint is damaged."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    from trainer.data import TokenDataset
    from trainer.model import model_config
    from trainer.pretrained import hugging_face_config

    record = read_run(paths)
    if output.exists():
        raise ConfigurationError(f"--output: {output} exists already; name a directory that is to be made")
    step = choose(paths, step)
    dataset = TokenDataset(Path(record.dataset), record.config.sequence_length)
    subject = Examination(paths.checkpoint(step), record, dataset)
    shape = model_config(record.config.model, dataset.manifest.vocabulary_size)
    reader = FileSystemReader(subject.path)
    try:
        check_files(subject, check_manifest(subject, step))
        metadata = reader.read_metadata()
        check_shapes(subject, metadata, shape)
    except Invalid as error:
        raise DataError(f"{subject.path} cannot be exported: {error}; `holdfast status` lists the others") from None
    part = output.with_name(f".{output.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    write_weights(reader, metadata, part, dtype, file_bytes)
    end = dataset.manifest.end_of_document
    described = hugging_face_config(shape, record.config.sequence_length) | {"torch_dtype": dtype}
    described |= {"bos_token_id": None, "eos_token_id": end if end >= 0 else None}
    (part / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    tokenizer = Path(record.config.tokenizer)
    if tokenizer.is_file():
        shutil.copy(tokenizer, part / "tokenizer.json")
    part.rename(output)
    return step


def choose(paths: RunPaths, step: int) -> int:
    """The step asked for, or the newest one that has a checkpoint."""
    found = checkpoints_on_disk(paths)
    if not found:
        raise ConfigurationError(f"--run-id: run {paths.run_id} has no checkpoint in {paths.checkpoints} yet")
    if step and step not in found:
        raise ConfigurationError(f"--step: there is no checkpoint of step {step}; there are {', '.join(map(str, found))}")
    return step or found[-1]


def write_weights(reader: Any, metadata: Metadata, directory: Path, dtype: str, file_bytes: int) -> None:
    """model.safetensors, or several files and their index."""
    import torch
    from safetensors.torch import save_file

    from trainer.pretrained import hugging_face_name

    wanted = getattr(torch, dtype)
    lots = list(groups(metadata, wanted.itemsize, file_bytes))
    where: dict[str, str] = {}
    total = 0
    for number, names in enumerate(lots, start=1):
        file = "model.safetensors" if len(lots) == 1 else f"model-{number:05d}-of-{len(lots):05d}.safetensors"
        tensors: dict[str, Tensor] = {
            hugging_face_name(name.removeprefix("model.")): tensor.to(wanted)
            for name, tensor in load(reader, metadata, names).items()
        }
        save_file(tensors, directory / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
        total += sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    if len(lots) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def groups(metadata: Metadata, itemsize: int, file_bytes: int) -> Iterator[list[str]]:
    """The parameters' names, as many at a time as fit in a file."""
    entries: dict[str, Any] = metadata.state_dict_metadata
    names: list[str] = []
    size = 0
    for name in (name for name in entries if name.startswith("model.")):
        this = int(entries[name].size.numel()) * itemsize
        if names and size + this > file_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += this
    yield names


if __name__ == "__main__":
    exit_with(main)
