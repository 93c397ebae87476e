# SPDX-License-Identifier: Apache-2.0
"""register(), the options and the machine checks."""

import subprocess
import sys

import pytest

import vllm_humming
from vllm_humming import compat, hardware, plugin
from vllm_humming.compat import Platform
from vllm_humming.options import HummingOptions


def test_register_takes_over_the_name_and_is_reentrant():
    from vllm_humming.quant_methods.config import HummingConfig

    for _ in range(3):
        vllm_humming.register()
    assert compat.base_config_class("humming") is HummingConfig


def test_register_logs_one_line_with_the_version(caplog, monkeypatch):
    monkeypatch.setattr(plugin, "_announced", False)
    log = compat.logger("vllm_humming.plugin")
    monkeypatch.setattr(log, "propagate", True)
    log.addHandler(caplog.handler)
    caplog.set_level("INFO", log.name)
    try:
        vllm_humming.register()
        vllm_humming.register()
    finally:
        log.removeHandler(caplog.handler)
    lines = {record.getMessage() for record in caplog.records if record.name == log.name}
    assert lines == {f'vllm-humming {vllm_humming.__version__} takes over quantization method "humming"'}


def test_register_never_raises(caplog, monkeypatch):
    def broken(*args):
        raise RuntimeError("registry is gone")

    monkeypatch.setattr(compat, "register_quantization", broken)
    log = compat.logger("vllm_humming.plugin")
    log.addHandler(caplog.handler)
    try:
        vllm_humming.register()
    finally:
        log.removeHandler(caplog.handler)
    assert "could not register" in caplog.text
    assert "registry is gone" in caplog.text


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0.0"])
def test_other_vllm_versions_are_refused(version, monkeypatch):
    monkeypatch.setattr("vllm.__version__", version)
    with pytest.raises(RuntimeError, match=r"supports vLLM >=0\.26,<0\.34, found"):
        compat.check_version()


@pytest.mark.parametrize("version", ["0.26.0", "0.33.2+cpu", "dev", "0.0.0"])
def test_supported_and_source_versions_pass(version, monkeypatch):
    monkeypatch.setattr("vllm.__version__", version)
    compat.check_version()


def test_register_is_light_in_a_fresh_process():
    code = (
        "import sys, torch, vllm_humming; vllm_humming.register(); vllm_humming.register();"
        "assert not torch.cuda.is_initialized();"
        "unwanted = ('vllm.model_executor.layers.fused_moe.', 'vllm_humming.moe.method', 'vllm_humming.ops');"
        "heavy = [m for m in sys.modules if m.startswith(unwanted)];"
        "assert not heavy, heavy;"
        "from vllm.model_executor.layers.quantization import get_quantization_config as get;"
        "assert get('humming').__module__ == 'vllm_humming.quant_methods.config'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_options_default_and_given():
    assert HummingOptions.parse({}) == HummingOptions("auto", "mxfp4")
    assert HummingOptions.parse({"humming": {"online_format": "nvfp4"}}).online_format == "nvfp4"
    assert HummingOptions.parse({"humming": {"activation": "fp8"}}) == HummingOptions("auto", "mxfp4", "fp8")
    assert HummingOptions.parse({"other": 1, "humming": {"backend": "reference"}}).backend == "reference"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"bakend": "kernel"},
            r"unknown option 'bakend'.*valid options: 'backend', 'online_format', 'activation', 'linears'",
        ),
        ({"activation": "int8"}, r"\"activation\"\] is 'int8'; valid values: 'auto', '16bit', 'fp8'"),
        ({"backend": "triton"}, r"\"backend\"\] is 'triton'; valid values: 'auto', 'kernel', 'reference'"),
        ({"online_format": ["mxfp4"]}, r"\"online_format\"\] is \['mxfp4'\]; valid values: 'mxfp4', 'nvfp4'"),
        ("kernel", r"must be a mapping of options, found 'kernel'"),
    ],
)
def test_options_errors_list_what_is_valid(section, message):
    with pytest.raises(ValueError, match=message):
        HummingOptions.parse({"humming": section})


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (Platform("cuda", "NVIDIA A100-SXM4-80GB", (8, 0)), r"capability 9\.0 .*found NVIDIA A100-SXM4-80GB with 8\.0"),
        (Platform("cuda", "NVIDIA B200", (10, 0)), r"capability 9\.0 .*found NVIDIA B200 with 10\.0"),
        (Platform("rocm"), r"found platform 'rocm'"),
        (Platform("tpu"), r"found platform 'tpu'"),
    ],
)
def test_other_machines_get_a_clear_message(found, message, monkeypatch):
    with pytest.raises(RuntimeError, match=message):
        hardware.resolve_backend(HummingOptions(), found)
    # Before weights load: making the config is enough.
    monkeypatch.setattr(hardware, "platform", lambda: found)
    from layers import CT_MXFP4, quant_config

    for checkpoint in (None, CT_MXFP4):
        with pytest.raises(RuntimeError, match=message):
            quant_config(checkpoint)


def test_backend_on_served_machines(monkeypatch):
    from vllm_humming import ops

    h200 = Platform("cuda", "NVIDIA H200", (9, 0))
    loaded = []
    monkeypatch.setattr(ops, "load_kernels", lambda: loaded.append(True))
    assert hardware.resolve_backend(HummingOptions(), Platform("cpu")) == "reference"
    assert hardware.resolve_backend(HummingOptions("reference"), h200) == "reference"
    assert not loaded
    assert hardware.resolve_backend(HummingOptions(), h200) == "kernel"
    assert hardware.resolve_backend(HummingOptions("kernel"), h200) == "kernel"
    assert len(loaded) == 2
    with pytest.raises(RuntimeError, match="runs without a GPU here"):
        hardware.resolve_backend(HummingOptions("kernel"), Platform("cpu"))


def test_missing_kernels_on_a_gpu_say_what_to_install(monkeypatch, tmp_path):
    from vllm_humming import ops

    monkeypatch.setattr(ops, "LIBRARY_PATH", tmp_path / "_kernels.so")
    monkeypatch.setattr(ops, "_loaded", False)
    with pytest.raises(RuntimeError, match=r"kernels are not installed.*[Ii]nstall"):
        hardware.resolve_backend(HummingOptions(), Platform("cuda", "NVIDIA H200", (9, 0)))
