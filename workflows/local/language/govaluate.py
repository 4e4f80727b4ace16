"""``when`` expressions: the language of the govaluate library as Argo uses it, where bare words are strings.

Grammar, loosest first; a level's operators associate to the left:

    ternary     ->  or ( ("?" | ":" | "??") ternary )?
    or          ->  and ( "||" and )*
    and         ->  comparison ( "&&" comparison )*
    comparison  ->  bitwise ( ("==" | "!=" | "<" | "<=" | ">" | ">=" | "=~" | "!~" | "in") bitwise )*
    bitwise     ->  shift ( ("&" | "|" | "^") shift )*
    shift       ->  sum ( ("<<" | ">>") sum )*
    sum         ->  product ( ("+" | "-") product )*
    product     ->  power ( ("*" | "/" | "%") power )*
    power       ->  value ( "**" value )*
    value       ->  ("-" | "!" | "~") value | number | string | word | [word] | "true" | "false" | "(" ternary ("," ternary)* ")"

Numbers are floats. Strings are in single or double quotes; a backslash takes the next character as it is, in words too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from workflows.local.language.values import go_print


class WhenError(ValueError):
    """A ``when`` expression that cannot be read or evaluated."""


@dataclass(frozen=True)
class Token:
    kind: str
    """number, string, time, bool, accessor, operator, open, close, comma"""
    value: Any


_SYMBOLS = frozenset(
    [
        "+",
        "-",
        "*",
        "/",
        "%",
        "**",
        "&",
        "|",
        "^",
        "<<",
        ">>",
        "&&",
        "||",
        "==",
        "!=",
        "<",
        "<=",
        ">",
        ">=",
        "=~",
        "!~",
        "?",
        ":",
        "??",
        "!",
        "~",
    ]
)
_PREFIXES = frozenset("-!~")
_LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"||"}),
    frozenset({"&&"}),
    frozenset({"==", "!=", "<", "<=", ">", ">=", "=~", "!~", "in"}),
    frozenset("&|^"),
    frozenset({"<<", ">>"}),
    frozenset("+-"),
    frozenset("*/%"),
    frozenset({"**"}),
)


def should_execute(when: str) -> bool:
    """Whether an already substituted ``when`` holds; an empty one does. ``WhenError`` in Argo's words otherwise."""
    if when == "":
        return True
    try:
        tokens = _tokens(when)
    except WhenError as error:
        hint = ' (hint: try wrapping the affected expression in quotes ("))' if "Invalid token" in str(error) else ""
        raise WhenError(f"Invalid 'when' expression '{when}': {error}{hint}") from None
    try:
        result = _Evaluation(tokens).run()
    except WhenError as error:
        raise WhenError(f"Failed to evaluate 'when' expresion '{when}': {error}") from None
    if not isinstance(result, bool):
        raise WhenError(f"Expected boolean evaluation for '{when}'. Got {go_print(result)}")
    return result


class _Lexer:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def take(self, condition: Callable[[str], bool], *, spaces: bool = False) -> tuple[str, bool]:
        """Characters while ``condition`` holds; a backslash takes the next one whatever it is. False at the end of the text."""
        out: list[str] = []
        while self.position < len(self.text):
            character = self.text[self.position]
            if character == "\\" and self.position + 1 < len(self.text):
                out.append(self.text[self.position + 1])
                self.position += 2
                continue
            if character.isspace() and not spaces:
                if out:
                    return "".join(out), True
                self.position += 1
                continue
            if not condition(character):
                return "".join(out), True
            out.append(character)
            self.position += 1
        return "".join(out), False


def _is_number(character: str) -> bool:
    return character.isdigit() or character == "."


def _is_word(character: str) -> bool:
    return character.isalnum() or character in "_."


def _is_symbol(character: str) -> bool:
    return not (character.isalnum() or character in "()[]'\"" or character.isspace())


@lru_cache(maxsize=4096)
def _tokens(text: str) -> tuple[Token, ...]:
    lexer = _Lexer(text)
    tokens: list[Token] = []
    while lexer.position < len(text):
        if text[lexer.position].isspace():
            lexer.position += 1
            continue
        tokens.append(_token(lexer, tokens[-1] if tokens else None))
    depth = sum({"open": 1, "close": -1}.get(token.kind, 0) for token in tokens)
    if depth:
        raise WhenError("Unbalanced parenthesis")
    _check_order(tokens)
    return tuple(tokens)


