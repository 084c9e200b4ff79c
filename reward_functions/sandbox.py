"""
Run programs that a model wrote, isolated from this machine. Only their printed output is returned.

    run_python("print(1 + 1)") == SandboxResult(ok=True, stdout="2\\n", stderr="", reason="")

A program is one process with threads: no other process or program. It has the standard library, but cannot
write files; time, memory and output are limited; it has no network, environment variables, open files, or
processes to signal. The first of these isolation methods that the kernel permits is used:

    namespaces  only the standard library exists, read-only; no other process and no network. This works for
                root, and for ordinary users if the kernel permits user namespaces
    user        for root without CAP_SYS_ADMIN, as in most containers, on a kernel with Landlock: an unused
                user that can read no other file, but can find out names and sizes of files

In both, a seccomp filter permits a list of system calls (system_calls.py). If neither works, and on systems
other than Linux on x86-64 and arm64, no program is run. Not covered: see docs/rewards.md.

Each thread of the caller has a server, a running interpreter, and each program is a fork of a fork of it. The
server forks before it reads the request, so that no program finds the text of another one in its memory.
"""

import ctypes
import gc
import glob
import json
import math
import os
import platform
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import time
import traceback
import types
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module

if __name__ != "__main__":      # the server, which has no packages, gets the filter from its caller
    system_calls = import_module(f"{__package__}.system_calls" if __package__ else "system_calls")

OUTPUT_BYTES = 1 << 16          # of stdout and of stderr
THREADS, OPEN_FILES = 32, 64
SECONDS_TO_START = 60.0         # for a server and its modules; the time limit of a program comes after that


@dataclass(frozen=True)
class SandboxResult:
    """The outcome of a program."""

    ok: bool        # it ended by itself, with exit code 0 and within all limits (the program can choose that)
    stdout: str                 # at most OUTPUT_BYTES
    stderr: str
    reason: str             # if not ok: "time", "memory", "output", "exit code 1", "SIGSEGV", ...; else ""


# ---- in the caller ----

idle_servers: dict[tuple, list[subprocess.Popen]] = defaultdict(list)       # (method, modules) -> processes
os.register_at_fork(after_in_child=idle_servers.clear)             # they belong to the parent


def run_python(
    code: str, *, timeout_s: float = 5.0, memory_mb: int = 512, modules: tuple[str, ...] = ()
) -> SandboxResult:
    """Run a program until it ends or exceeds a limit. Safe to call from many threads.

    timeout_s  limit on wall-clock time, and rounded up on processor time (of all threads)
    memory_mb  limit on the address space; the interpreter itself takes about 30
    modules    imported before the program starts, once for all programs, from wherever the caller finds
               them; the packages that this loads are available, others outside the standard library are not
    raises     RuntimeError where no isolation method works
    """
    return run_in_server(usable_method(), modules, code, timeout_s, memory_mb)


@cache
def usable_method() -> str:
    """Return the first isolation method with which a program works. Raise RuntimeError if there is none."""
    obstacles = []
    for method in RESTRICTIONS:
        result = run_in_server(method, (), "import fractions", 5.0, 512)     # a library may be for root alone
        if result.ok:
            return method
        obstacles.append(f"{method}: {result.reason} {result.stderr.strip().rpartition(chr(10))[2]}".strip())
    raise RuntimeError(
        "programs cannot be isolated here, so none is run: run as root, or allow user namespaces "
        f"({'; '.join(obstacles)})")


def run_in_server(
    method: str, modules: tuple[str, ...], code: str, timeout_s: float, memory_mb: int
) -> SandboxResult:
    """Send a program to an idle server, or to a new one, and wait for its result."""
    servers = idle_servers[method, modules]
    try:
        server = servers.pop()
    except IndexError:
        server = start_server(method, modules)
    try:
        server.stdin.write(json.dumps([code, timeout_s, memory_mb]).encode() + b"\n")
        server.stdin.flush()
        answered = select.poll()
        answered.register(server.stdout, select.POLLIN)
        if not answered.poll(1000 * (timeout_s + SECONDS_TO_START)):
            raise OSError("no answer")
        answer = json.loads(server.stdout.readline())
    except (OSError, ValueError):                       # the server was killed: the program counts as failed
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        return SandboxResult(False, "", "", "the sandbox was killed")
    servers.append(server)
    return SandboxResult(**answer)


