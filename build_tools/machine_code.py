"""What a kernel issues, read from its machine code: loops, their instructions by class, and what no
loop may hold.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

#: Classes of instructions by the beginnings of their names; what fits none is an integer one.
CLASSES = {
    "float": r"FFMA|FADD|FMUL|FSEL|FSETP|FMNMX|H(FMA|ADD|MUL|MNMX)2|DFMA|DADD|DMUL|F2FP|FCHK|HMMA|F2F",
    "special": r"MUFU",
    "shared": r"LDS|STS|LDSM|SHFL",
    "global": r"LDG|LDGSTS|STG|ATOM|RED",
    "branch": r"BRA|BSSY|BSYNC|EXIT|CALL|RET|BRX|BAR|WARPSYNC|MEMBAR|DEPBAR|LDGDEPBAR",
    "integer": r"",
}


@dataclass(frozen=True)
class Loop:
    """A loop without those inside it: ``LDG.E.128 R4, desc[UR4][R2.64]``, without predicates."""

    instructions: tuple[str, ...]

    @cached_property
    def operations(self) -> tuple[str, ...]:
        return tuple(text.split()[0] for text in self.instructions)

    @cached_property
    def classes(self) -> dict[str, int]:
        """Instructions by class, in the order of :data:`CLASSES`."""
        found = Counter(next(name for name, names in CLASSES.items() if re.match(names, op)) for op in self.operations)
        return {name: found[name] for name in CLASSES}


@dataclass(frozen=True)
class Kernel:
    """One instance of a kernel, by its mangled symbol."""

    symbol: str
    instructions: tuple[str, ...]
    loops: tuple[Loop, ...]


def disassemble(cubin: Path) -> str:
    """The machine code of a cubin as text. Raises SystemExit if there is no nvdisasm."""
    folders = [Path(folder) / "nvidia" for folder in sys.path]
    found = shutil.which("nvdisasm") or next((str(p) for d in folders for p in d.glob("cu1*/bin/nvdisasm")), None)
    if found is None:
        raise SystemExit("there is no nvdisasm to read machine code with: pip install nvidia-cuda-nvdisasm")
    return subprocess.run([found, "-c", str(cubin)], check=True, capture_output=True, text=True).stdout


def parse_code(text: str) -> list[Kernel]:
    """The kernels in what nvdisasm printed, with their loops of at least eight instructions."""
    kernels = []
    for part in re.split(r"^\.text\.", text, flags=re.MULTILINE)[1:]:
        symbol, _, body = part.partition(":")
        labels: dict[str, int] = {}
        code: list[str] = []
        for line in body.splitlines():
            if line.startswith("\t.section"):
                break
            if found := re.match(r"(\.L_x_\d+):", line):
                labels[found[1]] = len(code)
            elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", line):
                code.append(found[1])
        kernels.append(Kernel(symbol, tuple(code), tuple(_loops(code, labels))))
    return kernels


def _loops(code: Sequence[str], labels: dict[str, int]) -> Iterator[Loop]:
    spans: dict[int, int] = {}
    for last, text in enumerate(code):
        found = re.match(r"BRA\b.*`\((\.L_x_\d+)\)", text)
        if found and (first := labels.get(found[1], last + 1)) <= last:
            spans[first] = max(last, spans.get(first, 0))
    for first, last in sorted(spans.items()):
        inner = {
            line for start, end in spans.items() if first < start and end <= last for line in range(start, end + 1)
        }
        own = tuple(code[line] for line in range(first, last + 1) if line not in inner)
        if len(own) >= 8:
            yield Loop(own)


def instance_names(symbols: Sequence[str]) -> list[str]:
    """Instances from mangled symbols, such as ``kernel<__nv_bfloat16, 2, false>``."""
    told = subprocess.run(["c++filt", "-t", *symbols], check=True, capture_output=True, text=True).stdout.splitlines()
    return [_plain(name) for name in told]


def _plain(name: str) -> str:
    name = re.sub(r"\(anonymous namespace\)::|\w+::(?=\w)|unnamed>::", "", name)
    found = re.search(r"\b(\w+_kernel)\b(<)?", name)
    if not found:
        return name
    if not found[2]:
        return found[1]
    depth, end = 0, found.end() - 1
    for end in range(found.end() - 1, len(name)):
        depth += {"<": 1, ">": -1}.get(name[end], 0)
        if depth == 0:
            break
    return found[1] + name[found.end() - 1 : end + 1]


def refusals(kernel: Kernel) -> list[str]:
    """What a kernel must not do, by name."""
    found = []
    for loop in kernel.loops:
        count = Counter(loop.operations)
        for op in count:
            if re.match(r"(LDL|STL)\b", op):
                found.append(f"{count[op]} x {op}: local memory in a loop")
            if re.match(r"LDS\.(U8|S8|U16|S16)", op) and count[op] >= 4:
                found.append(f"{count[op]} x {op}: shared memory read in pieces of a word")
        # Of numbers that are neighbours in memory: offsets 0, 2, 4, 6 from one register.
        stores = Counter(re.findall(r"STG\.E\.U16 \S*\[(R\d+)\S*?(?:\+(0x[0-9a-f]+))?\]", "\n".join(loop.instructions)))
        offsets: dict[str, set[int]] = {}
        for base, offset in stores:
            offsets.setdefault(base, set()).add(int(offset or "0", 16))
        if any({at, at + 2, at + 4, at + 6} <= known for known in offsets.values() for at in known):
            found.append("4 x STG.E.U16 in a row: neighbours of 16 bits stored one by one")
    return found
