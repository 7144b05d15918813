"""What `scripts/bench` measures: us, beside others on the same machine in the same run."""
