"""How bench.py measures: two things in turns, a process alone. What it measures: one distillation step of train.py at a stated shape."""
from __future__ import annotations

import multiprocessing
import platform
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import peers
import train
from config import Config
from context import find_place
from files import Refusal
from flags import objective_of, parse
from model import Transformer
from optimizer import make_optimizer
from teachers import PRESETS

# -------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Row:
    what: str
    value: str
    spread: str = ""
    aim: str = ""  # set before anything was measured


def seconds(work, device: torch.device) -> float:
    """Of one call: a CPU's process time, an accelerator's wall time."""
    if device.type == "cpu":
        begun = time.process_time()
        work()
        return time.process_time() - begun
    torch.accelerator.synchronize()
    begun = time.perf_counter()
    work()
    torch.accelerator.synchronize()
    return time.perf_counter() - begun


def side_by_side(works: list, device: torch.device, repeats: int) -> list[list[float]]:
    """Seconds of each work, by repeat, after one call of each to warm up. Every second repeat goes backwards: a drift of the machine meets
    all alike."""
    for work in works:
        work()
    taken = [[] for _ in works]
    for repeat in range(repeats):
        order = range(len(works))
        for i in order if repeat % 2 == 0 else reversed(order):
            taken[i].append(seconds(works[i], device))
    return taken


def ratio(what: str, a: list[float], b: list[float], aim: str = "") -> Row:
    """a / b, repeat by repeat."""
    each = [x / y for x, y in zip(a, b)]
    spread = f"{min(each):.3f} to {max(each):.3f}; {statistics.median(a):.3g} s / {statistics.median(b):.3g} s"
    return Row(what, f"{statistics.median(each):.3f}", spread, aim)


def alone(work, make) -> tuple[float, int]:
    """work(make()) in a process of its own -> the CPU seconds of `work`, and the bytes by which it raises the process's resident memory.
    Linux, on the CPU."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=measure_alone, args=(theirs, work, make))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise Refusal(f"{work.__name__}: its process ended without an answer: not on Linux, or not memory enough") from None
    finally:
        process.join()


def measure_alone(pipe, work, make) -> None:
    torch.set_num_threads(1)

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
    made = make()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the high-water mark of the memory begins anew
    before, begun = status("VmRSS"), time.process_time()
    work(made)
    pipe.send((time.process_time() - begun, status("VmHWM") - before))


# ------------------------------------------------------------------------------------------- what is run


def paper_shape(device: torch.device, layers: int = 4) -> tuple[Config, int, int, int]:
    """(teacher, r, sequences, length) of a micro-batch; see bench.py. The vocabulary is cut as the layers are, so that the head keeps its
    share of the work."""
    s, full = 1 if device.type != "cpu" else 8, PRESETS["llama3.2-3b"]
    c = Config.from_hf(full["config"])
    small = replace(c, hidden_size=c.hidden_size // s, intermediate_size=c.intermediate_size // s,
                    num_attention_heads=c.num_attention_heads // s, num_key_value_heads=c.num_key_value_heads // s,
                    num_hidden_layers=layers, vocab_size=c.vocab_size * layers // c.num_hidden_layers // s)
    return small, full["width"] // s, 6, 2048 // s


@dataclass
class Distillation:
    """One optimizer step of train.py, ready to be called, on random weights and random tokens."""
    c: Config
    r: int
    batch: int
    length: int
    accum: int = 1
    flags: str = ""
    compile: bool = False

    def __post_init__(self):
        micro = f"--batch-size {self.batch} --seq-len {self.length} --accum {self.accum}"
        self.args = parse(f"--init orthonormal {micro} --w-align 0.2 {self.flags}".split())
        self.place = find_place(self.args)
        device = self.place.device
        self.teacher = Transformer(self.c)
        self.teacher.initialise(0)
        self.teacher.to(device, self.place.autocast).requires_grad_(False).eval()  # as files of bf16 are held
        self.args.width = self.r
        self.clone = train.build(self.args, None, self.teacher, self.c, None, self.place)
        self.student = self.clone.student
        self.student.checkpointing = self.args.checkpointing
        self.optimizer = make_optimizer(self.clone, 1e-4)
        self.net, self.guide = (torch.compile(m) if self.compile else m for m in (self.student, self.teacher))
        shape = self.accum, self.batch, self.length + 1
        tokens = torch.randint(0, self.c.vocab_size, shape, generator=torch.Generator().manual_seed(0))
        self.micro = [(t[:, :-1], t[:, 1:]) for t in tokens]
        self.objective = objective_of(self.args, self.c.vocab_size)

    def step(self):
        return train.take_step(self.clone, self.optimizer, self.net, self.guide, self.micro, self.objective, 1e-4, 1.0,
                               self.place, [])[0]

    def plain(self):
        """The same micro-batches through peers.plain_step."""
        self.clone.zero_grad()
        with self.place.precision():
            for ids, targets in self.micro:
                peers.plain_step(self.student, self.teacher, ids.to(self.place.device), targets.to(self.place.device))


def table(rows: list[Row]) -> str:
    return "\n".join(["| | measured | repeats, and seconds | aim |", "|---|---|---|---|",
                      *(f"| {r.what} | {r.value} | {r.spread} | {r.aim} |" for r in rows)])


def machine(device: torch.device) -> str:
    if device.type != "cpu":
        name, unit = torch.get_device_module(device).get_device_name(), "device"
    else:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
        unit = "thread"
    return f"{name}, one {unit}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
