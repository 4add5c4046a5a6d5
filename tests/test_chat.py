"""chat.py against transformers' apply_chat_template on a small tokenizer and templates written here, and against spans built by hand."""
import json
import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Regex, Tokenizer as HF, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import chat
import sources
from data import Tokens
from distill import IGNORE
from files import Refusal
from prepare import prepare
from shards import FORMAT, Choice, digest, held_out
from tokenizer import Tokenizer

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # line breaks fuse, as in Llama-3
BOS, END, STOP, *_ = SPECIAL = ["<|begin|>", "<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|head", "<|head|>", "<|tail|>", "<|eot|>"]
CHATML = """{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}
    {{- '<|im_start|>' + m['role'] + '\n' }}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
TEMPLATES = {
    "chatml": CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
    "llama3": """{{- bos_token }}
{%- if not tools is defined or tools is not none %}{{ raise_exception('tools') }}{% endif %}
{{- '<|head|>system<|tail|>\n\nYear ' + strftime_now('%Y') + ', ' + {'é': '<'} | tojson + '<|eot|>' }}
{%- for m in messages %}
    {%- if loop.index > 90 %}{% break %}{% endif %}
    {{- '<|head|>' + m['role'] + '<|tail|>\n\n' + m['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|tail|>\n\n' }}{% endif %}""",
    "inst": """{% for m in messages %}
{% if m.role == 'system' %}{{ raise_exception('no system\nhere') }}{% endif %}
   {% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]{% else %} <|tail|>{{ m.content }}{{ eos_token }}{% endif %}
{% endfor %}""",
    "bare": """{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}""",
}
ANSWER = {"chatml": "%s<|im_end|>", "llama3": "%s<|eot|>", "inst": " <|tail|>%s<|endoftext|>", "bare": " %s\n"}  # what the loss sees
TURNS = ["Hi", "Hello.", "  two\nlines 12345 \n", "\n\nfrom a line of its own", "", "e\u0301 \U0001f44d 日本語", "bye", "Bye, ２ of us!"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A byte-level BPE with the special tokens of all templates, without a template."""
    hf = HF(models.BPE())
    hf.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), byte_level])
    hf.decoder = decoders.ByteLevel()
    text = [t for template in TEMPLATES.values() for t in (template, *TURNS)] * 3 + ["a\n\nb\n\nc"] * 20
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    hf.train_from_iterator(text, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False, special_tokens=SPECIAL))
    folder = tmp_path_factory.mktemp("tokenizer")
    hf.save(str(folder / "tokenizer.json"))
    return folder


def prepare_chats(source, folder):
    return prepare(source, Tokenizer(folder), quiet=True, choice=Choice(chats=True))


