"""Log-likelihoods of continuations and greedy text, for lm-eval, from our own network.

Options of one question share its context, so they go through the network as one row: the context once, then each option in its own
branch, which sees the context and itself. What a context is, and where it ends, is lm-eval's own decision
(EleutherAI/lm-evaluation-harness); `harness` is its interface.
"""
from __future__ import annotations

import sys
import time

import torch
import torch.nn.functional as F

from files import Refusal
from model import Transformer, widen
from teachers import resolve
from tokenizer import Tokenizer


class Model:
    """A network that answers lm-eval: log-likelihoods of continuations, and greedy text."""

    def __init__(self, source: str, batch_tokens: int = 4096, device: str | None = None, dtype: str = "auto"):
        """batch_tokens: padded tokens that go through the network together; dtype: autocast, as in train.py."""
        self.folder, self.origin = resolve(source)
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.device = torch.device(device) if device else accelerator or torch.device("cpu")
        self.tokenizer = Tokenizer(self.folder)
        self.net = Transformer.from_pretrained(self.folder, device=str(self.device)).requires_grad_(False)
        self.tokenizer.must_fit(self.net.config.vocab_size, self.folder)
        self.batch_tokens, self.max_length = batch_tokens, self.net.config.max_position_embeddings
        self.dtype = "bfloat16" if dtype == "bfloat16" or dtype == "auto" and self.device.type != "cpu" else "float32"
        self.truncated = 0
        # stands before a continuation that has no context
        self.prefix = self.tokenizer.end if self.tokenizer.begin is None else self.tokenizer.begin

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """BOS first where the tokenizer's own post-processor puts one (Llama), never where it does not (Qwen), and never twice."""
        ids = self.tokenizer.encode(text)
        if not bos or self.tokenizer.bos is None:
            return ids
        written = next(name for name, i in self.tokenizer.special.items() if i == self.tokenizer.bos)
        return [self.tokenizer.bos, *(self.tokenizer.encode(text[len(written):]) if text.startswith(written) else ids)]

    def fit(self, context: list[int], continuation: list[int]) -> list[int]:
        """The context, cut from the left so that all but the last token fits: lm-eval's own rule. The continuation is never cut."""
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise Refusal(f"a continuation of {len(continuation)} tokens is longer than the model's {self.max_length} positions")
        if len(context) > room:
            if not self.truncated:
                print(f"{self.origin}: contexts beyond {self.max_length} positions are cut from the left", file=sys.stderr)
            self.truncated += 1
        return context[-room:]

    def score(self, pairs: list[tuple[list[int], list[int]]], progress: str = "") -> list[tuple[float, bool]]:
        """(context, continuation) -> (log-likelihood of the continuation, whether it is the greedy one), in the order given."""
        rows: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}  # context -> continuation -> where it was asked
        for i, (context, continuation) in enumerate(pairs):
            rows.setdefault(tuple(self.fit(context, continuation)), {}).setdefault(tuple(continuation), []).append(i)
        length = lambda item: len(item[0]) + sum(len(c) - 1 for c in item[1])
        ordered, found, begun = sorted(rows.items(), key=length, reverse=True), [(0.0, False)] * len(pairs), time.time()
        done = 0
        while done < len(ordered):  # longest first: the first batch is the one that may not fit
            batch = ordered[done:done + max(1, self.batch_tokens // length(ordered[done]))]
            for where, answer in self.answers(batch):
                for i in where:
                    found[i] = answer
            done += len(batch)
            if progress and sys.stderr.isatty():
                left = (time.time() - begun) / done * (len(ordered) - done)
                print(f"\r{progress}: {done}/{len(ordered)} contexts, at most {left:.0f} s left ",
                      end="" if done < len(ordered) else "\n", file=sys.stderr, flush=True)
        return found

    @torch.no_grad()
    def answers(self, batch) -> list[tuple[list[int], tuple[float, bool]]]:
        """One forward pass over rows of (context, {continuation: where}).

        A row is the context and, after it, each continuation but its last token. A continuation token sits at the position it would have
        alone, and attends to the context and to its own branch: the logits are those of separate rows, the context is paid for once.
        """
        T = max(len(context) + sum(len(c) - 1 for c in continuations) for context, continuations in batch)
        ids, positions = (torch.zeros(len(batch), T, dtype=torch.long) for _ in range(2))
        branch = torch.full((len(batch), T), -1)  # -1: padding, 0: context, k: the k-th continuation
        rows, columns, targets, spans = [], [], [], []  # where to read logits, what should follow there, and whose it is
        for b, (context, continuations) in enumerate(batch):
            n = end = len(context)
            ids[b, :n], positions[b, :n], branch[b, :n] = torch.tensor(context), torch.arange(n), 0
            for k, (continuation, where) in enumerate(continuations.items(), 1):
                inner = len(continuation) - 1
                ids[b, end:end + inner] = torch.tensor(continuation[:-1], dtype=torch.long)
                positions[b, end:end + inner] = n + torch.arange(inner)
                branch[b, end:end + inner] = k
                rows += [b] * len(continuation)
                columns += [n - 1, *range(end, end + inner)]  # the first token follows the context's last
                targets += continuation
                spans.append((where, len(continuation)))
                end += inner
        mask = None
        if branch.max() > 0:
            same = (branch[:, :, None] == branch[:, None]) | (branch[:, None] == 0)  # own branch, or the context
            mask = (same & torch.ones(T, T, dtype=torch.bool).tril())[:, None].to(self.device)  # (B, 1, T, T)
        rows, columns, targets = torch.tensor(rows), torch.tensor(columns), torch.tensor(targets)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            x = self.net(ids.to(self.device), head=False, positions=positions.to(self.device), mask=mask)  # (B, T, H)
            scores, greedy = [], []
            for part in torch.arange(len(targets)).split(512):  # the head, only where a continuation is
                z = widen(self.net.lm_head(x[rows[part], columns[part]]))  # (512, V)
                scores.append(F.log_softmax(z, -1).gather(1, targets[part, None].to(self.device))[:, 0].cpu())
                greedy.append((z.argmax(-1).cpu() == targets[part]))
        scores, greedy = torch.cat(scores).split([n for _, n in spans]), torch.cat(greedy).split([n for _, n in spans])
        return [(where, (s.double().sum().item(), bool(g.all()))) for (where, _), s, g in zip(spans, scores, greedy)]

    @torch.no_grad()
    def write(self, text: str, until: list[str], count: int) -> str:
        """Greedy text after `text`, up to the first of `until`, the end token, or `count` tokens. No cache: each token reruns the
        prefix."""
        ids = self.encode(text)[-max(1, self.max_length - count):]
        start, out = len(ids), ""
        while len(ids) < start + count:
            x = self.net(torch.tensor([ids], device=self.device), head=False)
            ids.append(int(self.net.lm_head(x[:, -1]).argmax()))
            if ids[-1] == self.tokenizer.end:
                break
            out = self.tokenizer.decode(ids[start:])
            if cuts := [out.find(stop) for stop in until if stop and stop in out]:
                return out[:min(cuts)]
        return out


def harness(model: Model):
    """The same as an lm-eval LM. Splitting context from continuation, empty contexts and rolling windows are lm-eval's own."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM

    class Ours(TemplateLM):
        eot_token_id, prefix_token_id, max_length = model.tokenizer.end, model.prefix, model.max_length
        tokenizer_name = model.tokenizer.fingerprint

        def tok_encode(self, string, add_special_tokens=None, **_):
            return model.encode(string, bos=add_special_tokens is not False)

        def loglikelihood(self, requests, disable_tqdm=False):
            return super().loglikelihood(requests, disable_tqdm=True)  # its bar is for the tokenizing; the scoring has a line of its own

        def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
            return model.score([(context, continuation) for _, context, continuation in requests], model.origin)

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            totals = []
            for request in requests:
                windows = utils.get_rolling_token_windows(token_list=self.tok_encode(request.args[0]), prefix_token=model.prefix,
                                                          max_seq_len=model.max_length, context_len=1)
                totals.append(sum(score for score, _ in model.score([utils.make_disjoint_window(window) for window in windows])))
            return totals

        def generate_until(self, requests, disable_tqdm=False):
            texts = []
            for request in requests:
                text, options = request.args
                if options.get("do_sample") or options.get("temperature"):
                    raise Refusal("this model answers greedily; a task that samples cannot be scored here")
                until = options.get("until") or []
                texts.append(model.write(text, [until] if isinstance(until, str) else until, options.get("max_gen_toks", 256)))
            return texts

    return Ours()
