"""Renumber GPUs and nodes, so that each of them has a unique number in a merged recording.

A GPU is recognised by its hash. Each results folder (option ``--results``) has a different salt for
its hashes, so a GPU with recordings in two results folders is treated as two GPUs. GPUs without
hashes are treated as different GPUs if they are from different recordings. Nodes are recognised in
the same way.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from sweeps.merging.source import MergeSource
from sweeps.store import Event


def numbers_of_gpus(sources: Sequence[MergeSource]) -> list[dict[int, int]]:
    """Return a mapping from old to new GPU numbers for each recording.

    A GPU that is also in an earlier recording has the same new number in both recordings. Any other
    GPU keeps its old number, unless another GPU already has that number.
    """
    number_of_card: dict[Hashable, int] = {}
    numbers = []
    for i, source in enumerate(sources):
        # The places that are stored with the samples have hashes even if run.json does not.
        descriptions = (*source.gpus, *source.places)
        hashes = {place["gpu"]: place["id"] for place in descriptions if "id" in place}
        listed = {place["gpu"] for place in source.gpus}
        sampled = {event["gpu"] for event in source.events if event.get("gpu") is not None}
        new_numbers = {}
        for gpu in sorted(listed | sampled):
            # Without a hash, the recording and the old number identify the card.
            card: Hashable = hashes.get(gpu, (i, gpu))
            if card not in number_of_card:
                in_use = set(number_of_card.values())
                number_of_card[card] = gpu if gpu not in in_use else max(in_use) + 1
            new_numbers[gpu] = number_of_card[card]
        numbers.append(new_numbers)
    return numbers


def merged_gpus(
    sources: Sequence[MergeSource], gpu_numbers: Sequence[Mapping[int, int]]
) -> list[dict[str, Any]]:
    """Return the list ``gpus`` of the merged run.json, ordered by the GPUs' new numbers."""
    number_of_node: dict[Hashable, int] = {}
    merged: dict[int, dict[str, Any]] = {}  # by new number
    for i, (source, new_numbers) in enumerate(zip(sources, gpu_numbers, strict=True)):
        host_hashes = {place["gpu"]: place.get("host") for place in source.places}
        for gpu in source.gpus:
            new_number = new_numbers[gpu["gpu"]]
            if new_number in merged:  # the same card in an earlier recording
                continue
            # Without a host's hash, nodes of different recordings count as different.
            node_key: Hashable = host_hashes.get(gpu["gpu"]) or (i, gpu["node"])
            node = number_of_node.setdefault(node_key, len(number_of_node))
            merged[new_number] = {**gpu, "gpu": new_number, "node": node}
    return [merged[number] for number in sorted(merged)]


def renumbered(event: Event, worker: str, new_numbers: Mapping[int, int]) -> Event:
    """Return a copy of an event with the worker name and the new numbers of its GPU and place."""
    merged_event = {**event, "worker": worker}
    if event.get("gpu") is not None:
        merged_event["gpu"] = new_numbers[event["gpu"]]
    # The place of a CPU's run is a node, which keeps its number.
    if event["event"] == "place":
        merged_event["place"] = new_numbers.get(event["place"], event["place"])
    return merged_event
