#!/usr/bin/env bash
# See baftd at work: train a small GPT as a 2-stage pipeline, kill a process, restore, compare every loss.
#
#   scripts/quickstart.sh
#
# Makes the virtual environment .venv, installs the project, and runs scripts/examples/quickstart.py (its options may
# be given here). Needs no argument; root on bare Debian or an ordinary user where compiler and headers are there. Uses
# directories of its own (.quickstart/, one below /dev/shm, one below /tmp) and a daemon of its own, which it ends.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/prepare.sh
. scripts/prepare.sh
prepare_system
prepare_venv torch
exec .venv/bin/python scripts/examples/quickstart.py "$@"
