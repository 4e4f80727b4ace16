"""The optimizer: which parameters decay, the learning rate as a function of the step, clipping on one process."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from trainer.config import RunConfig, build
from trainer.model import PRESETS, init_weights, token_loss
from trainer.model import build as build_model
from trainer.optim import apply_learning_rate, build_optimizer, clip_gradients, learning_rate


def config(**values: object) -> RunConfig:
    return build({"max_steps": 100, "warmup_steps": 10, "learning_rate": 1e-3, **values})


def test_the_rate_warms_up_linearly_then_falls_to_a_tenth() -> None:
    rates = [learning_rate(step, config()) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([1e-4 * step for step in range(1, 11)])
    assert max(rates) == rates[9] == 1e-3
    assert rates[10] < rates[9] and all(a > b for a, b in pairwise(rates[9:]))
    assert rates[54] == pytest.approx(0.55e-3, rel=1e-6)  # half-way
    assert rates[99] == pytest.approx(1e-4)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 5), (5, 5), (1, 1)])
def test_short_runs_have_a_rate_for_each_step(warmup: int, steps: int) -> None:
    for step in range(1, steps + 1):
        assert 0 < learning_rate(step, config(warmup_steps=warmup, max_steps=steps)) <= 1e-3


def test_the_rate_applies_to_all_groups() -> None:
    optimizer = build_optimizer(build_model(PRESETS["tiny"], "cpu"), config())
    assert apply_learning_rate(optimizer, 5, config()) == 5e-4
    assert [group["lr"] for group in optimizer.param_groups] == [5e-4, 5e-4]


def test_matrices_decay_and_vectors_do_not() -> None:
    model = build_model(PRESETS["tiny"], "cpu")
    init_weights(model, 0)
    optimizer = build_optimizer(model, config(weight_decay=0.1, learning_rate=0.1))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        expected = before[name] if parameter.ndim == 1 else before[name] * (1 - 0.1 * 0.1)
        torch.testing.assert_close(parameter.detach(), expected)


def test_the_update_is_that_of_torch_bit_for_bit() -> None:
    """Of parameters that get no gradient in some step too."""
    ours, theirs = (build_model(PRESETS["tiny"], "cpu") for _ in range(2))
    init_weights(ours, 0), init_weights(theirs, 0)
    optimizer = build_optimizer(ours, config(weight_decay=0.1))
    groups = build_optimizer(theirs, config(weight_decay=0.1)).param_groups
    reference = torch.optim.AdamW([{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(1, 5):
        generator = torch.Generator().manual_seed(step)
        for number, (mine, other) in enumerate(zip(ours.parameters(), theirs.parameters(), strict=True)):
            gradient = torch.randn(mine.shape, generator=generator)
            mine.grad, other.grad = (None, None) if number % 3 == 0 and step == 2 else (gradient, gradient.clone())
        apply_learning_rate(optimizer, step, config())
        apply_learning_rate(reference, step, config())
        optimizer.step()
        reference.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert all(torch.equal(optimizer.state[mine][key], reference.state[other][key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_a_few_steps_learn() -> None:
    model = build_model(PRESETS["tiny"], "cpu")
    init_weights(model, 0)
    optimizer = build_optimizer(model, config())
    tokens_BT = torch.arange(65).repeat(4, 1)
    losses = []
    for _ in range(15):
        loss = token_loss(model(tokens_BT[:, :-1]), tokens_BT[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert losses[-1] < 2.5


def test_clipping_agrees_with_torchs_own() -> None:
    ours, theirs = build_model(PRESETS["tiny"], "cpu"), build_model(PRESETS["tiny"], "cpu")
    for number, (a, b) in enumerate(zip(ours.parameters(), theirs.parameters(), strict=True)):
        a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(number))
        b.grad = a.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.5)
    assert clip_gradients(ours, 1.5) == pytest.approx(float(expected), rel=1e-5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_small_gradients_are_left_as_they_are() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[0.3, 0.4]])
    assert clip_gradients(model, 1.0) == pytest.approx(0.5)
    assert torch.equal(model.weight.grad, torch.tensor([[0.3, 0.4]]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_told_and_spreads_no_further(bad: float) -> None:
    model = torch.nn.Linear(2, 1, bias=True)
    model.weight.grad = torch.tensor([[bad, 1.0]])
    model.bias.grad = torch.tensor([4.0])
    assert not math.isfinite(clip_gradients(model, 1.0))
    assert model.bias.grad.item() == 4.0
