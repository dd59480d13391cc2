"""Rewards of a user's own. Imported by name, as a user's are."""

import time


def good(completion: str, answer: str) -> float:
    return float(f"<answer>{answer}</answer>" in completion)


def inverted(completion: str, answer: str) -> float:
    return float(answer not in completion)


def constant(completion: str) -> float:
    return 1.0


def raising(completion: str) -> float:
    return {"answer": 1.0}["gold"]


def fails_on_empty(completion: str, answer: str) -> float:
    return float(completion.split("<answer>")[1].startswith(answer))


def hanging(completion: str) -> float:
    while True:
        time.sleep(0.01)
