"""Everything around the training steps: set-up, phases, start-up check, checkpoints, the run folder."""

import os
import sys

# train.py and infer.py import this package before torch, and before syntax that older versions lack.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"this is Python {sys.version.split()[0]}; 3.11 or newer is needed (make PYTHON=python3.11 ...)")
if os.name == "nt":
    sys.exit("this is Windows; run it in WSL2, as Linux")
os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")      # what a Mac's GPU lacks, runs on its CPU
# A waiting thread of GNU OpenMP gives up its core after 10,000 spins, not 300,000. Beside another process on
# the same two cores, a step of SmolLM2 takes 22 s with this setting and 80 s without; it takes 7 s alone.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
if hasattr(sys.stdout, "reconfigure"):                         # not None or a notebook's
    sys.stdout.reconfigure(errors="replace")                   # an unprintable character is no error
