"""What the protocol's settings mean together."""

import pytest
from pydantic import ValidationError

from ref_server.config import ServeConfig

TOKEN = "a-token-of-enough-letters"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"no_model": True, "legacy": True}, "legacy: .* needs a --model"),
        ({"model": "m", "legacy_port": 59875}, "need --legacy"),
        ({"model": "m", "legacy_insecure": True}, "need --legacy"),
        ({"model": "m", "max_image_mib": 65}, r"max_image_mib: 65 must be at most max_body_mib \(64\)"),
        ({"model": "m", "max_body_mib": 129}, "must be at least twice max_body_mib"),
        ({"model": "m", "legacy": True, "legacy_port": 8400}, "legacy_port: 8400 is the port already"),
        ({"model": "m", "legacy": True, "legacy_port": 65_536}, "legacy_port"),
        ({"model": "m", "device": "cuda:0", "devices": ["cuda:0", "cuda:1"]}, "device and devices exclude each other"),
        ({"model": "m", "device_map": "balanced"}, "device_map: balanced needs at least two devices"),
        (
            {"model": "m", "device_map": "balanced", "devices": ["cuda:0", "cuda:0"]},
            "device_map: balanced needs at least two devices",
        ),
        ({"model": "m", "legacy": True, "token": TOKEN}, "add --legacy-insecure"),
        (
            {"model": "m", "legacy": True, "legacy_insecure": True, "token": TOKEN, "host": "0.0.0.0"},
            "listen on 127.0.0.1",
        ),
    ],
)
def test_settings_that_cannot_be(settings: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ServeConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"legacy": True},
        {"legacy": True, "legacy_port": 59875},
        {"legacy": True, "host": "0.0.0.0", "insecure": True},
        {"legacy": True, "legacy_insecure": True, "token": TOKEN},
    ],
)
def test_settings_that_can_be(settings: dict) -> None:
    assert ServeConfig(model="m", **settings).legacy
