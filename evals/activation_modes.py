# SPDX-License-Identifier: Apache-2.0
"""What other ways to quantise activations would do to a routed-experts layer's output, on a CPU.

    python -m evals.activation_modes [--inputs normal outliers] [--out modes.json]

Each mode is the kernels' arithmetic in fp32 (docs/kernel-notes.md, section 1): both operands as the tensor cores would
read them, sums of one activation scale multiplied by it and added in fp32, then the weights' row factor; h quantised
from fp32, slot outputs rounded to BF16. What FP8 tensor cores lose in their accumulators is not in it.

Modes: activations in BF16, in e4m3 with an fp32 scale a token and 128 K (what W4A8 does), with one a token, and as
MXFP8 (a power of two a token and 32 K: `up`, the smallest that holds the group; `ocp`, OCP MX v1.0's, under which up to
an eighth of the largest is cut). MXFP4 weights with them; NVFP4 weights as they are, and as e4m3 with the scale of each
group of 16 multiplied in and rounded, under a factor a row: a power of two, or the one of 32 an octave that leaves the
least squared error.

Errors are relative Frobenius norms against float64 with the format's dequantised weights: `plain`, with unquantised
activations; `token`, the root mean square of each token's own (trained models have tokens with outputs ten times as
large as most, which make up `plain`); `worst`, the worst token's; `kept`, as `plain` with x and h quantised as in the
mode (changed weights change h, so that it rounds otherwise: that is in `kept`, too). `changed` is the share of weights
that became others, `by` the norm of the change over that of the weights.

Inputs: `normal`; `outliers`, normal with one channel in 128 (--outlier-factor) times as large; `tinymath`, what the six
MoE layers of the trained model read on its held-out problems (needs transformers), for which a row holds root mean
squares over the layers, the worst token of all and the mean share.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evals import weights
from evals.engines import ROOT, surroundings
from vllm_humming.moe import fp8
from vllm_humming.moe.quantize import dequantize_mxfp4, dequantize_nvfp4, quantize_mxfp4, quantize_nvfp4
from vllm_humming.moe.reference import Activation, activate, oracle_moe

MODEL = ROOT / "evals" / "tinymath" / "model"
MX_GROUP = 32
FACTORS_AN_OCTAVE = 32
INPUTS = ("normal", "outliers", "tinymath")
ERRORS = ("plain", "token", "worst", "kept")
HEADINGS = "".join(f"{name:>9}" for name in (*ERRORS, "changed", "by"))


class Quantised(NamedTuple):
    """values fp32 [M, K], e4m3 or BF16 numbers; scales fp32 [M, ceil(K / group)]."""

    values: Tensor
    scales: Tensor
    group: int

    def dequantised(self) -> Tensor:
        """float64 [M, K]"""
        k = self.values.shape[1]
        return self.values.double() * self.scales.double().repeat_interleave(self.group, 1)[:, :k]


def bf16(x: Tensor) -> Quantised:
    """x [M, K] rounded to BF16."""
    return Quantised(x.bfloat16().float(), torch.ones(x.shape[0], 1), x.shape[1])


def fp8_block(x: Tensor) -> Quantised:
    """x [M, K] as W4A8 quantises it."""
    return Quantised(*fp8.quantize_activations(x), fp8.BLOCK_K)


def fp8_token(x: Tensor) -> Quantised:
    """The same rule with one scale a token, over all of K."""
    x = x.float()
    amax = x.abs().amax(1, keepdim=True).clamp(min=fp8.SMALLEST_AMAX)
    values = x * torch.full_like(amax, fp8.E4M3_MAX).div(amax)
    return Quantised(_e4m3(values), amax / fp8.E4M3_MAX, x.shape[1])


def mxfp8_up(x: Tensor) -> Quantised:
    """x [M, K], K a multiple of 32: the smallest power of two under which a group's largest is at most 448."""
    return _mxfp8(x, lambda amax: _exponent_up(amax, fp8.E4M3_MAX))


def mxfp8_ocp(x: Tensor) -> Quantised:
    """x [M, K], K a multiple of 32: 2^(floor(log2(amax)) - 8), saturated at 448 (OCP MX v1.0, section 6.3)."""
    return _mxfp8(x, lambda amax: torch.frexp(amax)[1] - 1 - 8)


