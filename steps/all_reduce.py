"""One rank of a bandwidth check: all-reduce a buffer a few times and say how fast the bus was.

    torchrun --standalone --nproc-per-node N -m steps.all_reduce [--mebibytes M]

Rank 0 prints one JSON object: ``ranks``, ``backend``, ``bytes``, ``seconds`` (of one all-reduce), ``bus_gb_per_second``
(bytes x 2 (n - 1) / n over the seconds: what each link carried, comparable between sizes of the world).
"""

from __future__ import annotations

import argparse
import json
import time

ROUNDS = 10
WARM_UP = 3


def main(argv: list[str] | None = None) -> int:
    import torch
    import torch.distributed as dist

    from trainer.environment import has_gpu, local_rank

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=512)
    size = parser.parse_args(argv).mebibytes * 1024**2
    gpu = has_gpu()
    if gpu:
        torch.cuda.set_device(local_rank())
    dist.init_process_group("nccl" if gpu else "gloo")
    buffer = torch.ones(size // 4, dtype=torch.float32, device="cuda" if gpu else "cpu")
    took = 0.0
    for turn in range(WARM_UP + ROUNDS):
        if turn == WARM_UP:
            if gpu:
                torch.cuda.synchronize()
            dist.barrier()
            took = -time.perf_counter()
        dist.all_reduce(buffer)
        buffer /= dist.get_world_size()
    if gpu:
        torch.cuda.synchronize()
    took = (took + time.perf_counter()) / ROUNDS
    ranks = dist.get_world_size()
    if dist.get_rank() == 0:
        bandwidth = size * 2 * (ranks - 1) / ranks / took / 1e9
        found = {
            "ranks": ranks,
            "backend": dist.get_backend(),
            "bytes": size,
            "seconds": took,
            "bus_gb_per_second": bandwidth,
        }
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    main()
