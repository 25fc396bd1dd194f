"""The program ``kvbudget`` of a wheel: runs the binary that the wheel contains."""

import os
import shutil
import sys
from pathlib import Path


def program() -> str:
    """Returns the path of the program: KVBUDGET_PROGRAM, the one inside of the package, or the one in PATH."""
    bundled = Path(__file__).parent / "bin" / "kvbudget"
    found = os.environ.get("KVBUDGET_PROGRAM") or (str(bundled) if bundled.exists() else None)
    if found is None:
        found = shutil.which("kvbudget")
        if found is not None and Path(found).read_bytes()[:4] != b"\x7fELF":  # this package's own script
            found = None
    if found is None:
        raise FileNotFoundError(
            "the program kvbudget was not found: install a wheel of kvbudget, run `make install`, or set "
            "KVBUDGET_PROGRAM"
        )
    return found


def main() -> None:
    try:
        path = program()
    except FileNotFoundError as why:
        sys.exit(f"kvbudget: {why}")
    os.execv(path, ["kvbudget", *sys.argv[1:]])
