"""What this project does on this machine's GPUs, in parts of a few minutes each; every part prints one short table.

    python benchmarks/gpu.py --part throughput|recovery|price|restarts [--gpus 2] [--out DIR]
    python benchmarks/gpu.py --part checkpoint --gpus 1      # (all ways take too long on two)

throughput   bf16 FSDP2, compiled blocks: tokens/s and MFU of the 8B and the 1B shape
checkpoint   training time lost per save: ours, torch.save, DCP's asynchronous ways, plain NVRx; the same loop and state
recovery     exception, SIGKILL and hang with the 1B model compiled; plain ft_launcher beside it
price        the pipeline's training with everything on against the bare loop
restarts     twenty exceptions and twenty SIGKILLs in a row: GPU memory, sockets and processes before and after

Everything is written below --root, which must have room: for the parts but ``throughput``, memory (/dev/shm).
The tables are kept in benchmarks/gpu.md with their date. On a machine without GPUs, ``--model tiny`` shows that a part runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gpu_checkpoint
import gpu_recovery
import gpu_runs
import gpu_throughput

PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, object]]]] = {
    "throughput": gpu_throughput.measure,
    "checkpoint": gpu_checkpoint.measure,
    "recovery": gpu_recovery.measure,
    "price": gpu_runs.price,
    "restarts": gpu_recovery.restarts,
}


def show(rows: list[dict[str, object]]) -> str:
    """The rows as a table in Markdown; rows with other columns begin another table."""
    lines: list[str] = []
    columns: list[str] = []
    for row in rows:
        if list(row) != columns:
            columns = list(row)
            lines += ["", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        cells = (f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}" if isinstance(value, float) else str(value) for value in row.values())
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", required=True, choices=PARTS)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--root", type=Path, default=Path("/dev/shm/holdfast-benchmark"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    parser.add_argument("--model", default="1b", help="a preset; for checkpoint also PRESET:LAYERS [1b; checkpoint on one GPU 1b:8]")
    parser.add_argument("--cases", default="", help="throughput: MODEL:SEQUENCE:BATCH[:recompute],...; recovery: MODE/KIND,KIND... with spaces between")
    parser.add_argument("--steps", type=int, default=0, help="measured steps (0: the part's own)")
    parser.add_argument("--sequence-length", type=int, default=0)
    parser.add_argument("--micro-batch-size", type=int, default=0)
    parser.add_argument("--compile", default="true")
    options = parser.parse_args()
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    options.root.mkdir(parents=True, exist_ok=True)
    options.root = options.root.absolute()
    os.environ["PYTHONPATH"] = f"{gpu_runs.REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"
    try:
        table = show(PARTS[options.part](options))
    finally:
        shutil.rmtree(options.root, ignore_errors=True)
    (options.out / f"{options.part}.md").write_text(table + "\n")
    print(f"{table}\n\n{options.part}: {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
