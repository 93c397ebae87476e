# SPDX-License-Identifier: Apache-2.0
"""The evaluations' own logic: statistics, formats, engines' arguments, what a profile must show."""

import json
import logging
import math
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from evals import capture_smoke, compare, engines, gsm8k, suite, tasks, upcycle, weights
from evals.capture_smoke import Answer, Report
from vllm_humming.moe.codes import E2M1_VALUES


@pytest.mark.parametrize(
    ("ours", "baseline", "p"), [(0, 0, 1.0), (5, 5, 1.0), (1, 9, 0.021484375), (0, 6, 0.03125), (9, 1, 0.021484375)]
)
def test_mcnemar(ours, baseline, p):
    assert compare.mcnemar(ours, baseline) == pytest.approx(p)


def test_paired_comparison():
    result = compare.paired([True, True, False, True], [True, False, False, False], list("abcd"), list("abxd"))
    assert (result.only_ours, result.only_baseline, result.same_outputs) == (2, 0, 3)
    assert result.difference == 0.5
    assert result.standard_error == pytest.approx(math.sqrt(1 / 3 / 4))
    assert result.p == 0.5
    with pytest.raises(ValueError, match="different problems"):
        compare.paired([True], [True, False], ["a"], ["a", "b"])


def test_arguments_of_vllm_serve_become_keywords():
    words = "--quantization humming --enforce-eager --max-model-len=512 --additional-config '{\"humming\": {}}'"
    assert engines.keyword_arguments(words) == {
        "quantization": "humming",
        "enforce_eager": True,
        "max_model_len": 512,
        "additional_config": {"humming": {}},
    }
    with pytest.raises(ValueError, match="unexpected argument 'humming'"):
        engines.keyword_arguments("humming")


def test_engines_refuse_contradictions():
    with pytest.raises(ValueError, match="needs its url"):
        engines.Engine("model", "server")
    with pytest.raises(ValueError, match="unknown engine"):
        engines.Engine("model", "magic")


def samples(right):
    return [
        {
            "doc_id": index,
            "filter": name,
            "exact_match": float(answer is True),
            "filtered_resps": [gsm8k.INVALID if answer is None else "1"],
            "resps": [[f"output {index}"]],
            "arguments": [[f"prompt {index}", {}]],
        }
        for name in gsm8k.FILTERS.values()
        for index, answer in reversed(list(enumerate(right)))
    ]


def word_ids(texts, add_special_tokens):
    return {"input_ids": [text.split() for text in texts]}


def test_scores_and_their_comparison():
    ours = gsm8k.scores(samples([True, False, None, True]), word_ids, seconds=2.0)
    assert ours["strict"]["accuracy"] == 0.5
    assert ours["strict"]["invalid"] == 0.25
    assert ours["outputs"] == [f"output {index}" for index in range(4)]
    assert ours["tokens_per_second"] == 4.0
    baseline = gsm8k.scores(samples([True, True, True, True]), word_ids, seconds=1.0)
    record, distance, line = gsm8k.compared(ours, baseline)
    assert distance == 50.0
    assert record["strict"]["only_baseline"] == 2
    assert "p = 0.50" in line
    assert "invalid 25.0 %" in gsm8k.summary(ours | {"changed_outputs": 1})


def test_perplexity_is_weighted_by_tokens():
    parts = [
        {"doc_id": 1, "doc": {"text": "d"}, "filtered_resps": [-1.0]},
        {"doc_id": 0, "doc": {"text": "a b c"}, "filtered_resps": [-3.0]},
    ]
    record = gsm8k.perplexity(parts, word_ids)
    assert record["token_perplexity"] == pytest.approx(math.e)
    assert record["byte_perplexity"] == pytest.approx(math.exp(4 / 6))
    assert record["log_likelihoods"] == [-3.0, -1.0]
    worse = gsm8k.perplexity(
        [part | {"filtered_resps": [part["filtered_resps"][0] * 1.01]} for part in parts], word_ids
    )
    _, distance, _ = gsm8k.compared(worse, record)
    assert distance == pytest.approx(100 * (math.exp(0.01) - 1))


def test_the_error_of_a_perplexity_comes_from_the_texts_differences():
    alike = compare.paired_perplexity([-1.0, -2.0], [-1.1, -2.1], tokens=10)
    assert alike.relative == pytest.approx(math.exp(-0.02) - 1)
    assert alike.standard_error == pytest.approx(0, abs=1e-12)
    uneven = compare.paired_perplexity([-1.0, -2.0], [-1.2, -2.0], tokens=10)
    assert uneven.relative == pytest.approx(math.exp(-0.02) - 1)
    assert uneven.standard_error == pytest.approx(math.exp(-0.02) * 0.02)
    with pytest.raises(ValueError, match="different texts"):
        compare.paired_perplexity([-1.0], [-1.0, -2.0], tokens=10)


