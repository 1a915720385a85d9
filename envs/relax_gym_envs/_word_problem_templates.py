"""The texts of the word problems, each with its answer."""

from __future__ import annotations

from collections.abc import Callable

# A template is (text, answer). Texts may use the numbers {a} {b} {c}, products {ab}, {a20} = 20a, {b5} = 5b, the
# names {n} {m} and the things {t}; products make divisions and percentages come out even.
Template = tuple[str, Callable[[int, int, int], float]]
SUMS: tuple[Template, ...] = (
    ("{n} has {a} {t} and buys {b} more. How many {t} does {n} have?", lambda a, b, c: a + b),
    ("{n} had {ab} {t} and gave {a} to {m}. How many {t} are left?", lambda a, b, c: a * b - a),
    ("{n} has {a} {t}, {m} has {b} and Kim has {c}. How many do they have together?", lambda a, b, c: a + b + c),
    ("It is {a} degrees and gets {ab} degrees colder. How many degrees is it then?", lambda a, b, c: a - a * b),
)
PRODUCTS: tuple[Template, ...] = (
    ("{n} has {a} bags with {b} {t} in each. How many {t} is that?", lambda a, b, c: a * b),
    ("{n} shares {ab} {t} equally among {a} friends. How many does each get?", lambda a, b, c: b),
    ("A row has {b} seats. How many rows do {ab} people fill?", lambda a, b, c: a),
    ("{n} runs {a} miles a day. How many miles is that in {b} weeks?", lambda a, b, c: 7 * a * b),
)
TWO_STEPS: tuple[Template, ...] = (
    ("{n} buys {a} boxes of {b} {t} and finds {c} more. How many {t} is that?", lambda a, b, c: a * b + c),
    ("{n} splits {ab} {t} into {a} equal heaps and adds {c} to one. How many are in it?", lambda a, b, c: b + c),
    ("{n} earns ${a20} a day for {b} days and spends ${c}. How many dollars are left?", lambda a, b, c: 20 * a * b - c),
    ("{n} is {a}. {m} is {b} years older, Kim twice as old as {m}. How old is Kim?", lambda a, b, c: 2 * (a + b)),
)
PERCENT: tuple[Template, ...] = (
    ("A coat costs ${a20} and is {b5}% off. How many dollars is it now?", lambda a, b, c: 20 * a - a * b),
    ("Of {a20} {t}, {b5}% are red. How many are red?", lambda a, b, c: a * b),
    ("A meal costs ${a20}; {n} adds a {b5}% tip. How many dollars does {n} pay?", lambda a, b, c: 20 * a + a * b),
    ("{n} scored {a} points and {m} {b}. What is their average?", lambda a, b, c: (a + b) / 2),
)
THREE_STEPS: tuple[Template, ...] = (
    (
        "{n} sells half of {a20} {t} for ${b} each and finds ${c}. How many dollars is that?",
        lambda a, b, c: 10 * a * b + c,
    ),
    ("{b5}% of {a20} people leave a hall, then {c} arrive. How many are there?", lambda a, b, c: 20 * a - a * b + c),
    ("{n} reads {a} pages a day for {b} days, {m} {c} more. How many do both read?", lambda a, b, c: 2 * a * b + c),
)
RATES: tuple[Template, ...] = (
    ("{b5}% of {a20} {t} sold at ${c} each are returned. How many dollars are kept?", lambda a, b, c: (20 - b) * a * c),
    (
        "{n} drives {a20} miles at 20 mph, rests {b} hours, drives {ab} miles at {b} mph. How many hours is that?",
        lambda a, b, c: 2 * a + b,
    ),
    (
        "{n} saves ${a} a week for {b} weeks, doubles it and spends a quarter. How many dollars are left?",
        lambda a, b, c: 1.5 * a * b,
    ),
)
LEVELS = (SUMS, PRODUCTS, TWO_STEPS, PERCENT, THREE_STEPS, RATES)
