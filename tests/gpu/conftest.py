"""How each test ends goes to the files HVDTRAIN_GPU_SEEN. What passed there is left out, and what failed comes last."""

import pytest

from tests.gpu import machine


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        machine.note(f"{report.outcome} {item.name}")
    return report


def pytest_collection_modifyitems(config, items):
    ended = dict(reversed(line.split(" ", 1)) for line in machine.noted() if line.startswith(("passed ", "failed ")))
    known = [item for item in items if ended.get(item.name) == "passed"]
    config.hook.pytest_deselected(items=known)
    items[:] = sorted((item for item in items if item not in known), key=lambda item: item.name in ended)
