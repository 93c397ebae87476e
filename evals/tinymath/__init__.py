# SPDX-License-Identifier: Apache-2.0
"""A small mixture of experts that solves arithmetic word problems: data, tokenizer, training, export."""
