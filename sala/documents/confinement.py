"""What Linux takes from the process that reads files: the network, other processes, and all changes to files.

Both mechanisms need no rights and hold in containers; neither can be undone. Where the system has one of them only, or
none, that is what holds: `confine` tells which.
"""

import ctypes
import platform
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446  # system calls, the same on all machines
LANDLOCK_VERSION = 1
CAPABILITIES_VERSION = 0x20080522
READ_ANYTHING = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, of the superuser
READ_FILE, READ_DIR = 1 << 2, 1 << 3
RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}  # versions of Landlock, and how many rights to files each knows
CONNECTIONS, SCOPES = {4: 0b11}, {6: 0b11}  # TCP; sockets without a file, and signals
LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, JUMP_IF_ANY, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of filters
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # where a filter finds them
ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # the latter with EPERM
OTHER_NUMBERS = 0x40000000  # from here on: the x32 calls of x86-64
WRITING = 0o1 | 0o2 | 0o100 | 0o1000 | 0o20000000  # flags of open: O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_TMPFILE
MACHINES = {  # identifier, refused system calls, and calls that open files with the argument that holds their flags
    "x86_64": (
        0xC000003E,
        (
            *(41, 53, 425),  # socket, socketpair, io_uring_setup
            *(56, 57, 58, 59, 322, 435),  # clone, fork, vfork, execve, execveat, clone3
            *(62, 101, 129, 200, 234, 297, 310, 311, 424, 438),  # signals, and the memory of other processes
            *(76, 82, 83, 84, 85, 86, 87, 88, 133, 258, 259, 263, 264, 265, 266, 316, 437),  # truncate … openat2
            *(90, 91, 92, 93, 94, 260, 268, 452),  # modes and owners
            *(132, 235, 261, 280, 188, 189, 190, 197, 198, 199, 463, 466),  # times and attributes
        ),
        {2: 1, 257: 2},
    ),
    "aarch64": (
        0xC00000B7,
        (
            *(198, 199, 425),
            *(220, 221, 281, 435),
            *(117, 129, 130, 131, 138, 240, 270, 271, 424, 438),
            *(33, 34, 35, 36, 37, 38, 45, 276, 437),
            *(52, 53, 54, 55, 452),
            *(88, 5, 6, 7, 14, 15, 16, 463, 466),
        ),
        {56: 2},
    ),
}


def confine() -> set[str]:
    """Give up what reading does not need, for this thread and those it starts; return what holds from now on."""
    if sys.platform != "linux":
        return set()
    libc = ctypes.CDLL(None)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return set()
    _drop_capabilities(libc)
    holds = {"landlock"} if _restrict_files(libc) else set()
    return holds | ({"seccomp"} if _filter_calls(libc) else set())


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Keep of what a superuser may do that it reads all files."""
    header = ctypes.create_string_buffer(struct.pack("Ii", CAPABILITIES_VERSION, 0))
    sets = ctypes.create_string_buffer(24)  # twice 32 bits of what is effective, permitted and inheritable
    if libc.capget(header, sets) == 0:
        effective, permitted = struct.unpack_from("II", sets.raw)
        kept = struct.pack("6I", effective & READ_ANYTHING, permitted & READ_ANYTHING, 0, 0, 0, 0)
        libc.capset(header, kept)


def _restrict_files(libc: ctypes.CDLL) -> bool:
    """Allow nothing but to read files; and to look into no process outside, whatever belongs to the same user."""
    version = _create_ruleset(libc, None, LANDLOCK_VERSION)
    if version < 1:
        return False
    files = (1 << _at(RIGHTS, version)) - 1 & ~(READ_FILE | READ_DIR)
    number = _create_ruleset(libc, struct.pack("QQQ", files, _at(CONNECTIONS, version), _at(SCOPES, version)), 0)
    restrict = (ctypes.c_long(LANDLOCK_RESTRICT_SELF), ctypes.c_int(number), ctypes.c_uint(0))
    return number >= 0 and bool(libc.syscall(*restrict) == 0)


def _create_ruleset(libc: ctypes.CDLL, ruleset: bytes | None, flags: int) -> int:
    size = ctypes.c_size_t(len(ruleset or b""))
    number: int = libc.syscall(ctypes.c_long(LANDLOCK_CREATE_RULESET), ruleset, size, ctypes.c_uint(flags))
    return number


def _at(table: dict[int, int], version: int) -> int:
    """Return what a version has: what the last one that changed it has."""
    return next((table[one] for one in sorted(table, reverse=True) if one <= version), 0)


def _filter_calls(libc: ctypes.CDLL) -> bool:
    """Refuse system calls that reading does not need."""
    if sys.byteorder != "little" or platform.machine() not in MACHINES:
        return False
    code = _program(*MACHINES[platform.machine()])
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    return bool(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0) == 0)


def _program(architecture: int, refused: tuple[int, ...], opening: dict[int, int]) -> bytes:
    """Return a filter: instructions with how many to pass over where a comparison holds, and where it does not."""
    checks = [(JUMP_IF_AT_LEAST, OTHER_NUMBERS), *((JUMP_IF_EQUAL, number) for number in refused)]
    code = [(LOAD, 0, 0, ARCHITECTURE), (JUMP_IF_EQUAL, 1, 0, architecture), (RETURN, 0, 0, REFUSE)]
    code.append((LOAD, 0, 0, NUMBER))
    for kind, value in checks:
        code += [(kind, 0, 1, value), (RETURN, 0, 0, REFUSE)]
    for number, at in opening.items():
        flags = (LOAD, 0, 0, ARGUMENTS + 8 * at)
        code += [(JUMP_IF_EQUAL, 0, 4, number), flags, (JUMP_IF_ANY, 0, 1, WRITING)]
        code += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("HBBI", *one) for one in [*code, (RETURN, 0, 0, ALLOW)])
