"""Chat: a conversation becomes ids, and a mask of those on which the loss falls: the assistant's alone.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}     one row of a source
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}         the same

The model's own template writes a conversation out: control tokens, role names, default system prompt. The ids are those of
transformers' apply_chat_template, with one difference: a control token written *inside* a message stays ordinary text.

To tell the two apart, every place in a message where the name of a special token begins gets a guard before it, a lone surrogate,
which no UTF-8 text can hold. What the template writes has no guard, so it becomes the special id; the guards are dropped when the text
between control tokens is encoded. The message keeps its words and its ends, so a template that trims or searches it still does.
A template is a program out of somebody else's folder: it runs in jinja2's sandbox, for SECONDS and with ROOM bytes more at the most.
(Placeholders would hide the words from the template; encoding part by part would cut tokens where the template's text meets a message.)
"""
from __future__ import annotations

import contextlib
import json
import os.path
import re
import signal
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from files import Refusal, one_line
from tokenizer import Tokenizer, named_tokens, tokenizer_config

GUARD = "\ud800"
SECONDS, ROOM = 10, 1 << 30
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}


def messages_of(row: dict, answered: bool) -> list[dict]:
    """The chat in a row: {"messages": [{"role", "content"}]}, or {"from", "value"} in their place as some sets write it. Raises
    ValueError or KeyError where it is none; with `answered` also where no message is the assistant's."""
    # where a table has both spellings, the other one is there, and null
    first = lambda m, *names: next((m[name] for name in names if m.get(name) is not None), None)
    messages = [{"role": ROLES[first(m, "role", "from")], "content": first(m, "content", "value")} for m in row["messages"]]
    if not messages or not all(isinstance(m["content"], str) for m in messages):
        raise ValueError("no message" if not messages else "a content that is not text")
    if any(m.get("tool_calls") for m in row["messages"]):
        raise ValueError("a tool call")
    if answered and all(m["role"] != "assistant" for m in messages):
        raise ValueError("no assistant message to learn from")
    return messages


def read_template(folder: Path) -> tuple[str, dict[str, str]] | None:
    """(chat template, special tokens by name) of a model folder; None where it has no template."""
    config = tokenizer_config(folder)
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None)
    if (folder / "chat_template.jinja").exists():
        try:
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise Refusal(f"{folder / 'chat_template.jinja'}: not UTF-8 text ({error}); fetch the file again") from None
    if template and (not isinstance(template, str) or re.search("[\ud800-\udfff]", template)):
        # half a character cannot be written into a file
        raise Refusal(f"{folder}: its chat template is no text; fetch the file again")
    return (template, named_tokens(config)) if template else None


def renderer_of(tokenizer: Tokenizer, now: datetime) -> Callable[[list[dict], bool], str] | None:
    """The chat template of a model folder as a function (see renderer); None where it has none, a Refusal where it is broken."""
    folder = tokenizer.folder
    found = read_template(folder)
    for name, text in found[1].items() if found else ():
        if name in found[0] and text and text not in tokenizer.special and len(tokenizer.encode(text)) > 1:
            raise Refusal(f"{folder}: its chat template writes {name}, and {text!r:.60} is no token of tokenizer.json; "
                          "name one that is in tokenizer_config.json")
    try:
        return found and renderer(*found, now)
    except Exception as error:  # jinja2 makes Python of it, and hands on what that raises
        raise Refusal(f"{folder}: its chat template is broken ({type(error).__name__}: {one_line(error)}); fetch the file again") from None


