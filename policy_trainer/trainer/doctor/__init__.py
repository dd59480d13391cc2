"""`policy-trainer doctor`: checks all that a run needs before it begins. A leaf."""
