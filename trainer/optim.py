"""AdamW, the learning rate as a function of the step, and gradient clipping under FSDP2. No scheduler, so no state of one."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from trainer.config import RunConfig

FINAL_FRACTION = 0.1
"""The learning rate of the last step over the peak."""


class ShardAdamW(AdamW):
    """Torch's fused AdamW, given this rank's shards as plain tensors.

    By way of DTensors the host needs 5 ms to launch the update of a 1B model, in which the GPU has nothing to do: it comes
    right after the gradients' norm, which the host waits for.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; ``closure`` is not supported."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            states = [moments(self, parameter) for parameter in parameters]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                [local(parameter) for parameter in parameters],
                [local(parameter.grad) for parameter in parameters],
                [local(state["exp_avg"]) for state in states],
                [local(state["exp_avg_sq"]) for state in states],
                [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )


def moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The optimizer's state of a parameter, made where there is none yet as AdamW does at its first step."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter.detach())
        state["exp_avg_sq"] = torch.zeros_like(parameter.detach())
    return state


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def build_optimizer(model: nn.Module, config: RunConfig) -> AdamW:
    """AdamW over the parameters of ``model``; matrices decay, vectors (norms) do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return ShardAdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True)


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
