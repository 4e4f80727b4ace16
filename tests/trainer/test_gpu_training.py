"""What only a GPU shows: NCCL, bf16 with float32 state, compiled blocks, and the initial weights of a large model in seconds."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer.checkpointing.staging import AnonymousBuffer, layout_of
from trainer.checkpointing.transfer import PIECE
from trainer.config import build as build_config
from trainer.loss import LARGE_VOCABULARY, projected_loss
from trainer.model import PRESETS, build, init_weights, token_loss
from trainer.optim import apply_learning_rate, build_optimizer, clip_gradients
from trainer.parallel import choose_device, forward_backward, mean_over_ranks, prepare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or none that a run without -m gpu sees"),
]


@pytest.fixture
def device(tmp_path: Path) -> Iterator[torch.device]:
    """The GPU, with an NCCL group of one rank."""
    chosen = choose_device()
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield chosen
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # the compiler's own, on its way
@pytest.mark.parametrize("compile_blocks", [False, True])
def test_training_learns_in_bf16_with_float32_state(device: torch.device, compile_blocks: bool) -> None:
    config = build_config({"max_steps": 20, "warmup_steps": 2, "gpus_per_node": 1, "learning_rate": 3e-3})
    model = prepare(PRESETS["tiny"], device, compile_blocks=compile_blocks)
    init_weights(model, 0)
    optimizer = build_optimizer(model, config)
    tokens_BT = torch.randint(0, 256, (8, 129), generator=torch.Generator().manual_seed(0)).to(device)
    expected = reference_loss(model, tokens_BT)
    losses = []
    for step in range(1, 21):
        loss = forward_backward(model, list(tokens_BT.split(4)))
        assert clip_gradients(model, 1.0) > 0
        apply_learning_rate(optimizer, step, config)
        optimizer.step()
        if step == 1:
            assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
            assert model(tokens_BT[:, :-1]).dtype == torch.bfloat16
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    assert losses[0] == pytest.approx(expected, rel=5e-3)
    assert losses[-1] < losses[0] - 0.5
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def reference_loss(model: torch.nn.Module, tokens_BT: torch.Tensor) -> float:
    """The loss of the same weights in float32 on the CPU."""
    plain = build(PRESETS["tiny"], "cpu")
    plain.load_state_dict({name: value.full_tensor().cpu() for name, value in model.state_dict().items()})
    tokens_BT = tokens_BT.cpu()
    return float(token_loss(plain(tokens_BT[:, :-1]), tokens_BT[:, 1:]).detach())


def test_a_copy_beside_training_holds_the_state_of_its_beginning(device: torch.device) -> None:
    """Larger than what one thread moves at a time, and of odd sizes; what is waited for may change."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = {"large": 3 * PIECE + 12, "small": 7, "one": 1}
    tensors = {name: torch.randn(size, device=device, generator=generator) for name, size in sizes.items()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    layout, size = layout_of(tensors)
    staging = AnonymousBuffer(size)
    for tensor in tensors.values():  # what is still to be computed when the copy begins belongs to it
        tensor.mul_(2).div_(2)
    copying = staging.buffer.store(tensors, layout)
    assert not copying.done
    copying.wait()
    for tensor in tensors.values():
        tensor.fill_(-1.0)
    staging.buffer.load(tensors, layout)
    assert all(torch.equal(tensors[name], before[name]) for name in sizes)
    staging.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_of_a_large_vocabulary_is_the_loss_of_its_logits(device: torch.device, compiled: bool) -> None:
    generator = torch.Generator(device).manual_seed(0)
    x_BLD = torch.randn(2, 96, 64, device=device, generator=generator).bfloat16().requires_grad_()
    weight_VD = (torch.randn(LARGE_VOCABULARY, 64, device=device, generator=generator) / 8).bfloat16().requires_grad_()
    targets_BL = torch.randint(0, LARGE_VOCABULARY, (2, 96), device=device, generator=generator)
    loss = projected_loss(x_BLD, weight_VD, targets_BL, chunk_logits=64 * LARGE_VOCABULARY, compiled=compiled)
    loss.backward()
    found = (x_BLD.grad, weight_VD.grad)
    x_BLD.grad = weight_VD.grad = None
    expected = token_loss(x_BLD.float() @ weight_VD.float().T, targets_BL)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    for mine, whole in zip(found, (x_BLD.grad, weight_VD.grad), strict=True):
        assert mine is not None and whole is not None
        assert (mine - whole).float().norm() < 0.02 * whole.float().norm()


def test_a_large_model_has_its_weights_within_seconds(device: torch.device) -> None:
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free GPU memory")
    model = prepare(PRESETS["llama-3.1-8b"], device)
    torch.cuda.synchronize()
    began = time.monotonic()
    init_weights(model, 0)
    torch.cuda.synchronize()
    assert time.monotonic() - began < 10
    local = model.blocks[31].ffn.gate.weight.to_local()
    assert local.std().item() == pytest.approx(0.02, rel=0.01) and abs(local.mean().item()) < 1e-4


@pytest.mark.filterwarnings("ignore")
def test_a_model_made_anew_takes_no_more_memory_than_the_one_before(device: torch.device) -> None:
    """As after an in-process restart: the process and what its allocator keeps are the same, the model is another."""
    config = build_config({"max_steps": 20, "gpus_per_node": 1})
    tokens_BT = torch.randint(0, 256, (8, 129)).to(device)
    reserved = []
    for _ in range(6):
        model = prepare(PRESETS["tiny"], device)
        init_weights(model, 0)
        optimizer = build_optimizer(model, config)
        for _ in range(2):
            forward_backward(model, [tokens_BT])
            optimizer.step()
            optimizer.zero_grad()
        del model, optimizer
        gc.collect()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[1:] == [reserved[1]] * 5
