# SPDX-License-Identifier: Apache-2.0
"""Loads one MoE layer's experts into the kernels' layout, expert by expert.

The packed parameters [E, ...] are allocated once, at their final size. vLLM's model code sees empty placeholder
parameters under the checkpoint's names, whose weight_loader ends here. A checkpoint tensor is sliced for this rank and
kept, as a view of what the loader handed over, only until the projection of its expert is complete; then that one
expert is moved to the device, packed and let go. So device memory peaks at the packed size plus the work of packing
one expert (its own size; where the packing runs in torch a few times as much), whatever the number of experts, also for
checkpoints that fuse all experts into one tensor (they stay in host memory until their scales and biases are there).

On a GPU the host waits for nothing meanwhile: what packing finds in the weights stays on the device, and is read once,
when the layer's last expert has come. (Quantising dense weights looks at each for NaN, and waits.)
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vllm_humming.moe.findings import Findings, Names, refuse, refuses, rounding_of
from vllm_humming.moe.fp8 import Rounding
from vllm_humming.moe.packing import PackedProjection, pack
from vllm_humming.moe.quantize import nvfp4_global_scale, quantize
from vllm_humming.moe.scales import window_of
from vllm_humming.quant_methods import checks
from vllm_humming.quant_methods.schemes import ExpertScheme, TensorKind
from vllm_humming.quant_methods.staging import Staging, staging_of

Projection = Literal["w13", "w2"]
PROJECTIONS: tuple[Projection, ...] = ("w13", "w2")

_GPT_OSS_SHARDS = ("gpt_oss_w13", "gpt_oss_w2")  # vLLM 0.33: one expert of a gpt-oss checkpoint, not sliced


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of one layer's experts and this rank's share of the intermediate channels.

    intermediate is the whole model's; shard the channels of one rank, a multiple of the scale group, so that no rank
    cuts a group (the last ranks may hold fewer or none). interleaved: gate and up rows alternate in w13.
    """

    num_experts: int
    hidden: int
    intermediate: int
    shard: int
    tp_rank: int
    gated: bool
    interleaved: bool
    has_bias: bool

    @property
    def start(self) -> int:
        return min(self.tp_rank * self.shard, self.intermediate)

    @property
    def channels(self) -> int:
        """Intermediate channels this rank really holds."""
        return min(self.start + self.shard, self.intermediate) - self.start


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """tensor on device. Host memory goes to a GPU on a stream of its own: a copy waits for no kernel that packs what
    came before it, and the current stream's next kernels wait for the copy."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    copies, current = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        moved = tensor.to(device)
    current.wait_stream(copies)
    moved.record_stream(current)  # its memory belongs to the other stream, which must not reuse it too early
    return moved


@lru_cache(maxsize=8)
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all layers, so that they share the memory that the allocator keeps for it."""
    return torch.cuda.Stream(device)


class _Part(NamedTuple):
    """A checkpoint tensor's place in an expert: shard w1 (gate), w3 (up), w13 (both) or w2 (down); what it holds."""

    shard: str
    kind: TensorKind


