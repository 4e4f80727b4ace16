"""The small languages: expressions (expr-lang), when (govaluate), tags, JSONPath, loops."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflows.local.language import jsonpath
from workflows.local.language.exprlang import evaluate, evaluate_bool
from workflows.local.language.exprsyntax import ExpressionError
from workflows.local.language.govaluate import WhenError, should_execute
from workflows.local.language.tags import Substitution, TagError, environment
from workflows.local.language.values import any_string, duration, duration_text, fnv32a, go_float, go_quote, to_json
from workflows.local.loops import LoopError, expand
from workflows.local.plan import Call, depends_of

SCOPE = {"lastRetry.exitCode": "2", "lastRetry.status": "Failed", "lastRetry.duration": "12", "n": "7", "a-b.c": "x"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("2 ** 3 ** 2", 512.0),
        ("-2 ** 2", -4.0),
        ("7 / 2", 3.5),
        ("-7 % 3", -1),
        ("1 < 2 and not (2 > 3)", True),
        ("1 < 2 < 3", True),
        ("asInt(lastRetry.exitCode) > 1 && lastRetry.status != 'Error'", True),
        ("lastRetry.exitCode in ['1', '2']", True),
        ("lastRetry.exitCode not in ['1', '2']", False),
        ("lastRetry.exitCode == 2", False),
        ("lastRetry.misspelt == nil", True),
        ("lastRetry?.none ?? 'd'", "d"),
        ("n matches '^[0-9]+$' ? 'digits' : 'else'", "digits"),
        ("filter(1..5, {# % 2 == 1})", [1, 3, 5]),
        ("map([{'k': 1}, {'k': 2}], .k)", [1, 2]),
        ("[3, 1, 2] | sort() | map(# * 10)", [10, 20, 30]),
        ("reduce([1, 2, 3], #acc + #, 10)", 16),
        ("all(['ab', 'ac'], # startsWith 'a') && none([1], # > 1)", True),
        ("count([1, 2, 3], # > 1)", 2),
        ("let x = 3; let y = x + 1; x * y", 12),
        ("'abc'[1:2] + \"d\" + `e`", "bde"),
        ("[1, 2, 3][-1]", 3),
        ("{'a': {'b': 5}}.a['b']", 5),
        ("len(split('a,b,c', ','))", 3),
        ("fromJSON('{\"a\": [1]}').a[0]", 1.0),
        ("toJson({'b': 1, 'a': '<'})", '{"a":"\\u003c","b":1}'),
        ("sprig.upper('x') + sprig.ternary('y', 'n', true)", "Xy"),
        ("if n == '7' { 'seven' } else { 'other' }", "seven"),
        ("sprig.date('2006-01-02', 0)", "1970-01-01"),
        ("sprig.date('2006', '1970-01-01') == sprig.date('2006', sprig.now())", True),
        ("string(0.1 + 0.2)", "0.30000000000000004"),
    ],
)
def test_an_expression_has_the_value_that_expr_lang_gives_it(text: str, value: object) -> None:
    assert evaluate(text, environment(SCOPE)) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 +", "unexpected end"),
        ("'a' | sprig.upper()", "unexpected token '.'"),
        ("unknown == 1", "unknown name unknown"),
        ("asInt('12.345') > 1", "int(12.345)"),
        ("'a' > 1", "invalid operation"),
        ("1 && true", "invalid operation"),
        ("[1][3]", "out of range"),
        ("lastRetry.a.b", "cannot fetch"),
        ("'unclosed", "not terminated"),
        ("sprig.nosuch('x')", "not callable"),
        ("5 % 0", "divide by zero"),
    ],
)
def test_an_expression_that_cannot_be_evaluated_says_why(text: str, words: str) -> None:
    with pytest.raises(ExpressionError, match=".*" + words.replace("(", r"\(").replace(")", r"\)") + ".*"):
        evaluate(text, environment(SCOPE))


def test_a_condition_must_be_a_bool() -> None:
    with pytest.raises(ExpressionError, match="bool"):
        evaluate_bool("1", {})


@pytest.mark.parametrize(
    ("when", "holds"),
    [
        ("", True),
        ("heads == heads", True),
        ("10 < 9", False),
        ("'10' == 10", False),
        ("abc =~ 'b'", True),
        ("abc !~ 'b'", False),
        ("(a == b && c == c) || !(1 == 2)", True),
        ("a in ('a', 'b')", True),
        ("[foo-bar] == 'foo-bar'", True),
        ("5 - 2 - 1 == 2", True),
        ("2 ** 3 == 8 && 7 % 4 == 3", True),
        ("'b' > 'a'", True),
        ("true ? 1 == 1 : 1 == 2", True),
        ("'' == ''", True),
        ("a\\-b == 'a-b'", True),
    ],
)
def test_when_holds_as_in_govaluate(when: str, holds: bool) -> None:
    assert should_execute(when) is holds


@pytest.mark.parametrize(
    "when", ["foo-bar == x", "abc > 1", "(1 == 1", "1 ==", "== 1", "a b", "1", "x.y == 1", "'open", "1 === 1", "!5"]
)
def test_when_that_means_nothing_is_refused(when: str) -> None:
    with pytest.raises(WhenError):
        should_execute(when)


def test_tags_are_replaced_everywhere_and_unknown_ones_stay() -> None:
    substitution = Substitution({"a": "1", "inputs.parameters.x": "y", "b.y": "nested"})
    document = {
        "{{a}}": ["{{ a }}-{{unknown}}", {"k": "{{=asInt(a) + 1}}"}, 5, None],
        "n": "{{b.{{inputs.parameters.x}}}}",
    }
    found = substitution.apply(document)
    assert found == {"1": ["1-{{unknown}}", {"k": "2"}, 5, None], "n": "{{b.y}}"}
    assert substitution.apply(found)["n"] == "nested", "nested tags resolve from the inside, one pass each"


def test_tags_with_a_strict_prefix_must_resolve() -> None:
    substitution = Substitution({"tasks.a.status": "Failed"}, ("tasks", "steps"))
    assert substitution.apply("{{tasks.a.status}} {{item}} {{=item}}") == "Failed {{item}} {{=item}}"
    for text in ("{{tasks.b.status}}", "{{=tasks.b.status}}"):
        with pytest.raises(TagError) as caught:
            substitution.apply(text)
        assert caught.value.missing
    for text in ("{{=asInt(tasks.a.status)}}", "{{=first([])}}"):
        with pytest.raises(TagError) as caught:
            substitution.apply(text)
        assert not caught.value.missing


def test_expressions_wait_for_variables_that_come_later() -> None:
    text = "{{=workflow.status == 'Failed' ? 'x' : 'y'}}"
    assert Substitution({"workflow.name": "w"}).apply(text) == text
    assert Substitution({"workflow.name": "w", "workflow.status": "Failed"}).apply(text) == "x"


@given(st.text(alphabet=st.characters(blacklist_characters="{}"), max_size=30), st.text(max_size=30))
def test_substitution_copies_values_and_surroundings_as_they_are(around: str, value: str) -> None:
    assert Substitution({"v": value}).text(f"{around}{{{{v}}}}{around}") == around + value + around


def test_json_path_selects_values_and_lists() -> None:
    document = jsonpath.parse_document('{"a": [{"n": 1, "x": "p"}, {"n": 2, "x": "q"}], "b": {"c": "d"}}')
    assert jsonpath.query("$.b.c", document) == "d"
    assert jsonpath.query("$['b']['c']", document) == "d"
    assert jsonpath.query("$.a[1].x", document) == "q"
    assert jsonpath.query("$.a[*].n", document) == [1.0, 2.0]
    assert jsonpath.query("$..n", document) == [1.0, 2.0]
    assert jsonpath.query("$.a[?(@.n > 1)].x", document) == ["q"]
    assert jsonpath.query("$.a[?(@.n > 0 && @.n < 2)].x", document) == ["p"]
    assert jsonpath.query("$.a[?(@.x == 'q' || @['n'] == 1)].n", document) == [1.0, 2.0]
    assert jsonpath.query("$.a[?(@.none)].n", document) == []
    for wrong in ("a", "$.none", "$.a[9]", "$.b["):
        with pytest.raises(ValueError):
            jsonpath.query(wrong, document)


def test_values_are_written_as_go_writes_them() -> None:
    assert (
        to_json({"b": [1.0, 2.5, True, None], "a": "<&>"}, sort_keys=True)
        == '{"a":"\\u003c\\u0026\\u003e","b":[1,2.5,true,null]}'
    )
    assert [go_float(x) for x in (5.0, 0.5, 1e21, 1e-7, 123456789.0)] == ["5", "0.5", "1e+21", "1e-07", "123456789"]
    assert [any_string(x) for x in (1.0, 1000000, 0.1, 12345678901234567890, 1.5e-7, True)] == [
        "1", "1000000", "0.1", "12345678901234567000", "0.00000015", "true",
    ]  # fmt: skip
    assert go_quote('a"b\n\x01é') == '"a\\"b\\n\\x01é"'
    assert fnv32a("hello") == 0x4F9F2CAB
    assert [duration(text) for text in ("90", "1m30s", "1.5h", "250ms")] == [90.0, 90.0, 5400.0, 0.25]
    assert [duration_text(x) for x in (0.0, 0.25, 65.0, 3725.5)] == ["0s", "250ms", "1m5s", "1h2m5.5s"]
    with pytest.raises(ValueError, match="5 minutes"):
        duration("5 minutes")


def _names(**raw: object) -> list[str]:
    call = Call(
        "steps",
        {"name": "s", "template": "t", "arguments": {"parameters": [{"name": "v", "value": "{{item}}"}]}, **raw},
    )
    return [f"{c.name}={c.arguments['parameters'][0]['value']}" for c in expand(call, {})]


def test_loops_name_their_items_as_argo_does() -> None:
    assert _names(withItems=["a(b)", 1.0, True]) == ["s(0:ab)=a(b)", "s(1:1)=1", "s(2:true)=true"]
    assert _names(withItems=[{"b": 1, "a": "x"}]) == ['s(0:a:x,b:1)={"a":"x","b":1}']
    assert _names(withParam="[1.50, [1, 2]]") == ["s(0:1.50)=1.50", "s(1:[1 2])=[1,2]"]
    assert _names(withSequence={"start": "3", "end": "1", "format": "n%02d"}) == [
        "s(0:n03)=n03",
        "s(1:n02)=n02",
        "s(2:n01)=n01",
    ]
    assert _names(withSequence={"count": 0}) == []
    for wrong in ({"withParam": "{}"}, {"withParam": "nope"}, {"withSequence": {"count": "x"}}):
        with pytest.raises(LoopError):
            _names(**wrong)


@given(
    st.lists(
        st.one_of(
            st.integers(-99, 99),
            st.booleans(),
            st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_items_from_json_text_mean_the_same_as_items_in_yaml(items: list[object]) -> None:
    assert _names(withItems=items) == _names(withParam=json.dumps(items))


def test_depends_widens_bare_names() -> None:
    tasks = {name: Call("tasks", {"name": name}) for name in ("a", "b-c")}
    found = depends_of(Call("tasks", {"name": "x", "depends": "a && !b-c.Failed"}), tasks)
    assert found.names == ("a", "b-c")
    assert found.logic == "(a.Succeeded || a.Skipped || a.Daemoned) && !b_c.Failed"
    tolerant = {"a": Call("tasks", {"name": "a", "continueOn": {"failed": True, "error": True}})}
    old = depends_of(Call("tasks", {"name": "x", "dependencies": ["a"]}), tolerant)
    assert old.logic == "(a.Succeeded || a.Skipped || a.Daemoned || a.Errored || a.Failed)"