@contextlib.contextmanager
def bounded():
    """What is done inside gets SECONDS (in the main thread) and ROOM bytes more than there are now (on Linux), or ends in an exception."""
    def stop(*_):
        raise TemplateError(f"it does not end within {SECONDS} s")
    with contextlib.ExitStack() as after:
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
            after.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, stop))
            after.callback(signal.setitimer, signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
        if os.path.exists("/proc/self/statm"):
            import resource
            with open("/proc/self/statm", "rb") as pages:
                now = int(pages.read().split()[0]) * resource.getpagesize()
            soft, hard = resource.getrlimit(resource.RLIMIT_AS)
            after.callback(resource.setrlimit, resource.RLIMIT_AS, (soft, hard))
            resource.setrlimit(resource.RLIMIT_AS, (min((limit for limit in (now + ROOM, soft, hard) if limit >= 0)), hard))
        yield


class Sandbox(ImmutableSandboxedEnvironment):
    """No attribute of Python's own, no range above 100,000 (jinja2's rules); and no power, and no product above a million: nothing
    could interrupt them."""
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context, operator, left, right):
        size = lambda value: len(value) if hasattr(value, "__len__") else abs(value)
        if operator == "**" or size(left) * size(right) > 1_000_000:
            raise SecurityError(f"`{operator}` of large numbers or texts")
        return super().call_binop(context, operator, left, right)


def renderer(template: str, tokens: dict[str, str], now: datetime) -> Callable[[list[dict], bool], str]:
    """The template as a function of (messages, whether the assistant's turn is to be opened), in jinja2's sandbox, with what
    transformers offers to it. The time is one for all calls: two renderings of a conversation must not fall on two days."""
    def raise_exception(message):
        raise TemplateError(message)

    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    sandbox.filters["tojson"] = lambda value, ensure_ascii=False, **how: json.dumps(value, ensure_ascii=ensure_ascii, **how)
    sandbox.globals.update(raise_exception=raise_exception, strftime_now=now.strftime)
    # {% generation %}, with which some templates mark the answer for transformers, says nothing new here: a plain scope in its place
    with bounded():
        compiled = sandbox.from_string(re.sub(r"(\{%[-+]?\s*(?:end)?)generation(\s*[-+]?%\})", r"\1with\2", template))
    return lambda messages, opened: compiled.render(messages=messages, tools=None, documents=None, add_generation_prompt=opened, **tokens)


def encode(messages: list[dict], render: Callable[[list[dict], bool], str], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids of a conversation, and for each a 1 where the loss falls: an answer and the token that ends its turn, not the line
    break after it. Raises ValueError where the template does not write turn after turn; what the template raises goes through."""
    names = "|".join(map(re.escape, sorted(tokenizer.special, key=len, reverse=True)))  # the longest first, where one begins another
    control, turn_end = re.compile(f"(?<!{GUARD})({names})"), re.compile(rf"(?<!{GUARD})(?:{names})(?=\s*\Z)")
    ids_of = lambda text: tokenizer.encode(text.replace(GUARD, ""))
    guarded = [m | {"content": re.sub(f"(?={names})", GUARD, re.sub("[\ud800-\udfff]", "\ufffd", m["content"]))} for m in messages]

    with bounded():
        whole, answers = render(guarded, False), []  # answers: (begin, end) in the characters of whole
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt, through = render(guarded[:i], True), render(guarded[:i + 1], False)
                if not through.startswith(prompt) or not whole.startswith(through):
                    raise ValueError(f"message {i + 1} does not continue what the template wrote before it")
                end = turn_end.search(through, len(prompt))
                answers.append((len(prompt), end.end() if end else len(through)))

    ids, mask, place = [], [], 0
    for k, piece in enumerate(control.split(whole)):  # text, control token, text, ..., text
        read = ids_of if k % 2 == 0 else lambda text: [tokenizer.special[text]] if text else []
        new = read(piece)
        own = [0] * len(new)
        for begin, end in answers:
            begin, end = max(begin - place, 0), min(end - place, len(piece))
            if begin < end:  # the tokens before the first that the text outside the answer does not give by itself are not the answer's
                first, last = (len(os.path.commonprefix([new, read(piece[:edge])])) for edge in (begin, end))
                own[first:last] = [1] * (last - first)
        ids, mask, place = ids + new, mask + own, place + len(piece)
    return ids, mask