def test_requests_must_end_by_a_stop_or_their_limit():
    assert gsm8k.failed({"stop": 3, "length": 2}, requests=5) == 0
    assert gsm8k.failed({"stop": 3, "abort": 1}, requests=5) == 2
    ours = gsm8k.scores(samples([True]), word_ids, seconds=1.0)
    assert "1 FAILED requests" in gsm8k.summary(ours | {"failed": 1, "ended": {"abort": 1}})


def test_layers_that_engines_inside_the_program_log():
    logger = logging.getLogger(engines.LOGGER)
    logger.setLevel(logging.INFO)
    with engines.logged_layers() as layers:
        logger.info("vllm-humming 0: %d MoE layers run through vllm_humming (%s experts, kernel path)", 6, "MXFP4")
        logger.info("something else")
    logger.info("vllm-humming 0: 1 MoE layer run through vllm_humming (MXFP4 experts, kernel path)")
    assert layers == ["6 MoE layers run through vllm_humming (MXFP4 experts, kernel path)"]


def test_results_name_a_commit_where_there_is_git_and_else_what_the_user_says(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("EVALS_COMMIT", raising=False)
    assert engines.surroundings()["commit"] is None
    monkeypatch.setenv("EVALS_COMMIT", "abc")
    assert engines.surroundings()["commit"] == "abc"


def test_documents_of_json_lines_and_of_text(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"question": "q", "answer": "a"}) + "\n\n" + json.dumps({"text": "t"}) + "\n")
    assert tasks.documents(lines) == ["q\na", "t"]
    text = tmp_path / "a.txt"
    text.write_text("\n\n".join(["x" * 3000, "y" * 900, "z" * 900]))
    assert [len(piece) for piece in tasks.documents(text)] == [3902, 900]


def test_lm_eval_finds_the_tasks_and_asks_in_gsm8ks_form(tmp_path):
    rows = [{"question": f"How much is {n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(20)]
    test, train = tmp_path / "test.jsonl", tmp_path / "train.jsonl"
    test.write_text("\n".join(map(json.dumps, rows[:10])))
    train.write_text("\n".join(map(json.dumps, rows[10:])))
    found = tasks.manager(test).load(["tinymath", "perplexity", tasks.gsm8k(test, train)])["tasks"]
    assert {name: len(list(task.test_docs())) for name, task in found.items()} == {
        "tinymath": 1000,
        "perplexity": 10,
        "gsm8k": 10,
    }
    for name, shots in (("tinymath", 0), ("gsm8k", 5)):
        found[name].build_all_requests(limit=2, rank=0, world_size=1)
        first, second = (instance.args[0] for instance in found[name].instances)
        assert first.count("Question: ") == second.count("Question: ") == shots + 1
        assert first.endswith("\nAnswer:")
        if shots:
            assert first.startswith("Question: How much is 10 + 1?\nAnswer: It is 11.\n#### 11\n\n")
            assert first.rsplit("Question", 1)[0] == second.rsplit("Question", 1)[0]
    (alone,) = (tasks.manager().load([tasks.gsm8k(test, None)])["tasks"]).values()
    alone.build_all_requests(limit=1, rank=0, world_size=1)
    assert alone.instances[0].args[0].count("How much is 0 + 1?") == 1  # asked, not shown as an example


# Formats


def test_nvfp4_dequantises_to_bf16_numbers_exactly_and_to_the_nearest():
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(48, 64, generator=generator) * torch.rand(48, 1, generator=generator)).bfloat16()
    factor = weights.nvfp4_factor([weight])
    assert math.log2(factor).is_integer()
    codes, scales = weights.quantize_nvfp4(weight, factor)
    assert scales.float().max() <= 448
    exact = weights.dequantize_nvfp4(codes, scales, factor)
    assert torch.equal(exact.bfloat16().float(), exact)
    # Every element is a nearest one of its group's grid.
    grid = torch.tensor(E2M1_VALUES[:8] + E2M1_VALUES[9:]).float()
    steps = (scales.float() / factor).repeat_interleave(16, dim=1)
    best = (weight.float()[..., None] - grid * steps[..., None]).abs().amin(-1)
    torch.testing.assert_close((weight.float() - exact).abs(), best, atol=1e-7, rtol=0)


def test_nvfp4_ties_go_to_the_even_code_and_zero_groups_stay_zero():
    weight = torch.zeros(2, 16)
    weight[0, :9] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0])
    codes, scales = weights.quantize_nvfp4(weight, 1.0)
    assert scales[0, 0] == 1
    exact = weights.dequantize_nvfp4(codes, scales, 1.0)
    assert exact[0, :9].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, -4]
    assert not exact[1].any()


