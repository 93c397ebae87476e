#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Times this plugin, Marlin and vLLM's in-tree humming in one run: whole layers, then the engine (the plugin's with BF16 and FP8 activations).
# Needs an SM90 GPU and an environment with vLLM and this package. About eight minutes; the first file is complete after about two.
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

# The engines start together, which is most of their time, and are measured one after the other.
export VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random
"$python" "$here/engine.py" --config "$out/model"
engine() {  # LABEL LLM_ARGUMENTS
    VLLM_CACHE_ROOT=$(mktemp -d) "$python" "$here/engine.py" "$out/model" \
        "{\"gpu_memory_utilization\": 0.25, \"kv_cache_memory_bytes\": 8000000000$2}" "$out/engine.jsonl" "$1" "$out/lock" 4 \
        > "$out/engine-$1.log" 2>&1
}
rm -f "$out/lock"
engine vllm-humming ', "quantization": "humming"' &
ours=$!
engine vllm-humming-fp8 ', "quantization": "humming", "additional_config": {"humming": {"activation": "fp8"}}' &
ours_fp8=$!
VLLM_PLUGINS="" engine marlin '' &
marlin=$!
VLLM_PLUGINS="" engine in-tree-humming ', "quantization": "humming"' &
in_tree=$!
wait $ours && wait $ours_fp8 && wait $marlin && wait $in_tree
cat "$out/engine.jsonl"
