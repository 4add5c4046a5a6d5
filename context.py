"""What a run stands on: its device, ranks and precision; and what it has at hand, how it takes its data, is judged, and says so."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import runs
import watch
from data import Mixture, Tokens, place_in_order
from distill import evaluate
from files import Refusal
from flags import Args, launched, objective_of
from lrc import Clone
from model import Transformer
from tokenizer import Tokenizer


@dataclass(frozen=True)
class Place:
    """Device, ranks and precision, decided once."""
    device: torch.device
    rank: int
    world: int
    autocast: torch.dtype | None

    def precision(self):
        return torch.autocast(self.device.type, self.autocast) if self.autocast else contextlib.nullcontext()

    def put(self, tensor: Tensor) -> Tensor:
        """On the device, without a wait for what it is at."""
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def device_ids(self) -> list[int] | None:
        """As DDP wants it: the GPU of this rank."""
        return [self.device.index] if self.device.type == "cuda" else None

    def __str__(self) -> str:
        return f"{self.device.type}, {'autocast to bfloat16' if self.autocast else 'float32'}"

    def say(self, text: str) -> None:
        if self.rank == 0:
            watch.tell(text)


def find_place(args: Args) -> Place:
    told = launched()
    rank, world, local = (told.get(name, default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    cuda = torch.cuda.is_available()
    if cuda and world > 1 and "LOCAL_RANK" not in told:
        raise Refusal(f"WORLD_SIZE={world}, but LOCAL_RANK is not set, so that no rank knows its GPU; start several ranks with torchrun")
    if cuda and 0 < (gpus := torch.cuda.device_count()) <= local:
        raise Refusal(f"rank {rank}: this machine has {gpus} GPU{'s' * (gpus > 1)}, too few for LOCAL_RANK={local}; "
                      f"give torchrun --nproc_per_node={gpus}")
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world > 1:
        try:
            # so long, because ranks wait while rank 0 tokenises or evaluates
            dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(hours=6), device_id=device if cuda else None)
        except ValueError as error:  # an environment variable is missing or no number
            raise Refusal(f"WORLD_SIZE={world}, but {error}; start several ranks with torchrun, or unset WORLD_SIZE for one") from None
        except dist.DistNetworkError as error:
            raise Refusal(f"rank {rank} cannot meet the others at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} "
                          f"({' '.join(str(error).split())[:200]}); is the port taken, the address right?") from None
    half = args.dtype == "bfloat16" or (args.dtype == "auto" and cuda and torch.cuda.is_bf16_supported(including_emulation=False))
    return Place(device, rank, world, torch.bfloat16 if half else None)


@dataclass
class Context:
    """What a run works with."""
    args: Args
    run: Path
    place: Place
    clone: Clone
    teacher: Transformer | None
    tokenizer: Tokenizer
    train: Tokens | Mixture
    held: Tokens | Mixture

    def __post_init__(self):
        self.objective = objective_of(self.args, self.tokenizer.vocab_size, self.tokenizer.separator)
        self.step_tokens = self.args.batch_size * self.args.seq_len * self.args.accum * self.place.world

    def held_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The same ones at every evaluation."""
        return self.held.spread(max(1, self.args.eval_tokens // self.args.seq_len), max(1, 2048 // self.args.seq_len))

    def micro_batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's share of a step's sequences: where they stand follows from the step alone."""
        places = [place_in_order(step, m, self.place.rank, self.args.accum, self.place.world, self.args.batch_size)
                  for m in range(self.args.accum)]
        return [self.train.batch(place, self.args.batch_size) for place in places]

    def score(self, model: Transformer, step: int, whose: str = "the student's") -> dict[str, float]:
        real_vocab = self.tokenizer.vocab_size if self.args.stage == "distill" else None
        with self.place.precision():
            figures = evaluate(model, self.teacher, self.held_batches(), real_vocab=real_vocab, separator=self.objective.separator)
        return watch.must_be_finite(figures, step, whose)

    def evaluate(self, step: int) -> None:
        figures = self.score(self.clone.student, step)
        runs.append_metrics(self.run, {"step": step, "tokens": step * self.step_tokens} | figures)
        shown = {"val_ce": "ce", "val_kl": "kl at T=1", "val_top1": "top1"}
        self.place.say(f"step {step:>6}/{self.args.steps}  held-out: " + "  ".join(f"{shown[k]} {v:.4f}" for k, v in figures.items()))

    def log(self, step: int, figures: dict, lr: float, seconds: float, left: float) -> None:
        """A step's row in the metrics and, every --log-every steps, its line; `seconds` of this step, `left` of all that are to come."""
        speed = self.step_tokens / seconds
        row = {"step": step, "tokens": step * self.step_tokens} | figures | {"lr": lr, "tokens_per_second": round(speed, 1)}
        runs.append_metrics(self.run, row)
        if "loss" in figures and (step % self.args.log_every == 0 or step == self.args.steps):
            terms = "  ".join(f"{k} {figures[k]:.4f}" for k in ("kl", "ce", "align", "loss") if k in figures)
            self.place.say(f"step {step:>6}/{self.args.steps}  {terms}  |g| {figures['grad_norm']:.2f}  lr {lr:.2e}  {speed:,.0f} tok/s  "
                           f"left {int(left) // 60}:{int(left) % 60:02d}")
