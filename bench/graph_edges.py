"""The graphs of a run's steps: whether they are instantiated where kernels begin early at forks and
joins, and what their edges are.

    python -m bench.graph_edges             # on a card

A step's branches run on streams of their own, and most of its kernels may begin before the one
before has ended, so that some edges at a fork or a join are programmatic ones, which a graph might
refuse. Prints how many nodes and edges of each kind the graphs have. Exit status: 0 if all steps
but the first of each graph were replayed.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch

from bench.smoke import GRAPHS, IMAGES, SETTINGS, two_tasks
from mose_fast.settings.run import RunConfig
from mose_fast.train import run


def described(dot: str) -> tuple[int, Counter[str]]:
    """The number of nodes, and of edges by their attributes, of a graph in Graphviz's language."""
    edges = re.findall(r'^\s*"?[\w.]+"?(?::\w+)?\s*->\s*"?[\w.]+"?(?::\w+)?\s*(?:\[(.*?)\])?;?\s*$', dot, re.MULTILINE)
    nodes = re.findall(r'^\s*"?[\w.]+"?\s*\[', dot, re.MULTILINE)
    return len(nodes), Counter(edge or "plain" for edge in edges)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.graph_edges", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    given = parser.parse_args(arguments)
    made: list[torch.cuda.CUDAGraph] = []

    def remembered(*options: bool) -> torch.cuda.CUDAGraph:
        made.append(graph_of_torch(*options))
        made[-1].enable_debug_mode()  # keeps the graph beside what it was instantiated to
        return made[-1]

    graph_of_torch = torch.cuda.CUDAGraph
    with mock.patch.object(torch.cuda, "CUDAGraph", remembered):
        results = run(RunConfig.create(**SETTINGS[given.device]), stream=two_tasks(IMAGES[given.device]))
    print(f"step: {results['resolved']['step']}; {results['eager_steps']} of {results['steps']} steps eager")
    with tempfile.TemporaryDirectory() as folder:
        for number, graph in enumerate(made):
            path = Path(folder) / f"{number}.dot"
            graph.debug_dump(str(path))
            nodes, edges = described(path.read_text(errors="replace"))
            print(f"graph {number + 1}: {nodes} nodes; edges: {dict(edges)}")
    return 0 if given.device == "cpu" or results["eager_steps"] == GRAPHS else 1


if __name__ == "__main__":
    sys.exit(main())