def _mxfp8(x: Tensor, exponent: Callable[[Tensor], Tensor]) -> Quantised:
    groups = x.float().unflatten(1, (-1, MX_GROUP))
    amax = groups.abs().amax(2).clamp(min=fp8.SMALLEST_AMAX)
    scales = torch.ldexp(torch.ones_like(amax), exponent(amax))
    return Quantised(_e4m3(groups / scales[..., None]).flatten(1), scales, MX_GROUP)


def _exponent_up(amax: Tensor, most: float) -> Tensor:
    """int32: the smallest b with amax <= most * 2^b."""
    mantissa, exponent = torch.frexp(amax / most)
    return exponent - (mantissa == 0.5).to(torch.int32)


def _e4m3(x: Tensor) -> Tensor:
    """fp32: the nearest e4m3 numbers, saturated at 448."""
    return x.clamp(-fp8.E4M3_MAX, fp8.E4M3_MAX).to(torch.float8_e4m3fn).float()


class Weight(NamedTuple):
    """values fp32 [N, K], what the tensor cores read; factor fp32 [N], of the rows; exact float64 [N, K], what the
    checkpoint says.
    """

    values: Tensor
    factor: Tensor
    exact: Tensor

    def change(self) -> Tensor:
        """float64 [N, K]: the weights that are multiplied with, minus exact."""
        return self.values.double() * self.factor.double()[:, None] - self.exact


def mxfp4(w: Tensor) -> Weight:
    """w [N, K] as MXFP4."""
    exact = dequantize_mxfp4(*quantize_mxfp4(w), torch.float64)
    return Weight(exact.float(), torch.ones(w.shape[0]), exact)


def mxfp4_e4m3(w: Tensor) -> Weight:
    """w [N, K] as MXFP4 that is packed for FP8 activations."""
    codes, scales = quantize_mxfp4(w)
    groups = codes.unflatten(1, (scales.shape[1], -1))
    folded, exponents, factor, _ = fp8.fold_scales(groups, scales, (groups & 0x77).ne(0).any(2))
    values = dequantize_mxfp4(folded.flatten(1), (exponents + 127).to(torch.uint8), torch.float32)
    return Weight(values, factor, dequantize_mxfp4(codes, scales, torch.float64))


def nvfp4(w: Tensor) -> Weight:
    """w [N, K] as NVFP4: e2m1 * e4m3 has six bits, so BF16 holds it; the global scale is the rows' factor."""
    codes, scales, global_scale = quantize_nvfp4(w)
    values = dequantize_nvfp4(codes, scales, torch.ones(()), torch.float32)
    exact = dequantize_nvfp4(codes, scales, global_scale, torch.float64)
    return Weight(values, global_scale.expand(w.shape[0]), exact)


def nvfp4_e4m3(w: Tensor) -> Weight:
    """w [N, K] as NVFP4, then rounded to e4m3 under the smallest power of two a row that holds it."""
    return _as_e4m3(nvfp4(w), [1.0])


def nvfp4_e4m3_best(w: Tensor) -> Weight:
    """The same with that power of two times 1, 33/32, .. 63/32: whichever leaves a row the least squared error."""
    return _as_e4m3(nvfp4(w), [1 + step / FACTORS_AN_OCTAVE for step in range(FACTORS_AN_OCTAVE)])


def _as_e4m3(weight: Weight, factors: list[float]) -> Weight:
    amax = weight.values.abs().amax(1).clamp(min=2.0**-10)
    values, factor = torch.zeros_like(weight.values), torch.ones_like(amax)
    least = torch.full_like(amax, math.inf)
    for mantissa in factors:
        own = torch.ldexp(torch.full_like(amax, mantissa), _exponent_up(amax, fp8.E4M3_MAX * mantissa))
        rounded = _e4m3(weight.values / own[:, None])
        error = (rounded * own[:, None] - weight.values).square().sum(1)
        better = error < least
        values[better], factor[better], least[better] = rounded[better], own[better], error[better]
    return Weight(values, factor * weight.factor, weight.exact)


@dataclass(frozen=True)
class Mode:
    """A weight format as its kernel would hold it, and what becomes of x and h."""

    name: str
    weight: Callable[[Tensor], Weight]
    quantise: Callable[[Tensor], Quantised]


