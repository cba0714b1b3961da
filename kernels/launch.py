"""What an implementation hands out: a callable that launches once, and how it was tuned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from kernels.config import Config
from kernels.machine import Machine
from kernels.operation import Workload

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.operands import Operands


class Launch:
    """``launch(i)`` launches once on operand set i, without synchronising, and returns its output.

    Libraries read process-wide settings (the precision of fp32 products, cuDNN's autotuner).
    Calling a launch sets and restores them around that one call. A timed batch enters
    ``settings()`` once and calls ``bare(i)``, so that no microsecond of it is measured. ``paced``
    says that the gaps between launches belong to the time. ``sets`` are the operand sets that it
    reads and writes.
    """

    def __init__(
        self,
        bare: Callable[[int], Tensor],
        sets: Sequence[Operands],
        settings: Callable[[], AbstractContextManager[object]] = nullcontext,
        paced: bool = False,
    ) -> None:
        self.bare = bare
        self.sets = sets
        self.settings = settings
        self.paced = paced

    def __call__(self, index: int) -> Tensor:
        """Launch once, under the settings that it needs."""
        with self.settings():
            return self.bare(index)


class Implementation(Protocol):
    """One way to compute problems. ``implementations()`` lists them by name."""

    name: str

    @property
    def ops(self) -> tuple[str, ...]:
        """Operations that it computes somewhere: ``gemm``, ``conv``, …"""
        ...

    def supports(self, problem: Workload, machine: Machine) -> str | None:
        """None if it computes the problem on the machine, or why not, as a sentence."""
        ...

    def configs(
        self, problem: Workload, machine: Machine, experimental: bool = False
    ) -> list[Config | None]:
        """Candidate configs, the one that it would choose first; None is the library's own.

        Those that are experimental are among them only where they are asked for.
        """
        ...

    def parse_config(self, text: str) -> Config | None:
        """Read a config's text; the empty text is the default."""
        ...

    def prepare(
        self, problem: Workload, operand_sets: Sequence[Operands], config: Config | None = None
    ) -> Launch:
        """Bind operand sets. Whatever is slow and needed once happens here or in the first call."""
        ...

    def compile_ahead(self, cases: Sequence[tuple[Workload, Config | None]]) -> None:
        """Compile what the cases need on all CPU cores; a library has nothing to compile."""
        ...
