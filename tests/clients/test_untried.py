"""A run in which no client could be installed says so, or fails if the clients were demanded."""

import sys
from collections.abc import Callable

import pytest

from tests.clients import conftest

DEMANDS = ("SALA_TEST_CLIENTS", *conftest.ASKED_FOR.values())


@pytest.fixture(autouse=True)
def demand(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    for name in DEMANDS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch.setenv


def try_to_install() -> None:
    conftest._try([sys.executable, "-c", "raise SystemExit('no route')"], "no package index answers")


def test_what_was_not_tried_is_told() -> None:
    with pytest.warns(UserWarning, match=r"NOT CHECKED.*no route"), pytest.raises(pytest.skip.Exception):
        try_to_install()


def test_0_demands_nothing(demand: Callable[[str, str], None]) -> None:
    demand("SALA_TEST_CLIENTS", "0")
    with pytest.warns(UserWarning, match="NOT CHECKED"), pytest.raises(pytest.skip.Exception):
        try_to_install()


@pytest.mark.parametrize("name", DEMANDS)
def test_what_is_demanded_fails(name: str, demand: Callable[[str, str], None]) -> None:
    demand(name, "1")
    with pytest.raises(pytest.fail.Exception, match=r"NOT CHECKED.*no package index answers.*no route"):
        try_to_install()


def test_a_program_that_is_missing_counts_too(demand: Callable[[str, str], None]) -> None:
    demand("SALA_TEST_CLIENTS", "1")
    with pytest.raises(pytest.fail.Exception, match="no-such-npm is not installed"):
        conftest._try(["no-such-npm"])
