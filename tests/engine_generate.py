# SPDX-License-Identifier: Apache-2.0
"""Runs one vLLM engine in a process of its own and writes what it generated as JSON. Used by engines.py.

Usage: python engine_generate.py REQUEST, a JSON object with engine (arguments of LLM), prompts, max_tokens and out.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    request = json.loads(sys.argv[1])
    llm = LLM(enforce_eager=True, max_model_len=256, max_num_seqs=8, **request["engine"])
    params = SamplingParams(
        temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, logprobs=5, prompt_logprobs=5
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in request["prompts"]], params)

    def plain(positions):
        return [{token: entry.logprob for token, entry in (position or {}).items()} for position in positions]

    result = [
        {
            "tokens": list(output.outputs[0].token_ids),
            "text": output.outputs[0].text,
            "logprobs": plain(output.outputs[0].logprobs),
            "prompt_logprobs": plain(output.prompt_logprobs),
        }
        for output in outputs
    ]
    Path(request["out"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
