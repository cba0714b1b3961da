"""The ``rooftile`` command, which runs the commands of ``kernels``, ``sweeps`` and ``analysis``."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from analysis.rooftile import __version__
from kernels.common.program import INSTALLED, verb

GROUPS = {
    "Ask": ("predict", "recommend", "audit", "explain", "machines"),
    "Measure": ("doctor", "run", "record", "import"),
    "Read results": ("report", "compare", "rules"),
}
"""Commands that most people need, by group. The help lists all other commands only by name."""


class Verbs(TyperGroup):
    """Command group with a help text that fits on a screen of 24 lines and 80 columns."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write only the list of commands, because a list of options would take too many lines."""
        formatter.write("\n")
        shown = {name for names in GROUPS.values() for name in names}
        width = max(map(len, shown))
        for title, names in GROUPS.items():
            formatter.write(f"{title}:\n")
            for name in names:
                # Each line has four spaces, the name and the text, and leaves two columns empty.
                text = self.commands[name].get_short_help_str(limit=74 - width)
                formatter.write(f"  {name:{width}}  {text}\n")
        formatter.write("Also:\n")
        with formatter.indentation():
            formatter.write_text(", ".join(sorted(self.commands.keys() - shown)) + ".")


def one_command() -> typer.Typer:
    """Return an application with the commands of all packages, named by :func:`verb`."""
    from analysis.__main__ import app as analysis
    from kernels.__main__ import app as kernels
    from kernels.cli import new_app
    from sweeps.__main__ import app as sweeps

    app = new_app(
        "Which GEMM and convolution shapes are fast on your GPU, why, and what to change.",
        cls=Verbs,
    )

    @app.callback()
    def declare_options(
        version: Annotated[
            bool,
            typer.Option("--version", callback=_print_version, help="Print the version and exit."),
        ] = False,
    ) -> None:
        """Declare ``--version``, which comes before any command."""

    for package, verbs in (("kernels", kernels), ("sweeps", sweeps), ("analysis", analysis)):
        for command in verbs.registered_commands:
            if command.name is not None and command.callback is not None:
                app.command(verb(package, command.name))(command.callback)
    return app


def _print_version(requested: bool) -> None:
    if requested:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line and exit."""
    from kernels.cli import run

    run(one_command(), "rooftile" if INSTALLED else f"python -m {__package__}")


if __name__ == "__main__":
    main()
