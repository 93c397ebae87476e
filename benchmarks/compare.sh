#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Times this plugin, Marlin and vLLM's in-tree humming in one run: whole layers, then the engine. Needs an SM90 GPU and an environment
# with vLLM and this package. About ten minutes, most of it engine starts; the first file is complete after about three.
#
#     bash benchmarks/compare.sh OUT_DIR
#
# Writes OUT_DIR/layers.jsonl and OUT_DIR/engine.jsonl; ends at the first step that fails.
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
tokens=(1 8 64 512 4096)

"$python" "$here/vllm_layer.py" humming vllm-humming --ms "${tokens[@]}" --out "$out/layers.jsonl"
VLLM_PLUGINS="" "$python" "$here/vllm_layer.py" compressed-tensors marlin --ms "${tokens[@]}" --out "$out/layers.jsonl"
VLLM_PLUGINS="" "$python" "$here/vllm_layer.py" humming in-tree-humming --ms "${tokens[@]}" --out "$out/layers.jsonl"

export VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random
"$python" "$here/engine.py" --config "$out/model"
"$python" "$here/engine.py" "$out/model" '{"quantization": "humming"}' "$out/engine.jsonl" vllm-humming
VLLM_PLUGINS="" "$python" "$here/engine.py" "$out/model" '{}' "$out/engine.jsonl" marlin
VLLM_PLUGINS="" "$python" "$here/engine.py" "$out/model" '{"quantization": "humming"}' "$out/engine.jsonl" in-tree-humming
