"""Verify a checkpoint and print its facts. hvdtrain.export writes the model's weights.

python -m hvdtrain.checkpoint.verify OUT/checkpoints/step-00000100.safetensors
"""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.checkpoint.checkpoint import Damaged, read_checkpoint
from hvdtrain.cli import Parser
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.lines import result
from hvdtrain.launching.exit_codes import run_command


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Return the command's flags. Raises UserError."""
    parser = Parser("hvdtrain.checkpoint.verify", __doc__)
    parser.add_argument("file", type=Path, help="a checkpoint")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code. Raises UserError."""
    flags = parse(argv)
    try:
        facts, _ = read_checkpoint(flags.file)
    except (Damaged, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"{flags.file}: {why}: name another checkpoint") from error
    result(json.dumps(facts, indent=2))
    return 0


if __name__ == "__main__":
    run_command(main)
