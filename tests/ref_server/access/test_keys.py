"""Tokens and roles: what a token file may say, and who gets through to which route."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Mount, Route

from ref_server.access.keys import ACCESS, Role, Unauthenticated, one_admin, read_keys, role_wanted
from ref_server.config import ServeConfig
from ref_server.http.app import create_app
from ref_server.service.service import Service
from shared import wire
from shared.batch import RolloutBatch

Serve = Callable[[Service], AbstractContextManager[httpx.Client]]
TOKENS = {role: f"{role.name.lower()}-0123456789abcdef" for role in (Role.UPLOAD, Role.TRAIN, Role.ADMIN)}
FILE = "".join(f"{role.name.lower()} {token}\n" for role, token in TOKENS.items())


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# The file


def written(directory: Path, text: str | bytes) -> Path:
    file = directory / "tokens"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def test_a_token_file(tmp_path: Path) -> None:
    text = f"# who may do what\n\n{FILE}train  second-token-of-a-trainer= # on gpu-2\nbare-token-of-an-admin\n"
    keys = read_keys(written(tmp_path, text.replace("\n", "\r\n")))
    given = {token: keys.role(f"Bearer {token}") for token in TOKENS.values()}
    assert given == {token: role for role, token in TOKENS.items()}
    assert keys.role("bearer  second-token-of-a-trainer=") is Role.TRAIN
    assert keys.role("Bearer bare-token-of-an-admin") is Role.ADMIN


SECRET = "s3cret-" * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no token"),
        ("# nothing\n\n", "holds no token"),
        (f"{FILE}root {SECRET}", "line 4: must be ROLE TOKEN, ROLE one of upload, train, admin"),
        (f"\n\nopen {SECRET}", "line 3: must be ROLE TOKEN"),
        (f"admin {SECRET} {SECRET}", "line 1: must be ROLE TOKEN"),
        ("admin s3cret", "line 1: a token has at least 16 characters"),
        ("s3cret", "line 1: a token has at least 16 characters"),
        (f"admin {SECRET}\u00e4", "line 1: a token is made of letters"),
        (f"admin {SECRET}:{SECRET}", "line 1: a token is made of letters"),
        (f"admin {SECRET}\nupload {SECRET}", "line 2: this token stands in a line above"),
        (b"admin \xff" + SECRET.encode(), "is not text"),
    ],
)
def test_a_bad_token_file_is_refused_without_repeating_it(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        ServeConfig(no_model=True, token_file=written(tmp_path, text))
    assert "token_file: " in str(refused.value)
    assert "s3cret" not in str(refused.value)


def test_a_token_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"token_file: .*No such file"):
        ServeConfig(no_model=True, token_file=tmp_path / "none")


def test_no_token_is_printed() -> None:
    config = ServeConfig.model_validate({"no_model": True, "token": SECRET})
    assert config.keys.role(f"Bearer {SECRET}") is Role.ADMIN
    assert SECRET not in repr(config) + str(config) + repr(config.keys) + config.model_dump_json()
    with pytest.raises(ValueError, match="token: a token has at least 16") as refused:
        ServeConfig.model_validate({"no_model": True, "token": "s3cret"})
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer ", f"Basic {SECRET}", SECRET, f"Bearer {SECRET}x", f"Bearer {SECRET[:-1]}",
     f"Bearer {SECRET.upper()}", "Bearer \u0100", f"Bearer {SECRET} {SECRET}"],
)  # fmt: skip
def test_what_is_no_token(given: str | None) -> None:
    with pytest.raises(Unauthenticated) as refused:
        one_admin(SECRET).role(given)
    assert refused.value.field == "Authorization"


# The table


def routes_of(app: Any) -> Iterator[BaseRoute]:
    """Also those of routers that it includes."""
    for route in app.routes:
        inner = getattr(route, "original_router", None)
        yield from routes_of(inner) if inner is not None else (route,)


def test_every_route_stands_in_the_table(make_service: Callable[..., Service]) -> None:
    service = make_service()
    app = create_app(service)
    seen = set()
    for route in routes_of(app):
        assert isinstance(route, APIRoute | Route | Mount), route
        if isinstance(route, Mount):
            assert any(path == route.path for _, path in ACCESS), f"{route.path} wants a line in ACCESS"
            continue
        for method in (route.methods or set()) - {"HEAD"}:
            assert (method, route.path) in ACCESS, f"{method} {route.path} wants a line in ACCESS"
            concrete = re.sub(r"{\w+}", "3f", route.path)
            assert role_wanted(method, concrete) is ACCESS[method, route.path]
            seen.add((method, route.path))
    assert {("GET", "/livez"), ("POST", "/v1/batches"), ("DELETE", "/v1/batches/{id}")} <= seen
    service.close()


@pytest.mark.parametrize(
    ("method", "path", "role"),
    [
        ("GET", "/surprise", Role.ADMIN),
        ("GET", "/v1/batches/", Role.ADMIN),
        ("GET", "/v1/batches/a/b", Role.ADMIN),
        ("GET", "/livez\n", Role.ADMIN),
        ("GET", "//livez", Role.ADMIN),
        ("OPTIONS", "/v1/batches", Role.ADMIN),
        ("DELETE", "/livez", Role.ADMIN),
        ("HEAD", "/livez", Role.OPEN),
        ("GET", "/v1/batches/lease", Role.TRAIN),
        ("POST", "/v1/batches/lease", Role.TRAIN),
    ],
)
def test_what_is_not_in_the_table_is_for_admins(method: str, path: str, role: Role) -> None:
    assert role_wanted(method, path) is role


# At work


@pytest.fixture(scope="module")
def guarded(
    make_service: Callable[..., Service], serve: Serve, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A server that wants tokens."""
    file = written(tmp_path_factory.mktemp("tokens"), FILE)
    service = make_service(token_file=file, token="the-environment-s-token", host="0.0.0.0")
    with serve(service) as client:
        yield client


