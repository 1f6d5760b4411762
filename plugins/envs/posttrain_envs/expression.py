"""Arithmetic written by a model: read by our own parser, computed exactly, never evaluated as code.

    read("(8-2)*4").value       # Fraction(24, 1)
    read("9**9**9")             # None: not an expression

The language is integers in ASCII digits, `+ - * /`, unary minus, round brackets and spaces; `× ÷ − ·` mean `* / - *`. There are
no powers, no floor division, no decimals, names or calls. Length and digits are bounded and nothing recurses, so any text costs
microseconds. Unary minus is allowed: what it reaches beyond plain subtraction are only the negatives of what that reaches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 512  # characters of an expression
_DIGITS = 12  # of one number
_TOKEN = re.compile(rf"\s*(?:([0-9]{{1,{_DIGITS}}})(?![0-9])|([-+*/()]))", re.ASCII)
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})
_BINDS = {"+": 1, "-": 1, "*": 2, "/": 2, "neg": 3}


@dataclass(frozen=True, slots=True)
class Expression:
    """What a text computes. `value` is None when it divides by zero; `numbers` are its literals from left to right."""

    value: Fraction | None
    numbers: tuple[int, ...]
    operators: int  # binary ones


def read(text: str) -> Expression | None:
    """The expression that the whole text is; None when it is not one. Never raises."""
    if len(text) > LONGEST:
        return None
    tokens = _tokens(text.translate(_SIGNS))
    return _Reader().read(tokens) if tokens else None


def _tokens(text: str) -> list[str] | None:
    tokens, at, end = [], 0, len(text.rstrip())
    while at < end:
        found = _TOKEN.match(text, at)
        if found is None:
            return None
        tokens.append(found.group(1) or found.group(2))
        at = found.end()
    return tokens


class _Reader:
    """Dijkstra's shunting yard: two stacks instead of recursion."""

    def __init__(self) -> None:
        self.values: list[Fraction | None] = []
        self.waiting: list[str] = []  # operators and opening brackets
        self.numbers: list[int] = []
        self.operators = 0

    def read(self, tokens: list[str]) -> Expression | None:
        operand_next = True
        for token in tokens:
            if operand_next:
                if token == "(":
                    self.waiting.append(token)
                elif token == "-":
                    self.waiting.append("neg")
                elif token.isdigit():
                    self.numbers.append(int(token))
                    self.values.append(Fraction(self.numbers[-1]))
                    operand_next = False
                else:
                    return None
            elif token == ")":
                if not self._close():
                    return None
            elif token in _BINDS:
                self._apply_down_to(_BINDS[token])
                self.waiting.append(token)
                self.operators += 1
                operand_next = True
            else:
                return None
        if operand_next:
            return None
        self._apply_down_to(0)
        if self.waiting:
            return None
        return Expression(self.values[0], tuple(self.numbers), self.operators)

    def _close(self) -> bool:
        """Compute back to the bracket that a `)` closes; False when there is none."""
        self._apply_down_to(0)
        return bool(self.waiting) and self.waiting.pop() == "("

    def _apply_down_to(self, binds: int) -> None:
        while self.waiting and self.waiting[-1] != "(" and _BINDS[self.waiting[-1]] >= binds:
            operator = self.waiting.pop()
            right = self.values.pop()
            if operator == "neg":
                self.values.append(None if right is None else -right)
            else:
                self.values.append(_compute(operator, self.values.pop(), right))


def _compute(operator: str, left: Fraction | None, right: Fraction | None) -> Fraction | None:
    """None is undefined: a division by zero, or anything computed from one."""
    if left is None or right is None or (operator == "/" and right == 0):
        return None
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    return left * right if operator == "*" else left / right
