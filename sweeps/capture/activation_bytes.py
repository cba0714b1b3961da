"""Count the bytes of activations that a step saves for its backward pass or needs at one time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sweeps.capture.captured import LossMemory
from sweeps.capture.products import is_product
from sweeps.capture.roles import is_head
from sweeps.capture.trace import SavedTensor, TracedOperation
from sweeps.capture.traffic import distinct, reads_of


def largest_operation_bytes(
    operations: Sequence[TracedOperation], parameter_storages: Collection[int]
) -> int:
    """Return the largest number of bytes that one operation reads and writes, without parameters.

    Without a backward pass, this number is an estimate of the memory that activations need, because
    earlier activations are freed. ``parameter_storages`` has the addresses of the parameters'
    storages.
    """

    def bytes_of(operation: TracedOperation) -> int:
        accesses = distinct([*reads_of(operation), *operation.writes])
        return sum(access.bytes for access in accesses if access.storage not in parameter_storages)

    return max(map(bytes_of, operations), default=0)


def saved_bytes(saved: Sequence[SavedTensor]) -> int:
    """Return the bytes of saved tensors, including those of identical layers."""
    return sum(tensor.count * tensor.bytes for tensor in saved)


def saved_recomputed(saved: Sequence[SavedTensor]) -> int:
    """Return the bytes kept for the backward pass if repeated layers keep only their inputs.

    Repeated layers are layers that have identical copies. A repeated layer inside another one
    counts as part of the outer layer.

    Layers are recomputed one at a time, and the layer that is being recomputed keeps all its
    tensors. The result is therefore the sum of

    - the bytes that are saved outside of repeated layers,
    - the bytes that the inputs of repeated layers occupy, over all calls, and
    - the largest number of bytes that a repeated layer saves in one call.

    The result can be too large, because an input that several layers share, such as the output of
    an encoder, is counted once for each of these layers.
    """
    outside_bytes = sum(tensor.bytes for tensor in saved if not tensor.layers)
    # Bytes by the id of a layer: those saved by one call, and those of the inputs of all calls.
    call_bytes: dict[int, int] = {}
    input_bytes: dict[int, int] = {}
    for tensor in saved:
        if tensor.layers:
            layer = tensor.layers[0]  # the outermost one
            count_per_call = tensor.count // layer.calls
            call_bytes.setdefault(id(layer), 0)
            call_bytes[id(layer)] += count_per_call * tensor.bytes
            input_bytes[id(layer)] = layer.calls * layer.input_bytes
    return outside_bytes + sum(input_bytes.values()) + max(call_bytes.values(), default=0)


def peak_bytes(
    operations: Sequence[TracedOperation],
    saved: Sequence[SavedTensor],
    parameter_storages: Collection[int],
) -> tuple[int, LossMemory]:
    """Return the largest number of bytes of activations at any time in the backward pass.

    The activations are the saved tensors that are still needed, and the other tensors that the
    running operation reads or writes, such as the gradient of the logits. Parameters do not count.
    The second value has the bytes that the output head and the loss need, and the peak after their
    backward pass.
    """
    # 1. Find where each saved tensor is needed last. Those that no operation reads are needed only
    # until the backward pass begins.
    backward = [operation for operation in operations if operation.backward]
    last_read = {
        access.storage: position
        for position, operation in enumerate(backward)
        for access in operation.reads
    }
    ends = [(last_read.get(tensor.storage, -1), tensor) for tensor in saved]
    kept = {tensor.storage for tensor in saved}.union(parameter_storages)
    # 2. Find the tensors that the head and the loss save, and the end of their backward pass.
    loss_storages, loss_node = _loss_outputs(operations)
    loss_end = max(
        (position for position, operation in enumerate(backward) if operation.node == loss_node),
        default=-1,
    )
    # 3. Add up the bytes at each operation, and find what belongs to the loss. Gradients that its
    # backward pass hands on, those of the head's input and parameters, exist once for all chunks.
    handed_on = {
        access.storage: access.bytes
        for operation in backward[: loss_end + 1]
        for access in operation.writes
        if not 0 <= last_read.get(access.storage, -1) <= loss_end
    }
    peak, peak_elsewhere, loss_peak = saved_bytes(saved), 0, 0
    for position, operation in enumerate(backward):
        accesses = distinct([*operation.reads, *operation.writes])
        temporary = [access for access in accesses if access.storage not in kept]
        needed = [tensor for end, tensor in ends if end >= position]
        total = saved_bytes(needed) + sum(access.bytes for access in temporary)
        peak = max(peak, total)
        if position > loss_end:
            peak_elsewhere = max(peak_elsewhere, total)
        else:
            of_loss = [tensor for tensor in needed if tensor.storage in loss_storages]
            in_parts = [access for access in temporary if access.storage not in handed_on]
            bytes_in_parts = saved_bytes(of_loss) + sum(access.bytes for access in in_parts)
            loss_peak = max(loss_peak, bytes_in_parts)
    saved_by_loss = saved_bytes([tensor for tensor in saved if tensor.storage in loss_storages])
    return peak, LossMemory(saved_by_loss, loss_peak, sum(handed_on.values()), peak_elsewhere)


def _loss_outputs(operations: Sequence[TracedOperation]) -> tuple[set[int], int]:
    """Return the storages that the output head and the loss write, and the head's autograd node.

    If the forward pass has several heads, use the last one. If it has none, return an empty set and
    -1.
    """
    forward = [operation for operation in operations if not operation.backward]
    heads = [
        position
        for position, operation in enumerate(forward)
        if is_product(operation) and not operation.layers and is_head(operation.module)
    ]
    if not heads:
        return set(), -1
    written = {access.storage for operation in forward[heads[-1] :] for access in operation.writes}
    return written, forward[heads[-1]].node
