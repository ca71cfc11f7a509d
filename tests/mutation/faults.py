"""All single faults that can be planted in one source file: a turned comparison, a number off by 1 and the like.

A fault is one replaced expression or statement. It is known by its file, its function and the text of the change, so
that it keeps its name when lines above it move.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
LONG = 120
CONTEXT = 30
NEGATED_BY_A_COMPARISON = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
IN_ANY_ORDER = {"max", "min"}
"""Functions to which the order of arguments says nothing."""
TYPING_CALLS = {"cast", "NewType", "TypeVar", "overload"}
NO_BEHAVIOUR = {
    "defer_build",  # of a pydantic model: saves time at import
    "frozen",  # of a dataclass: a promise to the reader, which mypy holds
    "maxsize",  # of a cache: one entry more or less changes no answer
    "non_blocking",  # of a copy: the device's order is the same; tests/runtime/test_gpu_build.py sees a wait on a GPU
    "slots",  # of a dataclass: saves memory
    "strict",  # of zip: states what holds already
}
"""Keywords whose value and absence are no faults: no result depends on them."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: replace the bytes ``start`` to ``end`` of a file by ``text``."""

    file: str
    """Path from the repository's root."""
    function: str
    """Qualified name of the function or class around it; ``<module>`` outside of any."""
    change: str
    """Source before and after, white space folded; ``(2)`` is the second change of that text in a function."""
    line: int
    last_line: int
    start: int
    end: int
    text: str
    in_body: bool
    """In the body of a function, so that it takes effect without a new import."""
    scope: tuple[int, int]
    """First and last line of the innermost class or function, or of the file."""
    name: str = ""
    """Of a planted fault: its name in planted.toml."""
    tests: tuple[str, ...] = ()
    """Of a planted fault: the tests to run, where core's tests do not reach it."""

    @property
    def key(self) -> str:
        return f"{self.file} | {self.function} | {self.change}"

    def apply(self, source: bytes) -> bytes:
        """The source with this fault in it."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def rank(self, seed: int) -> str:
        """Place in the draw of a seed. It depends on the key alone: a change elsewhere keeps the rest of a sample."""
        return hashlib.sha256(f"{seed} {self.key}".encode()).hexdigest()


def find_faults(root: Path, file: str) -> list[Fault]:
    """All faults of one source file, in order of lines, with unique keys."""
    source = (root / file).read_bytes()
    seen: Counter[str] = Counter()
    faults = []
    for fault in _Finder(file, source).find():
        seen[fault.key] += 1
        count = seen[fault.key]
        faults.append(fault if count == 1 else replace(fault, change=f"{fault.change} ({count})"))
    return faults


class _Finder:
    def __init__(self, file: str, source: bytes) -> None:
        self.file = file
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def find(self) -> Iterator[Fault]:
        tree = ast.parse(self.source)
        yield from self._visit_all(tree.body, tree, [], False, (1, len(self.starts)))

    def _span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _visit_all(
        self, nodes: list[ast.stmt], parent: ast.AST, names: list[str], body: bool, scope: tuple[int, int]
    ) -> Iterator[Fault]:
        for node in nodes:
            yield from self._visit(node, parent, names, body, scope)

    def _visit(
        self, node: ast.AST, parent: ast.AST, names: list[str], body: bool, scope: tuple[int, int]
    ) -> Iterator[Fault]:
        if _is_left_alone(node):
            return
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            assert node.end_lineno is not None
            inner = [*names, node.name]
            span = (min([node.lineno, *(each.lineno for each in node.decorator_list)]), node.end_lineno)
            is_function = isinstance(node, ast.FunctionDef)
            for decorator in node.decorator_list:
                yield from self._visit(decorator, node, inner, body, span)
            if isinstance(node, ast.FunctionDef):
                for default in [*node.args.defaults, *(each for each in node.args.kw_defaults if each)]:
                    yield from self._visit(default, node, inner, body, span)
            yield from self._visit_all(node.body, node, inner, body or is_function, span)
            return
        if isinstance(node, ast.expr | ast.stmt):
            for text in _replacements(node, parent):
                yield self._fault(node, parent, text, names, body, scope)
        for child in _children(node):
            yield from self._visit(child, node, names, body, scope)

    def _fault(
        self,
        node: ast.expr | ast.stmt,
        parent: ast.AST,
        text: str,
        names: list[str],
        body: bool,
        scope: tuple[int, int],
    ) -> Fault:
        start, end = self._span(node)
        if isinstance(node, ast.Constant) and isinstance(parent, ast.expr | ast.keyword):
            first, last = self._span(parent)
            before = self.source[first:last].decode()
            after = (self.source[first:start] + text.encode() + self.source[end:last]).decode()
        else:
            before, after = ast.unparse(node), text
        # Later lines keep their numbers: functions are found again by them.
        lost = self.source[start:end].count(b"\n")
        padded = f"({text}{chr(10) * lost})" if isinstance(node, ast.expr) else text + "\n" * lost
        assert node.end_lineno is not None
        return Fault(
            file=self.file,
            function=".".join(names) or "<module>",
            change=_change(before, after),
            line=node.lineno,
            last_line=node.end_lineno,
            start=start,
            end=end,
            text=padded,
            in_body=body,
            scope=scope,
        )


def _change(before: str, after: str) -> str:
    """Both texts, white space folded; of long ones the place that differs."""
    before, after = " ".join(before.split()), " ".join(after.split())
    if max(len(before), len(after)) > LONG:
        head = _shared(before, after)
        tail = _shared(before[:head:-1], after[:head:-1])
        first, last = max(0, head - CONTEXT), max(0, tail - CONTEXT)
        before, after = (
            ("…" if first else "") + each[first : len(each) - last] + ("…" if last else "") for each in (before, after)
        )
    return f"{before}  ->  {after}"


def _shared(one: str, two: str) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(two)))


def _is_left_alone(node: ast.AST) -> bool:
    """Annotations and what serves them, texts with values in them, documentation, declarations without a body."""
    match node:
        case ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.pattern() | ast.Expr(value=ast.Constant()):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.Call(func=ast.Name(id=name)) if name in TYPING_CALLS:
            return True
        case ast.FunctionDef():
            return any(
                isinstance(each, ast.Name) and each.id in ("abstractmethod", "overload") for each in node.decorator_list
            )
        case ast.ClassDef():
            return any(isinstance(each, ast.Name) and each.id == "Protocol" for each in node.bases)
    return False


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.keyword) and child.arg in NO_BEHAVIOUR:
                continue
            if isinstance(child, ast.AST):
                yield child


def _replacements(node: ast.expr | ast.stmt, parent: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.stmt):
        yield from _changed_statements(node)
        return
    for new in _changed_expressions(node):
        yield ast.unparse(new)
    if isinstance(node, ast.Constant):
        yield from (repr(value) for value in _changed_constants(node, parent))
    is_condition = isinstance(parent, ast.If | ast.While | ast.IfExp) and parent.test is node
    if is_condition and not isinstance(node, ast.UnaryOp):
        turned = isinstance(node, ast.Compare) and isinstance(node.ops[0], NEGATED_BY_A_COMPARISON)
        if not turned:
            yield f"not ({ast.unparse(node)})"


def _changed_statements(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return None"
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Continue() | ast.Break() | ast.Delete() | ast.AugAssign():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"


def _changed_constants(node: ast.Constant, parent: ast.AST) -> Iterator[object]:
    match node.value:
        case bool() as flag:
            yield not flag
        case int() | float() as number:
            yield number + 1
        case str() as text if _is_key(node, parent):
            yield text + "_"


def _is_key(node: ast.expr, parent: ast.AST) -> bool:
    match parent:
        case ast.Subscript():
            return parent.slice is node
        case ast.Dict():
            return node in parent.keys
        case ast.Compare():
            return True
        case ast.Call(func=ast.Attribute(attr="get" | "pop" | "setdefault") | ast.Name(id="getattr")):
            return node in parent.args[:2]
    return False


def _changed_expressions(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Compare():
            for i, operator in enumerate(node.ops):
                ops = [*node.ops[:i], COMPARISONS[type(operator)](), *node.ops[i + 1 :]]
                yield ast.Compare(node.left, ops, node.comparators)
        case ast.BoolOp():
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
            for i in range(len(node.values)):
                rest = [*node.values[:i], *node.values[i + 1 :]]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            yield ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            yield from _without_a_condition(node)
        case ast.Call():
            yield from _changed_calls(node)


def _without_a_condition(node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Iterator[ast.expr]:
    for i, loop in enumerate(node.generators):
        for condition in loop.ifs:
            new = copy.copy(node)
            ifs = [each for each in loop.ifs if each is not condition]
            changed = ast.comprehension(loop.target, loop.iter, ifs, loop.is_async)
            new.generators = [*node.generators[:i], changed, *node.generators[i + 1 :]]
            yield new


def _changed_calls(node: ast.Call) -> Iterator[ast.expr]:
    args = node.args
    in_any_order = isinstance(node.func, ast.Name) and node.func.id in IN_ANY_ORDER
    for i in range(0 if in_any_order else len(args) - 1):
        one, two = args[i : i + 2]
        if not isinstance(one, ast.Starred) and not isinstance(two, ast.Starred) and ast.dump(one) != ast.dump(two):
            yield ast.Call(node.func, [*args[:i], two, one, *args[i + 2 :]], node.keywords)
    for i, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in NO_BEHAVIOUR:
            yield ast.Call(node.func, args, [*node.keywords[:i], *node.keywords[i + 1 :]])
