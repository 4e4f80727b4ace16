"""Part checkpoint: what a save costs training, for several ways to save the same state in the same loop.

After each save the loop trains on until the save is durable on all ranks. The time lost to it is what that took, less what as
many steps take without a save: the time that the loop waited, and by how much the steps beside the writing were slower.
Started by torchrun, once a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from gpu_torchrun import torchrun

STEPS_AT_LEAST = 4
BARE_STEPS = 20
LEARNING = 1e-5


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """Rows for the ways in ``options.cases``, or for all; those that were reached, where time was up."""
    # Half of the 1B shape has on one GPU what the whole has on each of two.
    model = "1b:8" if (options.model, options.gpus) == ("1b", 1) else options.model
    out = options.out / "checkpoint.json"
    out.unlink(missing_ok=True)
    arguments = [
        str(options.root), str(out), model, str(options.sequence_length or 2048),
        str(options.micro_batch_size or 8), options.compile, str(options.steps or 5), options.cases,
    ]  # fmt: skip
    try:
        torchrun(options.gpus, __file__, *arguments)
    except subprocess.TimeoutExpired as error:
        print(f"after {error.timeout:g} s there was no time for more", file=sys.stderr)
    found: list[dict[str, object]] = json.loads(out.read_text()) if out.exists() else []
    return found


class Way(Protocol):
    """One way to save."""

    def save(self, step: int, path: Path) -> None: ...

    def fence(self, step: int) -> None:
        """Called between the backward pass and the update of each step: the state may change after it."""

    def done(self) -> bool: ...

    def close(self) -> None: ...


class TorchSave:
    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def save(self, step: int, path: Path) -> None:
        import torch

        from trainer.optim import local

        path.mkdir(exist_ok=True)
        torch.save({name: local(tensor) for name, tensor in self._loop.state.tensors().items()}, path / str(self._loop.rank))

    def fence(self, step: int) -> None: ...

    def done(self) -> bool:
        return True

    def close(self) -> None: ...


class PlainNvrx:
    """NVRx's asynchronous torch.save, with its persistent process."""

    def __init__(self, loop: Loop) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        self._loop = loop
        self._saver = TorchAsyncCheckpoint(persistent_queue=True)

    def save(self, step: int, path: Path) -> None:
        from trainer.optim import local

        path.mkdir(exist_ok=True)
        state = {name: local(tensor) for name, tensor in self._loop.state.tensors().items()}
        self._saver.async_save(state, str(path / str(self._loop.rank)))

    def fence(self, step: int) -> None: ...

    def done(self) -> bool:
        self._saver.finalize_async_save(blocking=False)
        return bool(self._saver._get_async_calls_queue().get_num_unfinalized_calls() == 0)

    def close(self) -> None:
        self._saver.close()


class Dcp:
    """DCP's asynchronous save: in a thread or a process; copied as it comes, with the options for pinned memory, or into pinned
    memory that is kept between saves."""

    def __init__(self, loop: Loop, kind: str, staging: str = "") -> None:
        import torch.distributed as dist
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self._loop, self._kind, self._staging = loop, AsyncCheckpointerType[kind], staging
        self._group = dist.new_group(backend="gloo")
        self._stager: Any = None
        self._staged: Any = None
        self._written: Any = None

    def save(self, step: int, path: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

        if self._staging == "pinned":  # (anew each time: torch 2.11's closes itself after the first use)
            self.close()
            self._stager = DefaultStager(StagingOptions())
        elif self._staging == "kept" and self._stager is None:
            self._stager = BlockingAsyncStager(cache_staged_state_dict=True)
        answer = dcp.async_save(
            dict(self._loop.state.tensors()), checkpoint_id=str(path), process_group=self._group,
            async_checkpointer_type=self._kind, async_stager=self._stager,
        )  # fmt: skip
        self._staged, self._written = getattr(answer, "staging_completion", None), getattr(answer, "upload_completion", answer)

    def fence(self, step: int) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def done(self) -> bool:
        if self._written is not None and self._written.done():
            self._written.result()
            self._written = None
        return self._written is None

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class Ours:
    """The durable tier, as the trainer uses it: hashed, with a manifest, committed by a rename."""

    def __init__(self, loop: Loop) -> None:
        from trainer.checkpointing import DurableTier, WriterSlot
        from trainer.config import build
        from trainer.events import EventLog
        from trainer.paths import RunPaths
        from trainer.records import RunRecord
        from trainer.recovery.base import Limits, Watch

        self._loop = loop
        config = build({"root": str(loop.root), "run_id": "ours", "checkpoint_interval_steps": 1, "keep_checkpoints": 1})
        paths = RunPaths(loop.root, "ours")
        paths.checkpoints.mkdir(parents=True, exist_ok=True)
        record = RunRecord(
            config=config, config_digest="benchmark", dataset="", dataset_digest="", versions={}, hardware={}, created=0.0
        )
        self._watch = Watch(Limits.of(config))
        self._watch.start()
        self._slot = WriterSlot(120.0)
        self._tier = DurableTier(
            record, paths, 1, loop.state, loop.control, EventLog(paths.events, "ours", "trainer"), self._watch, self._slot
        )
        self._busy = False

    def save(self, step: int, path: Path) -> None:
        from trainer.checkpointing import Completed

        self._busy = True
        self._tier.after_step(Completed(step, busy=False, last=False, stopping=False))

    def fence(self, step: int) -> None:
        self._busy = self._tier.busy(step)

    def done(self) -> bool:
        return not self._busy

    def close(self) -> None:
        self._watch.close()
        self._slot.queue.close()
        if self._slot.staging is not None:
            self._slot.staging.close()


def start_fork_server(root: Path, rank: int) -> subprocess.Popen[bytes]:
    """The process that our writer is forked from; in a run there is one for each node, long before the first save."""
    address = str(root / f"fork-{rank}")
    os.environ["HOLDFAST_FORK_SERVER"] = address
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.recovery.fork_server", address, str(root / "runs" / "ours"), "1", "0", "0", "600"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_WARM_POOL": "0", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
    )


