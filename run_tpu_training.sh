#!/usr/bin/env bash
# train.py on a TPU, with the same flags:
#     ./run_tpu_training.sh --use_grpo --num_completions_per_prompt 4
# PJRT_DEVICE=CPU in front of it tries the same out without one. PYTHON names another interpreter than python3.
set -euo pipefail
export PJRT_DEVICE="${PJRT_DEVICE:-TPU}"
# Compiled programs are kept there for the next run.
export XLA_PERSISTENT_CACHE_PATH="${XLA_PERSISTENT_CACHE_PATH:-${XDG_CACHE_HOME:-$HOME/.cache}/plain-grpo-xla}"
mkdir -p "$XLA_PERSISTENT_CACHE_PATH"
exec "${PYTHON:-python3}" "$(dirname "$0")/train.py" "$@"
