"""Shapes of calls of fused attention, as arrays, with their FLOPs and bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kernels.timemodel.estimate import Array

CONTEXT, FULL, DECODE = "context", "full", "decode"
KINDS = (CONTEXT, FULL, DECODE)
"""Kinds of calls: causal attention of a prompt, attention without a mask, and one query for each
sequence."""

_BYTES = 2  # of an element in 16 bits


class AttentionShapes(NamedTuple):
    """Shapes of calls as arrays of equal length.

    ``queries`` and ``keys`` are tokens per sequence, ``width`` is that of a head, and ``seen`` is
    the number of keys that one query sees, which a window limits.
    """

    batch: Array
    heads: Array
    kv_heads: Array
    queries: Array
    keys: Array
    width: Array
    seen: Array

    def where(self, chosen: Any) -> AttentionShapes:
        """Return some of the shapes."""
        return AttentionShapes(*(part[chosen] for part in self))

    def flops(self, kind: str) -> Array:
        """Return 4 · batch · heads · pairs · width; a causal mask leaves half of the pairs.

        A window that is shorter than the sequence limits the pairs instead.
        """
        pairs = self.queries * self.seen
        if kind == CONTEXT:
            pairs = np.where(self.seen < self.keys, pairs, pairs / 2)
        return 4.0 * self.batch * self.heads * self.width * pairs

    def bytes(self) -> Array:
        """Return the bytes of queries, keys, values and results, each moved once, in 16 bits."""
        of_queries = 2 * self.heads * self.queries
        of_keys = 2 * self.kv_heads * np.minimum(self.seen + self.queries, self.keys)
        return _BYTES * self.batch * self.width * (of_queries + of_keys)
