# SPDX-License-Identifier: Apache-2.0
"""Where the time of loading one layer goes: the host's seconds by step, its operators for one expert, rates of copies.

load.py --profile prints it. The steps are this package's; of other methods there are the operators and the rates.
"""

import time
from collections import defaultdict
from contextlib import contextmanager

import torch

ROUNDS = 5
OPERATORS = 25  # listed


class Steps:
    """Seconds and calls of functions while they are watched; what a watched one calls counts for that one alone."""

    def __init__(self):
        self.seconds, self.calls = defaultdict(float), defaultdict(int)
        self._inside = []  # seconds of watched calls within each running one

    def timed(self, step, function):
        def call(*args, **kwargs):
            self._inside.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                self.seconds[step] += seconds - self._inside.pop()
                self.calls[step] += 1
                if self._inside:
                    self._inside[-1] += seconds

        return call

    @contextmanager
    def watching(self, places):
        """places: (step, owner, name of the function in it)."""
        found = [(owner, name, getattr(owner, name)) for _, owner, name in places]
        for step, owner, name in places:
            setattr(owner, name, self.timed(step, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, function in found:
                setattr(owner, name, function)


def package_steps():
    """The places of this package that a loading goes through."""
    from vllm_humming.quant_methods import loading, staging

    return [
        ("copies into pinned memory, begun, and waiting for a free slot", staging.Staging, "_write"),
        ("waiting for copies into pinned memory", staging.Staging, "_finish"),
        ("copies to the GPU, started", staging.Staging, "_send"),
        ("copies of what is not staged", loading, "_moved"),
        ("packing, started", loading, "pack"),
        ("checks of shapes and dtypes, slices", loading.ExpertLoader, "_slice"),
        ("findings, with the wait for the GPU", loading.ExpertLoader, "_read"),
        ("the rest of the loader", loading.ExpertLoader, "load"),
    ]


def report(layer, experts, kinds, load_experts, device):
    """The lines for a layer that nothing was loaded into yet. kinds: of load.py, as load_experts takes them."""

    def wait():
        if device == "cuda":
            torch.cuda.synchronize()

    steps = Steps()
    ours = type(layer.quant_method).__module__.startswith("vllm_humming")
    with steps.watching(package_steps() if ours else []):
        wait()
        start = time.perf_counter()
        load_experts(layer, kinds, experts)
        loaded = time.perf_counter()
        wait()
        done = time.perf_counter()
    lines = [f"{experts} experts: {loaded - start:.3f} s, then {done - loaded:.3f} s until the GPU was done; host:"]
    for step, seconds in sorted(steps.seconds.items(), key=lambda entry: -entry[1]):
        lines.append(
            f"  {seconds:7.3f} s {1e6 * seconds / experts:8.0f} us an expert {steps.calls[step]:7} calls  {step}"
        )
    lines.append(f"  {loaded - start - sum(steps.seconds.values()):7.3f} s  vLLM, the method and this script")
    lines += [f"  {rate:6.1f} GB/s  {what}" for what, rate in copy_rates(kinds[0], device).items()]
    lines += [f"  (torch has {torch.get_num_threads()} threads)", "one expert's operators on the host:"]
    return lines + top_operators(lambda: load_experts(layer, kinds, 1), device).splitlines()


def copy_rates(tensors, device):
    """GB/s of one expert's tensors to the device: one by one from where they are, and as this package stages them."""
    from vllm_humming.quant_methods.staging import Staging

    tensors = [tensor.view(torch.uint8) for _, _, _, tensor in tensors if tensor.dim() == 2]
    staging = Staging(torch.device(device, 0) if device == "cuda" else torch.device(device))

    def fill():
        for tensor in tensors:
            staging._fill(staging._slots[0][: tensor.nbytes].view(tensor.shape), tensor)
            staging._finish()

    ways = {
        "pageable memory, each tensor": lambda: [tensor.to(device, copy=True) for tensor in tensors],
        "staged, each tensor": lambda: [staging.bring([[tensor]]) for tensor in tensors],
        "into pinned memory alone": fill,
    }
    size = sum(tensor.nbytes for tensor in tensors)
    rates = {}
    for what, copy in ways.items():
        if what.startswith("into") and max(tensor.nbytes for tensor in tensors) > staging.slot_bytes:
            continue
        copy()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(ROUNDS):
            copy()
        if device == "cuda":
            torch.cuda.synchronize()
        rates[what] = ROUNDS * size / (time.perf_counter() - start) / 1e9
    return rates


def top_operators(load, device):
    """torch's table of the operators that took the host longest."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        load()
        if device == "cuda":
            torch.cuda.synchronize()
    return profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=OPERATORS)
