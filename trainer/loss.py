"""Cross entropy of the next token without the logits of a whole batch in memory.

A vocabulary of 128,256 makes half a megabyte of logits a token. So the output projection, the loss and both its gradients
are computed a few positions at a time, in the forward pass; the backward pass only scales the gradients.

Letters as in ``model``; N positions (B x L), M of them at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_LOGITS = 1 << 28
"""Logits in memory at a time: float32 ones of as many take 1 GiB."""


def projected_loss(
    x_BLD: Tensor, weight_VD: Tensor, targets_BL: Tensor, *, chunk_logits: int = CHUNK_LOGITS
) -> Tensor:
    """Mean cross entropy of ``x @ weight.T`` over all positions, nats per token, float32.

    The same as ``F.cross_entropy`` of the float32 logits, gradients included.
    """
    at_once = max(1, chunk_logits // weight_VD.shape[0])
    loss: Tensor = _ProjectedLoss.apply(
        x_BLD.flatten(0, 1), weight_VD, targets_BL.flatten(), at_once, torch.is_grad_enabled()
    )  # type: ignore[no-untyped-call]
    return loss


class _ProjectedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, at_once: int, with_gradients: bool
    ) -> Tensor:
        positions = x_ND.shape[0]
        total = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        gradient_ND = torch.empty_like(x_ND) if with_gradients else None
        gradient_VD = torch.zeros_like(weight_VD) if with_gradients else None
        for start in range(0, positions, at_once):
            x_MD, targets_M1 = x_ND[start : start + at_once], targets_N[start : start + at_once, None]
            logits_MV = x_MD @ weight_VD.T
            log_p_MV = F.log_softmax(logits_MV, dim=-1, dtype=torch.float32)
            log_p_M1 = log_p_MV.gather(-1, targets_M1)
            total -= log_p_M1.sum()
            if gradient_ND is None or gradient_VD is None:
                continue
            # softmax minus one at the target; that difference is taken in float32, since it may be tiny.
            torch.exp(log_p_MV, out=logits_MV)
            logits_MV.scatter_(-1, targets_M1, torch.expm1(log_p_M1).to(logits_MV.dtype))
            torch.mm(logits_MV, weight_VD, out=gradient_ND[start : start + at_once])
            gradient_VD.addmm_(logits_MV.T, x_MD)
        ctx.save_for_backward(gradient_ND, gradient_VD)
        ctx.positions = positions
        return total / positions

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        gradient_ND, gradient_VD = ctx.saved_tensors
        scale = outer[0] / ctx.positions
        return gradient_ND.mul_(scale), gradient_VD.mul_(scale), None, None, None
