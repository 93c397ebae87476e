# SPDX-License-Identifier: Apache-2.0
"""The plugin's entry point: takes over vLLM's quantisation method "humming"."""

import logging

from vllm_humming import __version__

METHOD = "humming"
_announced = False


def announce() -> None:
    """Logs, once per process, which implementation of "humming" is active.

    From vLLM 0.32 on, logging is configured only after the API server has loaded its plugins; there the line waits for
    the next call, when the model's config is made.
    """
    global _announced
    from vllm_humming import compat

    log = compat.logger(__name__)
    if not _announced and log.isEnabledFor(logging.INFO):
        _announced = True
        log.info('vllm-humming %s takes over quantization method "%s"', __version__, METHOD)


def register() -> None:
    """Registers HummingConfig under the name "humming", replacing vLLM's own method of that name.

    vLLM calls this in every process (API server, engine core, each worker, model inspection), and may call it more
    than once. It imports no kernel and no MoE layer, touches no device, and never raises: an exception here would end
    every vLLM process on the machine, whatever model it serves. A failure is logged with its traceback instead.
    """
    try:
        from vllm_humming import compat

        compat.check_version()
        from vllm_humming.quant_methods.config import HummingConfig

        compat.register_quantization(METHOD, HummingConfig)
        announce()
    except Exception:
        # "vllm." so that vLLM's own handlers show it even when compat could not be imported.
        logging.getLogger(f"vllm.{__name__}").exception(
            'vllm-humming %s could not register; vLLM\'s own "%s" stays in place', __version__, METHOD
        )
