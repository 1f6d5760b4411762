"""Run a command in which the kernel refuses to copy between processes, as containers with an old seccomp profile do.

python without_cma.py python script.py
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
CALLS = (310, 311)  # process_vm_readv and process_vm_writev on x86-64
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, EPERM = 0x7FFF0000, 0x00050001


class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_void_p)]


def refuse() -> None:
    steps = [(LOAD, 0, 0, 0), (JUMP_EQUAL, 1, 0, CALLS[0]), (JUMP_EQUAL, 0, 1, CALLS[1]), (RETURN, 0, 0, EPERM)]
    program = b"".join(struct.pack("HBBI", *step) for step in [*steps, (RETURN, 0, 0, ALLOW)])
    buffer, libc = ctypes.create_string_buffer(program), ctypes.CDLL(None, use_errno=True)
    made = Filter(len(steps) + 1, ctypes.addressof(buffer))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(made)):
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    refuse()
    os.execvp(sys.argv[1], sys.argv[1:])
