"""
Running code that a model wrote, so that nothing of it is left afterwards but what it printed.

    run_python("print(1 + 1)") == SandboxResult(ok=True, stdout="2\\n", stderr="", reason="")

A program is one process: it may start threads, but no other process and no other program. It has the standard library,
read-only, and an empty scratch folder; limits on time, memory, files and output; no network, no environment, no open files,
and nobody to signal. Which wall stands around it depends on what the kernel allows us; the first of these that works is taken:

    namespaces  nothing exists but the standard library and the scratch folder, no other process, no network: for root, and
                for ordinary users where the kernel gives them namespaces
    bubblewrap  the same through bwrap, which may be allowed what we are not; slower, as it starts a new interpreter
    user        root without CAP_SYS_ADMIN, as in most containers: a user id that nobody else has. Files that everybody
                may read can be read, and folders where everybody may write (/tmp, /dev/shm) can be written to, unless the
                kernel has Landlock; what is left in them stays

and inside each of them a filter of system calls. Where none works, and on anything but Linux on x86-64 and arm64, programs
are refused. Not covered by any: bugs of the kernel, and what can be told from timing.

Each caller's thread has a server, an interpreter that has started already, and each program is a fork of a fork of it:
the server forks before it reads the request, so that no program finds another one's text in its memory.

Left out on purpose: cgroups, for one process needs no limit over many; a list of allowed system calls instead of forbidden
ones, which would break with every version of libc.
"""

import ctypes
import gc
import json
import math
import os
import platform
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections import defaultdict
from dataclasses import dataclass

OUTPUT_BYTES = 1 << 16          # of stdout and of stderr


FILE_MB, SCRATCH_MB = 16, 32    # one file, and all files together (in the way `user` there is no limit on all)


THREADS, OPEN_FILES = 32, 64


SETTLED = "namespaces", "bubblewrap", "user"


@dataclass(frozen=True)
class SandboxResult:
    """What became of a program."""

    ok: bool                    # it ended by itself, with exit code 0 and within all limits; it can choose that freely
    stdout: str                 # at most OUTPUT_BYTES
    stderr: str
    reason: str                 # why not ok: time, memory, output, exit code 1, SIGSEGV; else empty


# ---- in the caller -------------------------------------------------------------------------------------------------

idle: dict[tuple, list[subprocess.Popen]] = defaultdict(list)      # servers that wait for a program


os.register_at_fork(after_in_child=idle.clear)                     # they are the parent's


def run_python(
    code: str, *, timeout_s: float = 5.0, memory_mb: int = 512, modules: tuple[str, ...] = (), way: str = ""
) -> SandboxResult:
    """Run a program to its end, or to that of a limit. Safe to call from many threads.

    timeout_s  seconds on the clock, and rounded up of processor time (that of all threads)
    memory_mb  of address space; the interpreter itself takes about 30
    modules    imported before the program starts, once for all programs; other packages than the standard library are
               there only with these
    way        "namespaces", "bubblewrap" or "user"; "": the first that works
    raises     RuntimeError where programs cannot be contained
    """
    kind = (way, modules)
    try:
        server = idle[kind].pop()
    except IndexError:
        server = start_server(way, modules)
    try:
        server.stdin.write(json.dumps([code, timeout_s, memory_mb]).encode() + b"\n")
        server.stdin.flush()
        answer = json.loads(server.stdout.readline())
    except (OSError, ValueError):                                  # whoever killed it, this program counts as failed
        server.kill()
        server.wait()
        return SandboxResult(False, "", "", "the sandbox was killed")
    idle[kind].append(server)
    if "refused" in answer:
        raise RuntimeError(
            "programs cannot be contained here, so none is run: install bubblewrap, run as root, or allow user namespaces "
            f"({answer['refused']})"
        )
    return SandboxResult(**answer)


def start_server(way: str, modules: tuple[str, ...]) -> subprocess.Popen:
    """An interpreter without environment, site packages (unless modules are asked for) and open files."""
    command = [sys.executable, "-I", *([] if modules else ["-S"]), __file__, "serve", way, *modules]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}, cwd="/", start_new_session=True)


# ---- in the server, which never reads a request itself -------------------------------------------------------------