def start_server(method: str, modules: tuple[str, ...]) -> subprocess.Popen:
    """Start an interpreter without environment variables, open files and site packages."""
    path = [os.path.abspath(folder) for folder in sys.path if modules]
    call_filter = system_calls.system_call_filter(platform.machine()).hex()
    options = dict(method=method, modules=modules, path=path, call_filter=call_filter)
    command, pipe = [sys.executable, "-I", "-S", __file__, json.dumps(options)], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env={}, cwd="/", start_new_session=True)


def usable_cores() -> int:
    """Return the number of cores that this process may use: of its affinity, and of its container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = map(int, file.read().split())
        return min(cores, math.ceil(quota / period))
    except (OSError, ValueError):                       # cgroups of version 1; "max": no quota
        return cores


# ---- in the server, which never reads a request itself ----


def serve(method: str, modules: list[str], path: list[str], call_filter: str) -> None:
    """Isolate this process, then handle requests one after the other, each in a new fork, until the caller
    ends. call_filter is for seccomp(2), in hexadecimal digits.
    """
    sys.path += path
    for name in modules:
        __import__(name)
    obstacle = ""
    try:
        RESTRICTIONS[method]()
    except Exception as error:                                  # then every request is refused
        obstacle = str(error) or type(error).__name__
    gc.freeze()                 # otherwise garbage collection in forks would copy the page of every object
    while True:
        pid = os.fork()
        if pid == 0:
            os._exit(handle_request(method, call_filter, obstacle))
        if os.waitpid(pid, 0)[1]:
            return


def handle_request(method: str, call_filter: str, obstacle: str) -> int:
    """Read a request, run it, write the answer: a line of JSON each. Return 1 at the end of the input."""
    line = sys.stdin.buffer.readline()
    if not line:
        return 1
    try:
        if obstacle:
            raise OSError(obstacle)
        answer = run_isolated(method, call_filter, *json.loads(line))
    except OSError as error:                                    # also temporary ones: too many processes
        answer = {"ok": False, "stdout": "", "stderr": "", "reason": f"the sandbox failed: {error}"}
    print(json.dumps(answer), flush=True)
    return 0


def run_isolated(method: str, call_filter: str, code: str, timeout_s: float, memory_mb: int) -> dict:
    """Fork a process for a program, and kill it at the end. Raise OSError where it cannot be isolated.

    This process must end soon: it has the ends of the pipes.
    """
    (out, out_end), (err, err_end), (ready, ready_end) = os.pipe(), os.pipe(), os.pipe()
    user = 61184 + os.getpid() % 4336                              # in the range of systemd's dynamic users
    if method == "namespaces":
        check_libc(libc.unshare(0x20000000))                       # CLONE_NEWPID
    pid = os.fork()
    if pid == 0:
        try:
            for source, target in (os.open("/dev/null", os.O_RDWR), 0), (out_end, 1), (err_end, 2):
                os.dup2(source, target)
            apply_limits(user, timeout_s, memory_mb, bytes.fromhex(call_filter))
            os.write(ready_end, b"!")
            os.closerange(3, 1 << 16)
            execute(code)
        except BaseException as error:
            os.write(2, str(error).encode())
        os._exit(1)
    for end in out_end, err_end, ready_end:
        os.close(end)
    return wait_for_program(pid, out, err, ready, timeout_s)


def wait_for_program(pid: int, out: int, err: int, ready: int, timeout_s: float) -> dict:
    """Collect output until a program ends or exceeds a limit."""
    deadline, texts = time.monotonic() + timeout_s, {out: b"", err: b""}
    process, poll, reason = os.pidfd_open(pid), select.poll(), "time"
    for end in process, out, err:
        poll.register(end, select.POLLIN)
    while reason == "time" and (left := deadline - time.monotonic()) > 0:
        for end, _ in poll.poll(left * 1000):
            if end == process:
                reason = ""
            elif chunk := os.read(end, 1 << 16):
                texts[end] += chunk
            else:
                poll.unregister(end)                               # closed by the program, which continues
        if max(map(len, texts.values())) > OUTPUT_BYTES:
            reason = "output"
    os.kill(pid, signal.SIGKILL)        # in a namespace it is process 1, and all others are killed with it
    _, status, used = os.wait4(pid, 0)
    os.close(process)
    texts = [(text + read_available(end))[:OUTPUT_BYTES] for end, text in texts.items()]
    stdout, stderr = (text.decode(errors="replace") for text in texts)
    if not read_available(ready) and reason != "time":
        raise OSError(stderr.strip() or "it ended before the program started")
    code = os.waitstatus_to_exitcode(status)
    if reason == "" and code:
        killed = code == -signal.SIGKILL and used.ru_utime + used.ru_stime > timeout_s - 0.1
        memory = stderr.rstrip().rpartition("\n")[2].startswith("MemoryError")
        names = {-number: number.name for number in signal.Signals}             # not of all real-time signals
        name = f"exit code {code}" if code > 0 else names.get(code, f"signal {-code}")
        reason = "time" if killed else "memory" if memory else name
    return {"ok": reason == "", "stdout": stdout, "stderr": stderr, "reason": reason}


def read_available(pipe: int) -> bytes:
    """Return what is in a pipe, without waiting for its writers: something may hold the other end."""
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, 1 << 16)
    except BlockingIOError:
        return b""


# ---- files and rights ----

libc = ctypes.CDLL(None, use_errno=True)
LIBRARY = os.path.dirname(os.__file__)


def check_libc(result: int) -> int:
    """Return the result of a function of libc, or raise OSError if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{sys._getframe(1).f_code.co_name}: {os.strerror(number)}")
    return result