MODES = (
    Mode("MXFP4 x BF16", mxfp4, bf16),
    Mode("MXFP4 x FP8, a token and 128 K (W4A8)", mxfp4_e4m3, fp8_block),
    Mode("MXFP4 x FP8, a token", mxfp4_e4m3, fp8_token),
    Mode("MXFP4 x MXFP8, up", mxfp4_e4m3, mxfp8_up),
    Mode("MXFP4 x MXFP8, ocp", mxfp4_e4m3, mxfp8_ocp),
    Mode("NVFP4 x BF16", nvfp4, bf16),
    Mode("NVFP4 x FP8, weights unrounded", nvfp4, fp8_block),
    Mode("NVFP4 in e4m3, 2^b a row, x FP8", nvfp4_e4m3, fp8_block),
    Mode("NVFP4 in e4m3, best of 32, x FP8", nvfp4_e4m3_best, fp8_block),
)


class Layer(NamedTuple):
    """x BF16 [M, H], router weights fp32 [M, k], ids int32 [M, k]; w13 [E, 2I, H] ([gate; up]) and w2 [E, H, I], in
    float32 or BF16.
    """

    x: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    w13: Tensor
    w2: Tensor


def product(x: Quantised, weight: Weight) -> Tensor:
    """fp32 [M, N]: x [M, K] times the transpose of a weight [N, K], summed as the kernels do."""
    total = torch.zeros(x.values.shape[0], weight.values.shape[0])
    for group, scale in enumerate(x.scales.unbind(1)):
        k = slice(group * x.group, (group + 1) * x.group)
        total += (x.values[:, k] @ weight.values[:, k].T).mul_(scale[:, None])
    return total.mul_(weight.factor)


