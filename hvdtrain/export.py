"""Export a trained model, for use without hvdtrain: weights alone (any program), or a program (hvdtrain's own scripts).

python -m hvdtrain.export OUT --to weights.safetensors    or weights.pt: the state_dict, under the model's own names
python -m hvdtrain.export OUT --to model.pt2              torch.export; also model.onnx (pip install 'hvdtrain[onnx]')

OUT: the --output-dir or --mirror of a run, whose newest checkpoint is taken (--best: the best one), or a checkpoint. From
a program of your own, write `run.export("model.pt2", model, example)`.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.checkpoint import checkpoint, contents, mirror, own
from hvdtrain.checkpoint.checkpoint import Facts
from hvdtrain.cli import Parser, url_or_path
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.lines import say, warn
from hvdtrain.engines.modules import uncompiled_name
from hvdtrain.flags import Flags
from hvdtrain.launching.exit_codes import run_command
from hvdtrain.models import formats, gpt
from hvdtrain.models.classifiers import build_model, require_torchvision
from hvdtrain.models.convnet import MODELS
from hvdtrain.output.metric_names import Metric


def parse(argv: Sequence[str] | None = None) -> Flags:
    """Return the command's flags. Raises UserError."""
    parser = Parser("hvdtrain.export", __doc__)
    parser.add_argument("run", type=url_or_path, help="the --output-dir or --mirror of a run, or a checkpoint")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help=".safetensors, .pt, .pt2 or .onnx")
    parser.add_argument("--best", action="store_true", help="the epoch whose evaluation was the best, not the newest")
    return parser.parse_args(argv)


def weights_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's weights in a checkpoint, under its own names; of several models, NUMBER.NAME."""
    kinds = ("model.", "models.")
    return {uncompiled_name(name).partition(".")[2]: t for name, t in tensors.items() if name.startswith(kinds)}


def extra_of(facts: Facts, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what else a state_dict has, under the same names: what layers return from `get_extra_state`."""
    found: dict[str, Any] = {}
    for name, states in own.extra_states_in(tensors).items():
        kind, _, number = name.partition(" ")
        if kind == "model" and number.isdigit() and name not in facts["registered_types"]:
            prefix = f"{number}." if any(one.startswith("models.") for one in tensors) else ""
            found |= {prefix + key: value for key, value in states.items()}
    return found


def model_of(facts: Facts, weights: Mapping[str, Tensor]) -> tuple[nn.Module, Tensor]:
    """Return the untrained model of hvdtrain.mnist, .imagenet or .lm, and an example of its input. Raises UserError."""
    config, name = facts["config"], facts["config"].get("model")
    sizes = [field.name for field in fields(gpt.Sizes)]
    if "tokens.weight" in weights and all(size in config for size in sizes):
        chosen = gpt.Sizes(**{size: config[size] for size in sizes})
        return gpt.GPT(chosen, len(weights["tokens.weight"])), torch.zeros(2, chosen.context, dtype=torch.int64)
    if "image_size" in config and "classes" in facts["data"]:
        require_torchvision()
        side = config["image_size"]
        return build_model(name, facts["data"]["classes"], side), torch.rand(2, 3, side, side)
    if name in MODELS:
        return MODELS[name](), torch.rand(2, 1, 28, 28)
    remedy = "write run.export(FILE, model, example) in it, or export the weights (.safetensors)"
    raise UserError(f"the checkpoint is of a program whose model is not known here: {remedy}")


def evaluation_in_words(facts: Facts) -> str:
    """Return the value of the checkpoint's evaluation, if it follows one, for the line that is printed."""
    best = facts["best"]
    return f", {best['metric']} {best['value']:.4f}" if best else ""


def warn_if_better(directory: Path, facts: Facts) -> None:
    """Warn if the run has had a better epoch than that of these facts, whose checkpoint is not there."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no summary, or of a run without evaluations
        best, found = json.loads((directory / "summary.json").read_text())["best"], facts["best"]
        metric = Metric(found["direction"])
        if best["metric"] == found["metric"] and metric.better(best["value"], than=found["value"]):
            where = (
                f"step {best['step']} was better, {best['metric']} {best['value']:.4f}, and its checkpoint is not there"
            )
            warn(f"{directory}: {where}: this is the best of those that are")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code. Raises UserError."""
    flags = parse(argv)
    kind = formats.require_kind(flags.to)
    with mirror.local(flags.run, "the run at", best=flags.best) as path:
        if flags.best and path == flags.run:
            facts, tensors = checkpoint.best(path, str(flags.run), warn)
            warn_if_better(path, facts)
        else:
            facts, tensors = checkpoint.find_checkpoint(path, str(flags.run), warn, keep_names=True)
    weights = weights_of(tensors)
    if kind in formats.WEIGHTS:
        formats.write_weights(weights | extra_of(facts, tensors), flags.to)
    else:
        model, example = model_of(facts, weights)
        contents.load_model(model, weights)
        formats.write_program(model, [example], flags.to)
    say(f"{flags.to}: {len(weights)} tensors, as after step {facts['state']['step']}{evaluation_in_words(facts)}")
    return 0


if __name__ == "__main__":
    run_command(main)
