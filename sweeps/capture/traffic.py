"""Count the bytes that a model's other operations move if they run one at a time or are fused.

Other operations are those that do not multiply matrices, judging by their names.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from sweeps.capture.captured import MovedBytes
from sweeps.capture.products import is_product
from sweeps.capture.trace import TensorAccess, TracedOperation

# Kinds of operations, each with a pattern of the operations' names. The first match decides.
_KINDS = (
    ("nothing", r"empty|detach|alias|_local_scalar|is_same_size|set_"),
    ("normalisation", r"norm"),
    ("embedding", r"embedding"),
    ("loss", r"log_softmax|nll_loss|cross_entropy"),
    ("softmax", r"softmax"),
    ("activation", r"gelu|silu|relu|sigmoid|tanh|hardtanh|leaky|elu|softplus"),
    ("pooling", r"pool|upsample|interpolate"),
    ("dropout", r"dropout|bernoulli"),
    ("copies and casts", r"copy|clone|cat|stack|contiguous|repeat|index|gather|scatter|sort|pad"),
)


def kind_of(operation: TracedOperation) -> str:
    """Return the kind of an operation, judging by its name and its module."""
    name = operation.name.removeprefix("aten::")
    for kind, pattern in _KINDS:
        if re.search(pattern, name):
            return kind
    if re.search(r"norm|(^|\.)ln_?\w*$", operation.module.lower()):
        return "normalisation"
    return "elementwise"


def bytes_moved(operations: Sequence[TracedOperation], fused: bool) -> tuple[MovedBytes, ...]:
    """Return the bytes that other operations read and write, by their kind, largest first.

    Operations of the kind ``nothing``, such as ``empty``, are left out.

    If ``fused`` is True, consecutive operations of a layer without a matrix operation between them
    count as one kernel, which reads each tensor once and writes only the results that are used
    later. The bytes are then a lower bound, because a compiler may be unable to keep all
    intermediate results on the chip.
    """
    total: Counter[str] = Counter()
    if fused:
        for group, used_later in _groups_between_products(operations):
            total.update(_fused_bytes(group, used_later))
    else:
        for operation in operations:
            if not is_product(operation):
                accesses = [*_distinct(_reads(operation)), *_distinct(operation.writes)]
                moved = sum(access.bytes for access in accesses)
                total[kind_of(operation)] += operation.count * moved
    del total["nothing"]
    return tuple(MovedBytes(kind, moved) for kind, moved in total.most_common() if moved)


def largest_operation_bytes(
    operations: Sequence[TracedOperation], parameters: Collection[int]
) -> int:
    """Return the largest number of bytes that one operation reads and writes, without parameters.

    Without a backward pass, this number is an estimate of the memory that activations need, because
    earlier activations are freed. ``parameters`` are the storages of the parameters.
    """

    def bytes_of(operation: TracedOperation) -> int:
        accesses = _distinct([*_reads(operation), *operation.writes])
        return sum(access.bytes for access in accesses if access.storage not in parameters)

    return max(map(bytes_of, operations), default=0)


def _groups_between_products(
    operations: Sequence[TracedOperation],
) -> list[tuple[list[TracedOperation], set[int]]]:
    """Return the other operations in groups, each as a list.

    A group ends at a product, and where a traced layer begins or ends. With each group, return the
    storages of those of its results that are used later.
    """
    # 1. Divide the operations into groups, and find the position where each storage is read last.
    # Groups have the positions 2, 4, 6 and so on. A product has the odd position before the group
    # that follows it.
    groups: list[list[TracedOperation]] = [[]]
    last_read: dict[int, int] = {}
    for operation in operations:
        multiplies = is_product(operation)
        if multiplies or (groups[-1] and groups[-1][-1].layers != operation.layers):
            groups.append([])
        position = 2 * len(groups) - 1 if multiplies else 2 * len(groups)
        for access in operation.reads:
            last_read[access.storage] = position
        if not multiplies:
            groups[-1].append(operation)
    # 2. Find the results of each group that are used after it. A tensor that no operation reads,
    # such as the gradient of a parameter, counts as used, because it is a result of the step.
    groups_and_used = []
    for number, group in enumerate(groups, start=1):
        written = {access.storage for operation in group for access in operation.writes}
        used_later = {
            storage for storage in written if last_read.get(storage, math.inf) > 2 * number
        }
        groups_and_used.append((group, used_later))
    return groups_and_used


def _fused_bytes(group: Sequence[TracedOperation], used_later: set[int]) -> Counter[str]:
    """Return the bytes that a group of operations moves as one kernel, by kind of operation.

    A tensor from outside the group is counted once, as a read by the first operation that reads it.
    A result is counted once, as a write, if its storage is one of ``used_later``.
    """
    read_bytes: Counter[str] = Counter()
    written_bytes: Counter[str] = Counter()
    read: set[tuple[int, int]] = set()  # storages and offsets
    written: set[int] = set()  # storages
    results_to_write = set(used_later)
    for operation in group:
        kind = kind_of(operation)
        if kind == "nothing":
            continue
        for access in _reads(operation):
            start = (access.storage, access.offset)
            if access.storage not in written and start not in read:
                read.add(start)
                read_bytes[kind] += operation.count * access.bytes
        for access in _distinct(operation.writes):
            written.add(access.storage)
            if access.storage in results_to_write:
                written_bytes[kind] += operation.count * access.bytes
                results_to_write.remove(access.storage)
    total = Counter(written_bytes)
    total.update(read_bytes)
    return total


def _reads(operation: TracedOperation) -> Sequence[TensorAccess]:
    """Return the reads of an operation.

    A lookup reads at most as many bytes of each tensor as the result of the lookup has.
    """
    if operation.name not in ("aten::embedding", "aten::index", "aten::gather"):
        return operation.reads
    written_bytes = sum(access.bytes for access in operation.writes)
    return [replace(access, bytes=min(access.bytes, written_bytes)) for access in operation.reads]


def _distinct(accesses: Sequence[TensorAccess]) -> list[TensorAccess]:
    """Return, for each storage and offset, the largest access that begins there."""
    largest: dict[tuple[int, int], TensorAccess] = {}
    for access in accesses:
        start = (access.storage, access.offset)
        if start not in largest or access.bytes > largest[start].bytes:
            largest[start] = access
    return list(largest.values())
