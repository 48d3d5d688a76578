#!/usr/bin/env bash
# The benchmark of vLLM's pull request 51650 at a size that runs here: see published_benchmark.py.
set -euo pipefail
cd "$(dirname "$0")/.."
make --silent setup >&2
exec .venv/bin/python examples/published_benchmark.py "$@"
