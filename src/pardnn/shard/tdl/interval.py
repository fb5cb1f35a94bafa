"""Symbolic interval analysis of affine index expressions (Tofu, section 4.2 and Fig. 4).

Problem: which indices of an input does a worker read if it computes a range of an output?
Idea: an index is an affine expression in the variables of the description. Its interval has bounds
that are affine in the symbolic ends of those variables, so one run serves every worker, every
number of workers and every shape; numbers are substituted last.
Complexity: O(terms) per operation.
Reference: Tofu (EuroSys 2019), section 4.2, "Symbolic interval analysis", Eq. 1 and Fig. 4.
Deviations, all repairs of Eq. 1 and Fig. 4: lower and upper bound have a constant each (windows,
padding); a negative factor swaps the ends, so I - J is [l - u', u - l']; division by a number
rounds, floor or ceiling; ends are inclusive, so a variable of extent X is [0, X - 1] and no element
is counted twice; an expression stays affine in its variables until its interval is asked for, so (i
+ 2) - i is 2 and not an interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pardnn.errors import PardnnError

#: First and last value of each variable, both inclusive.
Ranges = Mapping[str, tuple[int, int]]


class DescriptionError(PardnnError):
    """A description of an operator cannot be analysed, or does not fit a call (exit 2)."""

    default_code = "E220"


@dataclass(frozen=True, slots=True)
class Variable:
    """An index variable, a parameter of a lambda of the description."""

    name: str


@dataclass(frozen=True, slots=True)
class Low:
    """The first value of a variable."""

    name: str


@dataclass(frozen=True, slots=True)
class High:
    """The last value of a variable, inclusive."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Floor:
    """An affine expression divided by a positive number and rounded down."""

    numerator: Affine
    divisor: int


Atom = Variable | Low | High | Floor


