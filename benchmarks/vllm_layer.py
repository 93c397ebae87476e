# SPDX-License-Identifier: Apache-2.0
"""Times one routed-experts layer of the installed vLLM, by quantisation method, as a graph replay over rotating layers.

usage: vllm_layer.py QUANT LABEL [--fmt mxfp4|nvfp4|mxfp4_fp8] [--shapes ...] [--ms ...] [--routing ...]
           [--out FILE]
QUANT: humming (the plugin's method where it is installed, else vLLM's own) or compressed-tensors (Marlin). Prints one
JSON line a point and, with --out, appends it to FILE. A point that fails prints FAIL and makes the exit status 1.
benchmarks/README.md states the protocol.
"""

import argparse
import json
import os
import sys
from contextlib import ExitStack

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["MASTER_ADDR"] = "127.0.0.1"
os.environ["MASTER_PORT"] = str(29511 + os.getpid() % 400)
import torch
from protocol import SHAPES, TOKENS, WEIGHT_BYTES, replay_times, require_gpu, weight_sets
from routing import ROUTINGS, route

# Of this plugin's packed chunks: bytes, and scale bytes of the same sizes (for FP8 activations: of 2^-5 and 2^-4).
PACKED_SCALES = {"mxfp4": (4352, (244, 248), 1), "nvfp4": (4608, (152, 168), 1), "mxfp4_fp8": (4352, (0, 2), 8)}
FP8_INPUT = dict(num_bits=8, type="float", strategy="group", group_size=128, symmetric=True, dynamic=True)


