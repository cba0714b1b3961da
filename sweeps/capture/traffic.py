"""Count the bytes that a model's *other operations* move: those that do not multiply matrices.

The other operations are assumed either to run one at a time, or to be fused into groups.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from sweeps.capture.captured import MovedBytes
from sweeps.capture.products import is_product
from sweeps.capture.trace import TensorAccess, TracedOperation, tensors_in

# Kinds of operations, each with a pattern of the operations' names. The first match decides.
_KINDS = (
    ("nothing", r"empty|detach|alias|_local_scalar|is_same_size|set_"),
    ("normalisation", r"norm"),
    ("embedding", r"embedding"),
    ("loss", r"log_softmax|nll_loss|cross_entropy"),
    ("softmax", r"softmax"),
    ("activation", r"gelu|silu|relu|sigmoid|tanh|hardtanh|leaky|elu|softplus|threshold|clamp"),
    ("pooling", r"pool|upsample|interpolate"),
    ("dropout", r"dropout|bernoulli"),
    ("reduction", r"^(sum|mean|var|std|prod|amax|amin|max|min|argmax|logsumexp)\b"),
    ("copies and casts", r"copy|clone|cat|stack|contiguous|repeat|index|gather|scatter|sort|pad"),
)

ELEMENTWISE, STRIDED = "elementwise", "strided access"
_IN_ANY_ORDER = ("activation", "copies and casts", ELEMENTWISE)
"""Kinds whose operations accept any memory layout, but use a slower kernel for some layouts."""

_LOOKUPS = (
    "aten::embedding", "aten::index", "aten::gather", "aten::nll_loss_forward",
    "aten::nll_loss2d_forward",
)  # fmt: skip
"""Operations that read only the entries that indices choose."""

_OVERWRITES = ("aten::copy_", "aten::fill_", "aten::zero_")
"""Operations that write their first argument without reading it."""

# Pattern of the names of normalisations that always read their inputs twice: once for sums, and
# once for the results that depend on these sums. The gradients of a layer norm's input and weight
# are computed by two kernels.
_READS_TWICE = re.compile(
    r"::(native_group_norm|native_batch_norm_backward|native_group_norm_backward"
    r"|native_layer_norm_backward|rms_norm_backward)$"
)


def kind_of(operation: TracedOperation) -> str:
    """Return the kind of an operation, judging by its name and its tensors."""
    kind = kind_of_name(operation.name)
    accesses = (*operation.reads, *operation.writes)
    shapes = {tensor.shape for tensor in tensors_in(operation.args) if tensor.numel() > 1}
    in_order = all(access.in_order for access in accesses)
    return kind_with_order(kind, in_order, len(shapes) > 1)


def kind_with_order(kind: str, in_order: bool, has_several_shapes: bool) -> str:
    """Return ``strided access`` if an operation needs a slower kernel, otherwise ``kind``.

    ``kind`` is the result of :func:`kind_of_name`. ``in_order`` is True if all tensors are in order
    (:class:`sweeps.capture.trace.TensorAccess`). ``has_several_shapes`` is True if the arguments
    that have more than one element differ in shape. An elementwise operation then broadcasts an
    argument, and needs the same slower kernel as for tensors that are not in order.
    """
    broadcasts = kind == ELEMENTWISE and has_several_shapes
    is_slower = kind in _IN_ANY_ORDER and (broadcasts or not in_order)
    return STRIDED if is_slower else kind


def kind_of_name(name: str) -> str:
    """Return the kind of an operation that does not multiply matrices, judging only by its name."""
    short_name = name.removeprefix("aten::")
    for kind, pattern in _KINDS:
        if re.search(pattern, short_name):
            return kind
    return ELEMENTWISE


def bytes_moved(operations: Sequence[TracedOperation], fused: bool) -> tuple[MovedBytes, ...]:
    """Return the bytes that other operations read and write, by kind of operation, largest first.

    Operations of the kind ``nothing``, such as ``empty``, are left out.

    If ``fused`` is True, consecutive operations count as one kernel if they are in the same layer
    and no matrix multiplication comes between them. The kernel is assumed to read each input once,
    to keep intermediate results on the chip, and to write only the results that are used later.
    This assumption is optimistic, because a compiler may have to write some intermediate results to
    memory.
    """
    total: Counter[str] = Counter()
    if fused:
        for group, used_later in _groups_between_products(operations):
            total.update(_fused_bytes(group, used_later))
    else:
        for operation in operations:
            if not is_product(operation):
                read = sum(access.bytes for access in distinct(reads_of(operation)))
                written = sum(access.bytes for access in distinct(operation.writes))
                times_read = 2 if _reads_twice(operation) else 1
                total[kind_of(operation)] += operation.count * (times_read * read + written)
    del total["nothing"]
    return tuple(MovedBytes(kind, moved) for kind, moved in total.most_common() if moved)


def _reads_twice(operation: TracedOperation) -> bool:
    """Return True if an operation reads its inputs once for sums, and once for its result."""
    if operation.name == "aten::native_batch_norm":
        is_training = operation.args[5]  # otherwise it applies recorded statistics
        return bool(is_training)
    return _READS_TWICE.search(operation.name) is not None


def launched(operations: Sequence[TracedOperation]) -> int:
    """Return the number of operations that launch at least one kernel on a GPU."""
    return sum(
        operation.count
        for operation in operations
        if is_product(operation) or kind_of(operation) != "nothing"
    )


def _groups_between_products(
    operations: Sequence[TracedOperation],
) -> list[tuple[list[TracedOperation], set[tuple[int, int]]]]:
    """Return the other operations in groups, each of which could be one fused kernel.

    Each group comes with the parts of its results that are used after the group, by a later
    operation or as a result of the step. A result may be written in several parts, and each part is
    given as its storage and its offset.
    """
    # 1. Divide the positions of the operations into groups, and find where each storage is read
    # last.
    groups: list[list[int]] = [[]]
    last_read: dict[int, int] = {}
    last_written: dict[tuple[int, int], int] = {}  # by part
    for position, operation in enumerate(operations):
        for access in reads_of(operation):
            last_read[access.storage] = position
        for access in operation.writes:
            last_written[access.storage, access.offset] = position
        if is_product(operation):
            groups.append([])
            continue
        if groups[-1] and operations[groups[-1][-1]].layers != operation.layers:
            groups.append([])
        groups[-1].append(position)
    # 2. Find the results of each group that are used after it. A tensor that no operation reads
    # after it was written, such as the gradient of a parameter, is a result of the step. It counts
    # as used.
    groups_and_used = []
    for positions in groups:
        if not positions:  # for example between two products in a row
            continue
        group = [operations[position] for position in positions]
        written = {
            (access.storage, access.offset) for operation in group for access in operation.writes
        }
        used_later = {
            part
            for part in written
            if last_read.get(part[0], -1) > positions[-1]
            or last_read.get(part[0], -1) <= last_written[part] <= positions[-1]
        }
        groups_and_used.append((group, used_later))
    return groups_and_used


def _fused_bytes(
    group: Sequence[TracedOperation], used_later: set[tuple[int, int]]
) -> Counter[str]:
    """Return the bytes that a group of operations moves as one kernel, by kind of operation.

    ``used_later`` has the parts of the group's results that are used after the group.
    """
    moved_bytes: Counter[str] = Counter()
    # Parts of tensors, each as a storage and an offset.
    read: set[tuple[int, int]] = set()
    written: set[tuple[int, int]] = set()
    # A part of a tensor that the group wrote is still on the chip, whichever part is read.
    written_storages: set[int] = set()
    for operation in group:
        kind = kind_of(operation)
        if kind == "nothing":
            continue
        for access in reads_of(operation):
            start = (access.storage, access.offset)
            if access.storage not in written_storages and start not in read:
                read.add(start)
                moved_bytes[kind] += operation.count * access.bytes
        for access in distinct(operation.writes):
            start = (access.storage, access.offset)
            if start in used_later and start not in written:
                moved_bytes[kind] += operation.count * access.bytes
            written.add(start)
            written_storages.add(access.storage)
    return moved_bytes


def reads_of(operation: TracedOperation) -> Sequence[TensorAccess]:
    """Return the reads of an operation, excluding bytes that its kernel does not read.

    A lookup, such as an embedding, is assumed to read from each tensor at most as many bytes as the
    lookup writes. The gradient of the negative log-likelihood does not depend on the values of the
    log-probabilities, so these are not counted as read. An operation that overwrites a tensor does
    not read it.
    """
    if operation.name in ("aten::nll_loss_backward", "aten::nll_loss2d_backward"):
        gradient, _, *others = operation.reads
        return [gradient, *others]
    if operation.name in _OVERWRITES:
        return operation.reads[1:]
    if operation.name not in _LOOKUPS:
        return operation.reads
    written_bytes = sum(access.bytes for access in operation.writes)
    return [replace(access, bytes=min(access.bytes, written_bytes)) for access in operation.reads]


def distinct(accesses: Sequence[TensorAccess]) -> list[TensorAccess]:
    """Return, for each storage and offset, the largest access that begins there."""
    largest: dict[tuple[int, int], TensorAccess] = {}
    for access in accesses:
        start = (access.storage, access.offset)
        if start not in largest or access.bytes > largest[start].bytes:
            largest[start] = access
    return list(largest.values())
