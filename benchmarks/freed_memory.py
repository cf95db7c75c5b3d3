"""Training steps on CPU whose process keeps freed memory, as that of the quickstart does, beside glibc's default.

    ebft fetch smollm2-135m
    python -m benchmarks.freed_memory

Strided steps of SmolLM2-135M with AdamW on documents of changing length, one thread, in processes of their own that
take turns. CPU seconds count, to which other work on the machine adds little; each way has those of its fastest
process. Seconds and page faults are of all steps but the first two; the peak is that of the resident memory of the
process.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.measuring import RESULTS, Clock, machine, parser_of, quiet_folder, store
from benchmarks.presets import Preset, document, find_preset
from benchmarks.sides import ours
from ebft.prefix.cpu import keep_freed_memory

WAYS = ("default", "kept")
LENGTHS = (256, 256, 64, 160, 320, 256, 96, 224)
WARM_UP = 2  # steps that are left out


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each way")
    parser.add_argument("--way", choices=WAYS, help="only this way, in this process; prints its JSON")
    plan = parser.parse_args(arguments)
    preset = find_preset("smollm2", on_cuda=False)
    preset = preset.shrunken() if plan.tiny else preset
    if plan.way:
        print(json.dumps(steps(preset, plan.dtype, plan.way)))
        return
    Clock.count_cpu_seconds()
    given = sys.argv[1:] if arguments is None else arguments
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(plan.rounds):
        for way in WAYS:
            found[way].append(in_new_process([*given, "--way", way]))
    ways = {way: min(rounds, key=lambda each: each["seconds"]) for way, rounds in found.items()}
    for way, values in ways.items():
        print(
            f"{way:8s} {values['seconds']:7.2f} CPU s (system {values['system']:.2f})  "
            f"{values['page_faults']:9,.0f} page faults  peak {values['peak_mib']:6,.0f} MiB"
        )
    print(f"kept / default: {(ratio := ways['kept']['seconds'] / ways['default']['seconds']):.3f} x the CPU time")
    card = {"model": preset.weights or preset.description, "dtype": plan.dtype, "lengths": LENGTHS[WARM_UP:]}
    results = {"card": {**card, "rounds": plan.rounds, **machine(torch.device("cpu"))}, "ways": ways, "ratio": ratio}
    store(plan.output or RESULTS / f"freed-memory-{preset.name}-{plan.dtype}-cpu.json", results)


def in_new_process(arguments: list[str]) -> dict[str, float]:
    """What `steps` returns in a process without settings of malloc in its environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-m", "benchmarks.freed_memory", *arguments]
    done = subprocess.run(command, env=clean, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def steps(preset: Preset, dtype: str, way: str) -> dict[str, Any]:
    """CPU seconds and page faults of the steps, and the peak of the process."""
    torch.set_num_threads(1)
    if way == "kept":
        keep_freed_memory()
    with quiet_folder() as folder:
        side = ours(preset, dtype=dtype, positions=max(LENGTHS), folder=folder)
        model = side.trainer.model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        for number, length in enumerate(LENGTHS):
            if number == WARM_UP:
                before, started = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
            side.trainer.compute_loss(model, document(preset, length, side.device)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    seconds, after = time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": seconds,
        "system": after.ru_stime - before.ru_stime,
        "page_faults": after.ru_minflt - before.ru_minflt,
        "peak_mib": after.ru_maxrss / 2**10,
    }


if __name__ == "__main__":
    main()
