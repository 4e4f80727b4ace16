"""Part throughput: the training step alone, as the trainer makes it, on random tokens. Started by torchrun, once a rank."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_torchrun import torchrun

if TYPE_CHECKING:
    from torch import Tensor

CASES = "llama-3.1-8b:8192:1,1b:8192:4"
ALONE = "llama-3.1-8b:8192:1:recompute,1b:8192:4"
WARM_UP = 4
AFTER = 5
"""Steps that a run of the trainer beside it goes on for, so that its last save is not among those measured."""
PEAK = 989e12


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """Rows for the cases: on all GPUs, then on one (where the 8B shape fits with its activations recomputed only)."""
    rows: list[dict[str, object]] = []
    given = options.cases
    for gpus, cases in ((options.gpus, given or CASES), (1, given or ALONE)):
        if gpus > 1 or options.gpus == 1 or not given:
            rows += bare(gpus, cases, options.steps or 12, options.out, options.compile == "true", 128_256)
    return rows


def bare(
    gpus: int, cases: str, steps: int, out: Path, compiled: bool, vocabulary: int = 0, *, dataset: str = "", warm_up: int = WARM_UP
) -> list[dict[str, object]]:
    """The bare loop's rows for ``cases``, on random tokens of ``vocabulary`` or on what the trainer would take from ``dataset``."""
    arguments = [cases, str(steps), str(out / "throughput.json"), str(int(compiled)), str(vocabulary), str(warm_up), dataset]
    torchrun(gpus, __file__, *arguments, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    found: list[dict[str, object]] = json.loads((out / "throughput.json").read_text())
    return found


def main() -> None:
    import torch
    import torch.distributed as dist

    from trainer.parallel import choose_device

    cases, steps, out, compiled, vocabulary, warm_up, dataset = sys.argv[1:]
    device = choose_device()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rows = []
    for case in cases.split(","):
        rows.append(one(case, int(steps), compiled == "1", int(vocabulary), int(warm_up), dataset))
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def random_tokens(vocabulary: int, length: int, batch: int) -> Callable[[int], Tensor]:
    """The same random tokens_BT for every step."""
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens_BT = torch.randint(0, vocabulary, (batch, length + 1), generator=generator)
    tokens_BT = tokens_BT.pin_memory() if torch.cuda.is_available() else tokens_BT
    return lambda step: tokens_BT


def trainer_tokens(dataset: str, length: int, batch: int) -> tuple[Callable[[int], Tensor], int]:
    """The tokens_BT that the trainer's step takes from ``dataset``, and the size of its vocabulary."""
    import torch
    import torch.distributed as dist

    from trainer.config import build
    from trainer.data import TokenDataset, rank_batch, sample_ids

    data, seed, ranks = TokenDataset(Path(dataset), length), build({"gpus_per_node": 1}).seed, dist.get_world_size()

    def tokens(step: int) -> Tensor:
        ids = sample_ids(seed, step, batch * ranks, data.samples)
        tokens_BT = data.batch(rank_batch(ids, dist.get_rank(), ranks, batch)[0])
        return tokens_BT.pin_memory() if torch.cuda.is_available() else tokens_BT

    return tokens, data.manifest.vocabulary_size


def one(case: str, steps: int, compiled: bool, vocabulary: int, warm_up: int, dataset: str) -> dict[str, Any]:
    """A row: build, warm up, ``steps`` steps."""
    import torch
    import torch.distributed as dist

    from trainer.config import build
    from trainer.model import flops_per_token, init_weights, model_config, parameter_count
    from trainer.optim import apply_learning_rate, build_optimizer, clip_gradients
    from trainer.parallel import choose_device, forward_backward, mean_over_ranks, prepare

    name, sequence, micro_batch, *recompute = case.split(":")
    length, batch, device = int(sequence), int(micro_batch), choose_device()
    tokens, vocabulary = trainer_tokens(dataset, length, batch) if dataset else (random_tokens(vocabulary, length, batch), vocabulary)
    shape = model_config(name, vocabulary)
    config = build({"max_steps": warm_up + steps + AFTER, "gpus_per_node": 1})
    model = prepare(shape, device, compile_blocks=compiled, recompute=bool(recompute))
    init_weights(model, config.seed)
    optimizer = build_optimizer(model, config)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began, times, loss, batch_BT = time.monotonic(), [], torch.zeros(()), tokens(1)
    for step in range(1, warm_up + steps + 1):
        loss = forward_backward(model, [batch_BT.to(device, non_blocking=True)])
        batch_BT = tokens(step + 1)  # (while a GPU is busy, as the trainer does)
        clip_gradients(model, config.gradient_clip)
        apply_learning_rate(optimizer, step, config)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step >= warm_up:
            if step in (warm_up, warm_up + steps) and device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.monotonic())
    seconds = (times[-1] - times[0]) / steps
    rate = batch * length / seconds
    parameters = parameter_count(shape)
    every = 6 * parameters + flops_per_token(shape, length) - 6 * (parameters - (0 if shape.tie_embeddings else shape.vocabulary_size * shape.dim))
    row = {
        "model": name + (" recomputed" if recompute else ""), "parameters": f"{parameters / 1e9:.2f}B", "GPUs": dist.get_world_size(),
        "batch a GPU": f"{batch} x {length}", "tokens/s/GPU": rate, "step, s": seconds,
        "MFU % (6N, embedding not counted)": 100 * rate * flops_per_token(shape, length) / PEAK, "MFU % (6N)": 100 * rate * every / PEAK,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0,
        "median, s": statistics.median(after - before for before, after in pairwise(times)), "warm-up, s": times[0] - began, "loss": mean_over_ranks(loss),
    }  # fmt: skip
    if dist.get_rank() == 0:
        print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
