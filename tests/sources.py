"""Sources as the checks of tidiness read them."""

from __future__ import annotations

import ast
import functools


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    """Every node of the file, which several checks look through."""
    return list(ast.walk(parsed(source)))


def dotted(expression: ast.expr) -> str:
    """`a.b.c` as it is written; what stands before the first name is left out: `f().b` is `.b`."""
    # ast.unparse says the same, and takes as long for the calls of this code base as all other checks together.
    match expression:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=inner, attr=name):
            return f"{dotted(inner)}.{name}"
        case _:
            return ""
