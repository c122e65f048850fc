"""One server that forks the audited programs of a worker."""

import pytest

from tests.audited import serving


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server")) as socket:
        yield socket
