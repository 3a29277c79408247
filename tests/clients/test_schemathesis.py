"""Schemathesis against what the server says about itself, with data that fits the schema and data that does not."""

import re
from collections.abc import Callable

from tests.clients.conftest import Environment

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection", "unsupported_method",
)  # fmt: skip
NUM_EXAMPLES = 25


def test_schemathesis(install: Callable[..., Environment], tiny_address: str) -> None:
    environment = install("schemathesis")
    words = environment.run(
        "st", "run", f"{tiny_address}/openapi.json", "--mode", "all", "--phases", "examples,coverage,fuzzing",
        "--checks", ",".join(CHECKS), "--max-examples", str(NUM_EXAMPLES), "--request-timeout", "30", "--no-color",
        "--continue-on-failure", "--seed", "1",
    )  # fmt: skip
    assert int(re.search(r"(\d+) generated", words)[1]) > 1000
