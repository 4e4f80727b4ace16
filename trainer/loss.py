"""Cross entropy of the next token without the logits of a whole batch in memory.

A vocabulary of 128,256 makes half a megabyte of logits a token. So the output projection, the loss and both its gradients
are computed a few positions at a time, in the forward pass; the backward pass only scales the gradients.

Letters as in ``model``; N positions (B x L), M of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_LOGITS = 1 << 28
"""Logits in memory at a time: float32 ones of as many take 1 GiB."""


LARGE_VOCABULARY = 1 << 15
"""From so many tokens on, compiled code for the softmax pays for what a restart takes to load it."""

Softmax = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def projected_loss(
    x_BLD: Tensor, weight_VD: Tensor, targets_BL: Tensor, *, chunk_logits: int = CHUNK_LOGITS, compiled: bool = False
) -> Tensor:
    """Mean cross entropy of ``x @ weight.T`` over all positions, nats per token, float32.

    The same as ``F.cross_entropy`` of the float32 logits, gradients included.
    """
    x_ND, targets_N1 = x_BLD.flatten(0, 1), targets_BL.reshape(-1, 1)
    chunks = -(-x_ND.shape[0] * weight_VD.shape[0] // chunk_logits)
    at_once = -(-x_ND.shape[0] // max(1, chunks))
    softmax = compiled_softmax() if compiled and weight_VD.shape[0] >= LARGE_VOCABULARY else log_p_and_gradient
    loss: Tensor = _ProjectedLoss.apply(
        x_ND, weight_VD, targets_N1, at_once, softmax, torch.is_grad_enabled()
    )  # type: ignore[no-untyped-call]
    return loss


def log_p_and_gradient(logits_MV: Tensor, targets_M1: Tensor) -> tuple[Tensor, Tensor]:
    """The summed log-probability of the targets, and the gradient of its negative: the softmax, less one at the target.

    That difference is taken in float32, since it may be tiny.
    """
    log_p_MV = F.log_softmax(logits_MV.float(), dim=-1)
    is_target_MV = torch.arange(logits_MV.shape[1], device=logits_MV.device) == targets_M1
    gradient_MV = torch.where(is_target_MV, torch.expm1(log_p_MV), torch.exp(log_p_MV))
    return log_p_MV.gather(-1, targets_M1).sum(), gradient_MV.to(logits_MV.dtype)


@cache
def compiled_softmax() -> Softmax:
    """``log_p_and_gradient`` as one reduction and one pass, for the life of the process."""
    return torch.compile(log_p_and_gradient, dynamic=False)


class _ProjectedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N1: Tensor, at_once: int, softmax: Softmax, with_gradients: bool
    ) -> Tensor:
        positions = x_ND.shape[0]
        total = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        gradient_ND = torch.empty_like(x_ND) if with_gradients else None
        gradient_VD = torch.zeros_like(weight_VD) if with_gradients else None
        for start in range(0, positions, at_once):
            x_MD = x_ND[start : start + at_once]
            log_p, gradient_MV = softmax(x_MD @ weight_VD.T, targets_N1[start : start + at_once])
            total -= log_p
            if gradient_ND is not None and gradient_VD is not None:
                torch.mm(gradient_MV, weight_VD, out=gradient_ND[start : start + at_once])
                gradient_VD.addmm_(gradient_MV.T, x_MD)
        ctx.save_for_backward(gradient_ND, gradient_VD)
        ctx.positions = positions
        return total / positions

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        gradient_ND, gradient_VD = ctx.saved_tensors
        scale = outer[0] / ctx.positions
        return gradient_ND.mul_(scale), gradient_VD.mul_(scale), None, None, None, None
