"""Bytes that operations other than products move, one at a time or fused between products."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from sweeps.capture.captured import MovedBytes
from sweeps.capture.products import is_product
from sweeps.capture.trace import TensorAccess, TracedOperation

_KINDS = (
    ("nothing", r"empty|detach|alias|_local_scalar|is_same_size|set_"),
    ("normalisation", r"norm"),
    ("embedding", r"embedding"),
    ("loss", r"softmax|nll_loss|cross_entropy"),
    ("activation", r"gelu|silu|relu|sigmoid|tanh|hardtanh|leaky|elu|softplus"),
    ("pooling", r"pool|upsample|interpolate"),
    ("dropout", r"dropout|bernoulli"),
    ("copies and casts", r"copy|clone|cat|stack|contiguous|repeat|index|gather|scatter|sort|pad"),
)


def kind_of(operation: TracedOperation) -> str:
    """One of a few kinds, by the operation's name and by the module that it belongs to."""
    name = operation.name.removeprefix("aten::")
    for kind, pattern in _KINDS:
        if re.search(pattern, name):
            return kind
    if re.search(r"norm|(^|\.)ln_?\w*$", operation.module.lower()):
        return "normalisation"
    return "elementwise"


def bytes_moved(operations: Sequence[TracedOperation], fused: bool) -> tuple[MovedBytes, ...]:
    """Bytes read and written by kind, largest first.

    One operation at a time each tensor is read and written through memory. ``fused``, what comes
    between two products is one kernel: it reads each tensor once and writes only what is used after
    it. That is the best that a compiler can do, since it may not hold all of it on the chip.
    """
    total: Counter[str] = Counter()
    if fused:
        for group, used_later in _groups(operations):
            total.update(_as_one(group, used_later))
    else:
        for operation in operations:
            if not is_product(operation):
                accesses = [*_distinct(_reads(operation)), *_distinct(operation.writes)]
                total[kind_of(operation)] += operation.count * sum(a.bytes for a in accesses)
    del total["nothing"]
    return tuple(MovedBytes(kind, count) for kind, count in total.most_common() if count)


def _groups(operations: Sequence[TracedOperation]) -> list[tuple[list[TracedOperation], set[int]]]:
    """Operations between products of one layer, and the storages that later ones read."""
    groups: list[list[TracedOperation]] = [[]]
    last_read: dict[int, int] = {}
    for operation in operations:
        product = is_product(operation)
        if product or (groups[-1] and groups[-1][-1].layers != operation.layers):
            groups.append([])
        # A product is a place of its own, after the group before and before the one that follows.
        for access in operation.reads:
            last_read[access.storage] = 2 * len(groups) - product
        if not product:
            groups[-1].append(operation)
    found = []
    for place, group in enumerate(groups, start=1):
        written = {access.storage for operation in group for access in operation.writes}
        # A gradient that nobody reads any more is the step's result.
        kept = {s for s in written if last_read.get(s, 3 * len(groups)) > 2 * place}
        found.append((group, kept))
    return found


def _as_one(group: Sequence[TracedOperation], used_later: set[int]) -> Counter[str]:
    """Reads of what came from elsewhere, by the kind that reads first; writes of what is kept."""
    total: Counter[str] = Counter()
    inside: set[int] = set()
    read: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
    for operation in group:
        kind = kind_of(operation)
        if kind == "nothing":
            continue
        for access in _reads(operation):
            place = (access.storage, access.offset)
            if access.storage not in inside and not any(place in of for of in read.values()):
                read[kind][place] = operation.count * access.bytes
        for access in _distinct(operation.writes):
            inside.add(access.storage)
            if access.storage in used_later:
                total[kind] += operation.count * access.bytes
                used_later = used_later - {access.storage}
    for kind, accesses in read.items():
        total[kind] += sum(accesses.values())
    return total


def _reads(operation: TracedOperation) -> Sequence[TensorAccess]:
    """What it reads; of a table that is looked up, only as much as comes out."""
    if operation.name not in ("aten::embedding", "aten::index", "aten::gather"):
        return operation.reads
    most = sum(access.bytes for access in operation.writes)
    return [replace(access, bytes=min(access.bytes, most)) for access in operation.reads]


def _distinct(accesses: Sequence[TensorAccess]) -> list[TensorAccess]:
    """One access for each part of a storage, the largest that begins there."""
    largest: dict[tuple[int, int], TensorAccess] = {}
    for access in accesses:
        place = (access.storage, access.offset)
        if place not in largest or access.bytes > largest[place].bytes:
            largest[place] = access
    return list(largest.values())
