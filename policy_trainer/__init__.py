"""The policy trainer: rollout workers, group advantages, the KL-penalised loss, and the training loop."""
