"""What runs first inside a sandbox: it bounds itself, gives up what it may do, says that it is ready, and becomes the program.

Run as `python -I -S -c <this text> <settings> <command>…`, without posttrain and site-packages. When everything holds it writes
`ready` to the socket `report`, waits for `go`, and writes `started`: no program starts whose owner is not there to end it. The
socket closes as the program starts, so no program can write to it. Modules that are slow to import (json, typing, signal) would
double the time of a start.

    report     descriptor of that socket
    patience   seconds to wait for the owner
    folder     where the program starts
    rlimits    [[number, value], …]
    user       number of the user to become; null: stay
    sealed     enter a last user namespace, in which there can be no further one: a program needs no mounts of its own
    reaper     stay as the parent of everything that the program starts, and end it all when the program ends
"""

import _signal as signal  # type: ignore[import-not-found]
import ctypes
import errno
import marshal
import os
import resource
import select
import struct
import sys

_NEW_USER = 0x10000000
_SUBREAPER, _NO_NEW_PRIVILEGES, _DEATH_SIGNAL, _DUMPABLE, _SECCOMP = 36, 38, 1, 4, 22
_DENIED = {
    # shmget, memfd_create, memfd_secret: memory that no limit counts; the others: parts of the kernel that no program here needs
    "x86_64": (0xC000003E, (29, 319, 447, 248, 249, 250, 298, 321, 323, 425)),
    "aarch64": (0xC00000B7, (194, 279, 447, 217, 218, 219, 241, 280, 282, 425)),
}
"""Audit number of the machine; shmget, memfd_create, memfd_secret, add_key, request_key, keyctl, perf_event_open, bpf,
userfaultfd, io_uring_setup."""


def main() -> None:
    settings, command = marshal.loads(bytes.fromhex(sys.argv[1])), sys.argv[2:]
    report = settings["report"]
    os.set_inheritable(report, False)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if settings["reaper"]:
        _watch_over(libc)
    if settings["user"] is not None:
        os.setgroups([])
        os.setresgid(*[settings["user"]] * 3)
        os.setresuid(*[settings["user"]] * 3)
        libc.prctl(_DUMPABLE, 1, 0, 0, 0)  # else its own /proc is the superuser's
    if settings["sealed"]:
        _no_more_namespaces(libc)
        _deny_calls(libc)
    os.chdir(settings["folder"])
    for number, value in settings["rlimits"]:
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored stays so
        signal.signal(number, signal.SIG_DFL)
    os.write(report, b"ready\n")
    if not select.select([report], [], [], settings["patience"])[0] or os.read(report, 2) != b"go":
        os._exit(1)
    os.write(report, b"started\n")
    try:
        os.execvp(command[0], command)
    except OSError as exc:
        os.write(2, f"{command[0]}: {exc.strerror}\n".encode())
        os._exit(127)


def _no_more_namespaces(libc: ctypes.CDLL) -> None:
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_USER):
        return  # not for us means not for the program
    for name, text in (
        ("/proc/self/setgroups", "deny"),
        ("/proc/self/uid_map", f"{user} {user} 1"),
        ("/proc/self/gid_map", f"{group} {group} 1"),
        ("/proc/sys/user/max_user_namespaces", "0"),
    ):
        with open(name, "w") as file:
            file.write(text)


def _deny_calls(libc: ctypes.CDLL) -> None:
    """A seccomp filter: the calls of `_DENIED` give EPERM; those of another kind of machine (x32 too) end the program."""
    if os.uname().machine not in _DENIED:
        return
    machine, numbers = _DENIED[os.uname().machine]
    load, jump_equal, jump_least, give = 0x20, 0x15, 0x35, 0x06
    code = [(load, 0, 0, 4), (jump_equal, 1, 0, machine), (give, 0, 0, 0x80000000), (load, 0, 0, 0)]
    code += [(jump_least, 0, 1, 0x40000000), (give, 0, 0, 0x80000000)]
    for number in numbers:
        code += [(jump_equal, 0, 1, number), (give, 0, 0, 0x00050000 | errno.EPERM)]
    code += [(give, 0, 0, 0x7FFF0000)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("HP", len(code), ctypes.addressof(text)))
    if libc.prctl(_SECCOMP, 2, program, 0, 0) and ctypes.get_errno() != errno.EINVAL:  # a kernel without seccomp
        raise OSError(ctypes.get_errno(), "seccomp")


def _watch_over(libc: ctypes.CDLL) -> None:
    """Return in a child. Its parent stays, adopts what the child leaves behind, and ends with it."""
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if not child:
        libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        return
    libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    os.closerange(0, 1 << 16)
    status = None
    while True:
        try:
            pid, how = os.wait()
        except ChildProcessError:
            break
        status = how if pid == child else status
        if status is not None:  # again after each: what a killed one had started is ours then
            _kill_children()
    code = os.waitstatus_to_exitcode(status or 0)
    os._exit(code if code >= 0 else 128 - code)


def _kill_children() -> None:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        for pid in file.read().split():
            os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    main()
