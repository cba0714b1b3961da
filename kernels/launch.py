"""Interface of all implementations: what they support, how they are tuned, and how they launch."""

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
    """Callable that computes a problem: ``launch(i)`` launches once on operand set i.

    It does not synchronise, and it returns the output. Vendor libraries read process-wide settings,
    such as the precision of fp32 GEMMs and cuDNN's autotuner. Calling a launch sets and restores
    them around that one call. A timed batch enters ``settings()`` once and calls ``bare(i)``, so
    that setting and restoring is not measured. ``paced`` is True if the gaps between launches are
    part of the measured time. ``sets`` are the operand sets that the launch reads and writes.
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
        """Launch once, under the settings that the launch needs."""
        with self.settings():
            return self.bare(index)


class Implementation(Protocol):
    """Way to compute problems, such as a vendor library or a Triton family.

    :func:`kernels.implementations` returns all of them by name.
    """

    name: str

    @property
    def ops(self) -> tuple[str, ...]:
        """Operations that are computed on at least one machine: ``gemm``, ``conv``, …"""
        ...

    def supports(self, problem: Workload, machine: Machine) -> str | None:
        """Return None if the machine can compute the problem this way; otherwise the reason."""
        ...

    def configs(
        self, problem: Workload, machine: Machine, experimental: bool = False
    ) -> list[Config | None]:
        """Return candidate configs, the implementation's own choice first.

        None stands for a vendor library's default. Experimental configs are included only if
        ``experimental`` is set.
        """
        ...

    def parse_config(self, text: str) -> Config | None:
        """Parse a config's text; an empty text stands for the default."""
        ...

    def prepare(
        self, problem: Workload, operand_sets: Sequence[Operands], config: Config | None = None
    ) -> Launch:
        """Bind operand sets; slow work that is needed once happens here or in the first launch."""
        ...

    def compile_ahead(self, cases: Sequence[tuple[Workload, Config | None]]) -> None:
        """Compile what the cases need in parallel; a vendor library has nothing to compile."""
        ...
