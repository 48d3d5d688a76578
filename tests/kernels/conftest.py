"""The paths that this machine can run, one after the other."""

from collections.abc import Iterator

import pytest

from headrace.kernels import linear, path


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
    path.use_path(name)
    with pytest.MonkeyPatch.context() as patch:
        # Where the CPU has bfloat16 products, they would go to oneDNN instead.
        patch.setattr(linear, "computes_natively", lambda dtype: False)
        yield name
    path.use_path(before)