class Loop:
    """The training loop that saves are made in; every step ends with an agreement of all ranks."""

    def __init__(self, root: Path, model: str, length: int, batch: int, compiled: bool) -> None:
        import torch
        import torch.distributed as dist

        from trainer.checkpointing import TrainingState
        from trainer.config import build
        from trainer.model import init_weights, model_config
        from trainer.optim import build_optimizer
        from trainer.parallel import choose_device, prepare
        from trainer.rendezvous import Control

        self.root, self.device = root, choose_device()
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")
        self.rank = dist.get_rank()
        self.control = Control(dist.new_group(backend="gloo"), self.rank, dist.get_world_size())
        name, _, layers = model.partition(":")
        shape = model_config(name, 256)
        built = prepare(replace(shape, layers=int(layers or shape.layers)), self.device, compile_blocks=compiled)
        init_weights(built, 0)
        self.state = TrainingState(built, build_optimizer(built, build({"gpus_per_node": 1, "learning_rate": LEARNING})))
        self.tokens_BT = torch.randint(0, 256, (batch, length + 1), generator=torch.Generator().manual_seed(self.rank))
        self.step = 0

    def train(self, way: Way | None = None) -> bool:
        """One step; whether ``way`` is done with its save on all ranks."""
        import torch

        from trainer.optim import clip_gradients
        from trainer.parallel import forward_backward

        self.step += 1
        forward_backward(self.state.model, [self.tokens_BT.to(self.device)])  # type: ignore[arg-type]
        if way is not None:
            way.fence(self.step)
        clip_gradients(self.state.model, 1.0)
        self.state.optimizer.step()
        self.state.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return self.control.all(way is None or way.done())

    def bare(self) -> float:
        """Seconds of a step without a save: the mean."""
        began = time.monotonic()
        for _ in range(BARE_STEPS):
            self.train()
        return (time.monotonic() - began) / BARE_STEPS

    def compare(self, name: str, way: Way, saves: int) -> dict[str, object]:
        """A row: one save to warm up, then ``saves``, each until it is durable."""
        before, blocked, lost, durable, beside = self.bare(), [], [], [], []
        for number in range(saves + 1):
            path = self.root / f"{type(way).__name__}-{number}"
            self.control.all(True)
            began = time.monotonic()
            way.save(self.step, path)
            blocked.append(time.monotonic() - began)
            steps, ends = 0, False
            while steps < STEPS_AT_LEAST or not ends:
                ends = self.train(way)
                steps += 1
                if ends and len(durable) == number:
                    durable.append(time.monotonic() - began)
            beside.append(steps)
            lost.append(time.monotonic() - began - steps * before)
            if self.rank == 0:
                shutil.rmtree(path, ignore_errors=True)
        after = self.bare()
        lost = [seconds + steps * (before - (before + after) / 2) for seconds, steps in zip(lost, beside, strict=True)]
        mean = statistics.mean
        return {
            "way": name, "saves": saves, "lost per save, s": mean(lost[1:]), "blocked, s": mean(blocked[1:]), "durable after, s": mean(durable[1:]),
            "slower steps meanwhile %": 100 * (mean(lost[1:]) - mean(blocked[1:])) / (mean(beside[1:]) * before),
            "first save: lost, s": lost[0], "bare step, s": (before + after) / 2,
        }  # fmt: skip


def main() -> None:
    import torch.distributed as dist

    root, out, model, length, batch, compiled, saves, *wanted = sys.argv[1:]
    server = start_fork_server(Path(root), int(os.environ["RANK"]))
    loop = Loop(Path(root), model, int(length), int(batch), compiled == "true")
    for _ in range(5):
        loop.train()
    from trainer.checkpointing.staging import layout_of
    from trainer.records import write_whole

    size = layout_of(loop.state.tensors())[1] / 2**30
    ways = {
        "torch.save": lambda: TorchSave(loop),
        "ours": lambda: Ours(loop),
        "plain NVRx": lambda: PlainNvrx(loop),
        "DCP, threads, pinned, kept": lambda: Dcp(loop, "THREAD", "kept"),
        "DCP, process": lambda: Dcp(loop, "PROCESS"),
        "DCP, threads": lambda: Dcp(loop, "THREAD"),
        "DCP, process, pinned": lambda: Dcp(loop, "PROCESS", "pinned"),
    }
    rows: list[dict[str, object]] = []
    for name, make in ways.items():
        if wanted and wanted[0] and name not in wanted[0].split(";"):
            continue
        try:
            way = make()
            rows.append(loop.compare(name, way, int(saves)) | {"GiB a rank": size})
            way.close()
        except Exception:
            traceback.print_exc()
            rows.append({"way": name, "failed": traceback.format_exc(limit=-1).strip().replace("\n", " ")[-200:]})
        if loop.rank == 0:
            print(rows[-1], flush=True)
            write_whole(Path(out), json.dumps(rows).encode())
    dist.barrier()
    server.kill()
    os._exit(0)  # the ways leave threads and processes that wait for ever


if __name__ == "__main__":
    main()