def dense_tensors(up="up_proj"):
    generator = torch.Generator().manual_seed(0)
    names = {"gate_proj": (64, 32), up: (64, 32), "down_proj": (32, 64)}
    tensors = {
        f"model.layers.0.mlp.experts.{expert}.{name}.weight": torch.randn(shape, generator=generator).bfloat16()
        for expert in range(2)
        for name, shape in names.items()
    }
    return tensors | {
        "model.layers.0.mlp.gate.weight": torch.ones(2, 32).bfloat16(),
        "model.layers.0.self_attn.q_proj.weight": torch.ones(32, 32).bfloat16(),
        "model.embed_tokens.weight": torch.ones(8, 32).bfloat16(),
    }


@pytest.mark.parametrize("weight_format", ["mxfp4", "nvfp4"])
def test_checkpoints_convert_to_bf16_and_back(tmp_path, weight_format):
    dense = dense_tensors()
    weights.write(tmp_path / "quantised", {"model_type": "qwen3_moe"}, dense, weight_format)
    (tmp_path / "quantised" / "tokenizer.json").write_text("{}")
    weights.convert(tmp_path / "quantised", tmp_path / "bf16", "bf16")
    assert (tmp_path / "bf16" / "tokenizer.json").exists()
    config, values = weights.read(tmp_path / "bf16")
    assert "quantization_config" not in config
    assert values.keys() == dense.keys()
    again, ours = weights.read(tmp_path / "quantised")
    assert all(torch.equal(values[name], ours[name]) for name in values)
    assert again["quantization_config"]["ignore"] == [
        "lm_head",
        "model.layers.0.mlp.gate",
        "model.layers.0.self_attn.q_proj",
    ]
    # MXFP4 of MXFP4 values is the same file.
    if weight_format == "mxfp4":
        weights.convert(tmp_path / "bf16", tmp_path / "again", "mxfp4")
        files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("quantised", "again")]
        assert files[0] == files[1]


def test_gate_and_up_share_the_nvfp4_factor():
    dense = dense_tensors()
    dense["model.layers.0.mlp.experts.0.up_proj.weight"] *= 64
    tensors = weights.quantise_experts(dense, "nvfp4")
    factors = [
        float(tensors[f"model.layers.0.mlp.experts.0.{name}_proj.weight_global_scale"])
        for name in ("gate", "up", "down")
    ]
    assert factors[0] == factors[1] < factors[2]


# The capture smoke


def answer(tokens, gap=1.0, other=99, reason="length"):
    return Answer(list(tokens), [{token: -0.1, other: -0.1 - gap} for token in tokens], reason)


def test_a_difference_counts_unless_the_eager_run_had_a_tie():
    eager = answer([1, 2, 3])
    assert capture_smoke.first_difference(answer([1, 2, 3]), eager, 0.1) is None
    assert "position 1" in capture_smoke.first_difference(answer([1, 99, 7]), eager, 0.1)
    assert capture_smoke.first_difference(answer([1, 99, 7]), answer([1, 2, 3], gap=0.05), 0.1) is None
    assert "not among" in capture_smoke.first_difference(answer([1, 42, 3]), answer([1, 2, 3], gap=0.0), 0.1)
    assert capture_smoke.first_difference(answer([1, 2]), eager, 0.1) == "lengths differ"
    graph, reference = (
        Report(batches={"4": [answer([1]), answer([5])]}),
        Report(batches={"4": [answer([1]), answer([2])]}),
    )
    equal, total, problems = capture_smoke.compare(graph, reference, 0.1)
    assert (equal, total, len(problems)) == (1, 2, 1)


def test_invalid_answers():
    assert not answer([1, 2]).invalid(10)
    assert answer([]).invalid(10)
    assert answer([11]).invalid(10)
    assert answer([1], reason="abort").invalid(10)
    assert answer([1], gap=math.nan).invalid(10)


def test_missing_graphs_are_named():
    captured = {"FULL": [1, 2, 4], "PIECEWISE": [1, 2]}
    assert capture_smoke.missing_sizes(captured, [1, 2]) == []
    assert capture_smoke.missing_sizes(captured, [1, 2, 4]) == ["no PIECEWISE graph of sizes [4]"]
    assert len(capture_smoke.missing_sizes({}, [1])) == 2


