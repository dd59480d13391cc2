"""The byte protocol of Simple-GRPO, for its unchanged generators and trainers. No other room needs this one."""
