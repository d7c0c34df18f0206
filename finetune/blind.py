"""The source of a chat template -> whether it looks at what the messages say, or only copies it.

    {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' }}         copies
    {% if '</think>' in message.content %}                                                            looks

A template that only copies writes the same frame for all conversations with the same roles, so the frame needs to be
rendered once and not for every row. The proof walks through the parsed template and gives each expression a kind; the
first that could carry anything of a content elsewhere than into the output ends it. It holds for messages that have
a role (system, user or assistant) and a content with more than white space in it, and nothing else, and no tools.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

PLAIN = "plain"  # the same for all conversations with the same roles
TEXT = "text"  # contents, copied or stripped, between plain text
MESSAGE = "message"
LIST = "list of messages"
ROLES = ("system", "user", "assistant")
_ABOUT_TYPES = {"string", "defined", "undefined", "none", "mapping", "iterable", "sequence", "number", "boolean"}
_TYPE_OF_TEXT = {"string": True, "defined": True, "undefined": False, "none": False, "mapping": False}
_FUNCTIONS = {"raise_exception", "namespace", "range"}
_OF_LOOP = {"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"}


class _Looks(Exception):
    """Something of a content may get elsewhere than into the output, or the walk does not know."""


@lru_cache(maxsize=64)
def only_copies(source: str) -> bool:
    """Whether the text of a conversation hangs on its contents in no other way than by holding them."""
    import jinja2

    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
        walk = _Walk()
        before: dict[str, str] | None = None
        while before != walk.names:  # until no name gets another kind any more
            before = dict(walk.names)
            walk.body(tree.body)
    except (_Looks, RecursionError, jinja2.TemplateError):
        return False
    return True


class _Walk:
    def __init__(self) -> None:
        self.names = {"messages": LIST}
        self._boxes: set[str] = set()  # names of namespaces that hold a text or a message
        self._macros: dict[str, Any] = {}
        self._inside: list[str] = []

    # ------------------------------------------------------------------------------------------------- statements

    def body(self, nodes: list[Any]) -> None:
        for node in nodes:
            visit = getattr(self, f"_do_{type(node).__name__.lower()}", None)
            if visit is None:
                raise _Looks
            visit(node)

    def _do_output(self, node: Any) -> None:
        for part in node.nodes:
            self._text(part)

    def _do_if(self, node: Any) -> None:
        known = self.truth(node.test)
        if known is None:
            self._value(node.test)
        if known is not False:
            self.body(node.body)
        if known is not True:
            for other in node.elif_:
                reached = self.truth(other.test)
                if reached is None:
                    self._value(other.test)
                if reached is not False:
                    self.body(other.body)
                if reached is True:
                    return
            self.body(node.else_)

    def _do_for(self, node: Any) -> None:
        kind = self.kind(node.iter)
        if node.recursive or kind in (TEXT, MESSAGE):
            raise _Looks
        targets = [node.target] if type(node.target).__name__ == "Name" else node.target.items
        if kind == LIST and len(targets) != 1:
            raise _Looks
        for target in targets:
            self._name(target.name, MESSAGE if kind == LIST else PLAIN)
        if node.test is not None:
            self._value(node.test)
        self.body(node.body)
        self.body(node.else_)

    def _do_assign(self, node: Any) -> None:
        kind = self.kind(node.node)
        if type(node.target).__name__ == "NSRef":
            self._name(f"{node.target.name}.{node.target.attr}", kind)
            if kind != PLAIN:
                self._boxes.add(node.target.name)
        elif type(node.target).__name__ == "Name":
            self._name(node.target.name, kind)
        elif kind != PLAIN:
            raise _Looks

    def _do_assignblock(self, node: Any) -> None:
        if node.filter is not None or type(node.target).__name__ != "Name":
            raise _Looks
        self.body(node.body)
        self._name(node.target.name, TEXT)

    def _do_macro(self, node: Any) -> None:
        if self._macros.setdefault(node.name, node) is not node or node.name in self.names:
            raise _Looks

    def _do_exprstmt(self, node: Any) -> None:
        self.kind(node.node)

    def _do_scope(self, node: Any) -> None:
        self.body(node.body)

    def _do_break(self, node: Any) -> None:
        pass

    _do_continue = _do_break

    def _name(self, name: str, kind: str) -> None:
        """Names are the same everywhere here, and one that may be two things is the one that may less."""
        if name in self._macros or name == "loop":
            raise _Looks
        self.names[name] = self._joined(self.names.get(name, kind), kind)

    # ------------------------------------------------------------------------------------------------ expressions

    def _joined(self, *kinds: str) -> str:
        found = set(kinds)
        if len(found) == 1:
            return kinds[0]
        if found <= {PLAIN, TEXT}:
            return TEXT
        raise _Looks

    def _text(self, node: Any) -> str:
        """Kind of what may be written: plain or text."""
        return self._joined(self.kind(node), PLAIN)

    def _value(self, node: Any) -> None:
        """Whether something is empty is plain for all kinds: a content never is."""
        self.kind(node)

    def _plain(self, nodes: Any) -> str:
        for node in nodes:
            if node is not None and self.kind(node) != PLAIN:
                raise _Looks
        return PLAIN

    def kind(self, node: Any) -> str:
        """The kind of an expression; raises when it could hang on a content."""
        visit = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        # what is not named below is plain when all its parts are
        return str(visit(node)) if visit else self._plain(node.iter_child_nodes())

    def _of_name(self, node: Any) -> str:
        if node.name in self._boxes or node.name == "loop":  # what they hold could go anywhere with them
            raise _Looks
        return self.names.get(node.name, PLAIN)

    def _of_getattr(self, node: Any) -> str:
        return self._member(node.node, node.attr)

    def _of_getitem(self, node: Any) -> str:
        if type(node.arg).__name__ == "Const" and isinstance(node.arg.value, str):
            return self._member(node.node, node.arg.value)
        if self.kind(node.node) == LIST:
            sliced = type(node.arg).__name__ == "Slice"
            self._plain([node.arg])
            return LIST if sliced else MESSAGE
        return self._plain([node.node, node.arg])

    def _member(self, owner: Any, key: str) -> str:
        if type(owner).__name__ == "Name":
            if owner.name in self._boxes:
                return self.names.get(f"{owner.name}.{key}", PLAIN)
            if owner.name == "loop" and key in _OF_LOOP:
                return PLAIN
        what = self.kind(owner)
        if what == PLAIN:
            return PLAIN
        if what != MESSAGE or hasattr(dict, key):
            raise _Looks
        return TEXT if key == "content" else PLAIN

    def _of_call(self, node: Any) -> str:
        arguments = [*node.args, *(pair.value for pair in node.kwargs)]
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _Looks
        function = node.node
        if type(function).__name__ == "Getattr":
            what = self.kind(function.node)
            if what == TEXT and function.attr in ("strip", "lstrip", "rstrip") and not arguments:
                return TEXT
            if what == MESSAGE and function.attr == "get" and node.args and not node.kwargs:
                key = node.args[0]
                if type(key).__name__ == "Const" and isinstance(key.value, str):
                    return self._joined(self._member(function.node, key.value), self._plain(node.args[1:]))
            if what != PLAIN:
                raise _Looks
            return self._plain(arguments)
        if type(function).__name__ != "Name":
            raise _Looks
        if function.name in self._macros:
            return self._macro(self._macros[function.name], node)
        if function.name not in _FUNCTIONS:
            raise _Looks
        return self._plain(arguments)

    def _macro(self, macro: Any, node: Any) -> str:
        if macro.name in self._inside or node.kwargs or len(node.args) > len(macro.args):
            raise _Looks
        for target, value in zip(macro.args, node.args, strict=False):
            self._name(target.name, self.kind(value))
        for target in macro.args[len(node.args) :]:
            self._name(target.name, PLAIN)
        self._plain(macro.defaults)
        self._inside.append(macro.name)
        self.body(macro.body)
        self._inside.pop()
        return TEXT

    def _of_filter(self, node: Any) -> str:
        if node.node is None or node.name == "random":
            raise _Looks
        what = self.kind(node.node)
        self._plain([*node.args, *node.kwargs, node.dyn_args, node.dyn_kwargs])
        if what == TEXT and (node.name in ("trim", "string", "safe")) and not (node.args or node.kwargs):
            return TEXT
        if what == LIST and node.name in ("length", "count"):
            return PLAIN
        if what == LIST and node.name in ("first", "last"):
            return MESSAGE
        if what != PLAIN:
            raise _Looks
        return PLAIN

    def _of_test(self, node: Any) -> str:
        self._plain([*node.args, *node.kwargs, node.dyn_args, node.dyn_kwargs])
        if self.kind(node.node) != PLAIN and node.name not in _ABOUT_TYPES:
            raise _Looks
        return PLAIN

    def _of_compare(self, node: Any) -> str:
        [first, *others] = [node.expr, *(operand.expr for operand in node.ops)]
        keys = [operand.op for operand in node.ops] in (["in"], ["notin"])
        if keys and type(first).__name__ == "Const" and self.kind(others[0]) == MESSAGE:
            return PLAIN
        return self._plain([first, *others])

    def _of_and(self, node: Any) -> str:
        known = self.truth(node.left)
        if known is False:
            return PLAIN
        return self._either(node)

    def _of_or(self, node: Any) -> str:
        if self.truth(node.left) is True:
            return self.kind(node.left)
        return self._either(node)

    def _either(self, node: Any) -> str:
        return self._joined(self.kind(node.left), self.kind(node.right))

    def _of_not(self, node: Any) -> str:
        if self.truth(node.node) is None:
            self._value(node.node)
        return PLAIN

    def _of_condexpr(self, node: Any) -> str:
        known = self.truth(node.test)
        if known is None:
            self._value(node.test)
        chosen = [node.expr1] * (known is not False) + [node.expr2] * (known is not True and node.expr2 is not None)
        return self._joined(*[self.kind(part) for part in chosen]) if chosen else PLAIN

    def _of_add(self, node: Any) -> str:
        return self._joined(self._text(node.left), self._text(node.right))

    def _of_concat(self, node: Any) -> str:
        return self._joined(*[self._text(part) for part in node.nodes])

    # -------------------------------------------------------------------------------------------- what is known

    def truth(self, node: Any) -> bool | None:
        """True or false for every conversation of the docstring's sort; None when it may be either."""
        name = type(node).__name__
        if name == "Not":
            inner = self.truth(node.node)
            return None if inner is None else not inner
        if name in ("And", "Or"):
            left, right = self.truth(node.left), self.truth(node.right)
            stops = name == "Or"
            if left is stops or (right is stops and left is not None):
                return stops
            return (not stops) if left is right is (not stops) else None
        if name == "Name" and node.name == "tools" and "tools" not in self.names:
            return False
        if name == "Test" and self._is_content(node.node):
            return _TYPE_OF_TEXT.get(node.name)
        if name == "Test" and node.name == "string" and self._is_absent(node.node):
            return False
        if self._is_absent(node):
            return False
        if name == "Compare" and len(node.ops) == 1:
            return self._compared(node.expr, node.ops[0].op, node.ops[0].expr)
        return None

    def _compared(self, left: Any, op: str, right: Any) -> bool | None:
        if type(left).__name__ == "Const" and op in ("in", "notin") and self._quiet(right) == MESSAGE:
            there = left.value in ("role", "content")
            return there if op == "in" else not there
        if type(right).__name__ == "Const" and op in ("eq", "ne") and self._key(left) == "role":
            return None if right.value in ROLES else op == "ne"
        return None

    def _key(self, node: Any) -> str | None:
        """The key of a message that an expression reads."""
        if type(node).__name__ == "Getattr":
            owner, key = node.node, node.attr
        elif type(node).__name__ == "Getitem" and type(node.arg).__name__ == "Const":
            owner, key = node.node, node.arg.value
        elif type(node).__name__ == "Call" and type(node.node).__name__ == "Getattr" and node.node.attr == "get":
            if len(node.args) != 1 or type(node.args[0]).__name__ != "Const" or node.kwargs:
                return None
            owner, key = node.node.node, node.args[0].value
        else:
            return None
        return key if self._quiet(owner) == MESSAGE and isinstance(key, str) and not hasattr(dict, key) else None

    def _is_content(self, node: Any) -> bool:
        return self._key(node) == "content"

    def _is_absent(self, node: Any) -> bool:
        return self._key(node) not in (None, "role", "content")

    def _quiet(self, node: Any) -> str | None:
        try:
            return self.kind(node)
        except _Looks:
            return None
