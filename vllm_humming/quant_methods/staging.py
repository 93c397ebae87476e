# SPDX-License-Identifier: Apache-2.0
"""Brings host tensors to a GPU through a little pinned memory, without waiting for the GPU.

A copy from pageable memory makes the host wait until the GPU has taken everything, and one thread makes it. Here a few
threads copy into one pinned buffer while the GPU takes another one, and the tensors of one projection lie together on
the device, gate and up one below the other, as packing wants them.

The threads are not torch's, whose teams are as large as the machine and wait for each other: slower than one thread
where something else runs.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(f"vllm.{__name__}")  # compat.logger without vLLM: this module does not need it

SLOT_BYTES = 16 << 20  # of pinned memory, twice; one expert's w13 of 7168 x 2048 fits one
COPY_THREADS = 4  # at most; one where torch is told to use one, as vLLM's workers of a parallel engine are
_ALIGNMENT = 16
_SHARE = 512 << 10  # bytes for which another thread is worth its while


class Staging:
    """Pinned buffers, and one on the device that grows to the largest projection. Used by one stream at a time."""

    def __init__(self, device: torch.device, slot_bytes: int = SLOT_BYTES) -> None:
        self.device, self.slot_bytes = device, slot_bytes - slot_bytes % _ALIGNMENT
        on_gpu = device.type == "cuda"
        self._slots = _two_slots(self.slot_bytes, pinned=on_gpu)
        self._taken = [torch.cuda.Event() if on_gpu else None for _ in self._slots]  # what a slot held is on the GPU
        self._shares = min(COPY_THREADS, torch.get_num_threads())
        self._pool = _copiers(self._shares)
        self._copies: list[Future[None]] = []
        self._landing = torch.empty(0, dtype=torch.uint8, device=device)
        self._slot = 0

    def bring(self, groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Each group's host tensors [rows, ..] of one dtype and otherwise one shape, joined, on the device.

        What comes back holds until the next call, of which the current stream makes sure: use it there. Rows must be
        smaller than a slot. When this returns or raises, nothing reads the host tensors any more.
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
        try:
            for place, group in zip(places, groups, strict=True):
                self._next = place
                for tensor in group:
                    self._write(tensor)
            self._send()
        except BaseException:
            self._stop()
            raise
        joined = []
        for place, group in zip(places, groups, strict=True):
            shape = (sum(tensor.shape[0] for tensor in group), *group[0].shape[1:])
            size = sum(tensor.nbytes for tensor in group)
            joined.append(self._landing[place : place + size].view(group[0].dtype).view(shape))
        return joined

    def _write(self, tensor: Tensor) -> None:
        rows = tensor.shape[0] if tensor.nbytes else 0
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
            self._fill(part.view(tensor.dtype).view(count, *tensor.shape[1:]), tensor[first : first + count])
            self._next += count * row_bytes
            first += count

    def _fill(self, part: Tensor, source: Tensor) -> None:
        """Copies source into a part of a slot; _finish waits for it."""
        if source.dtype != torch.uint8:  # scales of rows
            part.copy_(source)
            return
        rows = source.shape[0]
        shares = min(self._shares, source.nbytes // _SHARE, rows)
        if self._pool is None or shares < 2:
            np.copyto(part.numpy(), source.numpy())
            return
        ends = [rows * share // shares for share in range(shares + 1)]
        for first, last in pairwise(ends):
            self._copies.append(self._pool.submit(np.copyto, part[first:last].numpy(), source[first:last].numpy()))

    def _finish(self) -> None:
        copies, self._copies = self._copies, []
        for copy in copies:
            copy.result()

    def _stop(self) -> None:
        """After an error: no thread may go on writing to a slot that the next call fills, nor reading its source."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = _copiers(self._shares)
        self._copies = []

    def _send(self) -> None:
        """Has the GPU take what lies in the slot; afterwards the other one may be written."""
        self._finish()
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


def _two_slots(size: int, *, pinned: bool) -> list[Tensor]:
    try:
        return [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in range(2)]
    except RuntimeError as error:  # a limit on locked memory
        if not pinned:
            raise
        logger.warning("no %d MiB of pinned host memory (%s): weights load more slowly", 2 * size >> 20, error)
        return _two_slots(size, pinned=False)  # copies from it wait for the bus


def _copiers(number: int) -> ThreadPoolExecutor | None:
    return ThreadPoolExecutor(number, "vllm-humming-copies") if number > 1 else None


_STAGINGS: WeakValueDictionary[torch.device, Staging] = WeakValueDictionary()


def staging_of(device: torch.device) -> Staging:
    """The one that all layers of a model share while they load: it is gone when the last of them lets go of it."""
    found = _STAGINGS.get(device)
    if found is None:
        found = _STAGINGS[device] = Staging(device)
    return found