class ExpertLoader:
    """Takes a layer's checkpoint tensors in any order and packs each expert's projection when it is complete."""

    def __init__(
        self,
        layer: str,
        scheme: ExpertScheme,
        shape: ExpertShape,
        packed: dict[Projection, PackedProjection],
        dtype: torch.dtype,
    ) -> None:
        self.layer, self.scheme, self.shape, self.packed, self.dtype = layer, scheme, shape, packed, dtype
        self.format = scheme.weight_format
        self.touched = False
        self._device = next(iter(packed.values())).packed.device
        # Whether packing runs beside the host: what it finds is read with the last expert, otherwise with each.
        self.deferred = self._device.type != "cpu"
        self._findings = Findings(len(PROJECTIONS) * shape.num_experts, self._device)
        self._groups = 0  # scale groups packed so far
        self._rounding: Rounding | None = None  # of all that was packed, once it was read
        self._done: dict[tuple[Projection, int], tuple[str, ...]] = {}  # the shards that came
        self._staging: Staging | None = None
        self._staged: dict[tuple[Projection, int], dict[_Part, Tensor]] = {}
        self._names = {kind: suffix for suffix, kind in scheme.tensors}

    def load(
        self, projection: Projection, kind: TensorKind, tensor: Tensor, shard: str | None, expert: int | None
    ) -> None:
        """Takes one checkpoint tensor.

        shard "w1", "w2" or "w3" (or 0.33's gpt-oss shards): the tensor of local expert `expert`, whole; it is sliced
        for this rank here. shard None: all local experts' tensors stacked, sliced for this rank already.
        Raises ValueError naming layer, expert and tensor for a wrong shape or dtype, a scale that is NaN, negative or
        no value of the format, a global scale that is not positive and finite, a scale that the activation dtype cannot
        hold exactly, and NaN or infinity in a dense weight or a bias. On a GPU scales and biases are refused when the
        layer's last expert has come.
        """
        self.touched = True
        if kind == "unused":
            return
        if shard is None:
            self._load_stacked(projection, kind, tensor)
            return
        if expert is None:
            raise ValueError(
                f"{self.layer}: {projection} {self._name(kind)} for shard {shard!r} came without its expert"
            )
        part = _Part(self._shard_name(projection, kind, shard), kind)
        if shard in _GPT_OSS_SHARDS and kind == "codes" and tensor.dim() == 3:
            tensor = tensor.flatten(1)  # [rows, groups, bytes of a group]
        sliced = self._slice(projection, expert, part, tensor)
        if kind == "dense":
            self._stage_dense(projection, expert, part, sliced, tensor)
        else:
            self._stage(projection, expert, part, sliced)

    @property
    def rounding(self) -> Rounding:
        """What packing took from the weights so far. Waits for it, and raises ValueError for what load() refuses."""
        return self._rounding or self._read()

    def check_complete(self) -> None:
        """Raises ValueError that names the tensors that never came, by expert and checkpoint name, or for what load()
        refuses.
        """
        if self._rounding is None:
            self._read()
        missing: list[str] = []
        for expert in range(self.shape.num_experts):
            for projection in PROJECTIONS:
                if (projection, expert) not in self._done:
                    arrived = self._staged.get((projection, expert), {})
                    parts = [part for part in self._expected(projection, arrived) if part not in arrived]
                    missing += dict.fromkeys(f"expert {expert} {part.shard}_{self._name(part.kind)}" for part in parts)
        checks.check_nothing_missing(self.layer, missing, "this rank's experts (local ids)")

    def _name(self, kind: TensorKind) -> str:
        return self._names.get(kind) or self._names["dense"]

    def _where(self, expert: int, part: _Part) -> str:
        return f"{self.layer}: expert {expert}: {part.shard}_{self._name(part.kind)}"

    def _shard_name(self, projection: Projection, kind: TensorKind, shard: str) -> str:
        names = {"w13": ("w1", "w3", "gpt_oss_w13"), "w2": ("w2", "gpt_oss_w2")}[projection]
        if shard not in names:
            raise ValueError(f"{self.layer}: {projection} {self._name(kind)} came as unknown shard {shard!r}")
        if shard in _GPT_OSS_SHARDS or projection == "w2":
            return projection
        # A layer without gate has one projection, which models call either name.
        return shard if self.shape.gated else "w13"

    def _load_stacked(self, projection: Projection, kind: TensorKind, tensor: Tensor) -> None:
        part = _Part(projection, kind)
        if tensor.dim() < 1 or tensor.shape[0] != self.shape.num_experts:
            raise ValueError(
                f"{self.layer}: {projection}_{self._name(kind)} must hold {self.shape.num_experts} experts, "
                f"found shape {tuple(tensor.shape)}"
            )
        for expert, one in enumerate(tensor.unbind(0)):
            self._check(expert, part, one, self._extent(part, self.shape.channels))
            if kind == "dense":
                self._stage_dense(projection, expert, part, one, one)
            else:
                self._stage(projection, expert, part, one)

    def _extent(self, part: _Part, channels: int) -> tuple[int, ...]:
        """The shape of a part's tensor with that many intermediate channels."""
        shape = self.shape
        if part.shard == "w2":
            rows, k = shape.hidden, channels
        else:
            rows, k = channels * (2 if part.shard == "w13" and shape.gated else 1), shape.hidden
        if part.kind == "global":
            return ()
        return (rows,) if part.kind == "bias" else (rows, k // self._per_element(part.kind))

    def _per_element(self, kind: TensorKind) -> int:
        """Elements of K that one stored element covers."""
        return checks.per_element(kind, self.format)

    def _check(self, expert: int, part: _Part, tensor: Tensor, expected: tuple[int, ...]) -> None:
        where = self._where(expert, part)
        if part.kind == "global":
            both = part.shard == "w13" and self.shape.gated
            if tensor.numel() != 1 and not (both and tuple(tensor.shape) == (2,)):
                found = tuple(tensor.shape)
                raise ValueError(f"{where} must be one value{' or (gate, up)' if both else ''}, found shape {found}")
        else:
            checks.check_shape(where, tensor, expected)
        checks.check_dtype(where, part.kind, tensor, self.format)

    def _slice(self, projection: Projection, expert: int, part: _Part, tensor: Tensor) -> Tensor:
        """This rank's share of a whole checkpoint tensor."""
        shape = self.shape
        self._check(expert, part, tensor, self._extent(part, shape.intermediate))
        if part.kind == "global":
            return tensor
        if projection == "w2":
            if part.kind == "bias":
                # Ranks add up their outputs, so the down bias belongs to one of them.
                return tensor if shape.tp_rank == 0 else torch.zeros_like(tensor)
            per = self._per_element(part.kind)
            return tensor.narrow(1, shape.start // per, shape.channels // per)
        if part.shard != "w13" or not shape.gated:
            return tensor.narrow(0, shape.start, shape.channels)
        if shape.interleaved:
            return tensor.narrow(0, 2 * shape.start, 2 * shape.channels)
        return torch.cat([half.narrow(0, shape.start, shape.channels) for half in tensor.chunk(2)])

    def _expected(self, projection: Projection, arrived: dict[_Part, Tensor]) -> list[_Part]:
        """The parts that make the projection complete: gate and up apart, unless a tensor that holds both has come."""
        split = projection == "w13" and self.shape.gated and not any(part.shard == "w13" for part in arrived)
        kinds: list[TensorKind] = ["codes", "scales"]
        kinds += ["global"] if self.format.has_global else []
        kinds += ["bias"] if self.shape.has_bias else []
        return [_Part(shard, kind) for shard in (("w1", "w3") if split else (projection,)) for kind in kinds]

    def _stage(self, projection: Projection, expert: int, part: _Part, tensor: Tensor) -> None:
        staged = self._staged.setdefault((projection, expert), {})
        staged[part] = tensor.detach()
        expected = self._expected(projection, staged)
        if all(part in staged for part in expected):
            del self._staged[projection, expert]
            shards = tuple(dict.fromkeys(part.shard for part in expected))
            if self.shape.channels:
                self._pack(projection, expert, shards, staged)
            before = len(self._done)
            self._done[projection, expert] = shards
            if not self.deferred:
                self._refuse(projection, expert, self._record(projection, expert).tolist())
            elif before < len(self._done) == len(PROJECTIONS) * self.shape.num_experts:
                self._read()

    def _stage_dense(self, projection: Projection, expert: int, part: _Part, sliced: Tensor, whole: Tensor) -> None:
        """Quantises this rank's slice of a dense weight and stages the result.

        A global scale comes from the whole tensor, so that the ranks of a model share it: gate, up and down of each
        expert have their own.
        """
        device, rows = self.packed[projection].packed.device, sliced.shape[0]
        try:
            weight = _moved(sliced.detach(), device)
            # Of the whole tensor, where it is: only a rank that holds all of it has it on the device.
            source = weight if sliced.shape == whole.shape else whole.detach()
            factor = nvfp4_global_scale(source).to(device) if self.format.has_global else None
            if sliced.numel():
                parts = quantize(weight, self.format, factor)
                codes, scales = parts.codes, parts.scales
            else:
                codes = torch.empty((rows, sliced.shape[1] // 2), dtype=torch.uint8, device=device)
                scales = codes.new_empty((rows, sliced.shape[1] // self.format.group_k))
        except ValueError as error:
            raise ValueError(f"{self._where(expert, part)}: {error}") from error
        if factor is not None:
            self._stage(projection, expert, part._replace(kind="global"), factor)
        self._stage(projection, expert, part._replace(kind="codes"), codes)
        self._stage(projection, expert, part._replace(kind="scales"), scales)

    def _record(self, projection: Projection, expert: int) -> Tensor:
        return self._findings.records[PROJECTIONS.index(projection) * self.shape.num_experts + expert]

    def _read(self) -> Rounding:
        """Waits for the packing; raises for what it found, returns what it rounded."""
        found = self._findings.read()
        for index, (projection, expert) in enumerate(product(PROJECTIONS, range(self.shape.num_experts))):
            self._refuse(projection, expert, found[index])
        self._rounding = sum((rounding_of(one, 0) for one in found), Rounding(0, self._groups, 0.0))
        return self._rounding

    def _refuse(self, projection: Projection, expert: int, found: list[int]) -> None:
        """Raises for what is wrong with an expert, which then counts as one that did not come."""
        if not refuses(found):
            return
        shards = self._done.pop((projection, expert))
        self._record(projection, expert).copy_(self._findings.clear)
        where = f"{self.layer}: expert {expert}: "
        rows = self._extent(_Part(projection, "codes"), self.shape.channels)[0]
        bias = f"{where}{projection}_{self._name('bias')}"
        names = Names(where + projection, bias, tuple(where + shard for shard in shards), rows)
        refuse(found, names, self.format, window_of(self.dtype))

    def _pack(self, projection: Projection, expert: int, shards: tuple[str, ...], staged: dict[_Part, Tensor]) -> None:
        destination = self.packed[projection]
        self._rounding = None
        groups = [[staged[_Part(shard, "codes")].view(torch.uint8) for shard in shards]]
        # Bytes before gate and up are joined: each may have its own dtype, and errors name the one they are in.
        groups.append([self._raw(expert, shard, staged) for shard in shards])
        if self.format.has_global:
            rows = sum(codes.shape[0] for codes in groups[0])
            values = torch.cat([self._global_values(expert, shard, staged) for shard in shards])
            groups.append([self._row_globals(values, rows)])
        if self.shape.has_bias:
            groups.append([staged[_Part(shard, "bias")].float() for shard in shards])
        codes, scales, *rest = self._joined(groups)
        self._groups += scales.numel()
        # K may be less than that of a full shard, or of a hidden size that an all-to-all backend moves: packing pads.
        pack(
            destination,
            expert,
            codes,
            scales,
            rest.pop() if self.shape.has_bias else None,
            rest.pop() if self.format.has_global else None,
            self._record(projection, expert),
            gated=projection == "w13" and self.shape.gated,
            interleaved=self.shape.interleaved,
            dtype=self.dtype,
        )

    def _joined(self, groups: list[list[Tensor]]) -> list[Tensor]:
        """Each group's tensors one below the other, contiguous, on the device."""
        if self.deferred and all(tensor.device.type == "cpu" for group in groups for tensor in group):
            self._staging = self._staging or staging_of(self._device)
            return self._staging.bring(groups)
        moved = [[_moved(tensor, self._device) for tensor in group] for group in groups]
        return [group[0].contiguous() if len(group) == 1 else torch.cat(group) for group in moved]

    def _raw(self, expert: int, shard: str, staged: dict[_Part, Tensor]) -> Tensor:
        stored = staged[_Part(shard, "scales")]
        return self.format.scale_bytes_of(f"{self.layer}: expert {expert}: {shard}", stored)

    def _global_values(self, expert: int, shard: str, staged: dict[_Part, Tensor]) -> Tensor:
        """The fp32 factors of one checkpoint tensor, [1] or, for gate and up in one, [2]."""
        part = _Part(shard, "global")
        reciprocal = self.scheme.reciprocal_global
        return checks.global_factors(self._where(expert, part), staged[part], reciprocal=reciprocal)

    def _row_globals(self, values: Tensor, rows: int) -> Tensor:
        """Factors of a projection [1] or (gate, up) [2] -> one for each of its rows, in the checkpoint's order."""
        if values.numel() == 1:
            return values.expand(rows)
        return values.repeat(rows // 2) if self.shape.interleaved else values.repeat_interleave(rows // 2)