def _not_affine(what: str, instead: str) -> DescriptionError:
    return DescriptionError(f"an index {what}; an index must be affine.\n{instead}")


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """A sum of integer multiples of atoms, and a constant: an index, or a bound of an interval.

    Attributes:
        terms: Atoms with their factors, none zero, no atom twice.
        constant: The rest.

    Raises:
        DescriptionError: E220, from a product, a comparison or a true division of indices.
    """

    terms: tuple[tuple[Atom, int], ...] = ()
    constant: int = 0

    def __add__(self, other: Affine | int) -> Affine:
        other = affine(other)
        return _collect((*self.terms, *other.terms), self.constant + other.constant)

    __radd__ = __add__

    def __neg__(self) -> Affine:
        return self * -1

    def __sub__(self, other: Affine | int) -> Affine:
        return self + affine(other) * -1

    def __rsub__(self, other: Affine | int) -> Affine:
        return affine(other) + self * -1

    def __mul__(self, factor: object) -> Affine:
        if isinstance(factor, Affine):
            raise _not_affine("is multiplied by another index", "Multiply by numbers only.")
        times = _whole_number(factor)
        return _collect(((atom, n * times) for atom, n in self.terms), self.constant * times)

    __rmul__ = __mul__

    def __floordiv__(self, divisor: object) -> Affine:
        if isinstance(divisor, Affine) or _whole_number(divisor) < 1:
            raise _not_affine(
                "is divided by something other than a positive number", "Divide by numbers only."
            )
        by = _whole_number(divisor)
        if all(factor % by == 0 for _, factor in self.terms):  # the constant alone is rounded
            quotients = tuple((atom, factor // by) for atom, factor in self.terms)
            return Affine(quotients, self.constant // by)
        return Affine(((Floor(self, by), 1),))

    def __truediv__(self, divisor: object) -> Affine:
        raise _not_affine("is divided exactly", "Write `index // n` or `ceil_div(index, n)`.")

    def __mod__(self, divisor: object) -> Affine:
        raise _not_affine(
            "is taken modulo a number", "Write the output index as `n * a + b` instead, see `At`."
        )

    def _compare(self, other: object) -> bool:
        raise _not_affine(
            "is compared", "Which elements are read may not depend on the value of an index."
        )

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compare  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise _not_affine("decides a branch", "Branch on attributes and ranks only.")

    def __hash__(self) -> int:
        return hash((frozenset(self.terms), self.constant))


def same(a: Affine, b: Affine) -> bool:
    """Whether two expressions are equal term by term (`==` would be a comparison of indices)."""
    return a.constant == b.constant and dict(_keys(a)) == dict(_keys(b))


def _keys(value: Affine) -> Iterable[tuple[object, int]]:
    for atom, factor in value.terms:
        if isinstance(atom, Floor):
            inner = (frozenset(_keys(atom.numerator)), atom.numerator.constant, atom.divisor)
            yield inner, factor
        else:
            yield atom, factor


def _whole_number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _not_affine(
            f"meets {value!r:.40}, which is not a whole number", "Use integers in indices."
        )
    return value


def affine(value: Affine | int) -> Affine:
    """Return `value` as an expression.

    Raises:
        DescriptionError: E220, if it is neither an index nor a whole number.
    """
    return value if isinstance(value, Affine) else Affine((), _whole_number(value))


def variable(name: str) -> Affine:
    """Return the index variable `name` as an expression."""
    return Affine(((Variable(name), 1),))


def ceil_div(value: Affine, divisor: int) -> Affine:
    """Return `value / divisor` rounded up."""
    return -((-value) // divisor)


def _collect(terms: Iterable[tuple[Atom, int]], constant: int) -> Affine:
    terms = tuple(terms)
    if len(terms) < 2:
        return Affine(terms if terms and terms[0][1] else (), constant)
    found: list[tuple[Atom, int]] = []
    for atom, factor in terms:
        for position, (present, before) in enumerate(found):
            if _same_atom(present, atom):
                found[position] = (present, before + factor)
                break
        else:
            found.append((atom, factor))
    return Affine(tuple(term for term in found if term[1]), constant)


def _same_atom(a: Atom, b: Atom) -> bool:
    if isinstance(a, Floor) and isinstance(b, Floor):
        return a.divisor == b.divisor and same(a.numerator, b.numerator)
    return not isinstance(a, Floor) and not isinstance(b, Floor) and a == b


@dataclass(frozen=True, slots=True, eq=False)
class Interval:
    """From `lower` to `upper`, both inclusive, affine in the ends of the variables.

    Attributes:
        lower: First value.
        upper: Last value.
        names: Of the variables that it depends on.
    """

    lower: Affine
    upper: Affine
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        """Collect the names once: they are read thousands of times."""
        object.__setattr__(self, "names", variables(self.lower) | variables(self.upper))


def interval(index: Affine) -> Interval:
    """Return the values that an index takes while each variable runs from `Low` to `High`."""
    lower, upper = Affine((), index.constant), Affine((), index.constant)
    for atom, factor in index.terms:
        if isinstance(atom, Floor):
            inner = interval(atom.numerator)
            ends = inner.lower // atom.divisor, inner.upper // atom.divisor
        elif isinstance(atom, Variable):
            ends = Affine(((Low(atom.name), 1),)), Affine(((High(atom.name), 1),))
        else:
            ends = Affine(((atom, 1),)), Affine(((atom, 1),))
        first, last = ends if factor > 0 else ends[::-1]
        lower, upper = lower + first * factor, upper + last * factor
    return Interval(lower, upper)


def hull(intervals: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the smallest interval that contains all of them."""
    lowers, uppers = zip(*intervals, strict=True)
    return min(lowers), max(uppers)


def variables(value: Affine) -> frozenset[str]:
    """Names of the variables that an expression depends on."""
    names: set[str] = set()
    for atom, _ in value.terms:
        names |= variables(atom.numerator) if isinstance(atom, Floor) else {atom.name}
    return frozenset(names)


def bare_variable(value: Affine) -> str | None:
    """Name of the variable if the index is just that variable, otherwise None."""
    if value.constant == 0 and len(value.terms) == 1:
        ((atom, factor),) = value.terms
        if factor == 1 and isinstance(atom, Variable):
            return atom.name
    return None


def divisors(value: Affine, name: str) -> set[int]:
    """Numbers of which cuts of variable `name` must be multiples, because it is divided by them."""
    found: set[int] = set()
    for atom, _ in value.terms:
        if isinstance(atom, Floor) and name in variables(atom.numerator):
            found |= {atom.divisor} | divisors(atom.numerator, name)
    return found


def evaluate(bound: Affine, ranges: Ranges) -> int:
    """Return a bound in numbers.

    Raises:
        KeyError: If `ranges` lacks a variable.
    """
    total = bound.constant
    for atom, factor in bound.terms:
        if isinstance(atom, Floor):
            value = evaluate(atom.numerator, ranges) // atom.divisor
        elif isinstance(atom, Low):
            value = ranges[atom.name][0]
        elif isinstance(atom, High):
            value = ranges[atom.name][1]
        else:
            raise KeyError(atom.name)
        total += factor * value
    return total
