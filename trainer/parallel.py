"""How a model is spread over the ranks: FSDP2 per block, bf16 with float32 reduction on GPUs, float32 on a CPU.

The order matters and lives in ``prepare``: meta build, compile (in place, so names stay), shard, materialise.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer import environment
from trainer.model import Block, ModelConfig, Transformer, build

ATTENTION = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
"""Attention kernels, the fastest on Hopper first (8192 positions, forward and backward: cuDNN 535 TFLOP/s, flash 283)."""


KEEP_GATHERED = 0.125
"""The part of a GPU's memory that gathered parameters may take between forward and backward."""


def choose_device() -> torch.device:
    """This process's device: its own GPU (made the current one), or the CPU where there is none."""
    if not environment.has_gpu():
        return torch.device("cpu")
    device = torch.device("cuda", environment.local_rank())
    torch.cuda.set_device(device)
    return device


def pin_threads(processes: int) -> None:
    """Share the cores among the ``processes`` of this node.

    Fixed for the life of the process: the number of threads decides the order in which sums are taken, and so the bits.
    """
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))


def data_parallel_mesh(device: torch.device) -> DeviceMesh:
    """All ranks of the default process group, in one dimension. Made afresh at each entry: a restart changes the group."""
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))


def apply_compile(model: Transformer) -> Transformer:
    """``torch.compile`` each block in place: the blocks are alike, so one is compiled for all. Call it before ``shard``."""
    for block in model.blocks:
        block.compile()
    model.compile_loss = True
    return model


def ready_compilers(*, restarted: bool) -> None:
    """Begin to start the processes that compile for GPUs, or after a restart none: everything is in the compile cache."""
    import torch._inductor.config
    from torch._inductor.async_compile import AsyncCompile

    if restarted:
        torch._inductor.config.compile_threads = 1
    elif environment.has_gpu():
        AsyncCompile.warm_pool()
        AsyncCompile.wakeup()


def shard(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """FSDP2 over ``mesh``, in place: a group per block, and one for embedding, last norm and output projection.

    The inputs are left as they are: rotary tables stay float32 when the parameters are cast to bf16. Where the gathered
    parameters take little of a GPU's memory, they are kept from the forward pass to the backward pass.
    """
    gather_again = True
    if mesh.device_type == "cuda":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        gathered = 2 * sum(parameter.numel() for parameter in model.parameters())
        gather_again = gathered > KEEP_GATHERED * torch.cuda.get_device_properties(mesh.device_type).total_memory
    else:
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=gather_again)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    fully_shard.state(model)._comm_ctx = SameStreams()  # type: ignore[attr-defined]
    return model


class SameStreams(FSDPCommContext):
    """FSDP's streams, the same for every model of this process.

    It takes new ones for each, and torch's allocator keeps what was freed for the stream that it was allocated for: with
    every in-process restart a set of buffers would stay behind, until torch gives out its 32 streams again.
    """

    STREAMS = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")
    _made: ClassVar[dict[tuple[str, str], Any]] = {}

    def lazy_init(self, device: torch.device) -> None:
        super().lazy_init(device)
        for name in self.STREAMS:
            setattr(self, name, self._made.setdefault((str(device), name), getattr(self, name)))


def prepare(
    config: ModelConfig, device: torch.device, *, compile_blocks: bool = False, recompute: bool = False
) -> Transformer:
    """A sharded model on ``device`` whose values are undefined: ``init_weights`` or a load must follow.

    ``recompute`` keeps each block's input only, and computes the rest of its activations again in the backward pass.
    """
    model = build(config, "meta")
    for block in model.blocks:
        assert isinstance(block, Block)
        block.recompute = recompute
    if compile_blocks:
        apply_compile(model)
    shard(model, data_parallel_mesh(device))
    model.to_empty(device=device)
    return model


def forward_backward(model: Transformer, batches_BT: Sequence[Tensor]) -> Tensor:
    """Gradients of the mean loss over the equally sized micro-batches ``batches_BT`` (T = L + 1 tokens) of all ranks.

    Gradients are reduced over the ranks once, in the last backward. Returns this rank's mean loss, detached, on the device.
    """
    total: Tensor | None = None
    for number, tokens_BT in enumerate(batches_BT, start=1):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number == len(batches_BT))
        with sdpa_kernel(list(ATTENTION), set_priority=True):
            loss = model(tokens_BT[:, :-1], tokens_BT[:, 1:]) / len(batches_BT)
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total


def mean_over_ranks(value: Tensor) -> float:
    """The mean of ``value`` over all ranks; every rank returns the same bits."""
    total = value.detach().float().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
