"""The five papers: what each proposes, where it is here, and every table and figure with the answer found (a module
each). `launch.py papers` prints it, and `docs/papers.md` is generated from it."""

from bench.papers import buddymoe, expertflow, finemoe, moepic, speculating
from bench.papers.parts import Paper

PAPERS: tuple[Paper, ...] = (buddymoe.PAPER, moepic.PAPER, finemoe.PAPER, expertflow.PAPER, speculating.PAPER)