def _token(lexer: _Lexer, before: Token | None) -> Token:
    character = lexer.text[lexer.position]
    if _is_number(character):
        return _number(lexer)
    if character == ",":
        lexer.position += 1
        return Token("comma", ",")
    if character == "[":
        lexer.position += 1
        word, closed = lexer.take(lambda c: c != "]", spaces=True)
        if not closed:
            raise WhenError("Unclosed parameter bracket")
        lexer.position += 1
        return Token("string", word)
    if character.isalpha():
        return _word(lexer)
    if character in "'\"":
        lexer.position += 1
        word, closed = lexer.take(lambda c: c not in "'\"", spaces=True)
        if not closed:
            raise WhenError("Unclosed string literal")
        lexer.position += 1
        return Token("string", word)
    if character in "()":
        lexer.position += 1
        return Token("open" if character == "(" else "close", character)
    symbol, _ = lexer.take(_is_symbol)
    if symbol in _PREFIXES and _starts_operand(before):
        return Token("prefix", symbol)
    if symbol in _SYMBOLS - _PREFIXES | {"-"}:
        return Token("operator", symbol)
    raise WhenError(f"Invalid token: '{symbol or character}'")


def _number(lexer: _Lexer) -> Token:
    match = re.compile(r"0x([0-9a-fA-F]*)").match(lexer.text, lexer.position)
    if match:
        lexer.position = match.end()
        if not match.group(1):
            raise WhenError("Unable to parse hex value '' to uint64")
        return Token("number", float(int(match.group(1), 16)))
    text, _ = lexer.take(_is_number)
    try:
        return Token("number", float(text))
    except ValueError:
        raise WhenError(f"Unable to parse numeric value '{text}' to float64") from None


def _word(lexer: _Lexer) -> Token:
    word, _ = lexer.take(_is_word)
    if word in ("true", "false"):
        return Token("bool", word == "true")
    if word in ("in", "IN"):
        return Token("operator", "in")
    if word.find(".") > 0:
        if word.endswith("."):
            raise WhenError(f"Hanging accessor on token '{word}'")
        for part in word.split(".")[1:]:
            if part[:1].upper() != part[:1]:
                raise WhenError(f"Unable to access unexported field '{part}' in token '{word}'")
        return Token("accessor", word)
    return Token("string", word)


def _starts_operand(before: Token | None) -> bool:
    return before is None or before.kind in ("operator", "prefix", "open", "comma")


def _check_order(tokens: list[Token]) -> None:
    """Operands and operators must alternate."""
    before: Token | None = None
    for token in tokens:
        operand = token.kind in ("number", "string", "bool", "accessor", "prefix", "open")
        if operand and not _starts_operand(before):
            assert before is not None
            raise WhenError(
                f"Cannot transition token types from {_kind(before)} [{go_print(before.value)}] to {_kind(token)} [{go_print(token.value)}]"
            )
        if (
            not operand
            and _starts_operand(before)
            and not (token.kind == "close" and before is not None and before.kind == "open")
        ):
            raise WhenError(
                f"Cannot transition token types from {_kind(before)} to {_kind(token)} [{go_print(token.value)}]"
            )
        before = token
    if before is not None and _starts_operand(before):
        raise WhenError("Unexpected end of expression")


def _kind(token: Token | None) -> str:
    names = {
        "string": "VARIABLE",
        "number": "NUMERIC",
        "bool": "BOOLEAN",
        "open": "CLAUSE",
        "close": "CLAUSE_CLOSE",
        "comma": "SEPARATOR",
    }
    return "UNKNOWN" if token is None else names.get(token.kind, token.kind.upper())


class _Evaluation:
    """Parses and evaluates in one pass over a syntax tree of closures, so that ``&&``, ``||`` and ``?`` stay lazy."""

    def __init__(self, tokens: tuple[Token, ...]) -> None:
        self.tokens = tokens
        self.position = 0

    def run(self) -> Any:
        if not self.tokens:
            return None
        tree = self.separated()
        if self.position != len(self.tokens):
            raise WhenError(f"Unexpected token '{go_print(self.tokens[self.position].value)}'")
        return tree()

    def accept(self, symbols: frozenset[str]) -> str | None:
        if self.position < len(self.tokens):
            token = self.tokens[self.position]
            if token.kind == "operator" and token.value in symbols:
                self.position += 1
                return str(token.value)
        return None

    def separated(self) -> Callable[[], Any]:
        first = self.ternary()
        rest: list[Callable[[], Any]] = []
        while self.position < len(self.tokens) and self.tokens[self.position].kind == "comma":
            self.position += 1
            rest.append(self.ternary())
        return (lambda: [part() for part in (first, *rest)]) if rest else first

    def ternary(self) -> Callable[[], Any]:
        left = self.level(0)
        symbol = self.accept(frozenset({"?", ":", "??"}))
        if symbol is None:
            return left
        right = self.ternary()
        if symbol == "?":
            return lambda: _if(left(), right)
        return lambda: _else(left(), right)

    def level(self, number: int) -> Callable[[], Any]:
        if number == len(_LEVELS):
            return self.value()
        left = self.level(number + 1)
        while (symbol := self.accept(_LEVELS[number])) is not None:
            left = _binary(symbol, left, self.level(number + 1))
        return left

    def value(self) -> Callable[[], Any]:
        if self.position == len(self.tokens):
            raise WhenError("Unexpected end of expression")
        token = self.tokens[self.position]
        self.position += 1
        if token.kind == "prefix":
            operand = self.value()
            return lambda: _prefix(token.value, operand())
        if token.kind == "open":
            inside = self.separated()
            self.position += 1
            return inside
        if token.kind == "accessor":
            raise WhenError(f"No parameter '{token.value.split('.')[0]}' found.")
        return lambda: token.value


