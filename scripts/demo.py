# SPDX-License-Identifier: Apache-2.0
"""Serves the small trained MXFP4 model with `vllm serve --quantization humming` and asks it a word problem.

Run by `make demo` with the Python of the environment it made. Exits non-zero unless the server answered, the answer to
the problem, which the model's training never saw, is right, and every MoE layer ran through this package.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from evals.tinymath.data import Problem, evaluation, prompt  # noqa: E402

MODEL = ROOT / "evals" / "tinymath" / "model"
DIRECTORY = ROOT / ".demo"
NAME = "tinymath-mxfp4"
TEMPLATE = "remaining_share"  # a problem of three steps
START_LIMIT_S = 600
LAYERS = re.compile(r"(\d+) MoE layers? run through vllm_humming \((.+) experts, (kernel|reference) path\)")


class DemoError(Exception):
    """Why the demo failed, for the last line of its output."""


def step(text: str) -> None:
    print(f"[demo] {text}", flush=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def start_server(model: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    arguments = ["serve", str(model), "--quantization", "humming"]
    arguments += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024"]
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | os.environ
    settings.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if not torch.cuda.is_available():
        arguments.append("--enforce-eager")  # on a CPU the model compiler takes longer than the demo
    step(" ".join(["vllm", *arguments]))
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments]  # what the `vllm` script runs
    with log.open("wb") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=settings, start_new_session=True)


def stop_server(server: subprocess.Popen[bytes]) -> None:
    """Asks the server to stop, then ends whatever is left of its session."""
    server.send_signal(signal.SIGINT)
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        step("the server did not stop within 30 s and is killed")
    try:
        os.killpg(server.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def wait_until_ready(server: subprocess.Popen[bytes], base: str) -> None:
    start = time.monotonic()
    while time.monotonic() - start < START_LIMIT_S:
        if server.poll() is not None:
            raise DemoError(f"the server stopped with exit code {server.returncode}")
        try:
            urllib.request.urlopen(f"{base}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(1)
        else:
            step(f"ready after {time.monotonic() - start:.0f} s")
            return
    raise DemoError(f"the server was not ready after {START_LIMIT_S} s")


def complete(base: str, text: str) -> str:
    body = {"model": NAME, "prompt": text, "max_tokens": 192, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{base}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            answer: str = json.load(response)["choices"][0]["text"]
    except urllib.error.URLError as error:
        raise DemoError(f"the completion request failed: {error}") from error
    return answer


def check(problem: Problem, answer: str, log: str) -> None:
    """Raises DemoError unless the answer is right and the layers that ran are the expected ones."""
    lines = [*textwrap.wrap(problem.question, 100), "", *answer.strip().splitlines()]
    print("\n" + "".join(f"    {line}".rstrip() + "\n" for line in lines), flush=True)
    if not answer.rstrip().endswith(f"#### {problem.result}"):
        raise DemoError(f"the answer should be {problem.result}")
    found = LAYERS.search(log)
    if found is None:
        raise DemoError("the server's log does not say that MoE layers ran through vllm_humming")
    layers, weight_format, path = found.groups()
    expected = json.loads((MODEL / "config.json").read_text())["num_hidden_layers"]
    step(f"{layers} of {expected} MoE layers ran through vllm_humming: {weight_format} experts, {path} path")
    if int(layers) != expected:
        raise DemoError("some MoE layers ran elsewhere")


def main() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    log = DIRECTORY / "server.log"
    problem = next(problem for problem in evaluation("test") if problem.key[0] == TEMPLATE)
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    server = start_server(MODEL, port, log)
    try:
        wait_until_ready(server, base)
        check(problem, complete(base, prompt(problem.question)), log.read_text(errors="replace"))
    except DemoError as error:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise SystemExit(f"{tail}\n[demo] FAILED: {error} (log: {log})") from error
    finally:
        stop_server(server)
    step("server stopped; done")


if __name__ == "__main__":
    main()
