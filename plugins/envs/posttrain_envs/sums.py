"""Arithmetic questions of any size, made from a seed: a tree of whole numbers, in signs or in words.

    tree = draw(random.Random(0), terms=3, digits=2, operations=("+", "*"))
    written(tree)     # "(49+97)*53"
    spoken(tree)      # "the product of the sum of 49 and 97 and 53"
    value(tree)       # 7738
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeAlias

Tree: TypeAlias = "int | tuple[str, Tree, Tree]"
OPERATIONS = ("+", "-", "*")
_BINDS = {"+": 1, "-": 1, "*": 2}
_WORDS = {"+": "the sum of {} and {}", "*": "the product of {} and {}", "-": "what is left of {} when {} is taken away"}


def draw(rng: random.Random, *, terms: int, digits: int, operations: Sequence[str]) -> Tree:
    """A tree of `terms` numbers of up to `digits` digits: two subtrees are joined at a time until one is left."""
    trees: list[Tree] = [rng.randrange(1, 10**digits) for _ in range(terms)]
    while len(trees) > 1:
        left, right = (trees.pop(rng.randrange(len(trees))) for _ in range(2))
        trees.append((rng.choice(operations), left, right))
    return trees[0]


def value(tree: Tree) -> int:
    if isinstance(tree, int):
        return tree
    sign, left, right = tree[0], value(tree[1]), value(tree[2])
    return left + right if sign == "+" else left - right if sign == "-" else left * right


def written(tree: Tree) -> str:
    """The tree in signs, with no bracket that is not needed."""
    if isinstance(tree, int):
        return str(tree)
    sign, left, right = tree
    return f"{_bracketed(left, _BINDS[sign])}{sign}{_bracketed(right, _BINDS[sign] + (sign == '-'))}"


def spoken(tree: Tree) -> str:
    """The tree in words. Nothing in it is ambiguous: each name of an operation takes the two amounts that follow."""
    return str(tree) if isinstance(tree, int) else _WORDS[tree[0]].format(spoken(tree[1]), spoken(tree[2]))


def _bracketed(tree: Tree, binds: int) -> str:
    text = written(tree)
    return text if isinstance(tree, int) or _BINDS[tree[0]] >= binds else f"({text})"
