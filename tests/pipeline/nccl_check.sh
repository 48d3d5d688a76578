#!/bin/sh
# The link suite on NCCL, on a machine with a CUDA device (one is enough for all ranks). Beside torch
# it needs pytest, pytest-timeout, hypothesis and msgspec. A rank that hangs shows where after 60 s.
cd "$(dirname "$0")/../.." || exit
PYTHONPATH=src:$PYTHONPATH NCCL_DEBUG=${NCCL_DEBUG:-WARN} PYTHONUNBUFFERED=1 \
    timeout 240 python3 -m pytest --noconftest -p no:cacheprovider --timeout 200 --durations 5 -rA \
    -k nccl tests/pipeline/test_links.py "$@"
