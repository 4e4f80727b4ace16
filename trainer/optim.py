"""AdamW, the learning rate as a function of the step, and gradient clipping under FSDP2. No scheduler, so no state of one."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from trainer.config import RunConfig

FINAL_FRACTION = 0.1
"""The learning rate of the last step over the peak."""


def build_optimizer(model: nn.Module, config: RunConfig) -> AdamW:
    """Fused AdamW over the parameters of ``model``; matrices decay, vectors (norms) do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True)


def learning_rate(step: int, config: RunConfig) -> float:
    """The rate of step ``step`` (from 1): linear warm-up, then a cosine from the peak to a tenth of it at ``max_steps``."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * (FINAL_FRACTION + (1.0 - FINAL_FRACTION) * cosine)


def apply_learning_rate(optimizer: torch.optim.Optimizer, step: int, config: RunConfig) -> float:
    """Set the rate of ``step`` in all parameter groups, and return it."""
    rate = learning_rate(step, config)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients so that their norm over all ranks is at most ``max_norm``; returns the norm before that.

    One reduction of one number, whatever the number of parameters. A norm that is not finite is returned and scales
    nothing: the caller must not step. All ranks return the same value.
    """
    gradients: list[Tensor] = []
    sharded: DTensor | None = None
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            sharded = gradient
            gradients.append(gradient.to_local())
        elif gradient is not None:
            gradients.append(gradient)
    norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
    squared = torch.stack(norms).square().sum()
    if sharded is not None:
        dist.all_reduce(squared, group=sharded.device_mesh.get_group())
    total = float(squared.sqrt())
    if math.isfinite(total) and total > max_norm:
        torch._foreach_mul_(gradients, max_norm / (total + 1e-6))
    return total
