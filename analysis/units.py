"""Format rates in the unit that reads best: GFLOP/s for a CPU, TFLOP/s for a GPU."""

from __future__ import annotations


def rate_unit(top: float) -> tuple[float, str]:
    """Return the factor and the unit for rates of up to ``top`` TFLOP/s."""
    return (1e3, "GFLOP/s") if top < 1 else (1.0, "TFLOP/s")


def rate(tflops: float) -> str:
    """Format a rate given in TFLOP/s: 431 GFLOP/s, 788 TFLOP/s, 1,510 TFLOP/s."""
    factor, unit = rate_unit(tflops)
    value = tflops * factor
    # Three significant digits would print 1,510 as 1.51e+03.
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"
