# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of tinymath: a token for each digit, for each word of the problems, and for each byte.

Other words are spelled with pieces that the problems' words share, or with bytes: any text encodes and decodes.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from evals.tinymath.data import corpus_words

END = "<|endoftext|>"
PIECES = 384  # bytes and merges; the words come on top
SYMBOLS = ("<<", ">>", "####", "\n\n")
# A digit, a symbol, a word with the space before it, anything else one by one.
SPLIT = rf"\d| ?(?:{'|'.join(SYMBOLS)})| ?[A-Za-z]+| ?[^\sA-Za-z\d]|\s"


def build_tokenizer() -> Tokenizer:
    words = corpus_words()
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = split
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    pieces.train_from_iterator([" " + word for word in words], trainer)
    model = json.loads(pieces.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokens = [END, *sorted(model["vocab"], key=model["vocab"].__getitem__)]
    wanted = [*SYMBOLS, *words, *(" " + word for word in words), *(" " + mark for mark in ("<<", *"$=+-*/"))]
    encoded = [split.pre_tokenize_str(text) for text in wanted]
    tokens += [parts[0][0] for parts in encoded if len(parts) == 1]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    # ignore_merges: a word that has a token is that token, whether merges lead to it or not.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Writes the files that AutoTokenizer loads."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": "{% for message in messages %}{% if message['role'] == 'user' %}"
        "Question: {{ message['content'] }}\nAnswer:{% endif %}{% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
