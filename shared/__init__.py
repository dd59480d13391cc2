"""What the reference server and the policy trainer must agree on, and nothing else."""
