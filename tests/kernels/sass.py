"""Find registers that are written while tensor cores still use them, in the disassembly of a kernel for Hopper.

`wgmma` runs in the background: it reads its left operand from registers and writes its sums to registers until the
kernel waits for it. ptxas does not see every such wait that is missing, and the results are then wrong now and then.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

_PRODUCT = re.compile(r"[HQI]GMMA\.64x(\d+)x")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
_CONTROL = {"BRA", "BRX", "CALL", "RET", "EXIT", "WARPSYNC", "NANOSLEEP", "BAR"}

Pending = dict[int, int]  # products in flight by index → groups of products issued since, their own included


class Instruction(NamedTuple):
    address: int
    is_predicated: bool
    name: str  # with its suffixes
    operands: list[str]

    def __str__(self) -> str:
        return f"{self.address:#x} {self.name} {', '.join(self.operands)}"


def parse(sass: str) -> list[Instruction]:
    """Return the instructions of one kernel."""
    found = []
    for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/ +(.*?) *;", sass):
        predicate, name, operands = re.fullmatch(r"(@!?U?P\w+ +)?(\S+) *(.*)", text).groups()
        found.append(Instruction(int(address, 16), bool(predicate), name, re.split(r", *", operands)))
    return found


def hazards(sass: str) -> list[str]:
    """Return a line for every instruction that writes to a register of a product in flight, on any path to it."""
    code = parse(sass)
    index = {one.address: i for i, one in enumerate(code)}
    used = {i: _written(one) | _left_operand(one) for i, one in enumerate(code) if _PRODUCT.match(one.name)}
    before: list[Pending | None] = [None] * len(code)
    if code:
        before[0] = {}
    todo = [0] if code else []
    while todo:
        at = todo.pop()
        after = _after(code[at], at, before[at] or {})
        for follower in _followers(code, at, index):
            merged = _merged(before[follower], after)
            if merged != before[follower]:
                before[follower] = merged
                todo.append(follower)
    found = []
    for at, pending in enumerate(before):
        if at not in used and pending:
            hit = [product for product in sorted(pending) if used[product] & _written(code[at])]
            found += [f"{code[at]} while {code[product]}" for product in hit[:1]]
    return found


def _after(one: Instruction, at: int, pending: Pending) -> Pending:
    """Return the products in flight after an instruction."""
    if _PRODUCT.match(one.name):
        pending = pending | {at: 0}
        return {product: age + 1 for product, age in pending.items()} if "gsb0" in one.operands else pending
    if wait := _WAIT.match(f"{one.name} {', '.join(one.operands)}"):
        return {product: age for product, age in pending.items() if age <= int(wait[1], 16)}
    return pending


def _merged(known: Pending | None, more: Pending) -> Pending:
    """Return the products in flight on either path; the younger of two counts, since a wait may leave it."""
    if known is None:
        return more
    return {at: min(state[at] for state in (known, more) if at in state) for at in known | more}


def _followers(code: list[Instruction], at: int, index: dict[int, int]) -> Iterable[int]:
    one = code[at]
    name = one.name.split(".")[0]
    target = re.search(r"0x[0-9a-f]+", one.operands[-1]) if name == "BRA" else None
    if target is not None:
        yield index[int(target[0], 16)]
    is_conditional = one.is_predicated or len(one.operands) > 1
    if at + 1 < len(code) and (name not in ("BRA", "EXIT") or is_conditional):
        yield at + 1


def _left_operand(product: Instruction) -> set[int]:
    """Return the registers of the left operand; none if it lies in shared memory."""
    return _registers(product.operands[1], 4)


def _written(one: Instruction) -> set[int]:
    """Return the registers that an instruction writes: its first operand that is not a predicate."""
    if one.name.split(".")[0] in _CONTROL:
        return set()
    is_after_predicate = len(one.operands) > 1 and re.fullmatch(r"U?P[\dT]", one.operands[0])
    return _registers(one.operands[1 if is_after_predicate else 0], _width(one.name))


def _registers(operand: str, width: int) -> set[int]:
    found = re.fullmatch(r"R(\d+)(?:\.reuse|\.64)*", operand)
    return set(range(int(found[1]), int(found[1]) + width)) if found else set()


def _width(name: str) -> int:
    """Return how many registers an instruction writes."""
    if product := _PRODUCT.match(name):
        return int(product[1]) // 2
    parts = name.split(".")
    if "128" in parts or parts[0] in ("HMMA", "IMMA", "QMMA"):
        return 4
    if parts[0] == "LDSM":
        return int(parts[-1]) if parts[-1] in ("2", "4") else 1
    return 2 if "64" in parts or "WIDE" in parts or (parts[0] == "CS2R" and "32" not in parts) else 1
