"""What a person gave cannot be used."""


class UserError(ValueError):
    """A setting, a model or data that cannot be used. The message names it and says what would be right.

    Commands print it without a traceback, since the fault is not in the code.
    """