def run(layer: Layer, mode: Mode, w13: list[Weight], w2: list[Weight]) -> Tensor:
    """BF16 [M, H]: the layer in a mode; SiLU-gated."""
    top_k = layer.topk_ids.shape[1]
    ids, slot_weights = layer.topk_ids.flatten(), layer.topk_weights.flatten()
    y = torch.zeros(len(ids), layer.x.shape[1])
    for expert in range(len(w13)):
        slots = (ids == expert).nonzero()[:, 0]
        h = product(mode.quantise(layer.x[slots // top_k]), w13[expert])
        h = activate(h, Activation.SWIGLU, 1.0, 0.0, math.inf)
        y[slots] = product(mode.quantise(h), w2[expert]).mul_(slot_weights[slots, None]).bfloat16().float()
    return y.unflatten(0, (-1, top_k)).sum(1).bfloat16()


class Measured(NamedTuple):
    """One layer in one mode; module docstring."""

    plain: float
    token: float
    worst: float
    kept: float
    changed: float
    by: float


def measure(layer: Layer, mode: Mode) -> Measured:
    w13, w2 = ([mode.weight(w) for w in part] for part in (layer.w13, layer.w2))
    found = run(layer, mode, w13, w2).double()

    def oracle(x: Tensor, second_input: Callable[[Tensor, Tensor], Tensor] | None) -> Tensor:
        exact = [w.exact for w in w13], [w.exact for w in w2]
        routing = layer.topk_weights, layer.topk_ids, None
        return oracle_moe(
            x, *routing, exact[0], None, exact[1], None, activation=Activation.SWIGLU, second_input=second_input
        )

    plain = oracle(layer.x, None)
    kept = oracle(mode.quantise(layer.x).dequantised(), lambda _, h: mode.quantise(h.float()).dequantised())
    tokens = (found - plain).norm(dim=1) / plain.norm(dim=1)
    changes = torch.cat([w.change().flatten() for w in [*w13, *w2]])
    exact = torch.cat([w.exact.flatten() for w in [*w13, *w2]])
    # A factor may leave a weight the last bit of float64 away.
    changed = changes.abs() > 2.0**-40 * exact.abs()
    return Measured(
        float((found - plain).norm() / plain.norm()),
        float(tokens.square().mean().sqrt()),
        float(tokens.max()),
        float((found - kept).norm() / kept.norm()),
        float(changed.double().mean()),
        float(changes.norm() / exact.norm()),
    )


def combined(parts: list[Measured]) -> Measured:
    """Root mean squares over layers; the worst token of all, the mean share of changed weights."""

    def rms(values: list[float]) -> float:
        return math.sqrt(sum(value**2 for value in values) / len(values))

    plain, token, worst, kept, changed, by = (list(column) for column in zip(*parts, strict=True))
    return Measured(rms(plain), rms(token), max(worst), rms(kept), sum(changed) / len(changed), rms(by))


def random_layer(args: argparse.Namespace, outliers: float) -> Layer:
    """Normal x and weights; outliers: the factor of one channel of x in 128, wherever they lie."""
    gen = torch.Generator().manual_seed(args.seed)
    hidden, inner, experts = args.hidden, args.intermediate, args.experts
    x = torch.randn(args.tokens, hidden, generator=gen)
    x[:, torch.randperm(hidden, generator=gen)[: max(1, hidden // 128)]] *= outliers
    logits = torch.randn(args.tokens, experts, generator=gen)
    w13 = torch.randn(experts, 2 * inner, hidden, generator=gen) / math.sqrt(hidden)
    w2 = torch.randn(experts, hidden, inner, generator=gen) / math.sqrt(inner)
    return Layer(x.bfloat16(), *_routed(logits, args.top_k), w13, w2)


def _routed(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    values, ids = logits.float().softmax(-1).topk(top_k, -1)
    return values / values.sum(-1, keepdim=True), ids.int()


def tinymath_layers(model: Path, texts: int) -> list[Layer]:
    """The trained model's MoE layers with what they read on `texts` held-out problems and their answers, in BF16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from evals.tinymath.data import evaluation, prompt

    config, dense = weights.read(model)
    with tempfile.TemporaryDirectory() as directory:
        weights.convert(model, Path(directory), "bf16")
        network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(directory)
    inputs: list[list[Tensor]] = [[] for _ in network.model.layers]
    for block, seen in zip(network.model.layers, inputs, strict=True):
        block.mlp.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0].flatten(0, -2)))
    with torch.no_grad():
        for problem in evaluation("test")[:texts]:
            text = f"{prompt(problem.question)} {problem.answer}"
            network(tokenizer(text, return_tensors="pt").input_ids, use_cache=False)
    found = []
    for number, seen in enumerate(inputs):
        name = f"model.layers.{number}.mlp"
        parts = {
            part: [dense[f"{name}.experts.{e}.{part}_proj.weight"] for e in range(config["num_experts"])]
            for part in ("gate", "up", "down")
        }
        w13 = torch.stack([torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)])
        x = torch.cat(seen)
        routing = _routed(x.float() @ dense[f"{name}.gate.weight"].float().T, config["num_experts_per_tok"])
        found.append(Layer(x, *routing, w13, torch.stack(parts["down"])))
    return found


def layers(args: argparse.Namespace, name: str) -> list[Layer]:
    if name == "tinymath":
        return tinymath_layers(MODEL, args.texts)
    return [random_layer(args, args.outlier_factor if name == "outliers" else 1.0)]


def results(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record an input and mode, as the JSON has it."""
    for name in args.inputs:
        given = layers(args, name)
        peaks = torch.cat([layer.x.float().abs().amax(1) / layer.x.float().square().mean(1).sqrt() for layer in given])
        shape = {"layers": len(given), "tokens": given[0].x.shape[0], "peak": float(peaks.median())}
        for mode in MODES:
            parts = [measure(layer, mode) for layer in given]
            record: dict[str, Any] = {"input": name, "mode": mode.name} | shape | combined(parts)._asdict()
            yield record | ({"by_layer": [part._asdict() for part in parts]} if len(parts) > 1 else {})


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m evals.activation_modes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--inputs", nargs="+", choices=INPUTS, default=list(INPUTS))
    sizes = {"tokens": 128, "hidden": 2048, "intermediate": 768, "experts": 4, "top-k": 2, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="of the random inputs (default: %(default)s)")
    parser.add_argument("--outlier-factor", type=float, default=20.0, help="(default: %(default)s)")
    parser.add_argument("--texts", type=int, default=16, help="problems of tinymath (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    if args.hidden % MX_GROUP or args.intermediate % MX_GROUP:
        parser.error(f"--hidden and --intermediate must be multiples of {MX_GROUP}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    found: list[dict[str, Any]] = []
    for record in results(args):
        if not found or found[-1]["input"] != record["input"]:
            about = f"layers {record['layers']}, tokens {record['tokens']}, largest of a token {record['peak']:.1f} rms"
            print(f"\n{record['input']}: {about}\n{'':40}{HEADINGS}")
        found.append(record)
        errors = "".join(f"{record[name]:>9.2e}" for name in ERRORS)
        print(f"{record['mode']:40}{errors}{record['changed']:>9.1%}{record['by']:>9.1e}", flush=True)
    if args.out:
        said = surroundings() | {"command": argv or sys.argv[1:], "results": found}
        args.out.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
