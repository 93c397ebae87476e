# SPDX-License-Identifier: Apache-2.0
"""Evaluations of models served through vllm_humming; README.md has one command each."""
