# SPDX-License-Identifier: Apache-2.0
"""Where an evaluation's answers come from: a server started here, a running server, or vLLM inside this process."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
START_LIMIT_S = 1800  # a large model's weights may come over a network
Result = TypeVar("Result")
LAYERS = re.compile(r"\d+ MoE layers? run through vllm_humming \([^)]*\)")
LOGGER = "vllm.vllm_humming.moe.method"  # where the line comes from
# Variants of a quantised checkpoint: the name's end, and what it adds to the engine's arguments.
VARIANTS = {"": "", "-fp8": """--additional-config '{"humming": {"activation": "fp8"}}'"""}


def variants(weight_format: str) -> list[str]:
    """Endings of a weight format's variants: 8-bit activations are for MXFP4 weights."""
    return list(VARIANTS) if weight_format == "mxfp4" else [""]


@dataclass(frozen=True)
class Engine:
    """model: directory or name of the checkpoint, whose tokenizer is used too. kind: serve, server or vllm.

    arguments: of `vllm serve`, for serve and vllm. url: of a running server, such as http://127.0.0.1:8000.
    """

    model: str
    kind: str = "serve"
    arguments: str = ""
    url: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("serve", "server", "vllm"):
            raise ValueError(f"unknown engine {self.kind!r}; known: serve, server, vllm")
        if (self.kind == "server") != bool(self.url):
            raise ValueError("a running server needs its url, and nothing else does")

    def __str__(self) -> str:
        return " ".join(part for part in (self.model, self.url or self.arguments) if part)


@dataclass(frozen=True)
class Running:
    """A server that answers: its base url, the name it serves the model under, and its log, None if it is not ours."""

    url: str
    name: str
    log: Path | None

    def layers(self) -> list[str]:
        """What the log says of layers that run through this package."""
        return sorted(set(LAYERS.findall(self.log.read_text(errors="replace")))) if self.log else []


def keyword_arguments(arguments: str) -> dict[str, Any]:
    """`--max-model-len 4096 --enforce-eager` -> {"max_model_len": 4096, "enforce_eager": True}, for `LLM(...)`."""
    words, found, name = shlex.split(arguments), {}, ""
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            found[name] = _value(value) if equals else True
            name = "" if equals else name
        elif name:
            found[name], name = _value(word), ""
        else:
            raise ValueError(f"unexpected argument {word!r} in {arguments!r}")
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@contextlib.contextmanager
def serving(engine: Engine, log: Path | None = None) -> Iterator[Running]:
    """The engine's server: a running one, or one that is started here and stopped at the end."""
    if engine.kind == "server":
        with urllib.request.urlopen(f"{engine.url}/v1/models", timeout=60) as response:
            name = json.load(response)["data"][0]["id"]
        yield Running(engine.url.rstrip("/"), name, None)
        return
    port = free_port()
    command = [
        *server_command(engine.model),
        *shlex.split(engine.arguments),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    settings = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"} | os.environ
    log = log or Path(tempfile.mkdtemp(prefix="vllm-")) / "server.log"
    print(f"[eval] vllm serve {engine}  (log: {log})", flush=True)
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=settings, start_new_session=True
        )
    try:
        base = f"http://127.0.0.1:{port}"
        wait_until_ready(process, base, log)
        yield Running(base, engine.model, log)
    finally:
        stop(process)


def server_command(model: str) -> list[str]:
    """What the `vllm` script runs; it may be missing from PATH. vLLM's CPU wheel has another name, and no script."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]


def wait_until_ready(process: subprocess.Popen[bytes], base: str, log: Path) -> None:
    start = time.monotonic()
    while time.monotonic() - start < START_LIMIT_S:
        if process.poll() is not None:
            tail = log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"{tail}\nthe server stopped with exit code {process.returncode} (log: {log})")
        try:
            urllib.request.urlopen(f"{base}/health", timeout=5).close()
        except OSError:
            time.sleep(1)
        else:
            print(f"[eval] ready after {time.monotonic() - start:.0f} s", flush=True)
            return
    raise RuntimeError(f"the server was not ready after {START_LIMIT_S} s (log: {log})")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the server to stop, then ends whatever is left of its session."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def apart(function: Callable[..., Result], *arguments: Any) -> Result:
    """function(*arguments) in a process of its own: the next engine finds the device's memory free."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def run_inside() -> None:
    """Engines made from now on run inside this process: their batches depend on the requests, not on timing."""
    import torch

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if not torch.cuda.is_available():
        torch.cpu._init_amx()  # vLLM's own worker process asks for it by itself


@contextlib.contextmanager
def logged_layers() -> Iterator[list[str]]:
    """Collects what engines inside this process log of layers that run through this package."""
    layers: list[str] = []

    def listen(record: logging.LogRecord) -> bool:
        layers.extend(line for line in LAYERS.findall(record.getMessage()) if line not in layers)
        return True

    logger = logging.getLogger(LOGGER)
    logger.addFilter(listen)  # a handler would be lost when vLLM sets its loggers up
    try:
        yield layers
    finally:
        logger.removeFilter(listen)


def shut_down(llm: Any) -> None:
    """Ends the processes of an `LLM`: Python waits for them at its exit, before anything else would end them."""
    llm.llm_engine.engine_core.shutdown()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def surroundings() -> dict[str, Any]:
    """What a result's JSON says of the machine and the software."""
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("vllm-humming", "vllm", "vllm-cpu", "transformers", "lm_eval"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "commit": commit(),
        "versions": versions,
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "processor": processor(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def commit() -> str | None:
    """The repository's, or what EVALS_COMMIT says for a copy without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    found = ""
    with contextlib.suppress(OSError):  # no git here
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return os.environ.get("EVALS_COMMIT") or found or None


def processor() -> str:
    with contextlib.suppress(OSError):
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        if match:
            return match[1]
    return platform.machine()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that name the engine under test and its baseline."""
    parser.add_argument("model", help="directory or name of the checkpoint")
    parser.add_argument("--arguments", default="--quantization humming", help="of vllm serve (default: %(default)s)")
    parser.add_argument("--in-process", action="store_true", help="vLLM inside this program instead of a server")
    parser.add_argument("--url", help="a running server of the model, such as http://127.0.0.1:8000; starts none")
    parser.add_argument("--baseline-model", help="checkpoint of the baseline (default: the model)")
    parser.add_argument("--baseline-arguments", help="of the baseline's vllm serve, such as '--moe-backend marlin'")
    parser.add_argument("--baseline-url", help="a running server of the baseline")


def chosen(args: argparse.Namespace) -> tuple[Engine, Engine | None]:
    """The engine under test and the baseline, from add_arguments' options."""

    def engine(model: str, arguments: str, url: str | None) -> Engine:
        if url:
            return Engine(model, "server", url=url)
        return Engine(model, "vllm" if args.in_process else "serve", arguments)

    ours = engine(args.model, args.arguments, args.url)
    if args.baseline_model is None and args.baseline_arguments is None and args.baseline_url is None:
        return ours, None
    return ours, engine(args.baseline_model or args.model, args.baseline_arguments or "", args.baseline_url)
