# SPDX-License-Identifier: Apache-2.0
"""What `--quantization humming` means: checkpoint formats, their config classes and their weight loading."""
