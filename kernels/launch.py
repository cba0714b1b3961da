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
    """Callable that runs an implementation: ``launch(i)`` launches it once on operand set i.

    Each call applies the process-wide settings that the implementation needs, such as the precision
    of fp32 GEMMs, and restores the previous settings after the launch. It returns the output
    without waiting for the GPU. Code that times a batch of launches enters the context manager
    ``settings()`` once and calls ``bare(i)``, so that setting and restoring are not measured.
    ``paced`` is True if the gaps between launches are part of the measured time.
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
        """Launch once on operand set ``index``, while the settings are in effect."""
        with self.settings():
            return self.bare(index)


class Implementation(Protocol):
    """Implementation, such as a vendor library or a Triton family, of one or more operations."""

    name: str

    @property
    def ops(self) -> tuple[str, ...]:
        """Operations, such as ``gemm``, that the implementation computes on suitable machines."""
        ...

    def supports(self, problem: Workload, machine: Machine) -> str | None:
        """Return the reason why the problem is not supported, or None if it is supported."""
        ...

    def configs(
        self, problem: Workload, machine: Machine, experimental: bool = False
    ) -> list[Config | None]:
        """Return candidate configs; the first is the default choice of the implementation.

        A candidate that is None stands for the default of a vendor library. ``experimental``
        allows configs that turn on an experimental feature (:attr:`Config.experimental`).
        """
        ...

    def parse_config(self, text: str) -> Config | None:
        """Parse a config's text; return None for an empty text.

        Raises:
            UserError: if the text is neither empty nor a config of this implementation.
        """
        ...

    def prepare(
        self, problem: Workload, operand_sets: Sequence[Operands], config: Config | None = None
    ) -> Launch:
        """Return a launch that computes the problem on any of the operand sets.

        Slow work that is needed only once may be left to the first launch.
        """
        ...

    def compile_ahead(self, cases: Sequence[tuple[Workload, Config | None]]) -> None:
        """Compile the kernels of several cases in parallel; a case is a problem with a config."""
        ...