def test_sizes_of_captured_graphs_are_found_among_live_objects():
    class CUDAGraphWrapper:
        def __init__(self, mode, sizes, empty=()):
            self.runtime_mode = SimpleNamespace(name=mode)
            graphs = dict.fromkeys(sizes, object()) | dict.fromkeys(empty)
            self.concrete_cudagraph_entries = {
                Key(size): SimpleNamespace(cudagraph=graph) for size, graph in graphs.items()
            }

    class Key(SimpleNamespace):
        def __init__(self, num_tokens, mode=""):
            super().__init__(num_tokens=num_tokens, cg_mode=SimpleNamespace(name=mode))

        __hash__ = object.__hash__

    class ModelCudaGraphManager:
        graphs = None

    manager = ModelCudaGraphManager()
    manager.graphs = {Key(16, "FULL"): None}
    live = [CUDAGraphWrapper("FULL", [1, 2]), CUDAGraphWrapper("PIECEWISE", [1, 2, 4]), manager]
    live.append(CUDAGraphWrapper("PIECEWISE", [1, 2], empty=[4]))
    live.append(CUDAGraphWrapper.__new__(CUDAGraphWrapper))  # its start failed
    assert capture_smoke.captured_sizes() == {"FULL": [1, 2, 16], "PIECEWISE": [1, 2]}
    del live


def test_a_profile_must_show_our_kernels_and_no_call_of_our_operator():
    kernels = [("void vllm_humming::kernel<...>(...)", True)] * 8 + [("cudaGraphLaunch", False)]
    assert capture_smoke.judge_profile(kernels, layers=4, steps=2) is None
    assert "7 kernels" in capture_smoke.judge_profile(kernels[1:], layers=4, steps=2)
    assert "outside a graph" in capture_smoke.judge_profile([*kernels, ("vllm_humming::moe", False)], 4, 2)


def test_prompts_of_an_exact_length():
    assert capture_smoke.cut([[1, 2, 3], [4, 5]], 4) == [1, 2, 3, 4]
    assert capture_smoke.cut([[1, 2]], 5) == [1, 2, 1, 2, 1]


# The upcycled model


def test_rotated_pairs_move_half_a_head_apart():
    stored = torch.arange(8).view(8, 1)  # two heads of four: pairs (0, 1), (2, 3), ...
    assert upcycle._rotary_halves(stored, 2).view(-1).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("mode", ["split", "copy"])
def test_the_upcycled_model_computes_what_the_model_computes(mode):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    llama = transformers.LlamaForCausalLM(config).bfloat16().float().eval()
    dense = upcycle.Dense(config.to_dict(), {k: v.bfloat16() for k, v in llama.state_dict().items()}, {})
    moe_config, tensors = upcycle.upcycle(dense, mode, experts=4, top_k=2)
    left_out = ("model_type", "architectures", "torch_dtype")
    moe = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**{name: value for name, value in moe_config.items() if name not in left_out})
    ).eval()
    state = moe.state_dict()
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        old, new = f"{prefix}block_sparse_moe.", f"{prefix}mlp."
        state[f"{new}gate.weight"] = tensors.pop(f"{old}gate.weight").float()
        parts = [[tensors.pop(f"{old}experts.{e}.{w}.weight").float() for w in ("w1", "w3", "w2")] for e in range(4)]
        state[f"{new}experts.gate_up_proj"] = torch.stack([torch.cat(part[:2]) for part in parts])
        state[f"{new}experts.down_proj"] = torch.stack([part[2] for part in parts])
    moe.load_state_dict(state | {name: value.float() for name, value in tensors.items()})
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(moe(tokens).logits, llama(tokens).logits, atol=1e-5, rtol=1e-4)


def test_agreement_and_perplexity_of_scores():
    left, right = upcycle.Scores([-1.0, -3.0], [1, 2, 3, 4]), upcycle.Scores([-4.0, -4.0], [1, 2, 0, 4])
    assert upcycle.agreement(left, right) == 0.75
    assert right.perplexity == pytest.approx(math.exp(2))


