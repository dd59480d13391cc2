"""Every route declares a role, and the guard requires it.

`test_every_route_requires_its_role` finds the routes of the application. `_ROUTES` says, independently of what they
declare, which roles docs/operations.md promises.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from ref_server.access.keys import Role
from ref_server.access.requirements import UNDECLARED, requirement_of, requires
from ref_server.http.app import create_app
from ref_server.http.guard import RouteTable
from tests.ref_server.calls import MakeService, Rollout, Serve, bearer, lease, upload

SECRET = "s3cret-" * 4
TOKENS = {role: f"{role.name.lower()}-0123456789abcdef" for role in Role if role}
FILE = "".join(f"{role.name.lower()} {token}\n" for role, token in TOKENS.items())
_WEIGHTS = "/v1/weights/r/l/0/1"
_ROUTES = {
    Role.OPEN: "GET / | GET /dashboard/main.js | GET /livez | GET /readyz",
    Role.METRICS: "GET /metrics",
    Role.UPLOAD: "GET /openapi.json | GET /v1/model | GET /v1/models | GET /v1/queue | GET /v1/throughput | "
    "POST /v1/logprobs | POST /v1/completions | "
    f"POST /v1/batches | GET /v1/weights/r | GET {_WEIGHTS} | GET {_WEIGHTS}/f",
    Role.TRAIN: "GET /v1/batches | GET /v1/batches/3f | GET /v1/batches/3f/tokens | GET /v1/batches/3f/rewards | "
    "GET /v1/batches/3f/images/0 | "
    "PUT /v1/batches/3f/training | POST /v1/batches/lease | POST /v1/leases/ack | POST /v1/leases/extend | "
    f"POST /v1/leases/release | POST /v1/runs/mine/finish | PUT {_WEIGHTS}/f | POST {_WEIGHTS}/commit",
    Role.ADMIN: "POST /v1/batches/3f/requeue | DELETE /v1/batches/3f | POST /v1/batches/purge | PUT /v1/reference | "
    "GET /surprise",
}
ROLES = [(*route.split(), role) for role, routes in _ROUTES.items() for route in routes.split(" | ")]


@pytest.fixture(scope="module")
def table(make_service: MakeService) -> RouteTable:
    """Of an application with all routes that there are."""
    service = make_service(legacy=True, tinker=True)
    app = create_app(service)
    for route in app.routes:
        assert isinstance(route, Route), route
        assert requirement_of(route) is not UNDECLARED, f"{route.path} wants @requires(Role.…)"
    service.close()
    return RouteTable(app.routes)


def role_of(table: RouteTable, method: str, path: str) -> Role:
    return (table.find(method, path)[1] or UNDECLARED).role


@pytest.mark.parametrize(
    ("method", "path", "role"),
    [
        ("POST", "/upload", Role.UPLOAD),
        ("GET", "/get", Role.TRAIN),
        ("HEAD", "/livez", Role.OPEN),
        ("GET", "/v1/batches/lease", Role.TRAIN),
        ("GET", "/v1/batches/", Role.ADMIN),
        ("GET", "/livez\n", Role.ADMIN),
        ("GET", "//livez", Role.ADMIN),
        ("OPTIONS", "/v1/batches", Role.ADMIN),
    ],
)
def test_unknown_routes_require_an_admin(table: RouteTable, method: str, path: str, role: Role) -> None:
    assert role_of(table, method, path) is role


def test_of_two_routes_at_a_path_the_greater_role_is_required() -> None:
    routes = [
        requires(role)(Route(path, PlainTextResponse(""), methods=["GET"]))
        for role, path in [(Role.UPLOAD, "/{a}"), (Role.ADMIN, "/{b}"), (Role.OPEN, "/{c}")]
    ]
    assert role_of(RouteTable(routes), "GET", "/x") is Role.ADMIN


@pytest.fixture(scope="module")
def guarded(
    make_service: MakeService, serve: Serve, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A server that wants tokens."""
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    file.write_text(FILE)
    service = make_service(token_file=file, token="the-environment-s-token", host="0.0.0.0")
    with serve(service) as client:
        yield client


