"""Format rates, times and shares for people, with a suitable unit and few digits."""

from __future__ import annotations


def rate_unit(top: float) -> tuple[float, str]:
    """Return the factor from TFLOP/s to a suitable unit, and the name of this unit.

    ``top`` is the highest rate, in TFLOP/s, that is to be printed in this unit.
    """
    return (1e3, "GFLOP/s") if top < 1 else (1.0, "TFLOP/s")


def rate(tflops: float) -> str:
    """Format a rate, given in TFLOP/s, as text such as ``431 GFLOP/s`` or ``1,510 TFLOP/s``."""
    factor, unit = rate_unit(tflops)
    return f"{three_digits(tflops * factor)} {unit}"


def three_digits(value: float) -> str:
    """Format a non-negative number with three significant digits; above 999, as an integer."""
    # Three significant digits would print 999.6 as 1e+03.
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def microseconds(value: float) -> str:
    """Format a time in microseconds without its unit, as in ``12.35`` or ``1,244``."""
    # Four significant digits would print 999.96 as 1000, without the comma.
    return f"{value:,.0f}" if value >= 999.95 else f"{value:.4g}"


def signed_percent(share: float) -> str:
    """Format a fraction as a signed percentage, such as +3.9% or -0.4%, but never -0.0%."""
    # Adding zero turns the negative zero of a small negative share into +0.0.
    return f"{round(share, 3) + 0.0:+.1%}"


def percent_range(lo: float, hi: float) -> str:
    """Format a range of shares as ``86–91%``, or ``-2% to 4%`` if its lower end rounds below 0."""
    low, high = round(100 * lo), round(100 * hi)
    return f"{low}% to {high}%" if low < 0 else f"{low}–{high}%"
