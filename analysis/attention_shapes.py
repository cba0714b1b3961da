"""Shapes of calls of fused attention, as arrays, with their FLOPs and bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kernels.timemodel.estimate import Array

CONTEXT, FULL, DECODE = "context", "full", "decode"
KINDS = (CONTEXT, FULL, DECODE)
"""Kinds of calls: causal attention of a prompt, attention without a mask, and one query for each
sequence."""

_BYTES = 2  # bytes of a 16-bit element


class AttentionShapes(NamedTuple):
    """Shapes of calls as arrays of equal length.

    ``queries`` and ``keys`` are tokens per sequence, ``width`` is the width of a head, and ``seen``
    is the number of keys that one query sees, which a window may limit.
    """

    batch: Array
    heads: Array
    kv_heads: Array
    queries: Array
    keys: Array
    width: Array
    seen: Array

    def where(self, chosen: Any) -> AttentionShapes:
        """Return the shapes at an index array or a mask."""
        return AttentionShapes(*(sizes[chosen] for sizes in self))

    def flops(self, kind: str) -> Array:
        """Return the FLOPs of each call: 4 · batch · heads · width · pairs of a query and a key.

        A causal mask leaves half of the pairs, unless a window that is shorter than the sequence
        limits them.
        """
        pairs = self.queries * self.seen
        if kind == CONTEXT:
            pairs = np.where(self.seen < self.keys, pairs, pairs / 2)
        return 4.0 * self.batch * self.heads * self.width * pairs

    def bytes(self) -> Array:
        """Return the bytes of queries, keys, values and results, each moved once, in 16 bits."""
        # Results have the size of the queries, and values that of the keys. With a window, every
        # further query sees one further key, so all queries together see ``seen + queries`` keys.
        query_and_result_vectors = 2 * self.heads * self.queries
        keys_read = np.minimum(self.seen + self.queries, self.keys)
        key_and_value_vectors = 2 * self.kv_heads * keys_read
        vectors = query_and_result_vectors + key_and_value_vectors
        return _BYTES * self.batch * self.width * vectors
