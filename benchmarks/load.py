# SPDX-License-Identifier: Apache-2.0
"""Times the loading of one MoE layer with 256 experts into the installed vLLM, and its peak of GPU memory.

usage: load.py [--formats mxfp4 nvfp4 mxfp4_fp8] [--experts 256] [--hidden 7168] [--intermediate 2048] [--repeats 2]
               [--out FILE] [--profile]
Runs this package (--quantization humming) and Marlin (compressed-tensors), each in a process of its own, and prints
both. mxfp4_fp8 (MXFP4 for FP8 activations) is this package's alone. --profile also says, on standard error, where the
time of one more layer goes. benchmarks/README.md states the protocol.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import torch
from load_profile import report
from protocol import require_gpu
from vllm_layer import make_layer, method_of, start_vllm

# label: (quantization, environment)
CONTESTANTS = {
    "vllm-humming": ("humming", {}),
    "marlin": ("compressed-tensors", {"VLLM_PLUGINS": ""}),
}
WARM_UP_EXPERTS = 2
SEEDS = (0, 1)  # experts take turns, so that what is left of the last one's tensors shows
GIB = 1 << 30


def checkpoint_tensors(hidden, intermediate, fmt, seed=0):
    """(projection, suffix, shard, tensor) of one expert, as compressed-tensors checkpoints have them, on the host."""
    gen = torch.Generator(device="cpu").manual_seed(seed)
    group, low, high = (32, 118, 123) if fmt != "nvfp4" else (16, 0x30, 0x48)

    def random(low, high, *shape):
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=gen, device="cpu")

    tensors = []
    for projection, shard, rows, k in (
        ("w13", "w1", intermediate, hidden),
        ("w2", "w2", hidden, intermediate),
        ("w13", "w3", intermediate, hidden),
    ):
        scales = random(low, high, rows, k // group)
        tensors.append((projection, "weight_packed", shard, random(0, 256, rows, k // 2)))
        if fmt != "nvfp4":
            tensors.append((projection, "weight_scale", shard, scales))
            continue
        tensors.append((projection, "weight_scale", shard, scales.view(torch.float8_e4m3fn)))
        for suffix in ("weight_global_scale", "input_global_scale"):
            tensors.append((projection, suffix, shard, torch.full((1,), 64.0, dtype=torch.float32, device="cpu")))
    return tensors


def load_experts(layer, kinds, experts):
    """Hands each expert the tensors of the next of `kinds` through the parameters' weight_loader, as models do."""
    params = dict(layer.named_parameters())
    for expert in range(experts):
        for projection, suffix, shard, tensor in kinds[expert % len(kinds)]:
            param = params[f"{projection}_{suffix}"]
            name = f"{layer.layer_name}.{expert}.{shard}.{suffix}"
            done = param.weight_loader(param, tensor, name, shard_id=shard, expert_id=expert, return_success=True)
            if not done:
                raise RuntimeError(f"{name} was not loaded")


def experts_are_equal(layer, experts):
    """Whether experts that got equal tensors hold equal bytes, and others do not hold the same codes."""
    kinds = len(SEEDS)
    for param in layer.parameters():
        if param.dim() and param.shape[0] == experts:
            values = param.data.contiguous().view(experts, -1).view(torch.uint8)
            if not all(torch.equal(values[expert], values[expert % kinds]) for expert in range(kinds, experts)):
                return False
            # Codes are much the largest; biases and markers may be equal.
            if param.nbytes > layer_bytes(layer) / 8 and any(
                torch.equal(values[0], other) for other in values[1:kinds]
            ):
                return False
    return True


def layer_bytes(layer):
    return sum(param.nbytes for param in layer.parameters())


def prepare(args, experts, kinds, number, device):
    """(layer, seconds of its construction, the loader's calls and process_weights_after_loading)."""
    marks = [time.perf_counter()]

    def mark():
        if device == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())

    with torch.device(device):
        top_k = min(8, experts - 1)
        layer = make_layer(
            args.hidden, args.intermediate, experts, top_k, args.one, args.fmt, f"layers.{number}.experts"
        )
    mark()
    load_experts(layer, kinds, experts)
    mark()
    layer.quant_method.process_weights_after_loading(layer)
    mark()
    return layer, [stop - start for start, stop in pairwise(marks)]


