"""Draws the figures of docs/images/ that show layouts, from the code that computes them: `python docs/figures.py`."""

import sys
from pathlib import Path

import matplotlib
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from ebft.anchors import BlockOptions
from ebft.prefix.attention import MaskPattern
from ebft.prefix.attention.tiles import AttentionScores
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.passes import RolloutTree, StridedPass
from ebft.transformers_internals import causal_mask_function

matplotlib.use("Agg")

IMAGES = Path(__file__).parent / "images"
STYLE = {"svg.hashsalt": "ebft", "font.size": 9, "font.family": "DejaVu Sans"}  # the same bytes in every run
BLOCKS = {"stride": 4, "context_length": 4, "generate_max_len": 4}
TEXT, PROMPT, REFERENCE, ROLLOUTS = "#e8eaf6", "#b0bec5", "#a5d6a7", ("#ffcc80", "#ef9a9a", "#ce93d8", "#90caf9")


def place(lengths: list[int], prompts: list[int], samples: int, **options: int) -> tuple[Documents, StridedLayout]:
    """The layout of documents of these lengths, placed by the trainer's own code."""
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ids = torch.zeros_like(positions)
    documents = Documents.from_inputs(
        {"input_ids": ids, "position_ids": positions, "prompt_length": torch.tensor(prompts)}
    )
    return documents, StridedLayout.place(
        documents, BlockOptions(n_samples_per_prompt=samples, **{**BLOCKS, **options})
    )


def draw_blocks() -> Figure:
    """One document with its anchors, and for each block the reference and two rollouts."""
    documents, layout = place([20], [0], samples=2)
    figure, axes = pyplot.subplots(figsize=(9, 3.1), layout="constrained")
    _document(axes, 0, int(documents.lengths[0]), 0)
    for block, anchor in enumerate(layout.anchors[0]):
        colour = ROLLOUTS[block % len(ROLLOUTS)]
        _anchor(axes, anchor, 0, f"anchor {anchor}")
        _cells(axes, anchor, layout.generate_max_len, -1.5 - block % 2 * 4.2, REFERENCE, "reference")
        for sample in range(layout.num_samples):
            row = -2.7 - sample * 1.2 - block % 2 * 4.2
            _cells(axes, anchor, layout.generate_max_len, row, colour, f"rollout {sample + 1}")
    return _finished(figure, axes, (-0.5, 20.5), (-9.2, 2.4))


def draw_rows() -> Figure:
    """The anchors of raw text, of a prompt with its completion, and of two rows that are too short for more."""
    names = ("raw text", "prompt and completion", "long prompt", "short text")
    documents, layout = place([22, 22, 22, 9], [0, 6, 13, 0], samples=1, min_completion_prefix=2)
    figure, axes = pyplot.subplots(figsize=(9, 3.1), layout="constrained")
    for row, (name, anchors) in enumerate(zip(names, layout.anchors)):
        height = -2.6 * row
        _document(axes, height, int(documents.lengths[row]), int(documents.prompt_length[row]))
        axes.text(-0.4, height + 0.5, name, ha="right", va="center")
        for anchor in anchors:
            _anchor(axes, anchor, height, str(anchor))
            axes.add_patch(Rectangle((anchor, height - 0.35), layout.generate_max_len - 0.15, 0.22, color="#43a047"))
    return _finished(figure, axes, (-6, 22.5), (-8.6, 2.2))


def draw_attention() -> Figure:
    """The attention of the training pass over [document | rollouts], as the attention function computes it."""
    documents, layout = place([12], [0], samples=2)
    steps, document = 3, int(documents.lengths[0])
    rollouts = torch.zeros(layout.num_blocks, layout.num_samples, steps, dtype=torch.long)
    nodes = RolloutTree.of(rollouts, merge=False).nodes(steps)
    run = StridedPass(layout=layout, document_positions=documents.positions, nodes=nodes)
    size = run.position_ids().shape[1]
    zeros, identity = torch.zeros(1, size, size), torch.eye(size)[None]
    # With keys of zeros and values of unit vectors, the output of attention is its matrix of weights.
    weights = run.attend(
        0, zeros[None], zeros, identity, MaskPattern(causal_mask_function), AttentionScores(1.0), None
    )[:, 0]
    # Drawn rollout after rollout; the pass orders their tokens by step.
    order = torch.cat([torch.arange(document), document + nodes.of_rollouts.flatten()])
    weights, block = weights[order][:, order], torch.cat([torch.full((document,), -1), nodes.block])[order].tolist()
    figure, axes = pyplot.subplots(figsize=(6.2, 5.6), layout="constrained")
    for query, key in (weights > 0).nonzero().tolist():
        colour = "#3f51b5" if block[key] < 0 else ROLLOUTS[block[key]]
        axes.add_patch(Rectangle((key, query), 1, 1, facecolor=colour, edgecolor="white", linewidth=0.5))
    for line in range(document, size + 1, steps):
        axes.axhline(line, color="0.75", linewidth=0.6, zorder=0)
        axes.axvline(line, color="0.75", linewidth=0.6, zorder=0)
    per_block = layout.num_samples * steps
    middles = [document / 2] + [document + (block + 0.5) * per_block for block in range(layout.num_blocks)]
    labels = ["document"] + [f"rollouts at\nanchor {anchor}" for anchor in layout.anchors[0]]
    axes.set(xlim=(0, size), ylim=(size, 0), aspect="equal", xlabel="keys", ylabel="queries")
    axes.set_xticks(middles, labels)
    axes.set_yticks(middles, labels)
    axes.tick_params(length=0)
    return figure