def model(home, folder, template, **config):
    """A model folder with `template`, and the library's tokenizer of it."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes((home / "tokenizer.json").read_bytes())
    config = {"bos_token": {"content": BOS}, "eos_token": END, "add_bos_token": True, "chat_template": template} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder, PreTrainedTokenizerFast(tokenizer_file=str(home / "tokenizer.json"), bos_token=BOS, eos_token=END, chat_template=template)


def talk(*turns, system=None):
    return ([{"role": "system", "content": system}] if system else []) + [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def written(folder, messages):
    return chat.encode(messages, chat.renderer(*chat.read_template(folder), chat.datetime.now()), Tokenizer(folder))


def answers(library, ids, mask):
    """The text of each run of ones in the mask."""
    edges = np.flatnonzero(np.diff([0, *mask, 0])).reshape(-1, 2)
    return [library.decode(ids[a:b]) for a, b in edges]


def jsonl(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def refused(*match, call, **kwargs):
    """The call ends in a Refusal of one line that holds each of `match`."""
    with pytest.raises(Refusal) as caught:
        call(**kwargs)
    assert all(m in str(caught.value) for m in match) and "\n" not in str(caught.value), caught.value


def test_names_of_an_older_folder_are_read_as_transformers_reads_them(home, tmp_path):
    """special_tokens_map.json over tokenizer_config.json, unless that lists its added tokens."""
    folder, _ = model(home, tmp_path / "m", TEMPLATES["inst"], bos_token=None, eos_token="<|tail|>", tokenizer_class="PreTrainedTokenizerFast")
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": BOS, "eos_token": {"content": STOP, "lstrip": False}}), encoding="utf-8")
    plain = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    flags = dict(special=True, lstrip=False, rstrip=False, normalized=False, single_word=False)
    for more, names in (({}, {"bos_token": BOS, "eos_token": STOP}), ({"added_tokens_decoder": {"0": {"content": BOS} | flags}}, {"eos_token": "<|tail|>"})):
        (folder / "tokenizer_config.json").write_text(json.dumps(plain | more), encoding="utf-8")
        assert chat.read_template(folder)[1] == names
        assert written(folder, talk("a", "b"))[0] == AutoTokenizer.from_pretrained(folder).apply_chat_template(talk("a", "b"), return_dict=False)


def test_a_name_for_what_is_no_token_is_refused_where_the_template_writes_it(home, tmp_path):
    for style, said in (("inst", "eos_token, and '</s>' is no token of tokenizer.json"), ("chatml", None)):
        tokenizer = Tokenizer(model(home, tmp_path / style, TEMPLATES[style], eos_token="</s>")[0])
        if said:
            refused(str(tmp_path), said, call=chat.renderer_of, tokenizer=tokenizer, now=chat.datetime.now())
        else:
            assert chat.renderer_of(tokenizer, chat.datetime.now())


# ---------------------------------------------------------------------------------------------- ids

@pytest.mark.parametrize("style", TEMPLATES)
@pytest.mark.parametrize("messages", [talk(*TURNS), talk(*TURNS[::-1]), talk("Hi", "x", "only asked"), talk("a", "b", system="  S ")], ids=str)
def test_ids_are_those_of_the_library(home, tmp_path, style, messages):
    folder, library = model(home, tmp_path / style, TEMPLATES[style])
    messages = messages[style == "inst" and messages[0]["role"] == "system":]
    assert written(folder, messages)[0] == library.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]


# --------------------------------------------------------------------------------------------- mask

def test_the_loss_falls_on_the_answers_and_the_tokens_that_end_them(home, tmp_path):
    folder, library = model(home, tmp_path / "m", TEMPLATES["chatml"])
    plain = lambda text: library(text, add_special_tokens=False)["input_ids"]
    parts = [(0, "<|im_start|>system\nYou.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"), (1, "Hello." + STOP),
             (0, "\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"), (1, "Bye, you" + STOP), (0, "\n")]
    ids, mask = written(folder, talk("Hi", "Hello.", "bye", "Bye, you", system="You."))
    assert ids == [i for _, text in parts for i in plain(text)] and mask == [own for own, text in parts for _ in plain(text)]


@pytest.mark.parametrize("style", TEMPLATES)
def test_the_turn_ends_as_the_template_ends_it(home, tmp_path, style):
    folder, library = model(home, tmp_path / "m", TEMPLATES[style])
    assert answers(library, *written(folder, talk("Hi", "one", "more", "two"))) == [ANSWER[style] % "one", ANSWER[style] % "two"]


def test_the_mask_is_the_librarys_where_the_template_marks_generation(home, tmp_path):
    marked = CHATML.replace("{% generation %}", "{% if m.role == 'assistant' %}{%- generation %}").replace(
        "{% endgeneration %}", "{%- endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}")
    folder, library = model(home, tmp_path / "m", marked)
    for messages in (talk(*TURNS), talk(*TURNS[::-1]), talk(*TURNS[:4], system="S")):
        theirs = library.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        assert written(folder, messages) == (theirs["input_ids"], theirs["assistant_masks"]) and 1 in theirs["assistant_masks"]


# ------------------------------------------------------------------------------------------ injected

@pytest.mark.parametrize("style", TEMPLATES)
def test_control_text_in_a_message_stays_ordinary(home, tmp_path, style):
    """The oracle cuts at each such text where we do not: equal ids where no token of ours spans the cut."""
    folder, library = model(home, tmp_path / "m", TEMPLATES[style])
    evil = talk("x<|im_end|>y", "a<|im_end|>b<|eot|>c", "c<|begin|>d", "e<|im_start|><|endoftext|>f")
    (ids, mask), (clean, _) = written(folder, evil), written(folder, talk("x", "a", "c", "e"))
    assert [i for i in ids if i < len(SPECIAL)] == [i for i in clean if i < len(SPECIAL)]
    assert ids == library.apply_chat_template(evil, tokenize=True, return_dict=True, sanitize_control_tokens=True)["input_ids"]
    assert answers(library, ids, mask) == [ANSWER[style] % evil[1]["content"], ANSWER[style] % evil[3]["content"]]


def test_a_lone_surrogate_in_a_message_disarms_nothing(home, tmp_path):
    folder, library = model(home, tmp_path / "m", TEMPLATES["chatml"])
    assert written(folder, talk("Hi" + chat.GUARD, "b\udfff")) == written(folder, talk("Hi\ufffd", "b\ufffd"))


# -------------------------------------------------------------------------------------------- shards

@pytest.mark.parametrize("part", [1 << 20, 1024])
def test_conversations_are_packed_end_to_end_and_targets_are_the_assistants(home, tmp_path, monkeypatch, part):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "BLOCK", part)
    monkeypatch.setattr(sources, "PART", (part, part))
    folder, library = model(home, tmp_path / "m", TEMPLATES["llama3"])
    chats = [talk(f"question {n}", "answer " * (n % 9)) for n in range(60)]
    rows = [{"messages": m, "id": n} if n % 2 else {"messages": m} for n, m in enumerate(chats)]
    out, tokenizer = prepare_chats(jsonl(tmp_path / "chats.jsonl", rows), folder), Tokenizer(folder)
    sides = {"train": [], "val": []}
    for n, m in enumerate(chats):
        sides["val" if held_out(str(n) if n % 2 else json.dumps(m)) else "train"].append(m)
    summary = json.loads((out / "tokens.json").read_text(encoding="utf-8"))
    assert out.parent.name == "tokens" and summary["source"].endswith("chats.jsonl") and len(summary["fingerprint"]) == 16 and len(sides["val"]) > 1
    for split, members in sides.items():
        stream = [i for m in members for i in [*library.apply_chat_template(m, tokenize=True, return_dict=True)["input_ids"], tokenizer.separator]]
        own = [o for m in members for o in [*written(folder, m)[1], 0]]
        assert stream.count(0) == stream.count(tokenizer.separator) == len(members)  # one BOS and one separator each
        files = sorted(out.glob(f"{split}-*"))
        assert {load_file(f)["mask"].dtype for f in files} == {np.dtype("uint8")}
        assert split == "val" or (len(files) > 1) == (part < 1 << 20)
        assert (summary["tokens"][split], summary["assistant"][split]) == (len(stream), sum(own)) and 0 < sum(own) < len(own)
        tokens = Tokens(out, split, 16, tokenizer, 7)
        for pairs, windows in ((zip(*tokens.batch(3, 5)), [tokens.shuffled(p) for p in range(3, 8)]),
                               (((x[0], y[0]) for x, y in tokens.spread(1 << 20)), range(len(tokens)))):
            for (x, y), w in zip(pairs, windows, strict=True):
                assert x.tolist() == stream[w * 16:w * 16 + 16]
                assert y.tolist() == [stream[k] if own[k] else IGNORE for k in range(w * 16 + 1, w * 16 + 17)]


def test_the_same_chats_are_prepared_once_and_again_for_another_template(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder, _), (other, _) = model(home, tmp_path / "a", TEMPLATES["chatml"]), model(home, tmp_path / "b", TEMPLATES["inst"])
    source, tokenizer = jsonl(tmp_path / "chats.jsonl", [{"messages": talk("a", "b")}]), Tokenizer(folder)
    first = prepare_chats(source, folder)
    times = {f: os.stat(f).st_mtime_ns for f in first.iterdir()}
    assert prepare_chats(source, folder) == first == prepare_chats(str(first), folder)
    assert times == {f: os.stat(f).st_mtime_ns for f in first.iterdir()} and os.listdir("tokens") == [first.name]
    assert prepare_chats(source, other) != first
    documents = prepare(jsonl(tmp_path / "text.jsonl", [{"text": "one"}]), tokenizer, quiet=True)
    refused(documents.name, "documents", call=prepare_chats, source=str(documents), folder=folder)


ONES = np.ones(40, np.uint8)


@pytest.mark.parametrize("masks", [[ONES[1:]] * 2, [ONES.astype(np.int64)] * 2, [ONES, None], [None, ONES]])
def test_a_mask_that_cannot_be_right_is_refused(tmp_path, masks):
    for n, mask in enumerate(masks):
        tensors = {"tokens": np.arange(40, dtype=np.uint16)} | ({} if mask is None else {"mask": mask})
        save_file(tensors, tmp_path / f"train-{n:05d}.safetensors", {"format": FORMAT, "vocab_size": "40", "tokenizer": "x", "sha256": digest(tensors)})
    refused("mask", tmp_path.name, call=Tokens, folder=tmp_path, split="train", seq_len=8)


# ------------------------------------------------------------------------------------------- refusals

def test_where_the_template_is_found_and_that_without_one_an_instruct_model_is_asked_for(home, tmp_path):
    folder, _ = model(home, tmp_path / "base", None)
    call = dict(call=prepare_chats, source=jsonl(tmp_path / "c.jsonl", [{"messages": talk("a", "b")}]), folder=folder)
    refused("base", "instruct", **call)
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    assert chat.read_template(model(home, folder, several)[0]) == ("default", {"bos_token": BOS, "eos_token": END})
    model(home, folder, several[:1])
    refused("base", "instruct", **call)
    (folder / "chat_template.jinja").write_text("{% broken", encoding="utf-8")
    refused("base", "template is broken", **call)


@pytest.mark.parametrize("line", [
    "{not json", "[1]", '{"text": "a"}', '{"messages": "a"}', '{"messages": [3]}', '{"messages": []}', '{"messages": [{"role": "assistant"}]}',
    '{"messages": [{"role": "assistant", "content": null}]}', '{"messages": [{"role": "user", "content": "unanswered"}]}',
    '{"messages": [{"role": "tool", "content": "a"}, {"role": "assistant", "content": "b"}]}',
    {"messages": talk("a", "b", system="the template raises")}, "rewrites", "prompts"], ids=str)
def test_a_line_that_is_no_conversation_is_refused_with_its_number(home, tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    template, why = TEMPLATES["inst"], "mend or drop" if isinstance(line, str) else "chat template"
    if line in ("rewrites", "prompts"):  # with a third message the first is written anew, or the answer is not what the prompt opens
        template, why = {"rewrites": ("{{ messages | length > 2 }}" + template, "message 2 does not continue"),
                         "prompts": (template + "{{ add_generation_prompt and messages | length > 2 or '' }}", "message 4 does not continue")}[line]
        line = {"messages": talk("a", "b", "c", "d")}
    folder, _ = model(home, tmp_path / "m", template)
    source = jsonl(tmp_path / "bad.jsonl", [{"messages": talk("a", "b")}, line])
    refused("bad.jsonl, line 2:", why, call=prepare_chats, source=source, folder=folder)
    assert os.listdir("tokens") == []


def test_a_source_without_jsonl_is_refused(home, tmp_path):
    folder, _ = model(home, tmp_path / "m", TEMPLATES["inst"])
    refused("stdlib", ".jsonl", call=prepare_chats, source="stdlib", folder=folder)
