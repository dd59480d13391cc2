"""The error for invalid input of the user."""


class UserError(ValueError):
    """A setting, a model or data that cannot be used. The message names it and says what would be right.

    Commands print it without a traceback, because the code is not at fault.
    """