def serve(way: str, modules: list[str]) -> None:
    """Answer one request after the other, each from a fork of its own, until the caller is gone."""
    for name in modules:
        __import__(name)
    refused = {way: why_not(way, modules) for way in ([way] if way else SETTLED)}
    way = next((way for way in refused if not refused[way]), "")
    if way == "namespaces":
        enter_empty_root()
    gc.freeze()                                                    # or collections in forks would copy every object's page
    while True:
        pid = os.fork()
        if pid == 0:
            os._exit(answer_one(way, modules, refused))
        if os.waitpid(pid, 0)[1]:
            return


def why_not(way: str, modules: list[str]) -> str:
    """What keeps us from containing an empty program this way; "" if nothing does. In a fork: it changes its namespaces."""
    ours, theirs = os.pipe()
    if os.fork() == 0:
        try:
            if way == "namespaces":
                enter_empty_root()
            tried = supervise(way, modules, "import fractions", 5.0, 512)
            if not tried["ok"]:                                    # the library is in a folder that only root may enter
                raise OSError(f"{tried['reason']}: {tried['stderr'].strip().rpartition(chr(10))[2]}")
        except OSError as error:
            os.write(theirs, str(error).encode())
        os._exit(0)
    os.wait()
    os.close(theirs)
    with os.fdopen(ours) as answer:
        return answer.read()


def answer_one(way: str, modules: list[str], refused: dict[str, str]) -> int:
    """Read a request, run it, write the answer: a line of JSON each. Returns 1 when there will be no more requests."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return 1
        line += chunk
    try:
        answer = supervise(way, modules, *json.loads(line)) if way else {"refused": "; ".join(map(": ".join, refused.items()))}
    except OSError as error:                                       # it worked a moment ago: too many processes, a full disk
        answer = {"ok": False, "stdout": "", "stderr": "", "reason": f"the sandbox failed: {error}"}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    return 0


def supervise(way: str, modules: list[str], code: str, timeout_s: float, memory_mb: int) -> dict:
    """Fork a program, watch it, kill it. Raises OSError where it cannot be contained."""
    if platform.machine() not in FILTERED or sys.platform != "linux":
        raise OSError(f"no filter of system calls for {sys.platform} on {platform.machine()}")
    job = dict(code=code, timeout_s=timeout_s, memory_mb=memory_mb)
    (out, out_end), (err, err_end), (ready, ready_end) = os.pipe(), os.pipe(), os.pipe()
    user = 61184 + os.getpid() % 4336                              # the range that systemd hands out for a while, too
    scratch = None
    if way == "namespaces":                                        # of mounts, names, shared memory, processes, the network
        check(libc.unshare(0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000))
    elif way == "user":
        if os.geteuid() != 0:
            raise OSError("only root can take another user id")
        scratch = tempfile.mkdtemp(prefix="scratch-")
        os.chown(scratch, user, user)
    pid = os.fork()
    if pid == 0:
        try:
            stdin = as_file(job) if way == "bubblewrap" else os.open("/dev/null", os.O_RDWR)
            for here, there in (stdin, 0), (out_end, 1), (err_end, 2):
                os.dup2(here, there)
            if way == "bubblewrap":
                os.dup2(ready_end, 3)
                os.closerange(4, 1 << 16)
                enter_bubblewrap(modules)                          # goes on in `inside`
            if way == "namespaces":
                mount("tmpfs", "/scratch", "tmpfs", 2 | 4, f"size={SCRATCH_MB}m,nr_inodes=1000,mode=777")
            os.chdir(scratch or "/scratch")
            become(user)
            confine(job, scratch)
            os.write(ready_end, b"!")
            os.closerange(3, 1 << 16)
            run(code)
        except BaseException as error:
            os.write(2, str(error).encode())
        os._exit(1)
    for end in out_end, err_end, ready_end:
        os.close(end)
    try:
        return watch(pid, out, err, ready, timeout_s, 128 if way == "bubblewrap" else 255)
    finally:
        for end in out, err, ready:
            os.close(end)
        if scratch:
            subprocess.run(["rm", "-rf", scratch], check=False)    # deeper than Python's recursion goes


def watch(pid: int, out: int, err: int, ready: int, timeout_s: float, highest: int) -> dict:
    """Collect what a program prints until it ends, or until it is killed. Exit codes above highest stand for signals."""
    deadline, texts = time.monotonic() + timeout_s, {out: b"", err: b""}
    ended, poll, reason = os.pidfd_open(pid), select.poll(), "time"
    for end in ended, out, err:
        poll.register(end, select.POLLIN)
    while reason == "time" and (left := deadline - time.monotonic()) > 0:
        for end, _ in poll.poll(left * 1000):
            if end == ended:
                reason = ""
            elif chunk := os.read(end, 1 << 16):
                texts[end] += chunk
            else:
                poll.unregister(end)                               # closed by the program, which goes on
        if max(map(len, texts.values())) > OUTPUT_BYTES:
            reason = "output"
    os.kill(pid, signal.SIGKILL)                                   # in a namespace it is process 1, and all others go with it
    _, status, used = os.wait4(pid, 0)
    os.close(ended)
    for end in texts:
        while chunk := os.read(end, 1 << 16):                      # nobody is left to write
            texts[end] += chunk
    stdout, stderr = (text[:OUTPUT_BYTES].decode(errors="replace") for text in texts.values())
    if not os.read(ready, 1) and reason != "time":
        raise OSError(stderr.strip() or "it ended before it began")
    code = os.waitstatus_to_exitcode(status)
    code = highest - code if code > highest else code
    if reason == "" and code:
        killed = code == -signal.SIGKILL and used.ru_utime + used.ru_stime > timeout_s - 0.1
        memory = stderr.rstrip().rpartition("\n")[2].startswith("MemoryError")
        name = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        reason = "time" if killed else "memory" if memory else name
    return {"ok": reason == "", "stdout": stdout, "stderr": stderr, "reason": reason}


# ---- in the program's process, before the program ------------------------------------------------------------------

libc = ctypes.CDLL(None, use_errno=True)


# System calls that are answered with "not permitted": other processes (fork, vfork, execve, execveat, ptrace,
# process_vm_readv, process_vm_writev, pidfd_getfd), the network (socket, io_uring_setup), new walls (unshare, setns, mount,
# umount2, pivot_root, chroot), memory outside the address space (shmget, memfd_create), keys (add_key, request_key, keyctl)
# and favourite ways into the kernel (bpf, perf_event_open, userfaultfd).
FILTERED = {
    "x86_64": dict(audit=0xC000003E, clone=56, forbidden=(
        57, 58, 59, 322, 101, 310, 311, 438, 41, 425, 272, 308, 165, 166, 155, 161, 29, 319, 248, 249, 250, 321, 298, 323)),
    "aarch64": dict(audit=0xC00000B7, clone=220, forbidden=(
        221, 281, 117, 270, 271, 438, 198, 425, 97, 268, 40, 39, 41, 51, 194, 279, 217, 218, 219, 280, 241, 282)),
}


def check(result: int) -> None:
    """Raise what a function of libc complains about."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{sys._getframe(1).f_code.co_name}: {os.strerror(number)}")