def test_every_route_requires_its_role(guarded: httpx.Client, make_service: MakeService) -> None:
    """Lesser roles, and clients without a token, are refused before the route is called."""
    service = make_service()
    for route in create_app(service).routes:
        assert isinstance(route, Route)
        wanted = requirement_of(route).role
        lesser = [token for role, token in TOKENS.items() if role < wanted]
        for method in (route.methods or set()) if wanted is not Role.OPEN else ():
            url = re.sub(r"\{.*?\}", "1", route.path)
            assert guarded.request(method, url).status_code == 401, (method, url)
            assert {guarded.request(method, url, headers=bearer(token)).status_code for token in lesser} <= {403}, url
    service.close()


def test_a_route_without_a_declared_role_is_for_admins_of_all_runs(
    make_service: MakeService, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(app: FastAPI) -> None:
        @app.get("/v1/forgotten")
        def forgotten() -> str:
            return "secret"

    monkeypatch.setattr("ref_server.dashboard.add", forgetful)
    confined = "train-0123456789abcdef-of-one-run"
    (tmp_path / "tokens").write_text(f"{FILE}train {confined} run=mine\n")
    with serve(make_service(token_file=tmp_path / "tokens")) as http:
        assert http.get("/v1/forgotten").status_code == 401
        for token in (*TOKENS.values(), confined):
            status = http.get("/v1/forgotten", headers=bearer(token)).status_code
            assert status == (200 if token == TOKENS[Role.ADMIN] else 403)


@pytest.mark.parametrize(("method", "path", "wanted"), ROLES)
def test_roles_of_routes(guarded: httpx.Client, method: str, path: str, wanted: Role) -> None:
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


def test_a_worker_uploads_and_a_trainer_leases(guarded: httpx.Client, rollout: Rollout) -> None:
    batch = rollout()
    assert upload(guarded, batch, **bearer(TOKENS[Role.UPLOAD])).status_code == 201
    guarded.headers.update(bearer(TOKENS[Role.TRAIN]))
    try:
        assert lease(guarded).headers["Batch-Id"] == batch.id
    finally:
        del guarded.headers["Authorization"]
    assert guarded.get("/v1/queue", headers=bearer("the-environment-s-token")).status_code == 200


def test_the_token_is_checked_before_the_body(guarded: httpx.Client) -> None:
    answer = guarded.post("/v1/batches", content=b"x" * 2**20, headers={"Content-Type": "text/plain"})
    assert answer.status_code == 401
    wrong_host = guarded.get("/v1/queue", headers={"Host": "evil.example"})
    assert (wrong_host.status_code, wrong_host.json()["error"]["field"]) == (403, "Host")


@pytest.mark.parametrize(
    ("legacy_insecure", "headers", "through"),
    [
        (False, {}, False),
        (True, {}, True),
        (True, {"X-Forwarded-For": "10.0.0.1"}, False),
        (True, {"Forwarded": "for=10.0.0.1"}, False),
        (True, {"Via": "1.1 proxy"}, False),
        (True, {"X-Real-IP": "10.0.0.1"}, False),
    ],
)
def test_simple_grpo_s_routes_without_a_token(
    make_service: MakeService, serve: Serve, legacy_insecure: bool, headers: dict[str, str], through: bool
) -> None:
    with serve(make_service(token=SECRET, legacy=legacy_insecure, legacy_insecure=legacy_insecure)) as http:
        assert (http.get("/get", headers=headers).status_code != 401) is through
        assert (http.post("/upload", headers=headers).status_code != 401) is through
        assert http.get("/v1/queue", headers=headers).status_code == 401
        assert http.get("/upload/other", headers=headers).status_code == 401
