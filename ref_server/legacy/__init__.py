"""The byte protocol of Simple-GRPO, for its generators and trainers as they are: a leaf that can be deleted."""
