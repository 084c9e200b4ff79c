"""Around the training steps: set-up, phases, start-up check, checkpoints, records, the run folder."""

import os
import sys

# train.py and infer.py import this first: before syntax that older versions lack, and before torch.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"this is Python {sys.version.split()[0]}; 3.11 or newer is needed (make PYTHON=python3.11 ...)")
if os.name == "nt":
    sys.exit("this is Windows; run it in WSL2, as Linux")
os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")      # what a Mac's GPU lacks runs on its CPU
# Threads of GNU's OpenMP that wait for each other give up their core after 10,000 looks, not 300,000: one may
# wait for a core that another process has. Beside one a step of SmolLM2 took 80 s of 7 on two cores, so 22.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
if hasattr(sys.stdout, "reconfigure"):                         # not None, nor that of a notebook
    sys.stdout.reconfigure(errors="replace")                   # what a terminal cannot show: never an error
