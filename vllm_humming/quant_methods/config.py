# SPDX-License-Identifier: Apache-2.0
"""HummingConfig, registered as "humming", and the shadow classes that carry out its decision.

For a quantised checkpoint HummingConfig.from_config returns a shadow: a subclass of vLLM's own config class for that
format which changes the experts' method and, by option, that of FP4 linears, and nothing else. Other linears, KV
cache, ignore lists, name mappers and every isinstance check in vLLM go on as they are. Config objects travel to the
workers by pickle, so a shadow class is found by its qualified name: this module makes it on demand (see __getattr__).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from vllm_humming import compat, hardware
from vllm_humming.options import HummingOptions
from vllm_humming.plugin import announce
from vllm_humming.quant_methods import formats, schemes
from vllm_humming.quant_methods.formats import CheckpointFormat
from vllm_humming.quant_methods.schemes import ExpertScheme

logger = compat.logger(__name__)

_SHADOW_PREFIX = "HummingShadow_"
_ACTIVATION_DTYPES = (torch.bfloat16, torch.float16)


class _Served:
    """What both kinds of config answer for the engine."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return list(_ACTIVATION_DTYPES)

    @classmethod
    def get_min_capability(cls) -> int:
        return 90


class HummingConfig(_Served, QuantizationConfig):
    """`--quantization humming`. An instance of this class itself is an unquantised checkpoint, quantised on loading."""

    def __init__(self) -> None:
        super().__init__()
        announce()
        hardware.check_platform()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """The config for a checkpoint's quantization_config.

        Raises ValueError for a format the plugin does not load, RuntimeError on a machine it does not serve.
        """
        announce()
        hardware.check_platform()
        shadow = shadow_class(formats.resolve(config))
        result: QuantizationConfig = shadow.from_config(config)
        return result

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        if user_quant != "humming":
            return None
        formats.complete_mixed_precision(hf_config)
        return "humming"

    @classmethod
    def get_name(cls) -> str:
        return "humming"

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return []

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        if getattr(hf_config, "model_type", None) == "gpt_oss":
            raise ValueError(
                f"{model_name}: unquantised gpt-oss checkpoints cannot be quantised while loading, because vLLM copies "
                "their expert tensors past the weight loader; use the MXFP4 checkpoint"
            )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if compat.is_routed_experts(layer):
            return _moe_method(layer, schemes.ONLINE[HummingOptions.current().online_format], prefix)
        return compat.unquantized_linear_method() if compat.is_linear(layer) else None


class ShadowMixin(_Served):
    """Comes before vLLM's config class in a shadow's bases; takes over the methods of FP4 experts and FP4 linears."""

    checkpoint_format: CheckpointFormat

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if compat.is_routed_experts(layer):
            # Not super() for these: vLLM's method would choose and check one of its own backends.
            scheme = self.checkpoint_format.expert_scheme(self, layer, prefix)
            if scheme is not None:
                return _moe_method(layer, scheme, prefix)
            logger.info("%s: this checkpoint stores these experts not as FP4; vLLM's own method runs them", prefix)
        elif compat.is_linear(layer) and HummingOptions.current().linears == "humming":
            scheme = self.checkpoint_format.linear_scheme(self, layer, prefix)
            if scheme is not None and scheme.activation == "16bit":
                return _linear_method(scheme, prefix)
            if scheme is not None:
                logger.info_once(
                    "%s linears with FP8 activations (%s) stay vLLM's; vllm-humming has 16-bit activations for linears",
                    scheme.weight_format.label,
                    scheme.stated,
                )
        method: QuantizeMethodBase | None
        if compat.platform().kind == "cuda":
            method = super().get_quant_method(layer, prefix)  # type: ignore[misc]
            return method
        with self._refusals_explained(layer, prefix):
            method = super().get_quant_method(layer, prefix)  # type: ignore[misc]
        if isinstance(method, QuantizeMethodBase):  # some choose their kernel only there
            create_weights = method.create_weights

            def explained(*args: Any, **kwargs: Any) -> Any:
                with self._refusals_explained(layer, prefix):
                    return create_weights(*args, **kwargs)

            method.create_weights = explained
        return method

    @contextmanager
    def _refusals_explained(self, layer: torch.nn.Module, prefix: str) -> Iterator[None]:
        """What vLLM's own method refuses for want of a GPU, with the layer's name and what to do."""
        try:
            yield
        except (ValueError, AssertionError) as error:  # 0.26 asserts that a kernel runs here, without a word
            label = self.checkpoint_format.label
            reason = str(error).strip() or "no kernel of its own runs here."
            if not compat.is_linear(layer):  # a quantised lm_head or embedding
                raise ValueError(
                    f"{prefix}: vLLM itself runs this {type(layer).__name__} of a {label} checkpoint, and refuses it "
                    f"without a GPU: {reason} Use a checkpoint that leaves it unquantised"
                ) from error
            raise ValueError(
                f"{prefix}: vLLM itself runs the quantised linear layers of a {label} checkpoint, and refuses this one "
                f"without a GPU: {reason} FP4 ones with 16-bit activations run here with the option "
                "linears set to 'humming', and so do checkpoints that quantise the experts alone (the rest under their "
                "ignore list)"
            ) from error


def shadow_class(checkpoint_format: CheckpointFormat) -> Any:
    """The shadow of a format's vLLM config class; the same class on every call."""
    name = _SHADOW_PREFIX + checkpoint_format.key
    if name not in globals():
        base = compat.base_config_class(checkpoint_format.base)
        body = {"__module__": __name__, "__doc__": ShadowMixin.__doc__, "checkpoint_format": checkpoint_format}
        globals()[name] = type(name, (ShadowMixin, base), body)
    return globals()[name]


def __getattr__(name: str) -> Any:
    for candidate in formats.FORMATS:
        if name == _SHADOW_PREFIX + candidate.key:
            return shadow_class(candidate)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _moe_method(layer: torch.nn.Module, scheme: ExpertScheme, prefix: str) -> QuantizeMethodBase:
    from vllm_humming.moe.method import HummingMoEMethod

    return HummingMoEMethod(layer.moe_config, scheme, HummingOptions.current(), prefix)


def _linear_method(scheme: ExpertScheme, prefix: str) -> QuantizeMethodBase:
    from vllm_humming.quant_methods.linear import HummingLinearMethod

    return HummingLinearMethod(scheme, HummingOptions.current(), prefix)
