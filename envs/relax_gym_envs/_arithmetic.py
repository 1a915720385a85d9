"""Arithmetic on text that a model wrote: exact, bounded, and nothing but numbers and operators."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

MAX_CHARS = 200
MAX_EXPONENT = 100
MAX_VALUE = 10**100

OPERATORS: dict[type[ast.AST], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculate(expression: str) -> Fraction:
    """The exact value of `+ - * / // % **` and parentheses over decimal numbers.

    Raises:
        ValueError: anything else, a division by zero, or a number beyond `MAX_VALUE`; the message says which.
    """
    text = expression.strip()
    if len(text) > MAX_CHARS:
        raise ValueError(f"the expression has {len(text)} characters; at most {MAX_CHARS} are allowed")
    # Letters never reach the parser: no names, calls, strings or attributes to begin with.
    if not re.fullmatch(r"[0-9.+\-*/%() ]+", text):
        raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is not a complete expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def show(value: Fraction) -> str:
    """A whole number in full, anything else to 12 significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _value(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return _bounded(Fraction(str(number)))
        case ast.UnaryOp(op=op, operand=operand):
            return OPERATORS[type(op)](_value(operand))
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(op=op, left=left, right=right):
            return _bounded(OPERATORS[type(op)](_value(left), _value(right)))
        case _:
            raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"an exponent must be a whole number from -{MAX_EXPONENT} to {MAX_EXPONENT}")
    return _bounded(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) > MAX_VALUE:
        raise ValueError("the numbers get too long")
    return value
