#!/usr/bin/env bash
# tests/cli/malloc_faults.sh at every allocation of every command.
WALK=--all exec bash "$(dirname "${BASH_SOURCE[0]}")/malloc_faults.sh"
