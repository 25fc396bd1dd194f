"""``python -m kvbudget``: the program of the wheel."""

from ._program import main

main()
