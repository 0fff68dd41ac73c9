"""Read protobuf text and keep the place of every field.

protobuf's own text reader forgets where a field stood as soon as it has stored it, so nothing that
is found wrong later (an unknown bottom, a kernel larger than its input) could be shown in the
file. This reader works over the same descriptors, accepts the same language, and returns a
`Located`: the message, and a tree of `Place` of the same form.

The language: https://protobuf.dev/reference/protobuf/textformat-spec, without extension names
and ``Any``, which no net or solver uses.
"""

from __future__ import annotations

import bisect
import difflib
import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto
from google.protobuf.message import Message

from cgdnn.errors import DescriptionError
from cgdnn.proto import cgdnn_pb2 as pb


@dataclass
class Place:
    """Where one value stands, and the places of the fields inside it.

    `line` and `column` count from 1 and point at the first character of the field's name; a line
    of 0 means that only the file is known (binary files, overrides).
    """

    filename: str
    line: int = 0
    column: int = 0
    children: dict[str, list[Place]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.filename}:{self.line}:{self.column}" if self.line else self.filename

    def add(self, name: str, child: Place) -> Place:
        """Record `child` as the next value of field `name`, and return it."""
        self.children.setdefault(name, []).append(child)
        return child

    def child(self, name: str, index: int = 0) -> Place:
        """Return the place of the value `index` of field `name`; a new one if it has none."""
        values = self.children.get(name, [])
        if index < len(values):
            return values[index]
        return self.twin()

    def twin(self, children: dict[str, list[Place]] | None = None) -> Place:
        """Return a new place at the same position, with other children."""
        return Place(self.filename, self.line, self.column, children or {})

    def at(self, *path: str | int) -> Place:
        """Return the place of the value at `path`, or of the nearest known one around it."""
        place = self
        for position, step in enumerate(path):
            if isinstance(step, int):
                continue
            values = place.children.get(step)
            if not values:
                break
            following = path[position + 1] if position + 1 < len(path) else 0
            index = following if isinstance(following, int) else 0
            if not -len(values) <= index < len(values):
                break
            place = values[index]
        return place


@dataclass
class Located:
    """A message, where it was read from, and what its reader wants the user to know.

    Attributes
    ----------
    message
        A `NetParameter` or `SolverParameter` (or any other message).
    place
        The tree of places; its root is the file.
    warnings
        Texts to show to the user; nothing in netdef prints.
    """

    message: Any
    place: Place
    warnings: list[str] = field(default_factory=list)

    @property
    def filename(self) -> str:
        """The file that the message came from, as the user spelt it."""
        return self.place.filename

    def where(self, *path: str | int) -> str:
        """Return ``file:line:col`` of the field at `path`.

        `path` mixes field names and, after the name of a repeated field, indices:
        ``where("layer", 3, "inner_product_param", "num_output")``. A field that is not in the
        text gives the place of the nearest one around it.
        """
        return str(self.place.at(*path))

    def part(self, *path: str | int) -> Located:
        """Return the message at `path` (such as ``"net_param"``) with its places."""
        message = self.message
        for step in path:
            message = message[step] if isinstance(step, int) else getattr(message, step)
        return Located(message, self.place.at(*path), self.warnings)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that `name` was probably meant to be, or None."""
    close = difflib.get_close_matches(name, names := sorted(names), n=1)
    if close:
        return close[0]
    plain = name.replace("_", "").lower()
    return next((other for other in names if other.replace("_", "").lower() == plain), None)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return `` - did you mean 'x'?`` for the nearest of `names`, or nothing."""
    guess = nearest(name, names)
    return f" - did you mean '{guess}'?" if guess else ""


_TOKEN = re.compile(
    r"""(?P<blank>(?:[ \t\r\n\v\f]|\#[^\n]*)+)
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<number>\.?[0-9](?:[eE][+-]|[0-9A-Za-z_.])*)
    |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<symbol>[{}<>\[\]:;,\-])
    |(?P<wrong>.)""",
    re.VERBOSE | re.DOTALL,
)
_INTEGER = re.compile(r"0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*")
_FLOAT = re.compile(r"(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fF]?")
_ESCAPE = re.compile(
    rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL
)
_SIMPLE_ESCAPES = {
    b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v",
    b"?": b"?", b"'": b"'", b'"': b'"', b"\\": b"\\",
}  # fmt: skip

