"""The command `epigemm`."""

from __future__ import annotations

import sys

from epigemm import errors

# Exit statuses: what a shell script can tell apart.
FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130


def main() -> int:
    """Runs the command and returns its exit status: 0, 1 (failed, or a bar missed), 2 (wrong use), 130 (interrupted)."""
    try:
        try:
            from epigemm.cli.commands import app
        except ImportError as error:
            package = (error.name or "").partition(".")[0]
            if package not in ("typer", "rich"):
                raise
            raise errors.missing_package("The command `epigemm`", package, "cli") from error
        app(prog_name="epigemm")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return INTERRUPTED
    except (errors.EpigemmError, OSError) as error:
        print(f"epigemm: {error}", file=sys.stderr)
        return FAILED
    return 0
