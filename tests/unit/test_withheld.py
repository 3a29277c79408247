"""What other programs withhold from a server is told from what it takes itself."""

import os
from pathlib import Path

import pytest

from tests import withheld
from tests.withheld import Withheld

SERVER, WORKER = 2_000_000, 2_000_001  # no process has such numbers


class Machine:
    """The files of a kernel that counts."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.now = 0.0
        monkeypatch.setattr(withheld, "PROC", path)
        monkeypatch.setattr("tests.withheld.time.monotonic", lambda: self.now)

    def set(self, now: float, busy: float, server: float, worker: float, waited: float, own: float) -> None:
        """Say how long processors, the server and its worker have worked, and the server and this process waited."""
        self.now = now
        tick = os.sysconf("SC_CLK_TCK")
        self._write("stat", f"cpu {int(busy * tick)} 0 0 {int(now * tick)} 0 0 0 0 0 0\ncpu0 1 2 3\n")
        for pid, used, late in ((SERVER, server, waited), (WORKER, worker, 0.0), (os.getpid(), 0.0, own)):
            self._write(f"{pid}/stat", f"{pid} (a name) S {'0 ' * 10}{int(used * tick)} 0 0 0 0 20")
            self._write(f"{pid}/task/{pid}/schedstat", f"1 {int(late * 1e9)} 1")
            self._write(f"{pid}/task/{pid}/children", f"{WORKER} " if pid == SERVER else "")

    def _write(self, name: str, text: str) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    one = Machine(tmp_path, monkeypatch)
    one.set(0, busy=9, server=1, worker=1, waited=5, own=5)
    return one


@pytest.mark.parametrize(
    ("busy", "server", "worker", "waited", "own", "expected"),
    [
        (11, 1, 1, 5.6, 5, 0.6),  # others have run instead of the server,
        (11, 1, 1, 5.6, 5.2, 0.8),  # and instead of this process
        (9, 1, 1, 5, 5, 0),  # nobody has worked: the server has slept
        (11, 1, 1, 5, 5, 0),  # others have worked, and the server has slept
        (11, 2, 2, 5.6, 5, 0),  # the server and its worker have kept both processors from it
        (11, 1.9, 1.9, 5.6, 5, 0.2),  # nearly so
        (11, 1, 1, 7.5, 7.5, 1),  # not more than the time there was
    ],
)
def test_what_others_take_is_left_out(
    machine: Machine, busy: float, server: float, worker: float, waited: float, own: float, expected: float
) -> None:
    looks = Withheld(SERVER)
    looks.look()
    machine.set(1, busy, server, worker, waited, own)
    looks.look()
    assert looks.seconds(0, 1) == pytest.approx(expected)


def test_what_was_withheld_before_or_later_does_not_count(machine: Machine) -> None:
    looks = Withheld(SERVER)
    for now, waited in enumerate((5.0, 5.5, 5.5, 6.0)):
        machine.set(now, busy=9 + 2 * now, server=1, worker=1, waited=waited, own=5)
        looks.look()
    assert looks.seconds(1.2, 1.8) == 0
    assert looks.seconds(0.2, 0.8) == pytest.approx(0.5)


def test_nothing_is_left_out_where_the_kernel_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(withheld, "PROC", tmp_path)
    looks = Withheld(SERVER)
    looks.look()
    looks.look()
    assert looks.seconds(looks._times[0], looks._times[1]) == 0
