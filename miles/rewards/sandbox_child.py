"""The process that a sandboxed program starts in: makes its own limits and namespaces, then becomes the program.

Started by `sandbox.py` as a file of its own, with the standard library alone and its orders as JSON in argv[1].
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

NEWNS, NEWUSER, NEWPID, NEWNET, NEWIPC = 0x00020000, 0x10000000, 0x20000000, 0x40000000, 0x08000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY = 442, -100, 0x8000, 1
INSIDE_ID = 1000
"""Not 0: the program's exec then drops the capabilities that the new user namespace gives."""
COUNTED_AS = 10**9
"""Plus the pid, whose processes those of root are: the kernel never limits how many root has. Files are still read as root."""
OUTSIDE = "cannot make namespaces"


class MountAttr(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns_fd"))


def main() -> None:
    orders = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if orders["namespaces"]:
        enter_namespaces(libc, orders["folder"])
        go_on_in_a_child(libc)  # the first process of the new namespace, whose end is the end of all in it
        go_on_in_a_child(libc)  # the program, which is not the first one: that would be deaf to signals of its own
        set_limits(orders)
        os.execv(sys.executable, [sys.executable, "-I", orders["program"]])
    set_limits(orders)
    guard(Path(orders["folder"]))
    sys.argv = [orders["program"]]
    runpy.run_path(orders["program"], run_name="__main__")


def enter_namespaces(libc: Any, folder: str) -> None:
    """No network, no other process in sight, and nothing to write to but the folder. Exits when the kernel does not allow it."""
    uid, gid = os.geteuid(), os.getegid()
    if os.getuid() == 0:
        with contextlib.suppress(OSError):  # root in a container of mapped users is no root to the kernel's limits
            os.setresuid(COUNTED_AS + os.getpid(), 0, 0)
    if libc.unshare(NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC):
        sys.exit(f"{OUTSIDE}: {os.strerror(ctypes.get_errno())}")
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{INSIDE_ID} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{INSIDE_ID} {gid} 1")
    except OSError as error:
        sys.exit(f"{OUTSIDE}: {error}")
    here = folder.encode()
    done = (
        libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0
        and libc.mount(here, here, None, MS_BIND, None) == 0
        and set_attributes(libc, b"/", MountAttr(set=ATTR_RDONLY), AT_RECURSIVE)
        and set_attributes(libc, here, MountAttr(clear=ATTR_RDONLY), 0)
    )
    if not done:
        sys.exit(f"{OUTSIDE}: {os.strerror(ctypes.get_errno())}")
    os.chdir(folder)  # the folder as it is mounted now


def go_on_in_a_child(libc: Any) -> None:
    """Returns in the child alone; the parent ends as the child does."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def set_attributes(libc: Any, path: bytes, attributes: MountAttr, flags: int) -> bool:
    size = ctypes.sizeof(attributes)
    return bool(libc.syscall(MOUNT_SETATTR, AT_FDCWD, path, flags, ctypes.byref(attributes), size) == 0)


def set_limits(orders: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_AS: orders["memory"],
        resource.RLIMIT_CPU: orders["cpu"],
        resource.RLIMIT_FSIZE: orders["file_size"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 256,
    }
    if orders["namespaces"]:  # elsewhere it counts all processes of the user, and those are not ours to limit
        limits[resource.RLIMIT_NPROC] = orders["processes"]
    for what, most in limits.items():
        _, hard = resource.getrlimit(what)
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (allowed, allowed))


REFUSED = (
    "socket.",
    "subprocess.",
    "ctypes.",
    "os.system",
    "os.fork",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.startfile",
    "pty.",
    "os.kill",
    "signal.",
)
CHANGES = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "shutil.rmtree",
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def guard(folder: Path) -> None:
    """Without namespaces: Python itself refuses sockets, other programs, and changes outside the folder.

    This stops what a model writes by mistake or habit, not a program that is out to break Python.
    """
    inside = os.path.realpath(folder) + os.sep

    def allowed(path: object) -> bool:
        name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        return isinstance(path, int) or (os.path.realpath(name) + os.sep).startswith(inside) or name == os.devnull

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open" and isinstance(args[2], int) and args[2] & WRITES and not allowed(args[0]):
            raise PermissionError(f"writing to {args[0]!r} is not allowed here")
        if event.startswith(CHANGES) and not all(allowed(path) for path in args if isinstance(path, str | bytes | os.PathLike)):
            raise PermissionError(f"{event} outside of the program's folder is not allowed")

    sys.addaudithook(hook)


if __name__ == "__main__":
    main()
