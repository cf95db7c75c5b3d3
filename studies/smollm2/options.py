"""The command-line options that the study's programs share."""

from __future__ import annotations

import argparse
from pathlib import Path

import project
from scale import SCALES, Scale
from settings import Place


def study_options(document: str, base_model: str = "--base-model") -> argparse.ArgumentParser:
    """A parser of scale, pretrained model and folders; `document` is the module's docstring."""
    parser = argparse.ArgumentParser(description=document.split("\n")[0])
    parser.add_argument("--scale", choices=SCALES, default="smollm2", help="the real model, or a tiny random one")
    parser.add_argument(
        base_model, dest="base_model", help="folder of the pretrained model (default: as `ebft fetch` keeps it)"
    )
    parser.add_argument("--output", type=Path, help="folder of data, models and logs (default outputs/study/SCALE)")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options; `results` is the study's own folder at its own scale, at another one a folder in `output`."""
    arguments = parser.parse_args()
    arguments.output = (arguments.output or Path("outputs/study") / arguments.scale).resolve()
    is_own = arguments.scale == "smollm2"
    arguments.results = arguments.results or (project.RESULTS if is_own else arguments.output / "results")
    return arguments


def scale_and_place(arguments: argparse.Namespace) -> tuple[Scale, Place]:
    """What the parsed options stand for."""
    scale = SCALES[arguments.scale]
    return scale, Place(arguments.output, arguments.base_model or scale.base_model)
