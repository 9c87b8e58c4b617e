"""Checks what every kernel takes against budgets.

    python -m build_tools.kernel_budget               # compiles each .cu for every GPU of a release
    python -m build_tools.kernel_budget --archs 80 90 # for these alone, as each change is checked
    python -m build_tools.kernel_budget --write       # also writes csrc/loop_budget.txt anew

The check compares the registers that ptxas says every kernel takes with csrc/kernel_budget.txt, and
what the loops of the instances in csrc/loop_budget.txt issue, by class, with their lines there
(sm_90). ``--write`` writes the numbers of the instances that the file names; a new one is a line
with its name alone. The check fails if a kernel spills or has a stack, takes more registers than
its line grants, or has no line, if a line has no kernel, if nvcc warns, if a loop grew by more than
3 %, and if a loop does what :func:`build_tools.machine_code.refusals` names. Needs nvcc and
nvdisasm, but no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from build_tools.cuda import RELEASE_ARCHS, default_archs, find_toolkits
from build_tools.describe import jobs
from build_tools.machine_code import CLASSES, Kernel, disassemble, instance_names, parse_code, refusals
from build_tools.sources import read_sources

ROOT = Path(__file__).resolve().parent.parent
ARCHS = tuple(arch.replace(".", "") for arch in RELEASE_ARCHS)
#: How much a loop may grow before the check fails.
GROWTH = 1.03
HEAD = """# Instructions of the loops of the kernels that a step of MOSE uses (384 views, bf16), by class, on sm_90; a
# loop in another has its own line. `python -m build_tools.kernel_budget` fails if one grows by more than 3 %; with
# --write it writes these numbers. Lines of a kernel are in the order of its code.
"""


class Usage(NamedTuple):
    """What one instance of a kernel needs on one architecture; ``stack`` and ``spills`` (stores and
    loads) in bytes of local memory.
    """

    kernel: str
    arch: str
    registers: int
    stack: int
    spills: int
    symbol: str


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
            Usage(
                kernel_name(entry.group(1)),
                entry.group(2),
                int(registers.group(1)),
                stack,
                stores + loads,
                entry.group(1),
            )
        )
    return usages


def parse_budget(text: str) -> dict[str, dict[str, int]]:
    """Reads lines ``kernel registers ...``, one number for each of :data:`ARCHS`; ``#`` starts a
    comment.

    Returns:
        The registers by kernel and architecture.

    Raises:
        ValueError: A line is malformed, or a kernel has two.
    """
    budgets: dict[str, dict[str, int]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if len(words) != 1 + len(ARCHS) or not all(word.isdecimal() for word in words[1:]):
            raise ValueError(
                f"line {number} is {line!r}; wanted a kernel's name and its registers on sm_{', sm_'.join(ARCHS)}"
            )
        if words[0] in budgets:
            raise ValueError(f"line {number}: {words[0]} has a line already")
        budgets[words[0]] = dict(zip(ARCHS, map(int, words[1:]), strict=True))
    return budgets


def compare(usages: Iterable[Usage], budgets: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Returns one complaint for each thing that is not as the budget says; none means that all is
    well. Spills and stacks are never granted.
    """
    most: dict[str, dict[str, int]] = {}
    complaints = []
    for usage in usages:
        needs = most.setdefault(usage.kernel, {})
        # GPUs hand out registers in eights.
        needs[usage.arch] = max(needs.get(usage.arch, 0), -(-usage.registers // 8) * 8)
        if usage.spills or usage.stack:
            complaints.append(
                f"{usage.kernel} has a stack of {usage.stack} bytes and spills {usage.spills} on sm_{usage.arch};"
                " wanted none"
            )
    for kernel, needs in most.items():
        granted = budgets.get(kernel)
        line = " ".join([kernel, *(str(needs.get(arch, "-")) for arch in ARCHS)])
        if granted is None:
            complaints.append(f"{kernel} has no line; needed: {line}")
        elif beyond := [arch for arch in needs if needs[arch] > granted[arch]]:
            found = ", ".join(f"{needs[arch]} registers on sm_{arch}, granted are {granted[arch]}" for arch in beyond)
            complaints.append(f"{kernel} takes {found}. Needed: {line}")
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
        for (kernel, arch), (n, r, s, p) in sorted(rows.items(), key=lambda row: (row[0][0], len(row[0][1]), row[0][1]))
    ]
    return "\n".join(lines)


def loop_lines(kernels: Mapping[str, Kernel]) -> str:
    """The text of csrc/loop_budget.txt for these instances."""
    rows = [("# kernel", "all", *CLASSES)]
    for name, kernel in sorted(kernels.items()):
        rows += [
            (name.replace(" ", ""), str(len(loop.instructions)), *map(str, loop.classes.values()))
            for loop in kernel.loops
        ]
    width = max(len(row[0]) for row in rows)
    return HEAD + "".join(f"{row[0]:<{width}}" + "".join(f"{word:>9}" for word in row[1:]) + "\n" for row in rows)


def parse_loops(text: str) -> dict[str, list[list[int]]]:
    """The numbers of each kernel's lines in csrc/loop_budget.txt: all instructions, then by
    class.
    """
    budgets: dict[str, list[list[int]]] = {}
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if words:
            rows = budgets.setdefault(words[0], [])
            if words[1:]:  # else a new instance, whose numbers --write adds
                rows.append(list(map(int, words[1:])))
    return budgets


def compare_loops(kernels: Mapping[str, Kernel], budgets: Mapping[str, Sequence[Sequence[int]]]) -> list[str]:
    """Returns one complaint for each loop that grew, and for each thing that no loop may hold."""
    plain = {name.replace(" ", ""): kernel for name, kernel in kernels.items()}
    complaints = []
    for name, granted in budgets.items():
        if name not in plain:
            complaints.append(f"{name} has lines, but there is no such kernel")
            continue
        loops = plain[name].loops
        complaints += [f"{name}: {told}" for told in refusals(plain[name])]
        if len(loops) != len(granted):
            complaints.append(f"{name} has {len(loops)} loops; granted are {len(granted)}")
            continue
        for number, (loop, most) in enumerate(zip(loops, granted, strict=True), 1):
            found = [len(loop.instructions), *loop.classes.values()]
            grew = [
                f"{count} {what} instructions, granted are {allowed}"
                for what, count, allowed in zip(("", *CLASSES), found, most, strict=True)
                if count > max(GROWTH * allowed, allowed + 2)
            ]
            complaints += [f"{name}, loop {number}: {told}" for told in grew]
    return complaints


def _compile(nvcc: Path, flags: list[str], source: Path, arch: str) -> tuple[str, str]:
    """What ptxas said, and the machine code for sm_90 (empty for another)."""
    target = [f"-I{ROOT / 'csrc'}", "-cubin", "-gencode", f"arch=compute_{arch},code=sm_{arch}", "-Xptxas", "-v"]
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "x.cubin"
        command = [str(nvcc), *flags, *target, "-o", str(cubin), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        return done.stderr, disassemble(cubin) if arch == "90" else ""


def main(arguments: Sequence[str] = ()) -> int:
    """Compiles, prints the table and the complaints; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the loops' budgets")
    parser.add_argument(
        "--archs", nargs="+", choices=ARCHS, metavar="N", help=f"90 and others of {', '.join(ARCHS)}, instead of all"
    )
    wanted = parser.parse_args(arguments)
    toolkits, looked = find_toolkits(os.environ)
    if not toolkits:
        print("no CUDA toolkit to compile with. Looked in:\n  " + "\n  ".join(looked), file=sys.stderr)
        return 2
    lists = read_sources(ROOT / "csrc")
    nvcc = toolkits[0].root / "bin" / "nvcc"
    archs = wanted.archs or [arch.removesuffix("+PTX").replace(".", "") for arch in default_archs(toolkits[0].version)]
    if "90" not in archs:
        parser.error(f"--archs is {' '.join(archs)}; wanted 90 among them, whose loops have budgets")
    with ThreadPoolExecutor(jobs()) as pool:
        done = [
            pool.submit(_compile, nvcc, lists["MOSE_FAST_NVCC_FLAGS"], ROOT / "csrc" / name, arch)
            for name in lists["MOSE_FAST_CUDA_SOURCES"]
            for arch in archs
        ]
        usages = [usage for output in done for usage in parse_ptxas(output.result()[0])]
        code = [kernel for output in done for kernel in parse_code(output.result()[1])]
    print(table(usages))
    kernels = dict(zip(instance_names([kernel.symbol for kernel in code]), code, strict=True))
    loop_budget = ROOT / "csrc" / "loop_budget.txt"
    if wanted.write:
        listed = parse_loops(loop_budget.read_text())
        loop_budget.write_text(loop_lines({n: kernel for n, kernel in kernels.items() if n.replace(" ", "") in listed}))
    warnings = {line for output in done for line in output.result()[0].splitlines() if "warning" in line.lower()}
    for warning in sorted(warnings):
        print(f"nvcc: {warning}", file=sys.stderr)
    budgets = {
        "kernel_budget.txt": compare(usages, parse_budget((ROOT / "csrc" / "kernel_budget.txt").read_text())),
        "loop_budget.txt": compare_loops(kernels, parse_loops(loop_budget.read_text())),
    }
    for name, complaints in budgets.items():
        for complaint in complaints:
            print(f"csrc/{name}: {complaint}", file=sys.stderr)
    return 1 if warnings or any(budgets.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
