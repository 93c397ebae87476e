# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines for test_engine.py: each in processes of its own, two at a time."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GENERATE = HERE / "engine_generate.py"
REFERENCE = HERE / "transformers_generate.py"
START_LIMIT_S = 240  # an engine needs 20 to 60 s on a busy two-core machine


@dataclass(frozen=True)
class Run:
    """What one engine left: its exit code, its log and what it generated (None where it refused)."""

    code: int
    log: str
    result: Any


def environment() -> dict[str, str]:
    """Two engines share the machine's cores: one thread each, not bound to a core. Nothing is fetched."""
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    return os.environ | wanted


def generate(
    directory: Path, engine: dict[str, Any], prompts: list[list[int]], max_tokens: int, plugin: str | None = None
) -> Run:
    """Greedy tokens and the five best logprobs of each position, from `LLM(**engine)` with processes of its own.

    plugin: a module beside this one whose register() vLLM calls in each of its processes.
    """
    entries = [{"name": "", "engine": engine, "out": str(directory / "result.json")}]
    request = {"engines": entries, "prompts": prompts, "max_tokens": max_tokens}
    return _run(directory, GENERATE, request, environment() | _with_plugin(directory, plugin), START_LIMIT_S)


def generate_in_turn(
    directory: Path, engines: dict[str, dict[str, Any]], prompts: list[list[int]], max_tokens: int
) -> dict[str, Run]:
    """The same of several engines by name, one after the other in one process: most of a start is imports."""
    marks = {name: f"[engine: {name}]" for name in engines}
    outs = {name: directory / f"{name}.json" for name in engines}
    entries = [
        {"name": marks[name], "engine": engine | {"distributed_executor_backend": "uni"}, "out": str(outs[name])}
        for name, engine in engines.items()
    ]
    request = {"engines": entries, "prompts": prompts, "max_tokens": max_tokens}
    limit = START_LIMIT_S * len(engines)
    whole = _run(directory, GENERATE, request, environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, limit)
    runs = {}
    for name, out in outs.items():
        log = whole.log.partition(marks[name])[2].partition("[engine: ")[0]
        runs[name] = Run(whole.code, log, json.loads(out.read_text()) if out.exists() else None)
    return runs


def reference_generate(directory: Path, model: str, prompts: list[list[int]], max_tokens: int) -> Run:
    """The same from transformers, in float32."""
    request = {"model": model, "prompts": prompts, "max_tokens": max_tokens, "out": str(directory / "result.json")}
    return _run(directory, REFERENCE, request, environment(), START_LIMIT_S)


def _with_plugin(directory: Path, plugin: str | None) -> dict[str, str]:
    """Environment in which vLLM finds the plugin: an entry point on the path, as an installed package has it."""
    if plugin is None:
        return {}
    info = directory / "site" / f"{plugin}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {plugin}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{plugin} = {plugin}:register\n")
    path = [str(info.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}


def _run(directory: Path, script: Path, request: dict[str, Any], env: dict[str, str], limit_s: float) -> Run:
    """Runs the script to its end; the result is that of directory / result.json."""
    out, log = directory / "result.json", directory / "log.txt"
    command = [sys.executable, str(script), json.dumps(request)]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        with stopping(process):
            code = process.wait(limit_s)
    return Run(code, log.read_text(), json.loads(out.read_text()) if out.exists() else None)


def serve(directory: Path, arguments: list[str], requests: list[dict[str, Any]]) -> Run:
    """Answers of an OpenAI-compatible server started with `arguments` to completion requests, over HTTP."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port), *arguments]
    command += ["--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8"]
    log = directory / "log.txt"
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
        with stopping(process):
            base = f"http://127.0.0.1:{port}"
            wait_until_healthy(process, base, log)
            answers = [post(f"{base}/v1/completions", request) for request in requests]
    return Run(process.returncode, log.read_text(), answers)


@contextlib.contextmanager
def stopping(process: subprocess.Popen):
    """Ends the process and the workers in its session, whatever happened."""
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)


def wait_until_healthy(process: subprocess.Popen, base: str, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server stopped with code {process.returncode}:\n{log.read_text()[-4000:]}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{base}/health", timeout=5):
            return
        time.sleep(0.5)
    raise RuntimeError(f"the server was not ready after {START_LIMIT_S} s:\n{log.read_text()[-4000:]}")


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Engines:
    """Runs by name, started in the order they were added, two at a time, each once."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(2)
        self.runs: dict[str, Future[Any]] = {}

    def add(self, name: str, function, *arguments: Any) -> None:
        self.runs[name] = self.pool.submit(function, *arguments)

    def add_in_turn(self, directory: Path, engines: dict[str, dict[str, Any]], *arguments: Any) -> None:
        """See generate_in_turn; each engine's run is found under its own name."""
        future = self.pool.submit(generate_in_turn, directory, engines, *arguments)
        self.runs |= dict.fromkeys(engines, future)

    def __getitem__(self, name: str) -> Run:
        result: Run | dict[str, Run] = self.runs[name].result()
        return result[name] if isinstance(result, dict) else result

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
