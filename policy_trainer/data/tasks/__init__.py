"""Tasks: where problems come from and how an answer is judged. One file for each task."""
