"""The fixture of the pytest plugin, which only an installation registers by itself."""

from analysis.rooftile.benchmark_plugin import kernel_benchmark, kernel_replay

__all__ = ["kernel_benchmark", "kernel_replay"]
