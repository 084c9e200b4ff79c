"""
The system calls that a program in the sandbox (reward_functions/sandbox.py) may make, as a seccomp filter.

A list of permitted calls: what a kernel gains later is forbidden until it is listed here. Other calls fail
with ENOSYS, as on a kernel without them, so that a newer libc falls back to an older call. Permitted is what
the standard library needs for computing, threads, asyncio and reading files. Not: making and changing files;
other processes and programs; the network, and sending datagrams and open files (connect, bind, sendmsg);
memory that no limit counts (System V and POSIX queues and semaphores, memfd, splice, vmsplice, inotify,
timer_create); mounts, namespaces, keys; interfaces with many known exploits (bpf, io_uring, perf_event_open,
userfaultfd).
"""

import struct

# Name, number on x86-64, number on arm64 (-: it does not exist there).
PERMITTED = """
read 0 63, write 1 64, futex 202 98, clock_gettime 228 113, mmap 9 222, munmap 11 215, mprotect 10 226,
mremap 25 216, madvise 28 233, msync 26 227, brk 12 214, open 2 -, openat 257 56, close 3 57,
close_range 436 436, lseek 8 62, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69,
pwritev 296 70, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, fcntl 72 25, ioctl 16 29,
stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, statfs 137 43, fstatfs 138 44,
access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents 78 -,
getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, poll 7 -, ppoll 271 73, select 23 -,
pselect6 270 72, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22,
eventfd2 290 19, socketpair 53 199, sendto 44 206, recvfrom 45 207, shutdown 48 210, getsockname 51 204,
getpeername 52 205, getsockopt 55 209, clone 56 220, set_robust_list 273 99, set_tid_address 218 96,
rseq 334 293, gettid 186 178, getpid 39 172, getppid 110 173, getpgrp 111 -, getpgid 121 155, getsid 124 156,
sched_yield 24 124, sched_getaffinity 204 123, getcpu 309 168, rt_sigaction 13 134, rt_sigprocmask 14 135,
rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133,
sigaltstack 131 132, kill 62 129, tgkill 234 131, restart_syscall 219 128, pause 34 -, alarm 37 -,
getitimer 36 102, setitimer 38 103, wait4 61 260, nanosleep 35 101, clock_nanosleep 230 115,
clock_getres 229 114, gettimeofday 96 169, time 201 -, times 100 153, getrusage 98 165, getrlimit 97 163,
prlimit64 302 261, sysinfo 99 179, uname 63 160, getrandom 318 278, getuid 102 174, geteuid 107 175,
getgid 104 176, getegid 108 177, getgroups 115 158, getresuid 118 148, getresgid 120 150, exit 60 93,
exit_group 231 94
"""

# Replaced when the filter is installed: the process's number, upper halves of its libraries' addresses.
SELF, OVER, NEAR, NEXT = struct.unpack("<4I", b"selfovernearnext")

# Permitted arguments: byte offset in struct seccomp_data (argument i is at 16 + 8 * i), and the values.
ARGUMENTS = {
    "clone": [(16, [0x3D0F00, 0x7D0F00])],                          # the flags of threads in glibc and musl
    "fcntl": [(24, [0, 1, 2, 3, 4, 5, 6, 7, 1030])],                # no F_SETPIPE_SZ, F_NOTIFY, F_SETOWN
    "ioctl": [(24, [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451])],      # a terminal and its size, flags
    "kill": [(16, [SELF])],
    "tgkill": [(16, [SELF])],
    "mmap": [(20, [0, OVER, NEAR, NEXT])],                          # pages far apart need tables of their own
    "mremap": [(40, [0, 1])],                                       # not to a given address
    "prlimit64": [(16, [0])],                                       # of the calling process
    "sendto": [(48, [0]), (52, [0])],                               # to the other end, not to an address
    "socketpair": [(16, [1])],                                      # AF_UNIX
}


def system_call_filter(machine: str) -> bytes:
    """Return a filter for seccomp(2): BPF instructions (code, lines to skip if true, if false, number).

    machine  as in platform.machine(); for others than x86_64 and aarch64 no call is permitted
    """
    audit, column = {"x86_64": (0xC000003E, 1), "aarch64": (0xC00000B7, 2)}.get(machine, (0, 1))
    load, equal, answer, allow, kill, error = 0x20, 0x15, 0x06, 0x7FFF0000, 0x80000000, 0x50000
    lines = [(load, 0, 0, 4), (equal, 1, 0, audit), (answer, 0, 0, kill), (load, 0, 0, 0)]
    for entry in map(str.split, PERMITTED.split(",")):
        checks = []
        for offset, values in ARGUMENTS.get(entry[0], []):          # a permitted value skips the error EPERM
            checks += [(load, 0, 0, offset)]
            checks += [(equal, len(values) - i, 0, value) for i, value in enumerate(values)]
            checks += [(answer, 0, 0, error + 1)]
        if entry[column] != "-":
            lines += [(equal, 0, len(checks) + 1, int(entry[column])), *checks, (answer, 0, 0, allow)]
    lines += [(answer, 0, 0, error + 38)]                           # ENOSYS
    return b"".join(struct.pack("<HBBI", *line) for line in lines)
