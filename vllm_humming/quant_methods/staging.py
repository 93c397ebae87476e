# SPDX-License-Identifier: Apache-2.0
"""Brings host tensors to a GPU through a little pinned memory, without waiting for the GPU.

A copy from pageable memory makes the host wait until the GPU has taken everything. Here torch's threads copy into one
pinned buffer while the GPU takes another one, and the tensors of one projection lie together on the device, gate and up
one below the other, as packing wants them.
"""

from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

SLOT_BYTES = 16 << 20  # of pinned memory, twice; one expert's w13 of 7168 x 2048 fits one
_ALIGNMENT = 16


class Staging:
    """Pinned buffers, and one on the device that grows to the largest projection. Used by one stream at a time."""

    def __init__(self, device: torch.device, slot_bytes: int = SLOT_BYTES) -> None:
        self.device, self.slot_bytes = device, slot_bytes
        on_gpu = device.type == "cuda"
        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, device="cpu", pin_memory=on_gpu) for _ in range(2)]
        self._taken = [torch.cuda.Event() if on_gpu else None for _ in self._slots]  # what a slot held is on the GPU
        self._landing = torch.empty(0, dtype=torch.uint8, device=device)
        self._slot = 0

    def bring(self, groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Each group's host tensors [rows, ..] of one dtype and otherwise one shape, joined, on the device.

        What comes back holds until the next call, of which the current stream makes sure: use it there. Rows must be
        smaller than a slot.
        """
        places, end = [], 0
        for group in groups:
            start = end
            places.append(start)
            end = start + sum(tensor.nbytes for tensor in group)
            end += -end % _ALIGNMENT
        if end > self._landing.numel():
            self._landing = torch.empty(end, dtype=torch.uint8, device=self.device)
        self._start_at(0)
        for place, group in zip(places, groups, strict=True):
            self._next = place
            for tensor in group:
                self._write(tensor)
        self._send()
        joined = []
        for place, group in zip(places, groups, strict=True):
            shape = (sum(tensor.shape[0] for tensor in group), *group[0].shape[1:])
            size = sum(tensor.nbytes for tensor in group)
            joined.append(self._landing[place : place + size].view(group[0].dtype).view(shape))
        return joined

    def _write(self, tensor: Tensor) -> None:
        rows = tensor.shape[0]
        row_bytes = tensor.nbytes // rows if rows else 0
        first = 0
        while first < rows:
            at = self._next - self._base
            count = min(rows - first, (self.slot_bytes - at) // row_bytes)
            empty = self._next == self._start
            if count <= 0:
                if empty:
                    raise ValueError(f"a row of {row_bytes} bytes is larger than a staging slot of {self.slot_bytes}")
                self._send()
                continue
            if empty and (taken := self._taken[self._slot]) is not None:
                taken.synchronize()  # of long ago, unless the host is faster than the bus
            part = self._slots[self._slot][at : at + count * row_bytes]
            part.view(tensor.dtype).view(count, *tensor.shape[1:]).copy_(tensor[first : first + count])
            self._next += count * row_bytes
            first += count

    def _send(self) -> None:
        """Has the GPU take what lies in the slot; afterwards the other one may be written."""
        if self._next > self._start:
            filled = self._slots[self._slot][self._start - self._base : self._next - self._base]
            self._landing[self._start : self._next].copy_(filled, non_blocking=True)
            if (taken := self._taken[self._slot]) is not None:
                taken.record(torch.cuda.current_stream(self.device))
            self._slot = (self._slot + 1) % len(self._slots)
        self._start_at(self._next)

    def _start_at(self, place: int) -> None:
        """The next slot begins with what lands there. It keeps the alignment that things have on the device."""
        self._start = self._next = place
        self._base = place - place % _ALIGNMENT


_STAGINGS: WeakValueDictionary[torch.device, Staging] = WeakValueDictionary()


def staging_of(device: torch.device) -> Staging:
    """The one that all layers of a model share while they load: it is gone when the last of them lets go of it."""
    found = _STAGINGS.get(device)
    if found is None:
        found = _STAGINGS[device] = Staging(device)
    return found