def visible_paths() -> list[str]:
    """Return the paths that a program needs: the standard library without site packages, the shared libraries
    that its modules load, two devices, and the imported packages that lie elsewhere.
    """
    preload = [*glob.glob(f"{LIBRARY}/lib-dynload/*.so"), "libgcc_s.so.1"]      # the latter: to end a thread
    trace = {"LD_TRACE_LOADED_OBJECTS": "1", "LD_PRELOAD": ":".join(preload)}   # print their libraries
    traced = subprocess.run([sys.executable], env=trace, capture_output=True, text=True, check=False).stdout
    libraries = {path for path in re.findall(r"(/\S+) \(0x", traced) if not path.startswith(LIBRARY)}
    standard = {*glob.glob(f"{LIBRARY}/*")} - {f"{LIBRARY}/site-packages", f"{LIBRARY}/dist-packages"}
    top = [module for name, module in sys.modules.items() if "." not in name and name != "__main__"]
    files = {file for m in top for file in getattr(m, "__path__", [getattr(m, "__file__", None) or "/"])}
    others = {file for file in files if os.path.dirname(file) not in ("/", LIBRARY, f"{LIBRARY}/lib-dynload")}
    paths = {*libraries, *standard, *others, "/dev/null", "/dev/urandom"}
    return sorted(path for path in paths if os.path.exists(path))


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Call mount(2)."""
    kind = kind and kind.encode()
    check_libc(libc.mount(source.encode(), target.encode(), kind, ctypes.c_ulong(flags), options.encode()))


def enter_empty_root() -> None:
    """Change to a read-only root with nothing but visible_paths.

    Without the right to mount, first enter a user namespace as user 65534.
    """
    visible = visible_paths()
    uid, gid, root = os.getuid(), os.getgid(), "/proc"             # a mount point that always exists
    namespaces = 0x00020000 | 0x04000000 | 0x08000000 | 0x40000000      # of mounts, host name, IPC, network
    if libc.unshare(namespaces) < 0:
        check_libc(libc.unshare(namespaces | 0x10000000))               # CLONE_NEWUSER
        for name, text in ("setgroups", "deny"), ("uid_map", f"65534 {uid} 1"), ("gid_map", f"65534 {gid} 1"):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    mount("none", "/", None, 1 << 14 | 1 << 18)                 # MS_REC | MS_PRIVATE: mounts do not propagate
    mount("tmpfs", root, "tmpfs", 0, "size=1m,mode=755")
    for path in visible:
        if os.path.isdir(path):
            os.makedirs(root + path, exist_ok=True)
        elif not os.path.exists(root + path):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            open(root + path, "w").close()
        mount(os.path.realpath(path), root + path, None, 1 << 12 | 1 << 14)        # MS_BIND | MS_REC
    read_only = struct.pack("<4Q", 1 | 2, 0, 0, 0)                 # MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID
    # mount_setattr, recursive
    check_libc(libc.syscall(442, -100, root.encode(), 0x8000, read_only, len(read_only)))
    os.chroot(root)
    os.chdir("/")


def restrict_files() -> None:
    """Permit only reading visible_paths, and writing to devices, with Landlock.

    What Landlock does not restrict is forbidden by the filter (truncate, chmod).
    """
    if os.geteuid() != 0:
        raise OSError("only root can take another user id")
    rules = check_libc(libc.syscall(444, struct.pack("<Q", (1 << 13) - 1), 8, 0))
    for path in visible_paths():
        rights = 4 | 8 if os.path.isdir(path) else 2 | 4 if path.startswith("/dev/") else 4
        file = os.open(path, os.O_PATH)
        check_libc(libc.syscall(445, rules, 1, struct.pack("<Qi", rights, file), 0))
        os.close(file)
    check_libc(libc.prctl(38, 1, 0, 0, 0))                              # PR_SET_NO_NEW_PRIVS
    check_libc(libc.syscall(446, rules, 0))


# What a method changes in the server, before a program's process exists.
RESTRICTIONS = {"namespaces": enter_empty_root, "user": restrict_files}


# ---- in the program's process, before the program ----


def apply_limits(user: int, timeout_s: float, memory_mb: int, call_filter: bytes) -> None:
    """Apply all limits to this process, irrevocably. user: an unused user id"""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    check_libc(libc.capset(struct.pack("<Ii", 0x20080522, 0), bytes(24)))          # no capability
    limits = {
        resource.RLIMIT_CPU: math.ceil(timeout_s), resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0, resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_NOFILE: OPEN_FILES, resource.RLIMIT_NPROC: THREADS,
    }
    for limit, amount in limits.items():
        resource.setrlimit(limit, (amount, amount))
    check_libc(libc.prctl(1, signal.SIGKILL, 0, 0, 0))              # PR_SET_PDEATHSIG: end with the parent
    check_libc(libc.prctl(4, 0, 0, 0, 0))                           # PR_SET_DUMPABLE: no handler of crashes
    check_libc(libc.prctl(38, 1, 0, 0, 0))                              # PR_SET_NO_NEW_PRIVS
    near = ctypes.cast(libc.mmap, ctypes.c_void_p).value >> 32          # libraries are loaded beside this one
    for name, value in {b"self": os.getpid(), b"over": near + 1, b"near": near, b"next": near - 1}.items():
        call_filter = call_filter.replace(name, struct.pack("<I", value))
    instructions = ctypes.create_string_buffer(call_filter, len(call_filter))           # of 8 bytes each
    program = struct.pack("@HP", len(call_filter) // 8, ctypes.addressof(instructions))
    check_libc(libc.prctl(22, 2, program, 0, 0))                        # PR_SET_SECCOMP


def execute(code: str) -> None:
    """Execute a program as the module __main__, then exit with its status."""
    status, main = 0, types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv = main, ["program.py"]
    try:
        exec(compile(code, "program.py", "exec"), main.__dict__)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status & 255)


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
