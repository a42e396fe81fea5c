#!/usr/bin/env bash
# Make the virtual environment .venv, install what the tests need, run them.
#
#   scripts/test.sh                 all tests
#   scripts/test.sh --full          the larger matrices too
#   scripts/test.sh tests/wire -x   any arguments of pytest
#   scripts/test.sh --prepare       only make the environment
#
# Works as root on bare Debian (installs compiler and headers if they are missing) and as an ordinary user where those
# are there. Safe to run again: what is there and unchanged is not done again.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/prepare.sh
. scripts/prepare.sh
prepare_system
prepare_venv dev,torch

if [ "${1:-}" = "--prepare" ]; then
    exit 0
fi
say "running the tests"
exec .venv/bin/python -m pytest "$@"