def test_a_format_is_compared_with_its_own_dequantised_weights():
    runs = upcycle.plan(["nvfp4", "mxfp4-fp8"], "--quantization humming", 0.2, 1.0)
    assert list(runs) == ["bf16", "nvfp4-bf16", "nvfp4", "mxfp4-bf16", "mxfp4", "mxfp4-fp8"]
    assert runs["nvfp4"] == upcycle.Run("nvfp4", "--quantization humming", "nvfp4-bf16", 0.2)
    eight_bits = runs["mxfp4-fp8"]
    assert (eight_bits.checkpoint, eight_bits.against, eight_bits.percent) == ("mxfp4", "mxfp4", 1.0)
    assert engines.keyword_arguments(eight_bits.arguments)["additional_config"] == {"humming": {"activation": "fp8"}}


# The suite


def test_formats_bring_what_they_are_compared_with(tmp_path):
    wanted = suite.formats(["mxfp4-fp8", "nvfp4"])
    assert {name: part.twin for name, part in wanted.items()} == {
        "mxfp4-fp8": "mxfp4",
        "mxfp4": "bf16",
        "bf16": None,
        "nvfp4": "nvfp4-bf16",
        "nvfp4-bf16": None,
    }
    weights.write(tmp_path / "model", {"model_type": "qwen3_moe"}, dense_tensors(), "mxfp4")
    paths = suite.checkpoints(tmp_path / "model", tmp_path / "made", wanted)
    assert set(paths) == {"mxfp4", "bf16", "nvfp4", "nvfp4-bf16"}
    _, exact = weights.read(paths["nvfp4"])
    config, twin = weights.read(paths["nvfp4-bf16"])
    assert "quantization_config" not in config
    assert all(torch.equal(twin[name], exact[name]) for name in exact)


def ended_process(pid):
    """Whether a process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_suite_goes_on_after_a_step_that_fails(tmp_path, monkeypatch, capsys):
    good = "import json,sys; json.dump({}, open(sys.argv[1], 'w')); print('[eval]     fine')"
    hanging = "import subprocess,sys; server = subprocess.Popen(['sleep', '99'], start_new_session=True);"
    hanging += "open(sys.argv[1], 'w').write(str(server.pid)); server.wait()"
    ours = {"layers": [], "engine": {"arguments": "--quantization humming"}}
    (tmp_path / "fourth.json").write_text(json.dumps({"ours": ours}))
    steps = [
        suite.Step("first", [sys.executable, "-c", "raise SystemExit('no card')"]),
        suite.Step("second", [sys.executable, "-c", good, str(tmp_path / "second.json")]),
        suite.Step("third", [sys.executable, "-c", hanging, str(tmp_path / "server")]),
        suite.Step("fourth", [sys.executable, "-c", ""]),  # another method of the same name served the model
    ]
    monkeypatch.setattr(suite, "steps", lambda *_: steps)
    monkeypatch.setattr(suite, "checkpoints", lambda *_: {})
    monkeypatch.setattr("sys.argv", ["suite", str(tmp_path), "--step-limit", "5"])
    with pytest.raises(SystemExit) as ended:
        suite.main()
    assert ended.value.code == 1
    results = json.loads((tmp_path / "results.json").read_text())["steps"]
    assert [results[step.name]["code"] for step in steps] == [
        1,
        0,
        "stopped after 5 s",
        "no layer ran through vllm_humming",
    ]
    assert ended_process(int((tmp_path / "server").read_text()))  # the step's server has ended with it
    assert results["first"]["said"] == ["no card"]
    assert results["second"]["result"] == {}
    assert "second: ok" in capsys.readouterr().out


def test_runs_of_the_suite_are_compared_with_their_twins(capsys):
    def ran(accuracy, likelihood):
        tasks = {
            "tinymath": gsm8k.scores(samples([True] * accuracy + [False] * (100 - accuracy)), word_ids, seconds=1.0),
            "perplexity": {"token_perplexity": 1.0, "log_likelihoods": [likelihood, likelihood], "tokens": 10},
        }
        return {"result": {"ours": {"tasks": tasks}}}

    wanted = suite.formats(["mxfp4", "nvfp4"])
    results = {"mxfp4": ran(99, -5.0), "bf16": ran(100, -5.001), "nvfp4": ran(99, -5.0)}
    found, fine = suite.comparisons(results, wanted)
    assert fine
    assert found["mxfp4"]["perplexity"]["relative_perplexity"] == pytest.approx(math.exp(-2e-4) - 1)
    assert "nvfp4" not in found  # its twin did not run
    assert not suite.comparisons(results | {"bf16": ran(100, -5.02)}, wanted)[1]
    assert not suite.comparisons(results | {"bf16": ran(97, -5.0)}, wanted)[1]
    assert "OUT OF BOUNDS" in capsys.readouterr().out
