"""Prints the records that the server answers as an OpenAPI document, from which the types of the pages are made.

python -m tools.api_schema > tools/javascript/build/api.json
"""

import inspect
import json

from pydantic.json_schema import models_json_schema

import shared.api
from shared.api import ResponseRecord


def document() -> dict[str, object]:
    """Only `components`: the pages build their addresses themselves."""
    records = [each for each in vars(shared.api).values() if inspect.isclass(each) and issubclass(each, ResponseRecord)]
    _, schemas = models_json_schema(
        [(record, "serialization") for record in records], ref_template="#/components/schemas/{model}"
    )
    about = {"title": "Records of the reference server", "version": "1"}
    return {"openapi": "3.1.0", "info": about, "paths": {}, "components": {"schemas": schemas["$defs"]}}


if __name__ == "__main__":
    print(json.dumps(document()))
