"""Checks of results: the float64 reference, Freivalds' identity, and the verdict."""

STACKED_ELEMENTS = 1 << 22
"""Largest size of sets of GEMM operands and results that are tested at once, in elements."""


def sets_at_once(set_elements: int) -> int:
    """Return how many sets of GEMM operands and results, of this many elements, one test covers."""
    return max(1, STACKED_ELEMENTS // set_elements)
