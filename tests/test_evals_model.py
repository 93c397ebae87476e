# SPDX-License-Identifier: Apache-2.0
"""The shipped model in the real engine, through lm-eval: it solves unseen problems as well as its dequantised twin."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engines import environment
from safetensors.torch import load_file

from evals import weights
from evals.tinymath.tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "evals" / "tinymath" / "model"
PROBLEMS = 200
LIMIT_POINTS = 1.5
# All problems at once: the reference decodes each layer's weights in every step, whatever the batch.
ENGINE = f"--enforce-eager --max-model-len 512 --max-num-seqs {PROBLEMS}"


def test_size_tokenizer_and_record_of_the_shipped_model():
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 12e6
    assert json.loads((MODEL / "tokenizer.json").read_text()) == json.loads(build_tokenizer().to_str())
    record = json.loads((MODEL / "training.json").read_text())
    assert record["test"]["problems"] == 1000
    assert record["test"]["exact_match"] >= 0.85


def test_other_formats_are_made_from_the_shipped_file(tmp_path):
    for name in ("bf16", "nvfp4"):
        weights.convert(MODEL, tmp_path / name, name)
    weights.convert(tmp_path / "bf16", tmp_path / "mxfp4", "mxfp4")
    shipped, again = (load_file(path / "model.safetensors") for path in (MODEL, tmp_path / "mxfp4"))
    assert shipped.keys() == again.keys()
    assert all(torch.equal(shipped[name], again[name]) for name in shipped)
    _, exact = weights.read(MODEL)
    _, rounded = weights.read(tmp_path / "nvfp4")
    errors = [(rounded[name].float() - exact[name].float()).norm() / exact[name].float().norm() for name in exact]
    assert max(errors) < 0.1


@pytest.mark.engine
def test_quantised_model_solves_unseen_problems_like_its_dequantised_twin(tmp_path):
    weights.convert(MODEL, tmp_path / "bf16", "bf16")
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "evals.gsm8k", str(MODEL), "--task", "tinymath", "--limit", str(PROBLEMS)]
    command += [f"--arguments=--quantization humming {ENGINE}", f"--baseline-arguments={ENGINE}"]
    command += ["--baseline-model", str(tmp_path / "bf16"), "--max-length", "512", "--concurrency", str(PROBLEMS)]
    command += ["--tolerance", str(LIMIT_POINTS), "--out", str(out)]
    # One engine at a time: it may have both cores.
    settings = environment() | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        command, cwd=ROOT, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-6000:]
    result = json.loads(out.read_text())
    assert result["ours"]["layers"] == ["6 MoE layers run through vllm_humming (MXFP4 experts, reference path)"]
    assert result["baseline"]["layers"] == []
    ours, baseline = (result[name]["tasks"]["tinymath"] for name in ("ours", "baseline"))
    for run in (ours, baseline):
        assert run["problems"] == PROBLEMS
        assert run["failed"] == 0
        assert run["strict"]["accuracy"] >= 0.85
        assert run["strict"]["invalid"] <= 0.01
    assert abs(ours["strict"]["accuracy"] - baseline["strict"]["accuracy"]) <= LIMIT_POINTS / 100


@pytest.mark.engine
def test_engine_inside_the_program_answers_alike_twice_and_counts_its_layers(tmp_path):
    """lm-eval's vllm backend: two tasks on one start."""
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "evals.gsm8k", str(MODEL), "--task", "tinymath", "perplexity", "--limit", "8"]
    command += ["--in-process", "--twice", "--max-length", "512", "--out", str(out)]
    command += ["--arguments=--quantization humming --enforce-eager --max-num-seqs 8"]
    settings = environment() | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        command, cwd=ROOT, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-6000:]
    ours = json.loads(out.read_text())["ours"]
    assert ours["layers"] == ["6 MoE layers run through vllm_humming (MXFP4 experts, reference path)"]
    assert ours["tasks"]["tinymath"]["ended"] == {"stop": 16}
    assert ours["tasks"]["tinymath"]["changed_outputs"] == 0
    assert 1 < ours["tasks"]["perplexity"]["token_perplexity"] < 2
