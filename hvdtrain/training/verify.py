"""Verify a checkpoint and print its facts; with --export, write the model's weights alone.

python -m hvdtrain.training.verify OUT/checkpoints/step-00000100.safetensors
"""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.cli import Parser
from hvdtrain.engines.errors import UserError
from hvdtrain.launching.exit_codes import run
from hvdtrain.training.checkpoint import Damaged, read


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Return the command's flags. Raises UserError."""
    parser = Parser("hvdtrain.training.verify", __doc__)
    parser.add_argument("file", type=Path, help="a checkpoint")
    parser.add_argument("--export", type=Path, metavar="W.safetensors", help="write the model's weights there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code. Raises UserError."""
    flags = parse(argv)
    try:
        facts, tensors = read(flags.file)
    except (Damaged, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"{flags.file}: {why}: name another checkpoint") from error
    if flags.export is not None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        weights = {
            name.removeprefix("model."): t for name, t in tensors.items() if name.startswith(("model.", "models."))
        }
        try:
            save_file(weights, flags.export)
        except (OSError, SafetensorError) as error:
            raise UserError(f"--export {flags.export}: cannot be written ({error}): name another place") from error
    print(json.dumps(facts, indent=2))
    return 0


if __name__ == "__main__":
    run(main)
