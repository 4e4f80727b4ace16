"""The syntax of expr-lang 1.17, as ``depends``, ``{{=...}}``, hooks and retry strategies use it: text -> tree.

Grammar, loosest first (levels associate to the left unless said otherwise):

    expression  ->  "let" name "=" expression ";" expression | "if" expression "{" expression "}" "else" "{" expression "}"
                 |  binary ( "?" expression ":" expression | "?:" expression )?
    binary      ->  "|" (pipe) < "or" "||" < "and" "&&" < comparisons < ".." < "+" "-" < "*" "/" "%" < "**" "^" (right) < "??"
    comparisons ->  == != < <= > >= in matches contains startsWith endsWith, each but == != with "not" before it
    unary       ->  ("not" | "!") tighter than "+", ("-" | "+") tighter than "*"
    postfix     ->  primary ( "." name | "?." name | "[" expression "]" | "?.[" ... | "[" from ":" to "]" | "(" arguments ")" )*
    primary     ->  number | string | "true" | "false" | "nil" | name | "(" expression ")" | "[" list "]" | "{" map "}"
                 |  "#" | "#name" | "." name      (inside a predicate such as filter(list, # > 1) or map(list, .name))
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any


class ExpressionError(ValueError):
    """An expression that cannot be read, names something unknown, or fails while it is evaluated."""


@dataclass(frozen=True)
class Node:
    """A tree: ``kind`` says what ``value`` and ``parts`` are (see ``exprlang``)."""

    kind: str
    value: Any = None
    parts: tuple[Node | None, ...] = field(default=())


_TOKEN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*|/\*.*?\*/)
  | (?P<number>0x[0-9a-fA-F_]+|0b[01_]+|0o[0-7_]+|(?:\d[\d_]*(?:\.(?!\.)\d*)?|\.\d+)(?:[eE][+-]?\d+)?)
  | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|`[^`]*`)
  | (?P<name>[A-Za-z_$][A-Za-z0-9_$]*)
  | (?P<pointer>\#[A-Za-z_]*)
  | (?P<symbol>\?\.|\?\?|\?:|\.\.|\*\*|==|!=|<=|>=|&&|\|\||[-+*/%^<>!?:.,;|=(){}\[\]])
    """,
    re.VERBOSE | re.DOTALL,
)

_BINARY = {
    "|": 0, "or": 10, "||": 10, "and": 15, "&&": 15,
    "==": 20, "!=": 20, "<": 20, ">": 20, ">=": 20, "<=": 20,
    "in": 20, "matches": 20, "contains": 20, "startsWith": 20, "endsWith": 20,
    "..": 25, "+": 30, "-": 30, "*": 60, "/": 60, "%": 60, "**": 100, "^": 100, "??": 500,
}  # fmt: skip
_UNARY = {"not": 50, "!": 50, "-": 90, "+": 90}
_COMPARISONS = frozenset({"<", ">", ">=", "<="})
_NEGATABLE = frozenset({"in", "matches", "contains", "startsWith", "endsWith"})
PREDICATES = frozenset(
    [
        "all",
        "none",
        "any",
        "one",
        "filter",
        "map",
        "count",
        "sum",
        "find",
        "findIndex",
        "findLast",
        "findLastIndex",
        "groupBy",
        "sortBy",
        "reduce",
    ]
)
"""Builtins whose second argument is a predicate."""


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    position: int


def _lex(text: str) -> list[_Token]:
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            if text[position] in "\"'`":
                raise ExpressionError(f"literal not terminated ({_where(text, position)})")
            raise ExpressionError(f"unrecognized character: {text[position]!r} ({_where(text, position)})")
        if match.lastgroup != "space":
            tokens.append(_Token(str(match.lastgroup), match.group(), position))
        position = match.end()
    tokens.append(_Token("end", "", position))
    return tokens


def token_texts(text: str) -> list[str]:
    """The tokens' texts; empty if ``text`` cannot be read."""
    try:
        return [token.text for token in _lex(text)[:-1]]
    except ExpressionError:
        return []


def _where(text: str, position: int) -> str:
    line = text.count("\n", 0, position) + 1
    return f"{line}:{position - (text.rfind(chr(10), 0, position) + 1) + 1}"


