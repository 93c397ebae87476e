# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the three formats in the real engine, beside their dequantised BF16 twins.

The twin's weights are the exact values of the MXFP4 weights, and its engine computes in float32 where the engine under
test computes in BF16. Measured on a CPU, the five best logprobs of each position differ by at most 0.027 (Qwen3-MoE)
and 0.019 (gpt-oss); the same model with its unquantised weights differs by up to 0.44, 0.087 in the mean.
"""

import json
import re

import pytest

vllm = pytest.importorskip("vllm")

from engines import Engines, Run, generate, serve  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from vllm_humming.checkpoints import KINDS, write_checkpoint  # noqa: E402
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
# One prompt that ends in the demo's answer, a single token, a repetition, and one longer than the others together.
PROMPTS = [build_tokenizer().encode(PROMPT).ids, [44], [9, 9, 9, 9], list(range(40, 120))]
TWIN = {"qwen3-mxfp4": "qwen3-twin", "qwen3-bf16": "qwen3-twin", "gpt-oss-mxfp4": "gpt-oss-twin"}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for kind in KINDS:
        twin = root / TWIN[kind] if kind != "qwen3-bf16" else None  # its twin is qwen3-mxfp4's
        write_checkpoint(root / kind, kind, twin=twin)
    unknown = root / "unknown"
    unknown.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (unknown / name).write_bytes((root / "qwen3-mxfp4" / name).read_bytes())
    config = json.loads((root / "qwen3-mxfp4" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    (unknown / "config.json").write_text(json.dumps(config))

    def engine(model: str, dtype: str, quantization: str | None, **options) -> tuple:
        directory = tmp_path_factory.mktemp(model)
        arguments = {"model": str(root / model), "dtype": dtype, "quantization": quantization, **options}
        return directory, arguments, PROMPTS, MAX_TOKENS

    runs = Engines()
    runs.add("qwen3-twin", generate, *engine("qwen3-twin", "float32", None))
    runs.add("qwen3-mxfp4", generate, *engine("qwen3-mxfp4", "bfloat16", "humming"))
    runs.add("gpt-oss-twin", generate, *engine("gpt-oss-twin", "float32", None))
    runs.add("gpt-oss-mxfp4", generate, *engine("gpt-oss-mxfp4", "bfloat16", "humming"))
    runs.add("qwen3-bf16", generate, *engine("qwen3-bf16", "bfloat16", "humming"))
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


@pytest.mark.parametrize("kind", KINDS)
def test_same_tokens_and_logprobs_as_the_dequantised_model(engines, kind):
    ours, twin = engines[kind], engines[TWIN[kind]]
    assert twin.result is not None, twin.log[-4000:]
    assert ours.result is not None, ours.log[-4000:]
    assert {count for count, _ in layers_run_by_us(ours)} == {"2"}
    assert not layers_run_by_us(twin)
    differences = []
    for ours_prompt, twin_prompt in zip(ours.result, twin.result, strict=True):
        assert ours_prompt["tokens"] == twin_prompt["tokens"]
        for key in ("logprobs", "prompt_logprobs"):
            for left, right in zip(ours_prompt[key], twin_prompt[key], strict=True):
                assert not left or left.keys() & right.keys()
                differences += [abs(left[token] - right[token]) for token in left.keys() & right.keys()]
    assert len(differences) > 500
    assert max(differences) < LOGPROB_LIMIT
    assert sum(differences) / len(differences) < LOGPROB_MEAN_LIMIT


def test_the_model_answers_its_question(engines):
    assert engines["qwen3-mxfp4"].result[0]["text"].startswith(SENTENCE)
    assert engines["gpt-oss-mxfp4"].result[0]["text"].startswith(SENTENCE)


def test_http_server_with_an_option(engines):
    run, twin = engines["http"], engines["qwen3-twin"].result
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
    assert "Supported: compressed-tensors mxfp4-pack-quantized; gpt-oss mxfp4" in run.log
    assert "safetensors" not in run.log  # the directory has no weights, and nothing missed them


def test_unknown_option_is_refused_with_the_valid_ones(engines):
    run = engines["unknown option"]
    assert run.code != 0
    assert run.result is None
    assert "unknown option 'backand'" in run.log
    assert "valid options: 'backend', 'online_format'" in run.log
