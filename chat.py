"""Chat: conversations become token shards in which the loss falls on the assistant's tokens alone.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}     one line of a .jsonl file

The model's own template writes a conversation out: control tokens, role names, default system prompt. The ids are those of
transformers' apply_chat_template, with one difference: a control token written *inside* a message stays ordinary text.

To tell the two apart, every place in a message where the name of a special token begins gets a guard before it, a lone surrogate,
which no UTF-8 text can hold. What the template writes has no guard, so it becomes the special id; the guards are dropped when the text
between control tokens is encoded. The message keeps its words and its ends, so a template that trims or searches it still does.
(Placeholders would hide the words from the template; encoding part by part would cut tokens where the template's text meets a message.)
"""
from __future__ import annotations

import json
import os.path
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from data import Tokenizer, held_out, source_files, write_shards
from teachers import Refusal, read_json

GUARD = "\ud800"


def conversations(files: list[tuple[str, Path]]) -> Iterator[tuple[str, str, list[dict]]]:
    """(place, name, messages) of each line; name is its id, else the conversation itself, so that a copy falls on the same side."""
    for _, path in files:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                    messages = [{key: m[key] for key in ("role", "content")} for m in row["messages"]]
                    if not all(m["role"] in ("system", "user", "assistant") and isinstance(m["content"], str) for m in messages):
                        raise ValueError("a role other than system, user, assistant, or a content that is not text")
                    if all(m["role"] != "assistant" for m in messages):
                        raise ValueError("no assistant message to learn from")
                except (ValueError, KeyError, TypeError) as error:
                    raise Refusal(f'{path}, line {number}: not {{"messages": [{{"role", "content"}}, ...]}} '
                                  f"({type(error).__name__}: {error}); mend or drop the line") from None
                name = row["id"] if row.get("id") is not None else json.dumps(messages)
                yield f"{path}, line {number}", str(name), messages


def read_template(folder: Path) -> tuple[str, dict[str, str]]:
    """(chat template, special tokens by name) of a model folder. Raises Refusal where there is no template."""
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    tokens = {name: token["content"] if isinstance(token, dict) else token for name, token in config.items()
              if name.endswith("_token") and isinstance(token, (str, dict))}
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((t["template"] for t in template if t["name"] == "default"), None)
    if (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if not template:
        raise Refusal(f"{folder}: no chat template (chat_template.jinja, or in tokenizer_config.json); chat data needs an instruct model")
    return template, tokens


def renderer(template: str, tokens: dict[str, str], now: datetime) -> Callable[[list[dict], bool], str]:
    """The template as a function of (messages, whether the assistant's turn is to be opened), in jinja2's sandbox, with what
    transformers offers to it. The time is one for all calls: two renderings of a conversation must not fall on two days."""
    def raise_exception(message):
        raise TemplateError(message)

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    sandbox.filters["tojson"] = lambda value, ensure_ascii=False, **how: json.dumps(value, ensure_ascii=ensure_ascii, **how)
    sandbox.globals.update(raise_exception=raise_exception, strftime_now=now.strftime)
    # {% generation %}, with which some templates mark the answer for transformers, says nothing new here: a plain scope in its place
    compiled = sandbox.from_string(re.sub(r"(\{%[-+]?\s*(?:end)?)generation(\s*[-+]?%\})", r"\1with\2", template))
    return lambda messages, opened: compiled.render(messages=messages, tools=None, documents=None, add_generation_prompt=opened, **tokens)


def encode(messages: list[dict], render: Callable[[list[dict], bool], str], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids of a conversation, and for each a 1 where the loss falls: an answer and the token that ends its turn, not the line
    break after it. Raises ValueError where the template does not write turn after turn; what the template raises goes through."""
    names = "|".join(map(re.escape, sorted(tokenizer.special, key=len, reverse=True)))  # the longest first, where one begins another
    control, turn_end = re.compile(f"(?<!{GUARD})({names})"), re.compile(rf"(?<!{GUARD})(?:{names})(?=\s*\Z)")
    plain = lambda text: tokenizer.encode(text.replace(GUARD, ""))
    guarded = [m | {"content": re.sub(f"(?={names})", GUARD, re.sub("[\ud800-\udfff]", "\ufffd", m["content"]))} for m in messages]

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
        read = plain if k % 2 == 0 else lambda text: [tokenizer.special[text]] if text else []
        new = read(piece)
        own = [0] * len(new)
        for begin, end in answers:
            begin, end = max(begin - place, 0), min(end - place, len(piece))
            if begin < end:  # the tokens before the first that the text outside the answer does not give by itself are not the answer's
                first, last = (len(os.path.commonprefix([new, read(piece[:edge])])) for edge in (begin, end))
                own[first:last] = [1] * (last - first)
        ids, mask, place = ids + new, mask + own, place + len(piece)
    return ids, mask


def prepare(source: str, folder: str | Path, tokenizer: Tokenizer, quiet: bool = False) -> Path:
    """Tokenise the chats of `source` as the model in `folder` writes them into a folder of shards, or find that of an earlier call.

    A template may write the date: tokens.json states which. Raises Refusal: no .jsonl file, no template or a broken one, a line that is
    no conversation or that the template refuses.
    """
    if (Path(source) / "tokens.json").exists():
        if "assistant" not in read_json(Path(source) / "tokens.json"):
            raise Refusal(f"{source}: holds documents, not chats; give the .jsonl file of the chats")
        return Path(source)
    files = [(name, path) for name, path in source_files(source) if path.suffix == ".jsonl"]
    if not files:
        raise Refusal(f'data {source!r}: no .jsonl file in it; chat data is {{"messages": [{{"role", "content"}}, ...]}} a line')
    template, tokens = read_template(Path(folder))
    now, assistant = datetime.now(), {"train": 0, "val": 0}
    try:
        render = renderer(template, tokens, now)
    except TemplateError as error:
        raise Refusal(f"{folder}: its chat template is broken ({error.message}); fetch the file again") from None

    def rows():
        for place, name, messages in conversations(files):
            split = "val" if held_out(name) else "train"
            try:
                ids, mask = encode(messages, render, tokenizer)
            except Exception as error:  # a template is a program of somebody else's and may raise anything
                reason = " ".join(str(error).split())
                raise Refusal(f"{place}: the chat template of {folder} cannot write this ({reason}); mend or drop the line") from None
            assistant[split] += sum(mask)
            yield split, sum(len(m["content"].encode("utf-8", "replace")) for m in messages), {"tokens": ids, "mask": mask}

    return write_shards(source, files, rows(), tokenizer, None, quiet, (template, tokens), dict(assistant=assistant, date=str(now.date())))
