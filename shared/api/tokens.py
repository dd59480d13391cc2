"""Bearer tokens: what the server takes for one, and its clients send."""

import re

# RFC 6750.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
# The same, as refusals say it.
TOKEN_CHARACTERS = "letters, digits and - . _ ~ + / ="


def is_token(text: str) -> bool:
    """Whether a header can carry the text as a bearer token."""
    return _TOKEN.fullmatch(text) is not None
