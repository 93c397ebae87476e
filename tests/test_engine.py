# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every kind in the real engine, beside their dequantised twins.

The twin's weights are the exact values of the FP4 weights, and its engine computes in float32 where the engine under
test computes in BF16. Measured on a CPU, the five best logprobs of each position differ by at most 0.032 (MXFP4), 0.020
(NVFP4), 0.027 (block-FP8 attention) and 0.019 (gpt-oss, Nemotron-H); the Qwen3 model with its unquantised weights
differs by up to 0.44, 0.087 in the mean. FP8 activations differ from the twin by 0.087, 0.017 in the mean (gpt-oss
0.056 and 0.011), where 16-bit ones differ by 0.0043 in the mean. Models whose attention is NVFP4, too, run in FP16:
0.0031, 0.0006 in the mean; BF16 rounds a few of their tokens further (0.054; with another seed 0.24, and so does vLLM
on the twin).
"""

import json
import re

import pytest

vllm = pytest.importorskip("vllm")

from engines import Engines, Run, generate, reference_generate, serve  # noqa: E402
from layers import runs_block_fp8_linears  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from vllm_humming.checkpoints import KINDS, weight_format, write_checkpoint  # noqa: E402
from vllm_humming.moe.weight_formats import NVFP4  # noqa: E402
from vllm_humming.tokenizer import PROMPT, SENTENCE, build_tokenizer  # noqa: E402

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not (current_platform.is_cpu() or current_platform.is_cuda()), reason="this vLLM has no device to run on here"
    ),
]

MAX_TOKENS = 24
LOGPROB_LIMIT = 0.05
LOGPROB_MEAN_LIMIT = 0.01
FP16_LOGPROB_LIMIT = 0.01
FP16_LOGPROB_MEAN_LIMIT = 0.002
FP8_LOGPROB_LIMIT = 0.15
FP8_LOGPROB_MEAN_LIMIT = 0.03
# One prompt that ends in the demo's answer, a single token, a repetition, and one longer than the others together.
PROMPTS = [build_tokenizer().encode(PROMPT).ids, [44], [9, 9, 9, 9], list(range(40, 120))]
# Kinds with a twin of their own; the others share that of a qwen3-mxfp4 or qwen3-modelopt kind, by weight format.
OWN_TWIN = (
    "qwen3-mxfp4",
    "qwen3-modelopt",
    "qwen3-mxfp4-linears",
    "qwen3-modelopt-linears",
    "qwen3-deepseek",
    "gpt-oss-mxfp4",
    "nemotron-h-modelopt",
)
# These get an engine with processes of its own, as users start it; the others share one process, one after the other.
OWN_PROCESSES = ("qwen3-mxfp4", "gpt-oss-mxfp4", "qwen3-bf16", "nemotron-h-modelopt")
TESTED = [kind for kind in KINDS if kind != "qwen3-deepseek" or runs_block_fp8_linears()]
LINEARS = tuple(kind for kind in KINDS if kind.endswith("-linears"))
OPTIONS: dict[str, dict] = {kind: {"additional_config": {"humming": {"linears": "humming"}}} for kind in LINEARS} | {
    "qwen3-bf16-nvfp4": {"additional_config": {"humming": {"online_format": "nvfp4"}}},
    # Prefix caching of hybrid models asks for the Mamba layers that this one does not have.
    "nemotron-h-modelopt": {"enable_prefix_caching": False},
}


# Runs with FP8 activations by option, and their kinds; a kind whose name ends in w4a8 says so itself.
FP8 = {"additional_config": {"humming": {"activation": "fp8"}}}
FP8_RUNS = {f"{kind} with fp8": kind for kind in ("qwen3-mxfp4", "gpt-oss-mxfp4", "qwen3-bf16")}


def dtype_of(kind: str) -> str:
    return "float16" if kind in LINEARS and weight_format(kind) is NVFP4 else "bfloat16"


def twin_of(kind: str) -> str:
    shared = "qwen3-modelopt" if weight_format(kind) is NVFP4 else "qwen3-mxfp4"
    shared += "-linears" if kind in LINEARS else ""
    return f"{kind if kind in OWN_TWIN else shared}-twin"


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for kind in TESTED:
        write_checkpoint(root / kind, kind, twin=root / twin_of(kind) if kind in OWN_TWIN else None)
    unknown = root / "unknown"
    unknown.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (unknown / name).write_bytes((root / "qwen3-mxfp4" / name).read_bytes())
    config = json.loads((root / "qwen3-mxfp4" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    (unknown / "config.json").write_text(json.dumps(config))

    def arguments(model: str, dtype: str, quantization: str | None, **options) -> dict:
        return {"model": str(root / model), "dtype": dtype, "quantization": quantization, **options}

    def engine(model: str, *args, **options) -> tuple:
        return tmp_path_factory.mktemp(model), arguments(model, *args, **options), PROMPTS, MAX_TOKENS

    runs = Engines()
    in_turn = {}
    for kind in TESTED:
        twin, options = twin_of(kind), OPTIONS.get(kind, {})
        if kind not in OWN_PROCESSES:
            if kind in OWN_TWIN:
                in_turn[twin] = arguments(twin, "float32", None)
            in_turn[kind] = arguments(kind, dtype_of(kind), "humming", **options)
    for name in ("gpt-oss-mxfp4", "qwen3-bf16"):
        in_turn[f"{name} with fp8"] = arguments(name, "bfloat16", "humming", **FP8)
    runs.add_in_turn(tmp_path_factory.mktemp("in_turn"), in_turn, PROMPTS, MAX_TOKENS)
    runs.add("qwen3-mxfp4 with fp8", generate, *engine("qwen3-mxfp4", "bfloat16", "humming", **FP8))
    for kind in ("qwen3-mxfp4", "gpt-oss-mxfp4"):
        runs.add(twin_of(kind), generate, *engine(twin_of(kind), "float32", None))
    for kind in OWN_PROCESSES:
        plugin = ("non_gated_plugin",) if kind == "nemotron-h-modelopt" else ()
        runs.add(kind, generate, *engine(kind, "bfloat16", "humming", **OPTIONS.get(kind, {})), *plugin)
    directory, model = tmp_path_factory.mktemp("nemotron"), str(root / twin_of("nemotron-h-modelopt"))
    runs.add(twin_of("nemotron-h-modelopt"), reference_generate, directory, model, PROMPTS, MAX_TOKENS)
    options = json.dumps({"humming": {"backend": "reference"}})
    runs.add(
        "http",
        serve,
        tmp_path_factory.mktemp("http"),
        ["--model", str(root / "qwen3-mxfp4"), "--quantization", "humming", "--additional-config", options],
        [
            {"model": str(root / "qwen3-mxfp4"), "prompt": prompt, "max_tokens": 16, "temperature": 0, "logprobs": 5}
            for prompt in (PROMPT, PROMPTS[3])
        ],
    )
    runs.add("unknown format", generate, *engine("unknown", "bfloat16", "humming"))
    misspelt = {"humming": {"backand": "reference"}}
    runs.add("unknown option", generate, *engine("qwen3-mxfp4", "bfloat16", "humming", additional_config=misspelt))
    yield runs
    runs.close()


def layers_run_by_us(run: Run) -> set[tuple[str, str]]:
    """(number of layers, path) as the workers logged them."""
    return set(re.findall(r"(\d+) MoE layers? run through vllm_humming \(.*, (kernel|reference) path\)", run.log))


@pytest.mark.parametrize("name", [*TESTED, *FP8_RUNS])
def test_same_tokens_and_logprobs_as_the_dequantised_model(engines, name):
    kind = FP8_RUNS.get(name, name)
    fp8 = name in FP8_RUNS or name.endswith("w4a8")
    ours, twin = engines[name], engines[twin_of(kind)]
    assert twin.result is not None, twin.log[-4000:]
    assert ours.result is not None, ours.log[-4000:]
    assert {count for count, _ in layers_run_by_us(ours)} == {"2"}
    assert f"({weight_format(kind).label}{' x FP8' if fp8 else ''} experts, " in ours.log
    assert not layers_run_by_us(twin)
    differences = []
    for ours_prompt, twin_prompt in zip(ours.result, twin.result, strict=True):
        assert ours_prompt["tokens"] == twin_prompt["tokens"]
        for key in ("logprobs", "prompt_logprobs"):
            for left, right in zip(ours_prompt[key], twin_prompt[key], strict=True):
                assert not left or left.keys() & right.keys()
                differences += [abs(left[token] - right[token]) for token in left.keys() & right.keys()]
    assert len(differences) > 500
    limit, mean_limit = (FP8_LOGPROB_LIMIT, FP8_LOGPROB_MEAN_LIMIT) if fp8 else (LOGPROB_LIMIT, LOGPROB_MEAN_LIMIT)
    if dtype_of(kind) == "float16":
        limit, mean_limit = FP16_LOGPROB_LIMIT, FP16_LOGPROB_MEAN_LIMIT
    assert max(differences) < limit
    assert sum(differences) / len(differences) < mean_limit


@pytest.mark.parametrize("kind", LINEARS)
def test_fp4_linears_run_by_us(engines, kind):
    label = weight_format(kind).label
    assert f"4 linears run through vllm_humming ({label} weights, " in engines[kind].log


def test_fp8_is_the_same_by_option_by_checkpoint_and_for_weights_quantised_while_loading(engines):
    """The three have the same FP4 weights, and the option reaches the workers of an engine with processes."""
    by_option = engines["qwen3-mxfp4 with fp8"].result
    assert by_option is not None
    assert by_option == engines["qwen3-mxfp4-w4a8"].result == engines["qwen3-bf16 with fp8"].result
    assert by_option != engines["qwen3-mxfp4"].result


def test_the_model_answers_its_question(engines):
    assert engines["qwen3-mxfp4"].result[0]["text"].startswith(SENTENCE)
    assert engines["gpt-oss-mxfp4"].result[0]["text"].startswith(SENTENCE)
    assert engines["nemotron-h-modelopt"].result[0]["text"].startswith(SENTENCE)


def test_http_server_with_an_option(engines):
    run, twin = engines["http"], engines["qwen3-mxfp4-twin"].result
    sentence, tokens = (answer["choices"][0] for answer in run.result)
    assert sentence["text"] == SENTENCE
    assert sentence["finish_reason"] == "stop"
    for choice, expected in ((sentence, twin[0]), (tokens, twin[3])):
        logprobs = choice["logprobs"]["token_logprobs"]
        assert logprobs
        for mine, token, position in zip(logprobs, expected["tokens"], expected["logprobs"], strict=False):
            assert mine == pytest.approx(position[str(token)], abs=LOGPROB_LIMIT)
    assert layers_run_by_us(run) == {("2", "reference")}


def test_unknown_format_is_refused_before_weights_load(engines):
    run = engines["unknown format"]
    assert run.code != 0
    assert run.result is None
    assert "vllm-humming does not load checkpoints of format quant_method='awq'" in run.log
    assert "Supported: compressed-tensors mxfp4-pack-quantized and nvfp4-pack-quantized; ModelOpt NVFP4" in run.log
    assert "safetensors" not in run.log  # the directory has no weights, and nothing missed them


def test_unknown_option_is_refused_with_the_valid_ones(engines):
    run = engines["unknown option"]
    assert run.code != 0
    assert run.result is None
    assert "unknown option 'backand'" in run.log
    assert "valid options: 'backend', 'online_format', 'activation', 'linears'" in run.log
