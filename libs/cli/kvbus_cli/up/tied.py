"""Run as a script: `python -I -S tied.py PARENT_PID COMMAND...` becomes COMMAND, which gets SIGTERM when the parent dies.

A script of its own, because the kernel call must happen between fork and exec, where the parent's interpreter may not run code.
Standard library only.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the call
        raise SystemExit(1)
    os.execvp(command[0], command)  # noqa: S606  # no shell on purpose


if __name__ == "__main__":
    main()
