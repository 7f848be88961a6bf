"""Compiles the library of operators beforehand, for machines without a compiler: ``python -m models.prebuilding``.

What it makes lies beside the program (``graph_runner.PREBUILT``) and serves all x86-64 CPUs with AVX2, whatever CPU made it.
"""

from __future__ import annotations

import argparse
import platform
import sys
from typing import get_args

from models.compiled import without_compiler
from models.graph_runner import PREBUILT, build_runner, intact, runner_name
from models.tiles import Instructions


def prebuild() -> None:
    """Compile what is not there yet, and delete what was compiled of other sources or for another PyTorch; two minutes.

    Raises RuntimeError where nothing can be compiled.
    """
    if platform.machine() != "x86_64":
        raise RuntimeError(f"operators are for x86-64, not {platform.machine()}")
    for operators in get_args(Instructions):  # one that does not know them would leave them out
        if (problem := without_compiler(operators)) is not None:
            raise RuntimeError(problem)
    wanted = {runner_name(operators): operators for operators in get_args(Instructions)}
    for path in PREBUILT.glob("runner-*.so"):
        if path.name not in wanted:
            path.unlink()
    for name, operators in wanted.items():
        if not intact(PREBUILT / name):
            print(f"compiling operators of {operators}", flush=True)
            build_runner(PREBUILT / name, operators)


def main() -> None:
    """As a program."""
    about = f"Compile the operators of all x86-64 CPUs with AVX2 into {PREBUILT}, for machines without a compiler, in two minutes."
    argparse.ArgumentParser(prog="python -m models.prebuilding", description=about).parse_args()
    try:
        prebuild()
    except RuntimeError as error:
        sys.exit(f"prebuilding: {error}")


if __name__ == "__main__":
    main()
