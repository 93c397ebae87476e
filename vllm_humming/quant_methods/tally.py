# SPDX-License-Identifier: Apache-2.0
"""Counts a model's layers while it is loaded, so that one line afterwards can tell how many run here."""

from vllm_humming import __version__


class Tally:
    """what: a counted layer. weights: what of it this package runs."""

    def __init__(self, what: str, weights: str) -> None:
        self.what, self.weights = what, weights
        self.names: set[str] = set()
        self.labels: set[str] = set()
        self.ready = 0

    def add(self, name: str, label: str) -> None:
        """A layer is being built. label: its formats, as the line names them."""
        # Another model: the last one is complete, or loading it failed and this process tries again.
        if name in self.names or self.ready == len(self.names):
            self.names, self.labels, self.ready = set(), set(), 0
        self.names.add(name)
        self.labels.add(label)

    def done(self, backend: str) -> str | None:
        """A layer is loaded; the line when it was the last one."""
        self.ready += 1
        if self.ready != len(self.names):
            return None
        plural = "" if self.ready == 1 else "s"
        labels = " and ".join(sorted(self.labels))
        return (
            f"vllm-humming {__version__}: {self.ready} {self.what}{plural} run through vllm_humming "
            f"({labels} {self.weights}, {backend} path)"
        )