def checkpoint_config(fmt):
    """The quantization_config of a compressed-tensors checkpoint: weight-only experts, or with FP8 activations."""
    weights = dict(num_bits=4, type="float", symmetric=True, dynamic=False)
    inputs = FP8_INPUT if fmt == "mxfp4_fp8" else None
    fmt = fmt.removesuffix("_fp8")
    if fmt == "mxfp4":
        weights |= dict(strategy="group", group_size=32)
    else:
        weights |= dict(strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
    layout = f"{fmt}-pack-quantized"
    group = dict(targets=["Linear"], format=layout, weights=weights, input_activations=inputs, output_activations=None)
    return dict(
        quant_method="compressed-tensors",
        format=layout,
        quantization_status="compressed",
        ignore=["lm_head"],
        config_groups=dict(group_0=group),
    )


def fill(layer, fmt):
    """Random codes, scales of 2^-9..2^-6 (MXFP4) or about 1 (NVFP4), global scales 1."""
    chunk, scales, step = PACKED_SCALES[fmt]
    for name, param in layer.named_parameters():
        if param.dim() == 4 and param.shape[-1] == chunk:
            param.data.random_(0, 256)
            param.data[..., 4096:].random_(*scales).mul_(step)
        elif param.dtype == torch.uint8 and "scale" in name:
            param.data.random_(118, 122)
        elif param.dtype == torch.uint8:
            param.data.random_(0, 256)
        elif param.dtype == torch.float8_e4m3fn:
            param.data.copy_((torch.rand(param.shape) + 0.5).to(param.dtype))
        elif "global" in name or "scale_2" in name:
            param.data.fill_(1.0)
        elif param.dtype == torch.bfloat16:
            param.data.normal_(std=0.02)


def make_layer(hidden, intermediate, experts, top_k, quant, fmt, prefix):
    """The routed experts of one MoE layer as a model builds it, with weights that are allocated and not filled."""
    import vllm.model_executor.layers.fused_moe as fused_moe
    from vllm.model_executor.layers.quantization import get_quantization_config

    make = getattr(fused_moe, "FusedMoE", None) or fused_moe.FusedMoEFactory  # a factory in newer versions
    # from_config() may change what it is given
    quant_config = get_quantization_config(quant).from_config(json.loads(json.dumps(checkpoint_config(fmt))))
    module = make(
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=intermediate,
        params_dtype=torch.bfloat16,
        renormalize=True,
        quant_config=quant_config,
        prefix=prefix,
    )
    return getattr(module, "routed_experts", module)


def layers_of(shape, quant, fmt):
    """As many layers of one shape as it takes that each is out of L2 when its turn comes again."""
    layers = []
    for n in range(weight_sets(shape, fmt)):
        layer = make_layer(*SHAPES[shape], quant, fmt, f"{shape}.{n}.mlp.experts")
        fill(layer, fmt)
        layer.quant_method.process_weights_after_loading(layer)
        layers.append(layer)
    return layers


def timed(layers, x, weights, ids, vllm_config):
    """(sorted microseconds a layer of the graph replays, output of the last layer)."""
    from vllm.forward_context import set_forward_context

    def run():
        for layer in layers:
            out = layer.quant_method.apply(layer, x, weights, ids, None, None)
        return out

    with set_forward_context(None, vllm_config):
        return replay_times(run, len(layers)), run()


def measure(layers, shape, tokens, args, vllm_config):
    """The record of one point."""
    hidden, intermediate, experts, top_k = SHAPES[shape]
    gen = torch.Generator(device="cuda").manual_seed(tokens)
    x = torch.randn(tokens, layers[0].moe_config.hidden_dim, generator=gen)
    weights, ids = route(tokens, experts, top_k, args.routing.replace("onehot", "one-hot"), gen)
    times, out = timed(layers, x, weights, ids, vllm_config)
    us = times[len(times) // 2]
    active = ids.unique().numel()
    read = active * 3 * hidden * intermediate * WEIGHT_BYTES[args.fmt]
    return dict(
        label=args.label,
        fmt=args.fmt,
        shape=shape,
        routing=args.routing,
        m=tokens,
        us=round(us, 1),
        active=active,
        gbps=round(read / us / 1e3, 1),
        tflops=round(6 * tokens * top_k * hidden * intermediate / us / 1e6, 1),
        finite=bool(torch.isfinite(out).all()),
    )


def method_of(layer):
    """Names the classes that run a layer."""
    method = layer.quant_method
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    return f"{type(method).__module__} {type(method).__name__} experts {type(experts).__name__}"


def start_vllm(stack):
    """A VllmConfig, current until `stack` closes, and what a worker sets up before it builds layers."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.v1.worker.workspace import init_workspace_manager

    torch.cuda.set_device(0)
    init_workspace_manager(torch.device("cuda:0"))
    vllm_config = VllmConfig()
    vllm_config.scheduler_config.max_num_batched_tokens = max(TOKENS)
    stack.enter_context(set_current_vllm_config(vllm_config))
    rendezvous = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    init_distributed_environment(1, 0, local_rank=0, backend="nccl", distributed_init_method=rendezvous)
    initialize_model_parallel(1, 1)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda")
    return vllm_config


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quant")
    parser.add_argument("label")
    parser.add_argument("--fmt", choices=list(PACKED_SCALES), default="mxfp4")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--routing", choices=[*ROUTINGS, "onehot"], default="uniform")
    parser.add_argument("--ms", nargs="+", type=int, default=TOKENS, metavar="M")
    parser.add_argument("--out", help="append one JSON line a point")
    args = parser.parse_args()
    require_gpu()
    failed = 0
    with ExitStack() as stack:
        out = stack.enter_context(open(args.out, "a")) if args.out else None
        vllm_config = start_vllm(stack)
        for shape in args.shapes:
            layers = layers_of(shape, args.quant, args.fmt)
            print("METHOD", method_of(layers[0]), flush=True)
            for tokens in args.ms:
                try:
                    line = json.dumps(measure(layers, shape, tokens, args, vllm_config))
                except Exception as error:  # the other points are still worth their time; the exit status tells
                    failed += 1
                    print("FAIL", shape, tokens, type(error).__name__, str(error)[:300], flush=True)
                    continue
                print(line, flush=True)
                if out:
                    out.write(line + "\n")
                    out.flush()
            del layers
            torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
