"""The loss over a large vocabulary: computed in parts, it is the loss of the whole, and so are its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.loss import projected_loss
from trainer.model import PRESETS, Transformer, build, init_weights, token_loss

B, L, D, V = 2, 13, 8, 50


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_BLD = torch.randn(B, L, D, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    return x_BLD, weight_VD, torch.randint(0, V, (B, L), generator=generator)


@pytest.mark.parametrize("positions", [1, 4, 5, 26, 1000])
def test_loss_and_gradients_are_those_of_all_positions_together(positions: int) -> None:
    results = []
    for chunked in (True, False):
        x_BLD, weight_VD, targets_BL = inputs(torch.float64)
        if chunked:
            loss = projected_loss(x_BLD, weight_VD, targets_BL, chunk_logits=positions * V)
        else:
            loss = F.cross_entropy((x_BLD @ weight_VD.T).flatten(0, 1), targets_BL.flatten())
        (loss / 3).backward()
        results.append((loss.detach().double(), x_BLD.grad, weight_VD.grad))
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-5)


def test_a_target_that_is_nearly_certain_keeps_its_small_gradient() -> None:
    """In bf16, one minus a probability of 0.9997 must not be rounded to zero."""
    x_BLD = torch.ones(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight_VD = torch.tensor([[8.0], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    projected_loss(x_BLD, weight_VD, torch.zeros(1, 1, dtype=torch.int64)).backward()
    assert weight_VD.grad is not None
    assert weight_VD.grad[0].item() == pytest.approx(-1 / (1 + 2.718281828**8), rel=0.01)


def test_without_gradients_it_is_the_same_loss() -> None:
    x_BLD, weight_VD, targets_BL = inputs(torch.float32)
    with torch.inference_mode():
        bare = projected_loss(x_BLD.detach(), weight_VD.detach(), targets_BL, chunk_logits=3 * V)
    assert bare.item() == pytest.approx(projected_loss(x_BLD, weight_VD, targets_BL).item(), rel=1e-6)


def gradients(model: Transformer, *, recompute: bool) -> tuple[float, list[Tensor | None]]:
    for block in model.blocks:
        block.recompute = recompute
    model.zero_grad()
    tokens_BT = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(3))
    loss = model(tokens_BT[:, :-1], tokens_BT[:, 1:])
    loss.backward()
    assert loss.item() == pytest.approx(token_loss(model(tokens_BT[:, :-1]), tokens_BT[:, 1:]).item(), rel=1e-6)
    return loss.item(), [parameter.grad for parameter in model.parameters()]


def test_recomputed_activations_give_the_same_bits() -> None:
    model = build(PRESETS["tiny"], "cpu")
    init_weights(model, 0)
    plain, again = gradients(model, recompute=False), gradients(model, recompute=True)
    assert plain[0] == again[0]
    for one, other in zip(plain[1], again[1], strict=True):
        assert one is not None and other is not None and torch.equal(one, other)
