"""The byte protocol of Simple-GRPO, for its unchanged generators and trainers. Only `http/app.py` imports it."""
