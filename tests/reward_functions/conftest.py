"""Processes of the sandbox."""

import os
import time

import pytest

from reward_functions import sandbox


@pytest.fixture(scope="module")
def no_process_is_left():
    """Check after all tests of a module that each server has one child, and that no process has lost its parent."""
    yield
    servers = [server.pid for servers in sandbox.idle_servers.values() for server in servers]
    for _ in range(100):                                           # a server forks a moment after it has answered
        time.sleep(0.02)
        processes = map(parent_of, filter(str.isdecimal, os.listdir("/proc")))
        parents = sorted(parent for parent in processes if parent in [1, *servers])
        if parents == sorted(servers):
            return
    raise AssertionError(f"{servers=}, {parents=}")


def parent_of(pid):
    """The parent of a process that runs reward_functions/sandbox.py or belongs to a user that the sandbox makes up."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command, open(f"/proc/{pid}/stat") as stat:
            if b"/sandbox.py" in command.read() or 61184 <= os.stat(f"/proc/{pid}").st_uid < 65520:
                return int(stat.read().rpartition(")")[2].split()[1])
    except OSError:
        return None                                                # it has just ended