@lru_cache(maxsize=4096)
def parse(text: str) -> Node:
    """The tree of ``text``. ``ExpressionError`` says what is wrong and where (line:column)."""
    parser = _Parser(text)
    tree = parser.sequence()
    if parser.token.kind != "end":
        raise parser.unexpected()
    return tree


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = _lex(text)
        self.index = 0
        self.predicates = 0

    @property
    def token(self) -> _Token:
        return self.tokens[self.index]

    def unexpected(self) -> ExpressionError:
        token = self.token
        what = "unexpected end of expression" if token.kind == "end" else f"unexpected token {token.text!r}"
        return ExpressionError(f"{what} ({_where(self.text, token.position)})")

    def accept(self, *texts: str) -> str | None:
        if self.token.kind in ("symbol", "name") and self.token.text in texts:
            self.index += 1
            return self.tokens[self.index - 1].text
        return None

    def expect(self, text: str) -> None:
        if self.accept(text) is None:
            raise self.unexpected()

    def name(self) -> str:
        if self.token.kind != "name":
            raise self.unexpected()
        self.index += 1
        return self.tokens[self.index - 1].text

    def sequence(self) -> Node:
        parts = [self.expression()]
        while self.accept(";") and self.token.kind != "end":
            parts.append(self.expression())
        return parts[0] if len(parts) == 1 else Node("sequence", None, tuple(parts))

    def expression(self, level: int = 0) -> Node:
        if level == 0 and self.accept("let"):
            return self.let()
        if level == 0 and self.token.text == "if" and self.token.kind == "name":
            return self.condition()
        left = self.unary()
        previous: str | None = None
        while True:
            step = self.operator(level, left, previous)
            if step is None:
                break
            left, previous = step
        return self.ternary(left) if level == 0 else left

    def operator(self, level: int, left: Node, previous: str | None) -> tuple[Node, str] | None:
        token = self.token
        negate = token.text == "not" and token.kind == "name"
        symbol = self.tokens[self.index + 1].text if negate else token.text
        if token.kind not in ("symbol", "name") or symbol not in _BINARY or _BINARY[symbol] < level:
            return None
        if negate and symbol not in _NEGATABLE:
            return None
        self.index += 2 if negate else 1
        if symbol == "|":
            return self.pipe(left), symbol
        right = self.expression(_BINARY[symbol] if symbol in ("**", "^") else _BINARY[symbol] + 1)
        if symbol in _COMPARISONS and previous in _COMPARISONS and left.kind in ("binary", "chain"):
            last = left.parts[1]
            return Node("chain", "&&", (left, right, Node("binary", symbol, (last, right)))), symbol
        node = Node("binary", {"or": "||", "and": "&&", "^": "**"}.get(symbol, symbol), (left, right))
        return (Node("unary", "!", (node,)) if negate else node), symbol

    def let(self) -> Node:
        name = self.name()
        self.expect("=")
        value = self.expression()
        self.expect(";")
        return Node("let", name, (value, self.sequence()))

    def condition(self) -> Node:
        self.expect("if")
        condition = self.expression(1)
        self.expect("{")
        then = self.sequence()
        self.expect("}")
        self.expect("else")
        if self.token.text == "if":
            return Node("if", None, (condition, then, self.condition()))
        self.expect("{")
        otherwise = self.sequence()
        self.expect("}")
        return Node("if", None, (condition, then, otherwise))

    def ternary(self, left: Node) -> Node:
        if self.accept("?:"):
            return Node("elvis", None, (left, self.expression()))
        if self.accept("?"):
            then = self.expression()
            self.expect(":")
            return Node("if", None, (left, then, self.expression()))
        return left

    def pipe(self, left: Node) -> Node:
        node = Node("name", self.name())
        self.expect("(")
        return self.postfix(self.call(node, left))

    def unary(self) -> Node:
        token = self.token
        if token.kind in ("symbol", "name") and token.text in _UNARY:
            self.index += 1
            operand = self.expression(_UNARY[token.text])
            return self.postfix(Node("unary", "!" if token.text == "not" else token.text, (operand,)))
        return self.postfix(self.primary())

    def primary(self) -> Node:
        token = self.token
        if self.accept("("):
            inside = self.sequence()
            self.expect(")")
            return inside
        if self.accept("["):
            return Node("list", None, tuple(self.items("]")))
        if self.accept("{"):
            return self.map()
        if token.kind == "symbol" and token.text == "." and self.predicates:
            self.index += 1
            return Node("member", False, (Node("pointer", ""), Node("constant", self.name())))
        self.index += 1
        if token.kind == "number":
            return Node("constant", _number(token.text))
        if token.kind == "string":
            return Node("constant", _string(token.text))
        if token.kind == "pointer" and self.predicates:
            return Node("pointer", token.text[1:])
        if token.kind == "name" and token.text not in _BINARY:
            if token.text in ("true", "false", "nil"):
                return Node("constant", {"true": True, "false": False, "nil": None}[token.text])
            return Node("name", token.text)
        self.index -= 1
        raise self.unexpected()

    def items(self, end: str) -> list[Node]:
        items: list[Node] = []
        while not self.accept(end):
            if items:
                self.expect(",")
                if self.accept(end):
                    break
            items.append(self.expression())
        return items

    def map(self) -> Node:
        parts: list[Node] = []
        while not self.accept("}"):
            if parts:
                self.expect(",")
                if self.accept("}"):
                    break
            token = self.token
            if self.accept("("):
                key = self.expression()
                self.expect(")")
            elif token.kind in ("name", "number"):
                self.index += 1
                key = Node("constant", token.text)
            elif token.kind == "string":
                self.index += 1
                key = Node("constant", _string(token.text))
            else:
                raise self.unexpected()
            self.expect(":")
            parts += [key, self.expression()]
        return Node("map", None, tuple(parts))

    def postfix(self, node: Node) -> Node:
        while True:
            if (symbol := self.accept(".", "?.")) is not None:
                optional = symbol == "?."
                if optional and self.accept("["):
                    node = self.index_or_slice(node, optional=True)
                    continue
                if self.token.kind != "name":
                    raise self.unexpected()
                node = Node("member", optional, (node, Node("constant", self.name())))
            elif self.accept("["):
                node = self.index_or_slice(node, optional=False)
            elif self.accept("("):
                node = self.call(node, None)
            else:
                return node

    def index_or_slice(self, node: Node, *, optional: bool) -> Node:
        start = None if self.token.text == ":" else self.expression()
        if self.accept(":"):
            end = None if self.token.text == "]" else self.expression()
            self.expect("]")
            return Node("slice", None, (node, start, end))
        self.expect("]")
        return Node("member", optional, (node, start))

    def call(self, function: Node, first: Node | None) -> Node:
        if function.kind == "name" and function.value in PREDICATES:
            return Node("predicate", function.value, tuple(self.predicate_arguments(first)))
        arguments = ([] if first is None else [first]) + self.items(")")
        return Node("call", None, (function, *arguments))

    def predicate_arguments(self, first: Node | None) -> list[Node]:
        arguments = [] if first is None else [first]
        while not self.accept(")"):
            if arguments and not (first is not None and len(arguments) == 1):
                self.expect(",")
            arguments.append(self.expression() if not arguments or len(arguments) > 1 else self.predicate())
            first = None
        return arguments

    def predicate(self) -> Node:
        self.predicates += 1
        if self.accept("{"):
            body = self.sequence()
            self.expect("}")
        else:
            body = self.expression()
        self.predicates -= 1
        return body


def _number(text: str) -> int | float:
    text = text.replace("_", "")
    if text[:2].lower() in ("0x", "0b", "0o"):
        return int(text, 0)
    return float(text) if any(c in text for c in ".eE") else int(text)


_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{3}|.)", re.DOTALL)
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def _string(text: str) -> str:
    if text[0] == "`":
        return text[1:-1]

    def replace(match: re.Match[str]) -> str:
        code = match.group(1)
        if code[0] in "xuU" and len(code) > 1:
            return chr(int(code[1:], 16))
        if len(code) == 3:
            return chr(int(code, 8))
        if code not in _ESCAPES and code not in "\\'\"`":
            raise ExpressionError(f"unable to unescape string {json.dumps(text)}")
        return _ESCAPES.get(code, code)

    return _ESCAPE.sub(replace, text[1:-1])