def requests() -> list[tuple[str, str, Role]]:
    return [(method, path.replace("{id}", "3f"), role) for (method, path), role in ACCESS.items()]


@pytest.mark.parametrize(("method", "path", "wanted"), [*requests(), ("GET", "/surprise", Role.ADMIN)])
def test_who_gets_through(guarded: httpx.Client, method: str, path: str, wanted: Role) -> None:
    nobody = guarded.request(method, path)
    if wanted is Role.OPEN:
        assert nobody.status_code in (200, 404)
        return
    assert nobody.status_code == 401
    assert nobody.headers["WWW-Authenticate"] == "Bearer"
    assert nobody.json()["error"]["code"] == "unauthorized"
    for role, token in TOKENS.items():
        answer = guarded.request(method, path, headers=bearer(token))
        assert answer.status_code != 401
        if role >= wanted:
            assert answer.status_code != 403
        else:
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (403, "forbidden")
            assert f"role {wanted.name.lower()};" in error["message"]


def test_a_worker_uploads_and_a_trainer_leases(guarded: httpx.Client, rollout: Callable[..., RolloutBatch]) -> None:
    body, content_type = wire.encode(rollout()), {"Content-Type": wire.CONTENT_TYPE}
    upload = guarded.post("/v1/batches", content=body, headers=bearer(TOKENS[Role.UPLOAD]) | content_type)
    assert upload.status_code == 201
    lease = guarded.post("/v1/batches/lease", json={"consumer": "c"}, headers=bearer(TOKENS[Role.TRAIN]))
    assert lease.headers["Batch-Id"] == upload.json()["id"]
    assert guarded.get("/v1/queue", headers=bearer("the-environment-s-token")).status_code == 200


def test_a_token_is_asked_for_before_a_body_is_looked_at(guarded: httpx.Client) -> None:
    answer = guarded.post("/v1/batches", content=b"x" * 2**20, headers={"Content-Type": "text/plain"})
    assert answer.status_code == 401
    wrong_host = guarded.get("/v1/queue", headers={"Host": "evil.example"})
    assert (wrong_host.status_code, wrong_host.json()["error"]["field"]) == (403, "Host")


def test_two_tokens_in_a_request_are_none(guarded: httpx.Client) -> None:
    twice = [("Authorization", f"Bearer {TOKENS[Role.ADMIN]}"), ("Authorization", "Bearer nonsense")]
    assert guarded.get("/v1/queue", headers=twice).status_code == 400


# Clients of Simple-GRPO, which send none


@pytest.mark.parametrize(
    ("legacy_insecure", "headers", "through"),
    [
        (False, {}, False),
        (True, {}, True),
        (True, {"X-Forwarded-For": "10.0.0.1"}, False),
        (True, {"Forwarded": "for=10.0.0.1"}, False),
    ],
)
def test_simple_grpo_needs_no_token_where_that_is_asked_for(
    make_service: Callable[..., Service], serve: Serve, legacy_insecure: bool, headers: dict[str, str], through: bool
) -> None:
    with serve(make_service(token=SECRET, legacy=legacy_insecure, legacy_insecure=legacy_insecure)) as http:
        assert (http.get("/get", headers=headers).status_code != 401) is through
        assert (http.post("/upload", headers=headers).status_code != 401) is through
        assert http.get("/v1/queue", headers=headers).status_code == 401
        assert http.get("/upload/other", headers=headers).status_code == 401