def draw_rooms() -> Figure:
    """The folders of the package, each above those that it imports, from the table that a test compares with them."""
    sys.path.insert(0, str(IMAGES.parents[1]))
    from tests.test_package import CORE, ROOMS

    figure, axes = pyplot.subplots(figsize=(9, 0.62 * (len(ROOMS) + 1)), layout="constrained")
    height = 0.0
    for line in ROOMS:
        rooms, x = line.split(), 0.0
        for room in rooms:
            width = 0.115 * len(room) + 0.35
            if x + width > 10:
                height, x = height + 1, 0.0
            box = FancyBboxPatch((x, height), width, 0.7, "round,pad=0,rounding_size=0.1", fc=TEXT, ec="#5c6bc0")
            axes.add_patch(box)
            axes.text(x + width / 2, height + 0.33, room, ha="center", va="center", fontsize=8)
            x += width + 0.12
        is_wall = line == CORE[-1]  # below the tools
        axes.axhline(height + 0.85, color="#c62828" if is_wall else "0.8", linewidth=2 if is_wall else 0.8)
        if is_wall:
            axes.text(9.9, height + 0.95, "tools", ha="right", va="bottom", color="#c62828")
            axes.text(9.9, height + 0.75, "core", ha="right", va="top", color="#c62828")
        height += 1
    axes.annotate("", (10.4, 0), (10.4, height - 0.2), arrowprops={"arrowstyle": "->", "color": "0.3"})
    axes.text(10.6, height / 2, "imports", rotation=90, va="center")
    return _finished(figure, axes, (-0.1, 10.9), (-0.2, height))


def _document(axes: Axes, height: float, length: int, prompt: int) -> None:
    for token in range(length):
        colour = PROMPT if token < prompt else TEXT
        axes.add_patch(Rectangle((token, height), 0.92, 1, facecolor=colour, edgecolor="#9fa8da", linewidth=0.6))
        axes.text(token + 0.46, height + 0.5, str(token), ha="center", va="center", fontsize=7, color="0.3")


def _anchor(axes: Axes, anchor: int, height: float, name: str) -> None:
    axes.annotate(
        name,
        (anchor, height + 0.95),
        (anchor, height + 1.75),
        ha="center",
        fontsize=8,
        arrowprops={"arrowstyle": "->", "color": "#c62828"},
    )


def _cells(axes: Axes, start: int, count: int, height: float, colour: str, name: str) -> None:
    for token in range(start, start + count):
        axes.add_patch(Rectangle((token, height), 0.92, 1, facecolor=colour, edgecolor="white", linewidth=0.6))
    axes.text(start + count / 2, height + 0.5, name, ha="center", va="center", fontsize=8)


def _finished(figure: Figure, axes: Axes, x: tuple[float, float], y: tuple[float, float]) -> Figure:
    axes.set(xlim=x, ylim=y)
    axes.axis("off")
    return figure


FIGURES = {
    "strided-blocks.svg": draw_blocks,
    "strided-rows.svg": draw_rows,
    "strided-attention.svg": draw_attention,
    "architecture.svg": draw_rooms,
}


def write_figures(folder: Path) -> None:
    """Write all figures to `folder`."""
    with matplotlib.rc_context(STYLE):
        for name, draw in FIGURES.items():
            figure = draw()
            figure.savefig(folder / name, metadata={"Date": None, "Creator": None})
            pyplot.close(figure)


if __name__ == "__main__":
    write_figures(IMAGES)
    print(f"Wrote {', '.join(FIGURES)} in {IMAGES}")
