"""Where prompts come from and how an answer is judged: one file a task."""
