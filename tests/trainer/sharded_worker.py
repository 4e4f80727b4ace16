"""One rank of a sharded training run, for test_parallel. Not a test. Prints one JSON line of what it saw.

sharded_worker.py RANK WORLD_SIZE MEETING_FILE WEIGHTS_DIRECTORY
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import trainer.model
from trainer.config import build
from trainer.data import rank_batch
from trainer.model import PRESETS, Transformer, init_weights
from trainer.optim import apply_learning_rate, build_optimizer, clip_gradients
from trainer.parallel import SameStreams, choose_device, forward_backward, mean_over_ranks, pin_threads, prepare
from trainer.pretrained import load_hugging_face

STEPS = 4
BATCH = 8
# 255 rows do not divide by two, so that the ranks hold unequal shards; blocks of 7 rows cross the shards' edges.
SHAPE = replace(PRESETS["tiny"], vocabulary_size=255, init_std=0.05)
trainer.model.DRAW_ELEMENTS = 1000


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def digest(model: Transformer) -> str:
    """SHA-256 over all parameters, whole."""
    content = hashlib.sha256()
    for name, parameter in model.named_parameters():
        content.update(name.encode() + whole(parameter).cpu().numpy().tobytes())
    return content.hexdigest()


def gradients(model: Transformer) -> list[float]:
    """A number for each parameter's gradient, summed over all ranks' samples."""
    return [float(whole(p.grad).double().square().sum()) for p in model.parameters() if p.grad is not None]


def count_reductions(model: Transformer, batches: list[torch.Tensor]) -> int:
    """Calls of the collective that reduces gradients in one step of ``batches``."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as record:
        forward_backward(model, batches)
    return sum(e.count for e in record.key_averages() if "c10d::_reduce_scatter_base_" in e.key)


def train(rank: int, world_size: int, tie: bool) -> dict[str, Any]:
    config = build({"gpus_per_node": world_size, "max_steps": STEPS, "warmup_steps": 0, "learning_rate": 1e-2})
    model = prepare(replace(SHAPE, tie_embeddings=tie), choose_device())
    init_weights(model, seed=5)
    optimizer = build_optimizer(model, config)
    seen: dict[str, Any] = {"initial": digest(model), "losses": [], "norms": []}
    tokens_BT = torch.randint(0, 255, (BATCH, 65), generator=torch.Generator().manual_seed(0))
    for step in range(1, STEPS + 1):
        batches = [tokens_BT[ids] for ids in rank_batch(range(BATCH), rank, world_size, 2)]
        loss = forward_backward(model, batches)
        if step == 1:
            seen["gradients"] = gradients(model)
        seen["norms"].append(clip_gradients(model, 0.5))
        seen["losses"].append(mean_over_ranks(loss))
        apply_learning_rate(optimizer, step, config)
        optimizer.step()
        optimizer.zero_grad()
    seen["final"] = digest(model)
    states = [fully_shard.state(module) for module in (model, *model.blocks)]  # type: ignore[attr-defined]
    seen["streams"] = [getattr(s._comm_ctx, name) is SameStreams._made["cpu", name] for s in states for name in SameStreams.STREAMS]
    seen["micro_batches"] = len(batches)
    seen["reductions"] = [count_reductions(model, batches), count_reductions(model, batches[:1])]
    return seen


def load(directory: Path) -> list[float]:
    model = prepare(replace(SHAPE, rope_theta=10_000.0), choose_device())
    load_hugging_face(model, directory)
    return [float(whole(parameter).double().sum()) for parameter in model.parameters()]


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    pin_threads(2)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world_size)
    seen = {"untied": train(rank, world_size, tie=False), "tied": train(rank, world_size, tie=True)}
    seen["loaded"] = load(Path(sys.argv[4]))
    seen["threads"] = torch.get_num_threads()
    print(json.dumps(seen), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
