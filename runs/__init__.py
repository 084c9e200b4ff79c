"""Around the training steps: set-up, phases, start-up check, checkpoints, records, the run folder."""

import os
import sys

# train.py and infer.py import this first: before syntax that older versions lack, and before torch.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"this is Python {sys.version.split()[0]}; 3.11 or newer is needed (make PYTHON=python3.11 ...)")
if os.name == "nt":
    sys.exit("this is Windows; run it in WSL2, as Linux")
os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")      # what a Mac's GPU lacks runs on its CPU
