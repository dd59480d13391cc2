"""A reward that differs among the answers of a random model, which all have the same length."""


def letters(completion: str) -> float:
    return len(set(completion)) / 10
