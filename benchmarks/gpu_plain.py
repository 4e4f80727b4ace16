"""A plain worker for ft_launcher, to compare with: model, state from memory, steps; rank 1 kills itself in cycles 0 and 1.

Started by gpu_recovery, once a rank. It leaves a file with a time for each phase.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

FOLDER, MODEL, LENGTH, BATCH, COMPILE = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "true"
RANK, WORLD, CYCLE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def mark(name: str) -> None:
    (FOLDER / f"mark-{name}").write_text(repr(time.monotonic()))


mark(f"{CYCLE}-start-{RANK}")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient  # noqa: E402

from trainer.checkpointing.base import TrainingState  # noqa: E402
from trainer.config import build  # noqa: E402
from trainer.model import init_weights, model_config  # noqa: E402
from trainer.optim import build_optimizer, clip_gradients, local  # noqa: E402
from trainer.parallel import choose_device, forward_backward, prepare  # noqa: E402

mark(f"{CYCLE}-imports-{RANK}")
client = RankMonitorClient()
client.init_workload_monitoring()
device = choose_device()
dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
dist.barrier()
mark(f"{CYCLE}-group-{RANK}")
shape = model_config(MODEL, 256)
model = prepare(shape, device, compile_blocks=COMPILE)
state = TrainingState(model, build_optimizer(model, build({"gpus_per_node": 1})))
mark(f"{CYCLE}-build-{RANK}")
path = FOLDER / f"state-{RANK}"
if CYCLE:
    for name, tensor in torch.load(path, map_location="cpu", mmap=True).items():
        local(state.tensors()[name]).copy_(tensor)
else:
    init_weights(model, 0)
mark(f"{CYCLE}-load-{RANK}")
generator = torch.Generator().manual_seed(RANK)
for step in range(12):
    client.send_heartbeat()
    tokens_BT = torch.randint(0, 256, (BATCH, LENGTH + 1), generator=generator)
    forward_backward(model, [tokens_BT.to(device)])
    clip_gradients(model, 1.0)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    if step == 0:
        mark(f"{CYCLE}-step-{RANK}")
    if step == 5 and CYCLE == 0:
        torch.save({name: local(tensor) for name, tensor in state.tensors().items()}, path)
        dist.barrier()
    if step == 8 and CYCLE < 2 and RANK == WORLD - 1:
        mark(f"killed-{CYCLE}")
        os.kill(os.getpid(), signal.SIGKILL)
client.shutdown_workload_monitoring()
dist.destroy_process_group()
