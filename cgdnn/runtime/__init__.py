"""Run programs: memory, executors, and the net that users hold."""