def visible_paths() -> list[str]:
    """What of the file system a program needs to see: the interpreter, its libraries, two devices."""
    wanted = {sys.base_prefix, sys.prefix, "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/dev/null", "/dev/urandom"}
    return sorted(path for path in wanted if os.path.exists(path))


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    check(libc.mount(source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode()))


def enter_empty_root() -> None:
    """A root of nothing but visible_paths and an empty folder, read-only. Who may not mount becomes nobody, who may, first."""
    uid, gid, root = os.getuid(), os.getgid(), "/proc"             # is always there, and should not be seen anyway
    if libc.unshare(0x00020000) < 0:                               # CLONE_NEWNS
        check(libc.unshare(0x00020000 | 0x10000000))               # CLONE_NEWUSER
        for name, text in ("setgroups", "deny"), ("uid_map", f"65534 {uid} 1"), ("gid_map", f"65534 {gid} 1"):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    mount("none", "/", None, 1 << 14 | 1 << 18)                    # MS_REC | MS_PRIVATE: what we mount stays with us
    mount("tmpfs", root, "tmpfs", 0, "size=1m,mode=755")
    for path in visible_paths():
        if os.path.isdir(path):
            os.makedirs(root + path, exist_ok=True)
        elif not os.path.exists(root + path):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            open(root + path, "w").close()
        mount(path, root + path, None, 1 << 12 | 1 << 14)          # MS_BIND | MS_REC
    os.mkdir(root + "/scratch")
    read_only = struct.pack("<4Q", 1 | 2, 0, 0, 0)                 # MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID
    check(libc.syscall(442, -100, root.encode(), 0x8000, read_only, len(read_only)))          # mount_setattr, recursive
    os.chroot(root)
    os.chdir("/")


