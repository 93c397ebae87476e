# SPDX-License-Identifier: Apache-2.0
"""The recipe of the small trained model: problems, tokenizer, packed batches, the model and its checkpoint."""

import json
import re
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from evals import weights
from evals.tinymath import batches, data, train
from evals.tinymath.model import Model, Sizes, generate, packed_mask
from evals.tinymath.tokenizer import END, build_tokenizer

SMALL = Sizes(layers=2, hidden=64, intermediate=96)
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = \$?<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = Model(SMALL, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("template", data.TEMPLATES, ids=lambda template: template.name)
def test_worked_steps_are_right_and_lead_to_the_answer(template):
    generator = data.Generator(3)
    for _ in range(50):
        problem = generator.fill(template)
        *lines, last = problem.answer.split("\n")
        values = []
        for line in lines:
            left, operator, right, *repeated, value, again = EQUATION.search(line).groups()
            assert repeated == [left, operator, right]
            assert value == again
            result = {"+": "__add__", "-": "__sub__", "*": "__mul__", "/": "__truediv__"}[operator]
            assert getattr(int(left), result)(int(right)) == int(value)
            values.append(value)
        assert last == f"#### {values[-1]}"
        assert problem.result == values[-1]
        assert "{" not in problem.question + problem.answer
        numbers = set(re.findall(r"\d+", problem.question)) | set(values) | {"2", "3", "4", "7", "60"}
        numbers |= {str(100 // value) for value in (10, 20, 25, 50)}
        assert set(re.findall(r"\d+", problem.answer)) <= numbers  # nothing that the question does not give


def test_held_out_problems_are_distinct_and_never_trained_on():
    test, validation = (data.evaluation(split) for split in ("test", "validation"))
    keys = [problem.key for problem in test + validation]
    assert len(test) == 1000
    assert len(set(keys)) == len(keys) == 1500
    assert data.evaluation("test") == test
    trained = {problem.key for problem in islice(data.training(0), 20000)}
    assert not trained & set(keys)
    # No template's numbers are used up by the evaluation: training has enough of every kind.
    counts = Counter(name for name, _ in trained)
    assert min(counts[template.name] for template in data.TEMPLATES) > 80


def test_drills_are_trained_on_but_never_asked():
    drills = {template.name for template in data.TEMPLATES if template.drill}
    assert not {problem.key[0] for problem in data.evaluation("test")} & drills
    assert {problem.key[0] for problem in islice(data.training(1), 2000)} >= drills


def test_tokenizer_spells_any_text_and_gives_each_digit_a_token(tokenizer):
    assert tokenizer.get_vocab_size() <= Sizes().vocab
    assert tokenizer.to_str() == build_tokenizer().to_str()
    for text in ("Ada has 1207 apples. #### 12", "Héllo wörld 🙂\t\n\n  x", "<<3*4=12>>12 dollars"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("1207").tokens == list("1207")
    known = data.evaluation("test")[0]
    assert len(tokenizer.encode(known.question).ids) < 0.5 * len(known.question)


def test_packed_batches_hold_whole_problems(tokenizer):
    for batch in batches.make_batches(seed=5, rows=6, length=192):
        assert (batch.parts > 0).mean() > 0.75
        for row in range(6):
            for number in set(batch.documents[row][batch.parts[row] > 0]):
                span = np.nonzero(batch.documents[row] == number)[0]
                assert (np.diff(span) == 1).all()
                assert (batch.positions[row, span] == np.arange(len(span))).all()
                tokens, parts = batch.tokens[row, span], batch.parts[row, span]
                assert tokens[-1] == tokenizer.token_to_id(END)
                for piece in tokenizer.decode(tokens[:-1].tolist()).split("\n\n"):
                    assert re.fullmatch(r"Question: .*\nAnswer: (.*\n)+#### \d+", piece)
                first_answer = int(np.nonzero(parts == 2)[0][0])
                assert tokenizer.decode(tokens[:first_answer].tolist()).endswith("\nAnswer:")
    again = batches.make_batches(seed=5, rows=6, length=192)
    assert (again[-1].tokens == batch.tokens).all()


def test_packing_does_not_change_what_a_document_gives(model):
    documents = [torch.arange(3, 20), torch.arange(30, 41)]
    alone = [
        model(tokens[None], torch.arange(len(tokens))[None], packed_mask(torch.ones(1, len(tokens))))[0][0]
        for tokens in documents
    ]
    joined = torch.cat(documents)[None]
    positions = torch.cat([torch.arange(len(tokens)) for tokens in documents])[None]
    numbers = torch.cat([torch.full((len(tokens),), i) for i, tokens in enumerate(documents)])[None]
    hidden, _ = model(joined, positions, packed_mask(numbers))
    torch.testing.assert_close(hidden[0], torch.cat(alone), atol=2e-5, rtol=1e-4)


def test_checkpoint_computes_what_was_trained(model, tokenizer, tmp_path):
    """The exported files in transformers' Qwen3-MoE against the model here: logits and greedy text."""
    transformers = pytest.importorskip("transformers")
    size = train.write(tmp_path / "mxfp4", model, tokenizer)
    assert size == sum(tensor.nbytes for tensor in load_file(tmp_path / "mxfp4" / "model.safetensors").values())
    weights.convert(tmp_path / "mxfp4", tmp_path / "bf16", "bf16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.float32)
    ours = train.as_exported(model)
    tokens = torch.randint(0, 1000, (3, 40), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(40).expand(3, -1)
    with torch.no_grad():
        hidden, balance = ours(tokens, positions, packed_mask(torch.ones_like(tokens)))
        torch.testing.assert_close(ours.logits(hidden), theirs(tokens).logits, atol=2e-5, rtol=1e-4)
        # Already MXFP4 values: seeing them as MXFP4 again changes nothing.
        again, _ = ours(tokens, positions, packed_mask(torch.ones_like(tokens)), quantised=True)
    assert torch.equal(again, hidden)
    assert 0.9 < float(balance) < 2
    prompts = [[5, 6, 7], list(range(8, 19)), [9, 10]]
    for start, row in zip(prompts, generate(ours, prompts, end=0, max_tokens=12), strict=True):
        text = torch.tensor([start])
        full = theirs.generate(text, max_new_tokens=12, do_sample=False, eos_token_id=0, pad_token_id=0)
        assert [token for token in full[0, len(start) :].tolist() if token != 0] == row


def test_quantised_steps_train_the_weights_behind_the_mxfp4_values(model):
    tokens = torch.arange(3, 40)[None]
    hidden, _ = model(tokens, torch.arange(37)[None], packed_mask(torch.ones_like(tokens)), quantised=True)
    model.logits(hidden).square().mean().backward()
    for layer in model.blocks():
        assert layer.gate_up.grad.abs().sum() > 0
        assert layer.down.grad.abs().sum() > 0
    model.zero_grad()


def test_training_learns_and_writes_a_checkpoint(tmp_path, monkeypatch):
    arguments = "--steps 12 --rows 4 --layers 1 --hidden 64 --intermediate 64 --heads 1 --kv-heads 1 --report 4"
    arguments += " --workers 1 --validation 2 --test 4 --device cpu"
    monkeypatch.setattr("sys.argv", ["train", str(tmp_path), *arguments.split()])
    monkeypatch.setattr(train, "MAX_TOKENS", 8)
    train.main()
    record = json.loads((tmp_path / "training.json").read_text())
    losses = [point["loss"] for point in record["curve"]]
    assert losses[-1] < losses[0] - 0.5
    assert record["test"]["problems"] == 4
    assert len(record["validation"]) == len(train.EVALUATIONS)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["format"] == "mxfp4-pack-quantized"
    assert "model.layers.0.mlp.gate" in config["quantization_config"]["ignore"]


def test_learning_rate_rises_and_falls():
    rates = [train.learning_rate(1.0, progress) for progress in (0.0, 0.01, 0.02, 0.5, 1.0)]
    assert rates[0] < rates[1] < rates[2] == 1.0
    assert rates[2] > rates[3] > rates[4] == pytest.approx(0.01)
