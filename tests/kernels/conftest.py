"""The paths that this machine can run, one after the other."""

from collections.abc import Iterator

import pytest

from headrace.kernels import path


@pytest.fixture(scope="module", params=path.paths())
def any_path(request: pytest.FixtureRequest) -> Iterator[str]:
    """A path that the kernels take, the torch reference among them."""
    yield from _taken(request.param)


@pytest.fixture(scope="module", params=path.paths()[1:])
def native_path(request: pytest.FixtureRequest) -> Iterator[str]:
    """A native path that the kernels take."""
    yield from _taken(request.param)


def _taken(name: str) -> Iterator[str]:
    before = path.path_name()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path, "_chosen", True)
        path.use_path(name)
        yield name
        path.use_path(before)