def _if(condition: Any, then: Callable[[], Any]) -> Any:
    if not isinstance(condition, bool):
        raise WhenError(f"Value '{go_print(condition)}' cannot be used with the ternary operator '?', it is not a bool")
    return then() if condition else None


def _else(value: Any, otherwise: Callable[[], Any]) -> Any:
    return value if value is not None else otherwise()


def _prefix(symbol: str, value: Any) -> Any:
    if symbol == "!" and isinstance(value, bool):
        return not value
    if symbol in "-~" and isinstance(value, float):
        return -value if symbol == "-" else float(~int(value))
    raise WhenError(f"Value '{go_print(value)}' cannot be used with the prefix '{symbol}'")


def _binary(symbol: str, left: Callable[[], Any], right: Callable[[], Any]) -> Callable[[], Any]:
    if symbol in ("&&", "||"):
        return lambda: _logical(symbol, left(), right)
    return lambda: _apply(symbol, left(), right())


def _logical(symbol: str, left: Any, right: Callable[[], Any]) -> Any:
    _need(isinstance(left, bool), left, "logical operator", symbol, "bool")
    if left is (symbol == "||"):
        return left
    value = right()
    _need(isinstance(value, bool), value, "logical operator", symbol, "bool")
    return value


def _need(holds: bool, value: Any, what: str, symbol: str, kind: str) -> None:
    if not holds:
        raise WhenError(f"Value '{go_print(value)}' cannot be used with the {what} '{symbol}', it is not a {kind}")


def _apply(symbol: str, left: Any, right: Any) -> Any:
    if symbol in ("==", "!="):
        return (type(left) is type(right) and left == right) is (symbol == "==")
    if symbol in ("=~", "!~"):
        _need(isinstance(left, str), left, "comparator", symbol, "string")
        _need(isinstance(right, str), right, "comparator", symbol, "string")
        return _matches(left, right) is (symbol == "=~")
    if symbol == "in":
        _need(isinstance(right, list), right, "comparator", symbol, "array")
        return any(type(item) is type(left) and item == left for item in right)
    if symbol in ("<", "<=", ">", ">="):
        return _compare(symbol, left, right)
    if symbol == "+" and (isinstance(left, str) or isinstance(right, str)):
        return go_print(left) + go_print(right)
    for value in (left, right):
        _need(isinstance(value, float), value, "modifier", symbol, "number")
    return _arithmetic(symbol, left, right)


def _matches(text: str, pattern: str) -> bool:
    try:
        return re.search(pattern, text) is not None
    except re.error as error:
        raise WhenError(f"Unable to compile regexp pattern '{pattern}': {error}") from None


def _compare(symbol: str, left: Any, right: Any) -> bool:
    if not (isinstance(left, str) and isinstance(right, str)):
        for value in (left, right):
            _need(isinstance(value, float), value, "comparator", symbol, "number")
    if symbol == "<":
        return bool(left < right)
    if symbol == "<=":
        return bool(left <= right)
    return bool(left > right) if symbol == ">" else bool(left >= right)


def _arithmetic(symbol: str, left: float, right: float) -> float:
    if symbol in ("/", "%") and right == 0:
        return math.nan if symbol == "%" or left == 0 else math.copysign(math.inf, left)
    operations: dict[str, Callable[[], float]] = {
        "+": lambda: left + right,
        "-": lambda: left - right,
        "*": lambda: left * right,
        "/": lambda: left / right,
        "%": lambda: math.fmod(left, right),
        "**": lambda: math.pow(left, right),
        "&": lambda: float(int(left) & int(right)),
        "|": lambda: float(int(left) | int(right)),
        "^": lambda: float(int(left) ^ int(right)),
        "<<": lambda: float(int(left) << int(right)),
        ">>": lambda: float(int(left) >> int(right)),
    }
    return operations[symbol]()
