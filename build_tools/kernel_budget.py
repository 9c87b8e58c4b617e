"""Checks what ptxas says of every kernel (registers, stack, spills) against csrc/kernel_budget.txt.

    python -m build_tools.kernel_budget

compiles each .cu for compute capability 8.0 and 9.0, prints a table and fails if a kernel spills,
needs more than its line grants, or has no line, and if a line has no kernel. Needs nvcc, but
neither torch nor a card.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from build_tools.cuda import find_toolkits
from build_tools.describe import jobs
from build_tools.sources import read_sources

__all__ = ["Budget", "Usage", "compare", "kernel_name", "parse_budget", "parse_ptxas", "table"]

ROOT = Path(__file__).resolve().parent.parent
ARCHS = ("80", "90")


@dataclass(frozen=True)
class Usage:
    """What one instance of a kernel needs on one architecture; ``stack`` and ``spills`` (stores and
    loads) in bytes of local memory.
    """

    kernel: str
    arch: str
    registers: int
    stack: int
    spills: int


@dataclass(frozen=True)
class Budget:
    """What a kernel may need at most, in any instance on any architecture; spills are never
    granted.
    """

    registers: int
    stack: int


def kernel_name(symbol: str) -> str:
    """Returns the plain name in a mangled ``symbol``, without namespaces, template arguments and
    parameters.

    >>> kernel_name("_ZN2mf4cuda12_GLOBAL__N_111null_kernelENS_10NullParamsE")
    'null_kernel'
    """
    nested, rest, name = symbol.startswith("_ZN"), re.sub(r"^_ZN?", "", symbol), symbol
    while found := re.match(r"L?(\d+)", rest):  # <length><name>, one a namespace; L marks internal linkage
        end = found.end() + int(found.group(1))
        name, rest = rest[found.end() : end], rest[end:]
        if not nested:
            break  # what follows are the parameters
    return name


def parse_ptxas(text: str) -> list[Usage]:
    """Returns the usage of every kernel in the output of ``nvcc -Xptxas -v``, in its order.

    Device functions that were not inlined have lines of their own; their stack and spills count for
    the kernel they are listed with.
    """
    usages = []
    for part in re.split(r"Compiling entry function ", text)[1:]:
        entry = re.match(r"'(\w+)' for 'sm_(\w+)'", part)
        registers = re.search(r"Used (\d+) registers", part)
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        if not entry or not registers or not frames:
            raise ValueError(f"ptxas said something else than was wanted: {part[:300]!r}")
        stack, stores, loads = (sum(map(int, column)) for column in zip(*frames, strict=True))
        usages.append(
            Usage(kernel_name(entry.group(1)), entry.group(2), int(registers.group(1)), stack, stores + loads)
        )
    return usages


def parse_budget(text: str) -> dict[str, Budget]:
    """Reads lines ``kernel registers stack``; ``#`` starts a comment.

    Raises:
        ValueError: A line is malformed, or a kernel has two.
    """
    budgets: dict[str, Budget] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if len(words) != 3 or not all(word.isdecimal() for word in words[1:]):
            raise ValueError(f"line {number} is {line!r}; wanted a kernel's name, its registers and its bytes of stack")
        if words[0] in budgets:
            raise ValueError(f"line {number}: {words[0]} has a line already")
        budgets[words[0]] = Budget(int(words[1]), int(words[2]))
    return budgets


def compare(usages: Iterable[Usage], budgets: Mapping[str, Budget]) -> list[str]:
    """Returns one complaint for each thing that is not as the budget says; none means that all is
    well.
    """
    most: dict[str, list[int]] = {}
    complaints = []
    for usage in usages:
        needs = most.setdefault(usage.kernel, [0, 0])
        needs[:] = max(needs[0], usage.registers), max(needs[1], usage.stack)
        if usage.spills:
            complaints.append(f"{usage.kernel} spills {usage.spills} bytes on sm_{usage.arch}; wanted none")
    for kernel, (registers, stack) in most.items():
        budget = budgets.get(kernel)
        line = f"{kernel} {-(-registers // 8) * 8} {stack}"  # cards hand out registers in eights
        if budget is None:
            complaints.append(f"{kernel} has no line; needed: {line}")
        elif registers > budget.registers or stack > budget.stack:
            granted = f"{budget.registers} and {budget.stack}"
            complaints.append(
                f"{kernel} takes {registers} registers and {stack} bytes of stack; granted are {granted}. Needed:"
                f" {line}"
            )
    complaints += [f"{kernel} has a line, but there is no such kernel" for kernel in budgets if kernel not in most]
    return complaints


def table(usages: Iterable[Usage]) -> str:
    """The usages as columns, instances of one template merged to the most that any takes."""
    rows: dict[tuple[str, str], list[int]] = {}
    for usage in usages:
        row = rows.setdefault((usage.kernel, usage.arch), [0, 0, 0, 0])
        row[:] = (
            row[0] + 1,
            *(max(pair) for pair in zip(row[1:], (usage.registers, usage.stack, usage.spills), strict=True)),
        )
    lines = [f"{'kernel':<44}{'arch':>6}{'instances':>11}{'registers':>11}{'stack':>7}{'spills':>8}"]
    lines += [
        f"{kernel:<44}{'sm_' + arch:>6}{n:>11}{r:>11}{s:>7}{p:>8}"
        for (kernel, arch), (n, r, s, p) in sorted(rows.items())
    ]
    return "\n".join(lines)


def _compile(nvcc: Path, flags: list[str], source: Path, arch: str) -> str:
    target = [f"-I{ROOT / 'csrc'}", "-cubin", "-gencode", f"arch=compute_{arch},code=sm_{arch}", "-Xptxas", "-v"]
    with tempfile.TemporaryDirectory() as folder:
        command = [str(nvcc), *flags, *target, "-o", f"{folder}/x.cubin", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stderr


def main() -> int:
    """Compiles, prints the table and the complaints; returns the exit status."""
    toolkits, looked = find_toolkits(os.environ)
    if not toolkits:
        print("no CUDA toolkit to compile with. Looked in:\n  " + "\n  ".join(looked), file=sys.stderr)
        return 2
    lists = read_sources(ROOT / "csrc")
    nvcc = toolkits[0].root / "bin" / "nvcc"
    with ThreadPoolExecutor(jobs()) as pool:
        done = [
            pool.submit(_compile, nvcc, lists["MOSE_FAST_NVCC_FLAGS"], ROOT / "csrc" / name, arch)
            for name in lists["MOSE_FAST_CUDA_SOURCES"]
            for arch in ARCHS
        ]
        usages = [usage for output in done for usage in parse_ptxas(output.result())]
    print(table(usages))
    complaints = compare(usages, parse_budget((ROOT / "csrc" / "kernel_budget.txt").read_text()))
    for complaint in complaints:
        print(f"csrc/kernel_budget.txt: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
