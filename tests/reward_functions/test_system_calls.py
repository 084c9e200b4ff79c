"""The filter of system calls, run by a small interpreter of BPF: for both processors, whichever this one is."""

import re
import struct
from pathlib import Path

import pytest

from reward_functions.system_calls import NEAR, OVER, PERMITTED, SELF, system_call_filter

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, NOT_PERMITTED, NO_SUCH_CALL = 0x7FFF0000, 0x80000000, 0x50001, 0x50026
THREAD, FORK = 0x3D0F00, 17

FORBIDDEN = {                          # (x86-64, arm64)
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "vmsplice": (278, 75), "sendmsg": (46, 211),
    "sendmmsg": (307, 269), "connect": (42, 203), "bind": (49, 200), "socket": (41, 198), "shmget": (29, 194),
    "memfd_create": (319, 279), "execve": (59, 221), "ptrace": (101, 117), "mount": (165, 40), "unshare": (272, 97),
    "io_uring_setup": (425, 425), "bpf": (321, 280), "clone3": (435, 435), "inotify_init1": (294, 26),
    "timer_create": (222, 107), "truncate": (76, 45), "setxattr": (188, 5), "splice": (275, 76), "sendfile": (40, 71),
    "setsockopt": (54, 208), "prctl": (157, 167), "setuid": (105, 146), "process_vm_readv": (310, 270), "mkdirat": (258, 34),
    "unlinkat": (263, 35), "fchmod": (91, 52), "utimensat": (280, 88),
}


def verdict(machine, number, *arguments, audit=None):
    """The answer of the filter of a machine to a system call."""
    data = struct.pack("<iIQ6Q", number, audit or AUDIT[machine], 0, *arguments, *[0] * (6 - len(arguments)))
    program, position, value = system_call_filter(machine), 0, None
    while True:
        code, if_true, if_false, constant = struct.unpack_from("<HBBI", program, 8 * position)
        position += 1
        if code == 0x20:                                           # load a word
            value = struct.unpack_from("<I", data, constant)[0]
        elif code == 0x15:                                         # equal?
            position += if_true if value == constant else if_false
        else:
            assert code == 0x06                                    # return
            return constant


def numbers(text, machine):
    entries = [entry.split() for entry in text.split(",")]
    return {name: int(found[list(AUDIT).index(machine)]) for name, *found in entries if found[list(AUDIT).index(machine)] != "-"}


@pytest.mark.parametrize("machine", AUDIT)
def test_every_call_but_the_permitted_ones_does_not_exist(machine):
    listed = numbers(PERMITTED, machine)
    assert len(set(listed.values())) == len(listed)
    for name, pair in FORBIDDEN.items():
        assert verdict(machine, pair[list(AUDIT).index(machine)]) == NO_SUCH_CALL, name
    for number in {*range(600), *(0x40000000 + n for n in range(600))} - {*listed.values()}:
        assert verdict(machine, number) == NO_SUCH_CALL, number
    assert verdict(machine, 0, audit=0x40000003) == KILL           # 32-bit programs
    assert verdict(machine, listed["read"], 0, 1 << 40, 5) == ALLOW


@pytest.mark.parametrize("machine", AUDIT)
def test_arguments(machine):
    n = numbers(PERMITTED, machine)
    assert verdict(machine, n["clone"], THREAD) == ALLOW and verdict(machine, n["clone"], FORK) == NOT_PERMITTED
    assert verdict(machine, n["clone"], THREAD | 0x10000000) == NOT_PERMITTED, "a thread in a new namespace"
    assert [verdict(machine, n["fcntl"], 3, c) for c in (0, 6, 1030)] == [ALLOW] * 3
    assert [verdict(machine, n["fcntl"], 3, c) for c in (8, 10, 1024, 1026, 1031)] == [NOT_PERMITTED] * 5
    assert verdict(machine, n["ioctl"], 1, 0x5401) == ALLOW and verdict(machine, n["ioctl"], 1, 0x5412) == NOT_PERMITTED
    assert verdict(machine, n["sendto"], 3, 4, 5, 0, 0) == ALLOW
    assert [verdict(machine, n["sendto"], 3, 4, 5, 0, address) for address in (0x7F, 0x7F << 32)] == [NOT_PERMITTED] * 2
    assert verdict(machine, n["socketpair"], 1, 2) == ALLOW and verdict(machine, n["socketpair"], 30, 2) == NOT_PERMITTED
    assert [verdict(machine, n["mmap"], address) for address in (0, NEAR << 32, OVER << 32)] == [ALLOW] * 3
    assert verdict(machine, n["mmap"], 5 << 32) == verdict(machine, n["mremap"], 0, 1, 1, 3) == NOT_PERMITTED
    for name in "kill", "tgkill":
        assert verdict(machine, n[name], SELF) == ALLOW and verdict(machine, n[name], 1) == NOT_PERMITTED
        assert verdict(machine, n[name], 2**64 - 1) == NOT_PERMITTED, "everybody"


def test_no_call_is_permitted_on_another_processor():
    assert {verdict("riscv64", number, audit=0xC00000F3) for number in range(600)} == {KILL}


@pytest.mark.parametrize("machine,header", [("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "asm-generic/unistd.h")])
def test_the_numbers_are_those_of_the_kernel(machine, header):
    path = Path("/usr/include") / header
    if not path.exists():
        pytest.skip("no headers of the kernel here")
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)\b", path.read_text())}
    known = {"newfstatat": known.get("fstatat")} | known
    listed = numbers(PERMITTED, machine)
    assert listed == {name: known[name] for name in listed}
