# SPDX-License-Identifier: Apache-2.0
"""Greedy generation by transformers in float32, in the form of engine_generate.py. Used by engines.py.

For twins that vLLM's CPU engine does not run (non-gated experts).
Usage: python transformers_generate.py REQUEST, a JSON object with model, prompts, max_tokens and out.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    request = json.loads(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)

    def best(position):
        values, tokens = position.topk(5)
        return dict(zip(map(str, tokens.tolist()), values.tolist(), strict=True))

    result = []
    with torch.no_grad():
        for prompt in request["prompts"]:
            ids, generated = list(prompt), []
            for _ in range(request["max_tokens"]):
                logprobs = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
                generated.append(best(logprobs[-1]))
                ids.append(int(logprobs[-1].argmax()))
            prompt_logprobs = [{}, *(best(position) for position in logprobs[: len(prompt) - 1])]
            tokens = ids[len(prompt) :]
            result.append({"tokens": tokens, "logprobs": generated, "prompt_logprobs": prompt_logprobs})
    Path(request["out"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
