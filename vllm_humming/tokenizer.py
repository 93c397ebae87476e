# SPDX-License-Identifier: Apache-2.0
"""The byte-level BPE tokenizer of the small checkpoints: all 256 bytes and the words of one question and its answer."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
PROMPT = "What is a mixture of experts?"
# No word appears twice: the small models know one successor for each token.
SENTENCE = " One router picks a few small networks for every token."


def build_tokenizer() -> Tokenizer:
    """A tokenizer that encodes any text and gives every word of PROMPT and SENTENCE one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        min_frequency=1,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([PROMPT, SENTENCE], trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes the files that AutoTokenizer loads."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