_REPEATED = FieldDescriptorProto.LABEL_REPEATED
_REQUIRED = FieldDescriptorProto.LABEL_REQUIRED

_INTEGER_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_BOOLEANS = {"true": True, "True": True, "t": True, "false": False, "False": False, "f": False}

# String fields that name files: a control character in one is a Windows path gone wrong.
_PATH_FIELDS = frozenset(
    [
        "file_name", "mean_file", "meanfile", "net", "root_folder", "snapshot_prefix", "source",
        "test_net", "train_net", "weights",
    ]
)  # fmt: skip

# Fields of V1 layers that were reshaped, not renamed, on the way to LayerParameter.
_RESHAPED_FIELDS = {
    "blobs_lr": "param { lr_mult: .. }",
    "weight_decay": "param { decay_mult: .. }",
    "blob_share_mode": "param { share_mode: .. }",
}


def parse_text(
    text: str, message_class: type[Message], filename: str, *, numbered: bool = True
) -> Located:
    """Read `text` as one `message_class`.

    Parameters
    ----------
    text
        The whole file. Bytes that are no UTF-8 may stand in comments as surrogates (see
        ``errors="surrogateescape"``).
    message_class
        The class of the message, such as `NetParameter`.
    filename
        The name that places carry.
    numbered
        Whether places have lines and columns; an override such as ``base_lr=0.1`` needs none.

    Raises
    ------
    DescriptionError
        The text is no such message; the error says where and, where it can, what was meant.
    """
    return _Parser(text, filename, numbered).parse(message_class)


def is_binary(data: bytes) -> bool:
    """Tell a serialized message from text: its tags and lengths are control characters."""
    return re.search(rb"[\x00-\x08]", data) is not None


def top_level_fields(text: str) -> list[str]:
    """Return the field names that stand outside all braces, without checking anything else."""
    names = []
    depth = 0
    previous = ""
    for match in _TOKEN.finditer(text):
        token = match.group()
        if match.lastgroup == "blank":
            continue
        if token in "{<[":
            depth += 1
        elif token in "}>]":
            depth -= 1
        elif match.lastgroup == "word" and depth == 0 and previous != ":":
            names.append(token)
        previous = token
    return names


@dataclass(frozen=True)
class _Token:
    kind: str  # word, number, string, symbol, wrong or end
    text: str
    offset: int


@dataclass(frozen=True)
class _Open:
    """A message that is being read: the field that holds it, its place, what closes it."""

    name: str
    message: Message
    place: Place
    closing: str


