"""What surrounds the training steps: set-up, phases, start-up check, checkpoints, records, the run folder."""
