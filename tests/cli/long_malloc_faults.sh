#!/usr/bin/env bash
# Runs tests/cli/malloc_faults.sh for every allocation of every command.
WALK=--all exec bash "$(dirname "${BASH_SOURCE[0]}")/malloc_faults.sh"
