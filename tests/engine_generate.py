# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM engines and writes what each generated as JSON. Used by engines.py.

Usage: python engine_generate.py REQUEST, a JSON object with engines (a list of {engine: arguments of LLM, out, name}),
prompts and max_tokens. Several engines run one after the other; name starts the part of the output that is about one.
An engine that fails does not keep the next from running; the exit code tells.
"""

import gc
import json
import sys
import traceback
from pathlib import Path
from typing import Any


def generate(arguments: dict[str, Any], prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    llm = LLM(enforce_eager=True, max_model_len=256, max_num_seqs=8, **arguments)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=5, prompt_logprobs=5)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)

    def plain(positions):
        return [{token: entry.logprob for token, entry in (position or {}).items()} for position in positions]

    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "text": output.outputs[0].text,
            "logprobs": plain(output.outputs[0].logprobs),
            "prompt_logprobs": plain(output.prompt_logprobs),
        }
        for output in outputs
    ]


def main() -> None:
    request = json.loads(sys.argv[1])
    failed = False
    for entry in request["engines"]:
        print(entry["name"], flush=True)
        try:
            result = generate(entry["engine"], request["prompts"], request["max_tokens"])
        except Exception:
            traceback.print_exc()
            failed = True
        else:
            Path(entry["out"]).write_text(json.dumps(result))
        if len(request["engines"]) > 1:
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            gc.collect()
            cleanup_dist_env_and_memory()
    sys.exit(failed)


if __name__ == "__main__":
    main()
