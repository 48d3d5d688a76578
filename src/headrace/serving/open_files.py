"""The limit of open files, of which each connection is one."""

import resource

from headrace.errors import StartError

# As high as vLLM raises it: some systems allow billions, which programs then loop over.
_ENOUGH = 65_535
# What the server has open without any connection, with something to spare, and more for each stage.
_OWN, _OF_STAGE = 32, 8
# Connections that are told that there are too many.
REFUSED_AT_ONCE = 16
_LEAST_CONNECTIONS = 8


def raise_open_files(num_stages: int) -> int:
    """Raise the soft limit as far as the hard one allows; gives how many connections there may be.

    Stages inherit it. Raises StartError if there are too few for a server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        limit = _ENOUGH if soft == resource.RLIM_INFINITY else soft
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    own = _OWN + _OF_STAGE * num_stages + REFUSED_AT_ONCE
    if limit < own + _LEAST_CONNECTIONS:
        raise StartError(
            f"the limit of open files is {limit}, and {own + _LEAST_CONNECTIONS} is the least for "
            "a server: raise it (ulimit -n, LimitNOFILE= in a systemd unit)"
        )
    return limit - own
