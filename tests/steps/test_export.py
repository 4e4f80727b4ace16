"""A checkpoint as Hugging Face weights: the same bits when read again, and the same logits in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_validate import TOKENS, VOCABULARY, record, tensors, write_checkpoint

from steps import export
from trainer.config import RunConfig
from trainer.errors import ConfigurationError, DataError
from trainer.model import Transformer, build, model_config
from trainer.paths import RunPaths
from trainer.pretrained import load_hugging_face
from trainer.records import DatasetManifest, FileRecord


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A run with checkpoints of steps 10 and 20, whose weights differ."""
    root = tmp_path_factory.mktemp("exported")
    dataset = root / "datasets" / "text"
    dataset.mkdir(parents=True)
    content = np.zeros(TOKENS, dtype=np.uint16).tobytes()
    (dataset / "shard").write_bytes(content)
    DatasetManifest(
        source="", revision="", tokenizer="byte", vocabulary_size=VOCABULARY, dtype="uint16", documents=1, tokens=TOKENS,
        shards=(FileRecord(name="shard", size=len(content), sha256=""),), digest="", end_of_document=256,
    ).write(dataset / "manifest.json")  # fmt: skip
    paths = RunPaths(root, "run")
    record(RunConfig(), dataset).write(paths.record)
    for step in (10, 20):
        state = tensors()
        for name, tensor in state.items():
            if name.startswith("model."):
                tensor += step / 100 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(step))
        write_checkpoint(paths.checkpoint(step), step, state)
    return paths


def trained(step: int) -> Transformer:
    """The model whose weights were saved at ``step``."""
    state = {}
    for name, tensor in tensors().items():
        if name.startswith("model."):
            tensor += step / 100 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(step))
            state[name.removeprefix("model.")] = tensor
    model = build(model_config("tiny", VOCABULARY), "cpu")
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("file_bytes", [200_000, 1 << 30])
def test_weights_come_back_with_their_bits_and_give_the_same_logits(paths: RunPaths, tmp_path: Path, file_bytes: int) -> None:
    from transformers import AutoModelForCausalLM

    output = tmp_path / "weights"
    assert export.export(paths, output, 0, "float32", file_bytes) == 20  # the newest
    assert (output / "model.safetensors.index.json").exists() == (file_bytes < 1 << 30)
    ours, again = trained(20), build(model_config("tiny", VOCABULARY), "cpu")
    load_hugging_face(again, output)
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
    theirs = AutoModelForCausalLM.from_pretrained(output, attn_implementation="eager").eval()
    assert type(theirs).__name__ == "LlamaForCausalLM" and theirs.dtype == torch.float32
    tokens_BL = torch.randint(0, VOCABULARY, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens_BL), theirs(tokens_BL).logits, atol=2e-4, rtol=1e-4)


def test_the_command_exports_another_step_in_half_the_size(paths: RunPaths, tmp_path: Path) -> None:
    arguments = ["--root", str(paths.root), "--run-id", "run", "--output", str(tmp_path / "half")]
    assert export.main([*arguments, "--step", "10", "--dtype", "bfloat16"]) == 0
    model = build(model_config("tiny", VOCABULARY), "cpu")
    load_hugging_face(model, tmp_path / "half")
    expected = trained(10).embedding.weight.to(torch.bfloat16).float()
    assert torch.equal(model.embedding.weight, expected)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["eos_token_id"] == 256
    with pytest.raises(ConfigurationError, match="exists already"):
        export.main(arguments)


def test_what_is_not_there_is_refused(paths: RunPaths, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no checkpoint of step 15; there are 10, 20"):
        export.export(paths, tmp_path / "x", 15, "float32")
    with pytest.raises(ConfigurationError, match="there is no run 'other'"):
        export.export(RunPaths(paths.root, "other"), tmp_path / "x", 0, "float32")


def test_a_damaged_checkpoint_is_not_exported(paths: RunPaths, tmp_path: Path) -> None:
    path = next(paths.checkpoint(10).glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="SHA-256"):
        export.export(paths, tmp_path / "x", 10, "float32")
    assert not list(tmp_path.iterdir())