class _Parser:
    """One pass over the tokens; `_open` is the stack of messages that are not closed yet."""

    def __init__(self, text: str, filename: str, numbered: bool) -> None:
        self._text = text.removeprefix("\ufeff")
        self._filename = filename
        self._numbered = numbered
        self._line_starts = [0, *(m.end() for m in re.finditer("\n", self._text))]
        self._offset = 0
        self._open: list[_Open] = []
        self._token = self._next_token()

    def parse(self, message_class: type[Message]) -> Located:
        message = message_class()
        place = Place(self._filename)
        self._open.append(_Open(message.DESCRIPTOR.name, message, place, ""))
        while self._token.kind != "end":
            if self._token.text in ("}", ">"):
                raise self._error(self._here(), f"'{self._token.text}' closes nothing. Remove it")
            self._read_field()
        return Located(message, place)

    # Tokens

    def _next_token(self) -> _Token:
        while self._offset < len(self._text):
            match = _TOKEN.match(self._text, self._offset)
            assert match is not None  # the last alternative takes any character
            start, self._offset = self._offset, match.end()
            if match.lastgroup != "blank":
                return _Token(str(match.lastgroup), match.group(), start)
        return _Token("end", "", self._offset)

    def _advance(self) -> _Token:
        token, self._token = self._token, self._next_token()
        return token

    def _accept(self, *symbols: str) -> str:
        """Consume the next token if it is one of `symbols`; return its text, else nothing."""
        if self._token.kind == "symbol" and self._token.text in symbols:
            return self._advance().text
        return ""

    def _here(self) -> Place:
        if not self._numbered:
            return Place(self._filename)
        line = bisect.bisect_right(self._line_starts, self._token.offset)
        column = self._token.offset - self._line_starts[line - 1] + 1
        return Place(self._filename, line, column)

    def _seen(self) -> str:
        """Describe the next token for a message."""
        token = self._token
        if token.kind == "end":
            return "the end of the file"
        return token.text if token.kind == "string" else repr(token.text)

    def _error(self, place: Place, text: str) -> DescriptionError:
        """Return an error with `text`, completed by the layer that it is about."""
        if text[-1] not in "?.":
            text += "."
        for opened in reversed(self._open):
            layer: Any = opened.message
            if isinstance(layer, (pb.LayerParameter, pb.V1LayerParameter)) and layer.name:
                kind = f" ({layer.type})" if isinstance(layer.type, str) and layer.type else ""
                text += f' In layer "{layer.name}"{kind}.'
                break
        return DescriptionError(f"{place}: {text}")

    # Grammar

    def _read_field(self) -> None:
        inside = self._open[-1]
        place = self._here()
        token = self._token
        if token.kind != "word":
            raise self._field_name_error(place)
        self._advance()
        descriptor = inside.message.DESCRIPTOR.fields_by_name.get(token.text)
        if descriptor is None:
            raise self._unknown_field_error(token.text, place)
        repeated = is_repeated(descriptor)
        if not repeated and token.text in inside.place.children:
            first = inside.place.children[token.text][0]
            raise self._error(
                place,
                f"{token.text} given twice (first at {first.line}:{first.column}). Keep one",
            )
        is_message = descriptor.type == FieldDescriptor.TYPE_MESSAGE
        if not self._accept(":") and not is_message:
            raise self._error(
                place, f"{token.text} needs a ':' before its value, got {self._seen()}"
            )
        if repeated and self._accept("["):
            self._read_list(descriptor, place)
        else:
            self._read_value(descriptor, place)
        self._accept(",", ";")

    def _read_list(self, descriptor: Any, place: Place) -> None:
        if self._accept("]"):
            return
        while True:
            self._read_value(descriptor, place.twin())
            if self._accept("]"):
                return
            if not self._accept(","):
                raise self._error(
                    place,
                    f"the list of {descriptor.name} goes on with {self._seen()}, "
                    "expected ',' or ']'",
                )

    def _read_value(self, descriptor: Any, place: Place) -> None:
        inside = self._open[-1]
        name = descriptor.name
        if descriptor.type == FieldDescriptor.TYPE_MESSAGE:
            if is_repeated(descriptor):
                child = getattr(inside.message, name).add()
            else:
                child = getattr(inside.message, name)
                child.SetInParent()
            inside.place.add(name, place)
            self._read_message(name, child, place)
            return
        value = self._read_scalar(descriptor, place)
        if is_repeated(descriptor):
            getattr(inside.message, name).append(value)
        else:
            setattr(inside.message, name, value)
        inside.place.add(name, place)

    def _read_message(self, name: str, message: Message, place: Place) -> None:
        opening = self._accept("{", "<")
        if not opening:
            raise self._error(place, f"{name} needs '{{' .. '}}', got {self._seen()}")
        opened = _Open(name, message, place, "}" if opening == "{" else ">")
        self._open.append(opened)
        while not self._accept(opened.closing):
            if self._token.kind == "end":
                raise self._error(
                    place, f"{name} {opening} is not closed before the end of the file"
                )
            self._read_field()
        missing = sorted(_labelled(message.DESCRIPTOR, _REQUIRED) - place.children.keys())
        if missing:
            raise self._error(place, f"{name} lacks {' and '.join(missing)}. Add what is missing")
        self._open.pop()

    # Values

    def _read_scalar(self, descriptor: Any, place: Place) -> object:
        name = descriptor.name
        cpp_type = descriptor.cpp_type
        if cpp_type == FieldDescriptor.CPPTYPE_STRING:
            return self._read_string(descriptor, place)
        if cpp_type == FieldDescriptor.CPPTYPE_ENUM:
            return self._read_enum(name, descriptor.enum_type, place)
        if self._token.kind == "string":
            raise self._error(
                place, f"{name} got {self._seen()}, expected a value without quotes. Remove them"
            )
        if cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return self._read_bool(name, place)
        negative = bool(self._accept("-"))
        if cpp_type in _INTEGER_RANGES:
            return self._read_integer(name, negative, _INTEGER_RANGES[cpp_type], place)
        return self._read_float(name, negative, place)

    def _read_bool(self, name: str, place: Place) -> bool:
        text = self._token.text
        if self._token.kind == "word" and text in _BOOLEANS:
            self._advance()
            return _BOOLEANS[text]
        if self._token.kind == "number" and _INTEGER.fullmatch(text) and _whole(text) <= 1:
            self._advance()
            return _whole(text) == 1
        raise self._error(place, f"{name} got {self._seen()}, expected true or false")

    def _read_integer(
        self, name: str, negative: bool, limits: tuple[int, int], place: Place
    ) -> int:
        text = self._token.text
        if self._token.kind == "number" and _INTEGER.fullmatch(text):
            value = -_whole(text) if negative else _whole(text)
            if limits[0] <= value <= limits[1]:
                self._advance()
                return value
        sign = "-" if negative else ""
        seen = f"{sign}{text}" if self._token.kind == "number" else self._seen()
        raise self._error(
            place, f"{name} got {seen}, expected a whole number from {limits[0]} to {limits[1]}"
        )

    def _read_float(self, name: str, negative: bool, place: Place) -> float:
        text = self._token.text
        value = None
        if self._token.kind == "number" and _FLOAT.fullmatch(text):
            value = float(text.rstrip("fF"))
        elif self._token.kind == "word" and text.lower() in ("inf", "infinity", "nan"):
            value = float(text)
        if value is None:
            raise self._error(place, f"{name} got {self._seen()}, expected a number")
        self._advance()
        return math.copysign(value, -1.0) if negative else value

    def _read_enum(self, name: str, enum: Any, place: Place) -> int:
        text = self._token.text
        names = list(enum.values_by_name)
        if self._token.kind == "string":
            guess = nearest(text[1:-1], names) or names[0]
            raise self._error(
                place,
                f"{name} got {text}, expected an enum without quotes: {guess} "
                f"(one of {', '.join(names)})",
            )
        if self._token.kind == "word":
            if text not in enum.values_by_name:
                hint = did_you_mean(text, names) or "."
                raise self._error(
                    place, f"{name} has no value {text} (one of {', '.join(names)}){hint}"
                )
            self._advance()
            return int(enum.values_by_name[text].number)
        negative = bool(self._accept("-"))
        numbers = sorted(enum.values_by_number)
        number = self._read_integer(name, negative, (numbers[0], numbers[-1]), place)
        if number not in enum.values_by_number:
            raise self._error(place, f"{name} has no value {number} (one of {', '.join(names)})")
        return number

    def _read_string(self, descriptor: Any, place: Place) -> str | bytes:
        name = descriptor.name
        if self._token.kind != "string":
            if self._token.text in ('"', "'"):
                raise self._error(place, f"the string of {name} is not closed on its line")
            raise self._error(place, f"{name} got {self._seen()}, expected a string in quotes")
        value = b""
        while self._token.kind == "string":
            value += self._unescape(name, self._advance().text[1:-1], place)
        if descriptor.type == FieldDescriptor.TYPE_BYTES:
            return value
        if name in _PATH_FIELDS and any(byte < 32 for byte in value):
            raise self._error(
                place,
                f"{name} names a path but holds a control character, {value.decode()!r}. "
                "In a path use / or \\\\",
            )
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise self._error(
                place, f"the string of {name} is not UTF-8. Save the file as UTF-8"
            ) from None

    def _unescape(self, name: str, text: str, place: Place) -> bytes:
        def replace(match: re.Match[bytes]) -> bytes:
            octal, hexadecimal, short, long, simple = match.groups()
            if octal is not None:
                return bytes([int(octal, 8) & 255])
            if hexadecimal is not None:
                return bytes([int(hexadecimal, 16)])
            if simple is None:
                code = int(short or long, 16)
                if code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF:
                    return chr(code).encode()
            elif simple in _SIMPLE_ESCAPES:
                return _SIMPLE_ESCAPES[simple]
            shown = match.group().decode(errors="replace")
            raise self._error(
                place,
                f"the string of {name} has the unknown escape {shown}. "
                "Write a backslash as \\\\, and in a path use / or \\\\",
            )

        return _ESCAPE.sub(replace, text.encode(errors="surrogateescape"))

    # Explanations

    def _field_name_error(self, place: Place) -> DescriptionError:
        inside = self._open[-1]
        text = self._token.text
        if self._text.startswith(("//", "/*"), self._token.offset):
            return self._error(
                place, f"'{self._text[self._token.offset :][:2]}' starts no comment, use #"
            )
        if text in ("}", ">"):
            return self._error(
                place,
                f"'{text}' does not close {inside.name}, which is open since "
                f"{inside.place.line}:{inside.place.column} and needs '{inside.closing}'",
            )
        if text == "[":
            return self._error(
                place, "names of extensions cannot be read here. Write plain field names"
            )
        return self._error(
            place, f"got {self._seen()}, expected the name of a field of {inside.name}"
        )

    def _unknown_field_error(self, name: str, place: Place) -> DescriptionError:
        inside = self._open[-1]
        descriptor = inside.message.DESCRIPTOR
        text = f"{inside.name} has no field '{name}'"
        if descriptor.name == "LayerParameter" and name in _RESHAPED_FIELDS:
            return self._error(place, f"{text} - `{name}` is now `{_RESHAPED_FIELDS[name]}`")
        guess = did_you_mean(name, descriptor.fields_by_name)
        if guess:
            return self._error(place, text + guess)
        for outer in reversed(self._open[:-1]):
            if name in outer.message.DESCRIPTOR.fields_by_name:
                return self._error(
                    place,
                    f"{text}, but {outer.name} has: is a '{inside.closing}' missing before it?",
                )
        inner = _holders(descriptor, name)
        if inner:
            return self._error(place, f"{text} - it belongs inside {' or '.join(inner)} {{ .. }}")
        for other, kind in ((pb.SolverParameter, "solver"), (pb.NetParameter, "net")):
            if len(self._open) == 1 and name in other.DESCRIPTOR.fields_by_name:
                return self._error(place, f"{text}, but a {kind} has: is this a {kind} file?")
        return self._error(place, f"{text}. Remove it, or correct its name")


@functools.cache
def _labelled(descriptor: Any, label: int) -> frozenset[str]:
    """Return the names of the fields of `descriptor` that carry `label`.

    ``FieldDescriptor.label`` is gone from protobuf 7 and ``is_repeated`` unknown to 5.29; the
    descriptor as a message serves both.
    """
    description = DescriptorProto()
    descriptor.CopyToProto(description)
    return frozenset(f.name for f in description.field if f.label == label)


def is_repeated(descriptor: Any) -> bool:
    """Tell whether the field holds a list."""
    return descriptor.name in _labelled(descriptor.containing_type, _REPEATED)


def _whole(text: str) -> int:
    """Return the value of an integer literal: decimal, 0x hexadecimal or 0 octal."""
    if text[:2] in ("0x", "0X"):
        return int(text, 16)
    return int(text, 8 if text[0] == "0" else 10)


def _holders(descriptor: Any, name: str) -> Sequence[str]:
    """Return the message fields of `descriptor` whose messages have a field `name`."""
    return [
        f.name
        for f in descriptor.fields
        if f.message_type is not None and name in f.message_type.fields_by_name
    ][:3]