def one(args):
    """Measures the installed method of one quantisation in this process; the last line printed is the record."""
    with ExitStack() as stack:
        vllm_config = start_vllm(stack)
        torch.set_default_device(None)  # a model's constructor alone has the GPU as the default
        kinds = [checkpoint_tensors(args.hidden, args.intermediate, args.fmt, seed) for seed in SEEDS]
        seconds, peaks, held, equal, method = [], [], 0, True, ""
        for repeat in range(args.repeats + 1):
            experts = args.experts if repeat else WARM_UP_EXPERTS
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            layer, times = prepare(args, experts, kinds, repeat, "cuda")
            peak = torch.cuda.max_memory_allocated() - before
            gc.collect()
            if repeat:
                seconds.append(times)
                peaks.append(peak)
                held = torch.cuda.memory_allocated() - before
                equal = equal and experts_are_equal(layer, experts)
            method = method_of(layer)
            del layer
            vllm_config.compilation_config.static_forward_context.clear()  # it holds the layers
        if args.profile:
            top_k = min(8, args.experts - 1)
            with torch.device("cuda"):
                layer = make_layer(
                    args.hidden, args.intermediate, args.experts, top_k, args.one, args.fmt, "layers.profile.experts"
                )
            print(*report(layer, args.experts, kinds, load_experts, "cuda"), sep="\n", file=sys.stderr, flush=True)
        print(json.dumps(record(args, seconds, peaks, held) | dict(equal=equal, method=method)), flush=True)
    return 0


def record(args, seconds, peaks, held):
    """Means over the repeats; peaks and held are bytes beyond what was there before the layer."""
    build, load, process = (sum(column) / len(seconds) for column in zip(*seconds, strict=True))
    return dict(
        label=args.label,
        fmt=args.fmt,
        e=args.experts,
        hidden=args.hidden,
        intermediate=args.intermediate,
        seconds=round(build + load + process, 3),
        build_s=round(build, 3),
        load_s=round(load, 3),
        process_s=round(process, 3),
        seconds_each=[round(sum(times), 3) for times in seconds],
        peak_gib=round(max(peaks) / GIB, 3),
        held_gib=round(held / GIB, 3),
        beyond_gib=round((max(peaks) - held) / GIB, 3),
    )


def table(records):
    """The lines of all records; each format's times and peaks beside Marlin's."""
    head = f"{'format':<7} {'method':<14} {'s':>7} {'build':>7} {'load':>7} {'process':>8} {'peak GiB':>9}"
    lines = [f"{head} {'layer':>7} {'beyond':>7}  Marlin's time, peak / this one's"]
    marlin = {r["fmt"]: r for r in records if r["label"] == "marlin"}
    for r in records:
        base = marlin.get(r["fmt"])
        ratio = f"{base['seconds'] / r['seconds']:.2f}, {base['peak_gib'] / r['peak_gib']:.2f}" if base else "-"
        note = "" if r["equal"] else "  EXPERTS DIFFER"
        lines.append(
            f"{r['fmt']:<7} {r['label']:<14} {r['seconds']:>7.2f} {r['build_s']:>7.2f} {r['load_s']:>7.2f} "
            f"{r['process_s']:>8.2f} {r['peak_gib']:>9.2f} {r['held_gib']:>7.2f} {r['beyond_gib']:>7.2f}  {ratio}{note}"
        )
    return lines


def contestant(args, label, fmt):
    """The record of one contestant, measured in a process of its own, or None after printing why there is none."""
    quant, environment = CONTESTANTS[label]
    command = [sys.executable, str(Path(__file__).resolve()), "--one", quant, "--label", label, "--fmt", fmt]
    for name in ("experts", "hidden", "intermediate", "repeats"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--profile"] if args.profile else []
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        print(f"FAIL {label} {fmt}: exit status {done.returncode}", *lines[-5:], sep="\n", flush=True)
        return None
    return json.loads(lines[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=["mxfp4", "nvfp4", "mxfp4_fp8"], default=["mxfp4", "nvfp4"])
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, help="append one JSON line a contestant and format")
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    for name in ("--one", "--label", "--fmt"):  # of the processes that this one starts
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    require_gpu()
    if args.one:
        return one(args)
    pairs = [
        (label, fmt)
        for fmt in args.formats
        for label in args.contestants
        if fmt != "mxfp4_fp8" or label == "vllm-humming"
    ]
    records = [found for label, fmt in pairs if (found := contestant(args, label, fmt))]
    if args.out and records:
        with args.out.open("a") as file:
            file.writelines(json.dumps(found) + "\n" for found in records)
    print(*table(records), sep="\n")
    return 0 if len(records) == len(pairs) and all(found["equal"] for found in records) else 1


if __name__ == "__main__":
    sys.exit(main())
