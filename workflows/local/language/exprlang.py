"""Evaluates expr-lang trees over an environment of plain values (``exprsyntax`` has the grammar, ``exprbuiltins`` the functions).

As in expr-lang: a name that the environment lacks is an error before anything runs, a missing key of a map is nil,
``/`` always gives a float, comparing values of unlike types is an error except with ``==`` and ``!=``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from workflows.local.language.exprbuiltins import BUILTINS, type_name
from workflows.local.language.exprsyntax import PREDICATES, ExpressionError, Node, parse
from workflows.local.language.values import go_print

Environment = Mapping[str, Any]


def evaluate(text: str, environment: Environment) -> Any:
    """The value of ``text``. ``ExpressionError`` if it cannot be read, names what is not there, or fails."""
    tree = parse(text)
    check_names(tree, environment)
    return run(tree, environment, text)


def run(tree: Node, environment: Environment, text: str) -> Any:
    """The value of a tree whose names were checked."""
    try:
        return _Run(environment).value(tree)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, OverflowError, ArithmeticError) as error:
        if isinstance(error, ExpressionError):
            raise
        raise ExpressionError(f"{error} in {text!r}") from None
    except RecursionError:
        raise ExpressionError(f"{text[:40]!r}... is nested too deeply") from None


def evaluate_bool(text: str, environment: Environment) -> bool:
    """The same, where only true and false will do."""
    result = evaluate(text, environment)
    if not isinstance(result, bool):
        raise ExpressionError(f"unable to cast expression result '{go_print(result)}' to bool")
    return result


def check_names(tree: Node, environment: Environment) -> None:
    """``ExpressionError`` for the first free name that is neither in the environment nor a builtin called as a function."""
    for name, called in free_names(tree):
        if name not in environment and not (called and (name in BUILTINS or name in PREDICATES)) and name != "$env":
            raise ExpressionError(f"unknown name {name}")


def free_names(tree: Node) -> list[tuple[str, bool]]:
    """(name, whether it is called) of every name that no ``let`` binds, in order."""
    found: list[tuple[str, bool]] = []

    def walk(node: Node | None, bound: frozenset[str]) -> None:
        if node is None:
            return
        if node.kind == "name" and node.value not in bound:
            found.append((node.value, False))
        elif node.kind == "let":
            walk(node.parts[0], bound)
            walk(node.parts[1], bound | {node.value})
        elif node.kind == "call" and node.parts[0] is not None and node.parts[0].kind == "name":
            if node.parts[0].value not in bound:
                found.append((node.parts[0].value, True))
            for part in node.parts[1:]:
                walk(part, bound)
        else:
            for part in node.parts:
                walk(part, bound)

    walk(tree, frozenset())
    return found


def paths(tree: Node) -> list[str]:
    """Every name and dotted constant path that the tree reads (``tasks.A.outputs``, also written ``tasks['A'].outputs``)."""
    found: dict[str, None] = {}

    def path(node: Node | None) -> str | None:
        if node is None:
            return None
        if node.kind == "name":
            return str(node.value)
        if node.kind == "member":
            inside, key = path(node.parts[0]), node.parts[1]
            if inside is not None and key is not None and key.kind == "constant" and isinstance(key.value, str):
                return f"{inside}.{key.value}"
        return None

    def walk(node: Node | None) -> None:
        if node is None:
            return
        if (whole := path(node)) is not None:
            found[whole] = None
        for part in node.parts:
            walk(part)

    walk(tree)
    return list(found)


class _Run:
    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.bound: dict[str, Any] = {}
        self.scopes: list[dict[str, Any]] = []

    def value(self, node: Node | None) -> Any:
        assert node is not None
        return _VALUES[node.kind](self, node)

    def name(self, node: Node) -> Any:
        if node.value in self.bound:
            return self.bound[node.value]
        return self.environment if node.value == "$env" else self.environment.get(node.value)

    def pointer(self, node: Node) -> Any:
        return self.scopes[-1][node.value]

    def items(self, node: Node) -> list[Any]:
        return [self.value(part) for part in node.parts]

    def map(self, node: Node) -> dict[str, Any]:
        values = self.items(node)
        return {str(key): value for key, value in zip(values[::2], values[1::2], strict=True)}

    def member(self, node: Node) -> Any:
        inside = self.value(node.parts[0])
        if inside is None and node.value:
            return None
        return fetch(inside, self.value(node.parts[1]))

    def slice(self, node: Node) -> Any:
        inside = self.value(node.parts[0])
        if not isinstance(inside, (str, list)):
            raise ExpressionError(f"cannot slice {type_name(inside)}")
        start = 0 if node.parts[1] is None else self.value(node.parts[1])
        end = len(inside) if node.parts[2] is None else self.value(node.parts[2])
        return inside[start:end]

    def unary(self, node: Node) -> Any:
        value = self.value(node.parts[0])
        if node.value == "!" and isinstance(value, bool):
            return not value
        if node.value in "+-" and _is_number(value):
            return -value if node.value == "-" else value
        raise ExpressionError(f"invalid operation: {node.value} {type_name(value)}")

    def binary(self, node: Node) -> Any:
        left = self.value(node.parts[0])
        if node.value in ("&&", "||"):
            return self.logical(node, left)
        if node.value == "??":
            return self.value(node.parts[1]) if left is None else left
        return binary(node.value, left, self.value(node.parts[1]))

    def logical(self, node: Node, left: Any) -> bool:
        decides = node.value == "||"
        if self.truth(node, left) is decides:
            return decides
        return self.truth(node, self.value(node.parts[1]))

    def truth(self, node: Node, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ExpressionError(f"invalid operation: {node.value} on {type_name(value)}")
        return value

    def chain(self, node: Node) -> bool:
        return bool(self.value(node.parts[0])) and bool(self.value(node.parts[2]))

    def condition(self, node: Node) -> Any:
        condition = self.value(node.parts[0])
        if not isinstance(condition, bool):
            raise ExpressionError(f"non-bool expression (type {type_name(condition)}) used as condition")
        return self.value(node.parts[1] if condition else node.parts[2])

    def elvis(self, node: Node) -> Any:
        left = self.value(node.parts[0])
        return left if left is True or (left is not None and left is not False) else self.value(node.parts[1])

    def let(self, node: Node) -> Any:
        saved = dict(self.bound)
        self.bound[node.value] = self.value(node.parts[0])
        try:
            return self.value(node.parts[1])
        finally:
            self.bound = saved

    def sequence(self, node: Node) -> Any:
        return self.items(node)[-1]

    def call(self, node: Node) -> Any:
        head = node.parts[0]
        arguments = [self.value(part) for part in node.parts[1:]]
        if (
            head is not None
            and head.kind == "name"
            and head.value not in self.bound
            and head.value not in self.environment
        ):
            return BUILTINS[head.value](*arguments)
        function = self.value(head)
        if not callable(function):
            raise ExpressionError(f"{type_name(function)} is not callable")
        return function(*arguments)

    def predicate(self, node: Node) -> Any:
        collection = self.value(node.parts[0])
        if not isinstance(collection, list):
            raise ExpressionError(f"builtin {node.value} takes only array (got {type_name(collection)})")
        body = node.parts[1] if len(node.parts) > 1 else None

        def test(item: Any, index: int, accumulator: Any = None) -> Any:
            self.scopes.append({"": item, "index": index, "acc": accumulator})
            try:
                return self.value(body)
            finally:
                self.scopes.pop()

        if node.value == "reduce":
            return self.reduce(node, collection, test)
        if node.value in ("count", "sum") and body is None:
            return sum(collection) if node.value == "sum" else sum(1 for item in collection if item is True)
        extra = self.value(node.parts[2]) if len(node.parts) > 2 else None
        return _over(node.value, collection, [test(item, index) for index, item in enumerate(collection)], extra)

    def reduce(self, node: Node, collection: list[Any], test: Callable[[Any, int, Any], Any]) -> Any:
        rest = list(enumerate(collection))
        if len(node.parts) > 2:
            accumulator = self.value(node.parts[2])
        elif rest:
            accumulator = rest.pop(0)[1]
        else:
            raise ExpressionError("reduce of empty array with no initial value")
        for index, item in rest:
            accumulator = test(item, index, accumulator)
        return accumulator


_VALUES: dict[str, Callable[[_Run, Node], Any]] = {
    "constant": lambda run, node: node.value,
    "name": _Run.name,
    "pointer": _Run.pointer,
    "list": _Run.items,
    "map": _Run.map,
    "member": _Run.member,
    "slice": _Run.slice,
    "unary": _Run.unary,
    "binary": _Run.binary,
    "chain": _Run.chain,
    "if": _Run.condition,
    "elvis": _Run.elvis,
    "let": _Run.let,
    "sequence": _Run.sequence,
    "call": _Run.call,
    "predicate": _Run.predicate,
}


def _over(name: str, items: list[Any], results: list[Any], extra: Any) -> Any:
    chosen = [index for index, result in enumerate(results) if result is True]
    if name in ("all", "none", "any", "one", "count"):
        count = len(chosen)
        return {"all": count == len(items), "none": count == 0, "any": count > 0, "one": count == 1, "count": count}[
            name
        ]
    if name == "filter":
        return [items[index] for index in chosen]
    if name == "map":
        return results
    if name == "sum":
        return sum(results)
    if name == "groupBy":
        groups: dict[Any, list[Any]] = {}
        for item, key in zip(items, results, strict=True):
            groups.setdefault(key, []).append(item)
        return groups
    if name == "sortBy":
        order = sorted(range(len(items)), key=lambda index: results[index], reverse=extra == "desc")
        return [items[index] for index in order]
    index = (chosen[0] if "Last" not in name else chosen[-1]) if chosen else None
    if name.endswith("Index"):
        return index
    return None if index is None else items[index]


def fetch(inside: Any, key: Any) -> Any:
    """``inside[key]``: nil for a key that a map lacks, an error outside a list."""
    if isinstance(inside, Mapping):
        return inside.get(key)
    if isinstance(inside, (list, str)) and isinstance(key, int) and not isinstance(key, bool):
        if not -len(inside) <= key < len(inside):
            raise ExpressionError(f"index out of range: {key} (array length is {len(inside)})")
        return inside[key]
    raise ExpressionError(f"cannot fetch {go_print(key)} from {type_name(inside)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def equal(left: Any, right: Any) -> bool:
    """Equality between values of any types; an int equals a float of the same value, nothing else crosses types."""
    if _is_number(left) and _is_number(right):
        return bool(left == right)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))
    return type(left) is type(right) and bool(left == right)


def binary(symbol: str, left: Any, right: Any) -> Any:
    """An operator that always wants both sides."""
    if symbol in ("==", "!="):
        return equal(left, right) is (symbol == "==")
    if symbol == "in":
        return _contains(left, right)
    if symbol in ("matches", "contains", "startsWith", "endsWith"):
        if not (isinstance(left, str) and isinstance(right, str)):
            raise ExpressionError(f"invalid operation: {type_name(left)} {symbol} {type_name(right)}")
        return _text(symbol, left, right)
    numbers = _is_number(left) and _is_number(right)
    if symbol in ("<", "<=", ">", ">=", "+") and not numbers and isinstance(left, str) and isinstance(right, str):
        numbers = True
    if not numbers:
        raise ExpressionError(f"invalid operation: {type_name(left)} {symbol} {type_name(right)}")
    return _ARITHMETIC[symbol](left, right)


def _contains(item: Any, inside: Any) -> bool:
    if inside is None:
        return False
    if isinstance(inside, Mapping):
        return item in inside
    if isinstance(inside, list):
        return any(equal(item, other) for other in inside)
    raise ExpressionError(f'operator "in" not defined on {type_name(inside)}')


def _text(symbol: str, left: str, right: str) -> bool:
    if symbol == "contains":
        return right in left
    if symbol == "startsWith":
        return left.startswith(right)
    if symbol == "endsWith":
        return left.endswith(right)
    try:
        return re.search(right, left) is not None
    except re.error as error:
        raise ExpressionError(f"error parsing regexp: {error}: `{right}`") from None


def _divide(left: Any, right: Any) -> float:
    if right == 0:
        return math.nan if left == 0 else math.copysign(math.inf, left)
    return float(left / right)


def _modulo(left: Any, right: Any) -> int:
    if isinstance(left, float) or isinstance(right, float):
        raise ExpressionError("invalid operation: float64 % float64")
    if right == 0:
        raise ExpressionError("integer divide by zero")
    return int(math.fmod(left, right))


def _range(left: Any, right: Any) -> list[int]:
    if right - left > 1_000_000:
        raise ExpressionError("memory budget exceeded")
    return list(range(left, right + 1))


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _divide,
    "%": _modulo,
    "**": lambda a, b: float(a) ** float(b),
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "..": _range,
}
