"""metrics.jsonl on file systems that fail."""

import errno
import json
import os
from io import FileIO

from hvdtrain.output.run_output import RunOutput


def test_a_file_system_that_fails_a_seek_costs_lines_not_the_run(engine, tmp_path, capfd):
    """As one that turned stale does."""
    with RunOutput(engine, tmp_path, progress=False) as output:
        output.open(continued=False)
        output.event("before")

        class Stale(FileIO):
            def seek(self, *where):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        sound = output._file
        output._file = Stale(tmp_path / "metrics.jsonl", "a")
        output.event("lost")
        output._file.close()
        output._file = sound
        output.event("after")
    assert "metrics.jsonl cannot be written for now (Stale file handle)" in capfd.readouterr().err
    written = [json.loads(line)["event"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == ["before", "error", "after"]
