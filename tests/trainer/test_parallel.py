"""Sharded training on real process groups (gloo) of one and of two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.model import PRESETS, build, init_weights
from trainer.parallel import apply_compile, forward_backward

WORKER = Path(__file__).with_name("sharded_worker.py")
pytestmark = pytest.mark.timeout(900)  # five processes import torch before the first test
BOTH = pytest.mark.parametrize("shape", ["untied", "tied"])


def launch(world_size: int, meeting: Path, weights: Path) -> list[dict[str, Any]]:
    """What each of ``world_size`` ranks printed."""
    root = WORKER.parents[2]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(WORKER), str(rank), str(world_size), str(meeting), str(weights)],
            stdout=subprocess.PIPE, text=True, cwd=root, env=os.environ | {"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""},
        )
        for rank in range(world_size)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=280)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world_size
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of the worker's shape, written by hand."""
    from safetensors.torch import save_file

    from trainer.pretrained import hugging_face_name

    directory = tmp_path_factory.mktemp("weights")
    shape = PRESETS["tiny"]
    model = build(type(shape)(**(vars(shape) | {"vocabulary_size": 255})), "cpu")
    init_weights(model, 9)
    save_file(
        {hugging_face_name(name): parameter.detach() for name, parameter in model.named_parameters()},
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama", "hidden_size": shape.dim, "num_hidden_layers": shape.layers,
                "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
                "intermediate_size": shape.ffn_dim, "vocab_size": 255, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
            }
        )
    )  # fmt: skip
    return directory


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("meetings")
    return {name: launch(int(name[0]), folder / name, weights) for name in ("1", "2", "2 again")}


@BOTH
def test_initial_weights_are_the_same_at_every_world_size(runs: Any, shape: str) -> None:
    assert len({rank[shape]["initial"] for ranks in runs.values() for rank in ranks}) == 1


@BOTH
def test_losses_norms_and_gradients_agree_between_world_sizes(runs: Any, shape: str) -> None:
    one, two = runs["1"][0][shape], runs["2"][0][shape]
    assert two["gradients"] == pytest.approx(one["gradients"], rel=1e-3)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-3)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert one["losses"][-1] < one["losses"][0] - 0.1  # and it learns
    assert one["norms"][0] > 0.5  # so that clipping had something to do


@BOTH
def test_a_run_that_is_repeated_has_the_same_bits(runs: Any, shape: str) -> None:
    assert [rank[shape] for rank in runs["2"]] == [rank[shape] for rank in runs["2 again"]]
    assert runs["2"][0][shape]["final"] != runs["2"][0][shape]["initial"]


@BOTH
def test_all_ranks_see_the_same_norm_loss_and_weights(runs: Any, shape: str) -> None:
    first, second = (rank[shape] for rank in runs["2"])
    for key in ("losses", "norms", "final"):
        assert first[key] == second[key]


@BOTH
def test_accumulation_reduces_gradients_once(runs: Any, shape: str) -> None:
    seen = runs["2"][0][shape]
    assert seen["micro_batches"] == 2
    assert seen["reductions"] == [3, 3]  # two blocks and the rest, whether with two micro-batches or with one


def test_models_of_one_process_use_the_same_streams(runs: Any) -> None:
    """The allocator keeps freed memory for the stream it was allocated for, so new ones would cost memory at each restart."""
    for seen in runs["2"]:
        assert seen["untied"]["streams"] == seen["tied"]["streams"] == [True] * 12


def test_published_weights_load_into_shards(runs: Any, weights: Path) -> None:
    from safetensors.torch import load_file

    from trainer.pretrained import hugging_face_name

    shape = PRESETS["tiny"]
    model = build(type(shape)(**(vars(shape) | {"vocabulary_size": 255})), "meta")
    tensors = load_file(weights / "model.safetensors")
    sums = [float(tensors[hugging_face_name(name)].double().sum()) for name, _ in model.named_parameters()]
    for ranks in runs.values():
        for rank in ranks:
            assert rank["loaded"] == pytest.approx(sums, rel=1e-9, abs=1e-9)


def test_threads_are_shared_between_the_processes_of_a_node(runs: Any) -> None:
    assert {rank["threads"] for ranks in runs.values() for rank in ranks} == {max(1, len(os.sched_getaffinity(0)) // 2)}


def test_micro_batches_weigh_the_same() -> None:
    """Without sharding: the gradients of four micro-batches are those of the whole batch."""
    tokens_BT = torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(0))
    results = []
    for batches in ([tokens_BT], list(tokens_BT.split(2))):
        model = build(PRESETS["tiny"], "cpu")
        init_weights(model, 1)
        loss = forward_backward(model, batches)
        results.append((loss, model.blocks[0].ffn.up.weight.grad))
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiling_keeps_the_names_of_the_parameters() -> None:
    """Checkpoints of a compiled and a plain run are interchangeable."""
    plain, compiled = build(PRESETS["tiny"], "meta"), apply_compile(build(PRESETS["tiny"], "meta"))
    assert list(plain.state_dict()) == list(compiled.state_dict())