def become(user: int) -> None:
    """Take a user id that nobody has, and give up every capability."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    check(libc.capset(struct.pack("<Ii", 0x20080522, 0), bytes(24)))


def confine(job: dict, scratch: str | None = None) -> None:
    """Limits, and no way back. With a scratch folder, nothing else can be written to, where the kernel has Landlock."""
    cpu, memory = math.ceil(job["timeout_s"]), job["memory_mb"] << 20
    limits = {
        resource.RLIMIT_CPU: cpu, resource.RLIMIT_AS: memory, resource.RLIMIT_FSIZE: FILE_MB << 20, resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: OPEN_FILES, resource.RLIMIT_NPROC: THREADS, resource.RLIMIT_MEMLOCK: 0,
    }
    for limit, amount in limits.items():
        resource.setrlimit(limit, (amount, amount))
    check(libc.prctl(1, signal.SIGKILL, 0, 0, 0))                  # PR_SET_PDEATHSIG: no supervisor, no program
    check(libc.prctl(38, 1, 0, 0, 0))                              # PR_SET_NO_NEW_PRIVS
    if scratch:
        landlock(scratch)
    filter_system_calls(**FILTERED[platform.machine()])


def landlock(scratch: str) -> None:
    """Reading visible_paths and writing to the scratch folder is all that files are good for. Nothing on an old kernel."""
    rules = libc.syscall(444, struct.pack("<Q", (1 << 13) - 1), 8, 0)
    if rules < 0:
        return
    for path in [*visible_paths(), scratch]:
        rights = (1 << 13) - 2 if path == scratch else 4 | 8 if os.path.isdir(path) else 2 | 4
        check(libc.syscall(445, rules, 1, struct.pack("<Qi", rights, os.open(path, os.O_PATH)), 0))
    check(libc.syscall(446, rules, 0))


def filter_system_calls(audit: int, clone: int, forbidden: tuple[int, ...]) -> None:
    """seccomp(2): a program for the kernel, in instructions (code, lines to skip if true, lines to skip if not, number)."""
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, not_permitted, not_there = 0x7FFF0000, 0x80000000, 0x50001, 0x50026
    lines = [(load, 0, 0, 4), (equal, 1, 0, audit), (answer, 0, 0, kill), (load, 0, 0, 0)]
    lines += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, not_permitted)]                    # x32's numbers
    for number in forbidden:
        lines += [(equal, 0, 1, number), (answer, 0, 0, not_permitted)]
    lines += [(equal, 0, 1, 435), (answer, 0, 0, not_there)]                                  # clone3: libc then takes clone,
    lines += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 1, 0, 0x10000), (answer, 0, 0, not_permitted)]
    lines += [(answer, 0, 0, allow)]                                                          # which must ask for a thread
    program = b"".join(struct.pack("<HBBI", *line) for line in lines)
    held = ctypes.create_string_buffer(program, len(program))
    check(libc.prctl(22, 2, struct.pack("@HP", len(lines), ctypes.addressof(held)), 0, 0))


def as_file(job: dict) -> int:
    """An open file with a job in it. It has no name; a pipe would hold only 64 KB."""
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(job).encode())
        file.seek(0)
        return os.dup(file.fileno())


def enter_bubblewrap(modules: list[str]) -> None:
    """The same empty root by bwrap, with a new interpreter in it that goes on in `inside`."""
    program = shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")
    if program is None:
        raise OSError("bwrap is not installed")
    binds = {path: "--dev-bind" if path.startswith("/dev/") else "--ro-bind" for path in visible_paths()}
    shown = [part for path, bind in binds.items() for part in (bind, path, path)]
    nobody = ["--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--die-with-parent", "--cap-drop", "ALL"]
    scratch = ["--size", str(SCRATCH_MB << 20), "--tmpfs", "/scratch", "--chdir", "/scratch"]
    command = [sys.executable, "-I", *([] if modules else ["-S"]), "/sandbox.py", "inside"]
    os.execv(program, [program, *nobody, *shown, *scratch, "--ro-bind", __file__, "/sandbox.py", "--remount-ro", "/", *command])


def inside() -> None:
    """What bubblewrap starts: standard input holds the job, descriptor 3 says when we are ready."""
    job = json.load(sys.stdin)
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    confine(job)
    os.write(3, b"!")
    os.closerange(3, 1 << 16)
    run(job["code"])


def run(code: str) -> None:
    """The program itself, as if it were a file of its own."""
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
    serve(sys.argv[2], sys.argv[3:]) if sys.argv[1] == "serve" else inside()
