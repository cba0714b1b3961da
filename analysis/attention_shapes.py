"""Shapes of fused attention calls as arrays, with their FLOPs and bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kernels.timemodel.estimate import Array

CONTEXT, FULL, DECODE = "context", "full", "decode"
KINDS = (CONTEXT, FULL, DECODE)
"""Kinds of calls: causal attention over a prompt, attention without a mask, and decoding (with one
or a few queries per sequence)."""

_BYTES = 2  # bytes of a 16-bit element


class AttentionShapes(NamedTuple):
    """Shapes of calls as arrays of equal length, with one element per call.

    Attributes:
        batch: number of sequences.
        heads: number of query heads.
        kv_heads: number of key/value heads.
        queries: query tokens per sequence.
        keys: key tokens per sequence.
        width: elements of a query, key or value in one head.
        seen: number of keys that one query may see (all keys, or those of a sliding window). A
            causal mask does not reduce this number.
    """

    batch: Array
    heads: Array
    kv_heads: Array
    queries: Array
    keys: Array
    width: Array
    seen: Array

    def take(self, selection: Any) -> AttentionShapes:
        """Return the shapes that an array of indices or a boolean mask selects."""
        return AttentionShapes(*(sizes[selection] for sizes in self))

    def flops(self, kind: str) -> Array:
        """Return the FLOPs of each call: 4 · batch · heads · width · query–key pairs.

        A causal mask (kind ``context``) removes half of the pairs. With a window that is shorter
        than the sequence, the pairs are not halved, because each query sees about ``seen`` keys.
        """
        pairs = self.queries * self.seen
        if kind == CONTEXT:
            pairs = np.where(self.seen < self.keys, pairs, pairs / 2)
        return 4.0 * self.batch * self.heads * self.width * pairs

    def bytes(self) -> Array:
        """Return the bytes of 16-bit queries, keys, values and results, each moved once."""
        # Results are as large as queries, and values as large as keys. With a window, each query
        # sees one key that its predecessor does not see, so about one key per query is added.
        query_and_result_vectors = 2 * self.heads * self.queries
        keys_read = np.minimum(self.seen + self.queries, self.keys)
        key_and_value_vectors = 2 * self.kv_heads * keys_read
        vectors = query_and_result_vectors + key_and_value_vectors
        return _BYTES * self.batch * self.width * vectors
