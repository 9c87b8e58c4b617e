"""One measurement of :mod:`bench.peers`, in a process of its own: trains one method by one library
with one seed, and prints what that took as a line of JSON.

    python -m bench.peer_process '{"by": "avalanche", "method": "er", ...}'

Only the library in question is imported before the peak of the memory is read.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

#: What all libraries are told alike: Adam's settings, DER++'s weights, SCR's projection and
#: temperature.
LR, WEIGHT_DECAY = 1e-3, 1e-4
ALPHA, BETA = 0.1, 0.5
PROJECTION, TEMPERATURE = 128, 0.07
#: Images of an evaluation's forward pass, as in a run on a CPU.
_EVALUATION_BATCH = 256

# Of the stream's images in [0, 1]: the constants that a run calls cifar10.
_MEAN = (125.3 / 255, 123.0 / 255, 113.9 / 255)
_STD = (63.0 / 255, 62.1 / 255, 66.7 / 255)


class Given(NamedTuple):
    """What a measurement is told. ``data``: an .npz as ``stream.name`` takes it; ``order``: a .npy
    with the order of its training images, int64 [tasks, images]; ``checkout``: the folder of the
    authors' code, None for other libraries.
    """

    by: str
    method: str
    seed: int
    threads: int
    width: int
    memory: int
    tasks: int
    batch: int
    data: str
    order: str
    checkout: str | None


class Images(NamedTuple):
    """Normalised images float32 [N, 3, 32, 32] and labels int64 [N], each task's in order of their
    arrival, and those of all tests.
    """

    tasks: list[tuple[Tensor, Tensor]]
    x_test: Tensor
    y_test: Tensor

    @property
    def classes(self) -> int:
        return int(self.y_test.max()) + 1


class Meter:
    """Counts the rows that pass a network's first layer with gradients, and the optimiser's steps;
    takes the seconds of :meth:`training` without those of :meth:`pause`.
    """

    def __init__(self, first_layer: nn.Module) -> None:
        self.seconds, self.rows, self.steps = 0.0, 0, 0
        first_layer.register_forward_pre_hook(self._pass)
        register_optimizer_step_post_hook(self._step)

    def _pass(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.rows += len(inputs[0]) * torch.is_grad_enabled()

    def _step(self, *_: Any) -> None:
        self.steps += 1

    @contextmanager
    def training(self, sign: int = 1) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += sign * (time.perf_counter() - start)

    def pause(self, call: Callable[[], None]) -> Callable[[], None]:
        """The same call, whose time does not count."""

        def paused() -> None:
            with self.training(-1):
                call()

        return paused


def load(given: Given) -> Images:
    with np.load(given.data) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}

    def normalised(images: Tensor) -> Tensor:
        scaled = (images / 255 - torch.tensor(_MEAN)) / torch.tensor(_STD)
        return scaled.permute(0, 3, 1, 2).contiguous()

    x, y = normalised(arrays["x_train"]), arrays["y_train"].long()
    tasks = [(x[rows], y[rows]) for rows in torch.from_numpy(np.load(given.order))]
    return Images(tasks, normalised(arrays["x_test"]), arrays["y_test"].long())


@torch.no_grad()
def accuracy(scores: Callable[[Tensor], Tensor], images: Images) -> float:
    """The mean over tasks of the share of test images whose class has the highest score."""
    found = torch.cat([scores(part).argmax(1) for part in images.x_test.split(_EVALUATION_BATCH)]) == images.y_test
    task = images.y_test * len(images.tasks) // images.classes
    return float(torch.stack([found[task == t].float().mean() for t in range(len(images.tasks))]).mean())


def peak_bytes() -> int:
    """The largest resident memory of this process. (``ru_maxrss`` would include its parent's.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measured(meter: Meter, final: float, network: nn.Module, forward: Callable[[Tensor], object]) -> dict[str, Any]:
    peak = peak_bytes()
    from mose_fast.nn import count_cost

    cost = count_cost(network, forward, (32, 32))
    return {
        "seconds": meter.seconds,
        "steps": meter.steps,
        "rows": meter.rows,
        "peak_bytes": peak,
        "accuracy": final,
        "parameters": cost.parameters,
        "macs": cost.macs,
    }


def adam(network: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(network.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)


class _OnSphere(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1)


def by_avalanche(given: Given) -> dict[str, Any]:
    from avalanche.benchmarks import tensors_benchmark
    from avalanche.models import SCRModel, SlimResNet18
    from avalanche.training.supervised import DER, SCR, Replay

    images = load(given)
    torch.manual_seed(given.seed)
    backbone = network = SlimResNet18(images.classes, nf=given.width)
    if given.method == "scr":
        size = backbone.linear.in_features
        backbone.linear = nn.Identity()
        layers = [nn.Linear(size, size), nn.ReLU(), nn.Linear(size, PROJECTION), _OnSphere()]
        network = SCRModel(backbone, nn.Sequential(*layers))
    meter = Meter(backbone.conv1)
    told = {
        "model": network,
        "optimizer": adam(network),
        "mem_size": given.memory,
        "train_mb_size": given.batch,
        "eval_mb_size": _EVALUATION_BATCH,
        "evaluator": None,
    }
    if given.method == "er":
        strategy = Replay(**told, criterion=nn.CrossEntropyLoss())
    elif given.method == "derpp":
        strategy = DER(**told, batch_size_mem=given.batch, alpha=ALPHA, beta=BETA)
    else:
        strategy = SCR(**told, batch_size_mem=given.batch, temperature=TEMPERATURE)
        # Of its classifier, which training does not use: we compute ours for an evaluation, too.
        strategy.compute_class_means = meter.pause(strategy.compute_class_means)
    tests = [(images.x_test, images.y_test)]
    benchmark = tensors_benchmark(train_tensors=images.tasks, test_tensors=tests, task_labels=[0] * given.tasks)
    # Replay's one switch is for the stream and the memory: without it, the memory comes in a fixed
    # order, task after task. DER++ shuffles its memory by itself.
    shuffle = given.method != "derpp"
    for experience in benchmark.train_stream:
        with meter.training():
            strategy.train(experience, shuffle=shuffle)
    network.eval()
    final = accuracy(network, images)
    project = network if given.method != "scr" else lambda x: network.train_classifier(backbone(x))
    return measured(meter, final, network, project)


def by_capymoa(given: Given) -> dict[str, Any]:
    from avalanche.models import SlimResNet18
    from capymoa.classifier import Finetune
    from capymoa.ocl.strategy import ExperienceReplay
    from capymoa.stream import TorchStream

    images = load(given)
    torch.manual_seed(given.seed)
    network = SlimResNet18(images.classes, nf=given.width)
    meter = Meter(network.conv1)
    parts = [TensorDataset(*task) for task in images.tasks]
    schema = TorchStream.from_classification(parts[0], images.classes, shape=(3, 32, 32)).get_schema()
    learner = ExperienceReplay(Finetune(schema, network, adam(network), random_seed=given.seed), given.memory)
    # The loop of ocl_train_eval_loop, without its prediction for each batch before it is learned.
    for part in parts:
        with meter.training():
            for x, y in DataLoader(part, given.batch):
                learner.batch_train(x.flatten(1), y)
    final = accuracy(lambda x: learner.batch_predict_proba(x.flatten(1)), images)
    return measured(meter, final, network, network)


def by_authors(given: Given) -> dict[str, Any]:
    """Their code calls ``.cuda()`` everywhere, which here does nothing; its scaler and its autocast
    switch themselves off where there is no GPU.
    """
    nn.Module.cuda = Tensor.cuda = lambda self, *_, **__: self
    sys.path.insert(0, given.checkout)
    # Packages without their __init__, which imports the agents and networks of other methods.
    for name in ("agent", "models"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [f"{given.checkout}/{name}"]
    from agent.mose import MOSE
    from models.buffer import Buffer
    from models.Resnet18_SD import resnet18_sd

    images = load(given)
    torch.manual_seed(given.seed)
    np.random.seed(given.seed)
    network = resnet18_sd(images.classes, nf=given.width)
    meter = Meter(network.conv1)
    told = types.SimpleNamespace(
        dataset="cifar100",
        n_classes=images.classes,
        buffer_size=given.memory,
        batch_size=given.batch,
        buffer_batch_size=64,
        epoch=1,
        ins_t=TEMPERATURE,
        classifier="ncm",
        augmentation="ocm",
    )
    agent = MOSE(network, Buffer(told, (3, 32, 32)), adam(network), (3, 32, 32), told)
    for number, task in enumerate(images.tasks):
        loader = DataLoader(TensorDataset(*task), given.batch)
        with meter.training():
            agent.train(number, loader)
    rows = meter.rows
    of = images.y_test * given.tasks // images.classes
    tests = [TensorDataset(images.x_test[of == t], images.y_test[of == t]) for t in range(given.tasks)]
    _, accuracies = agent.test(given.tasks - 1, [{"test": DataLoader(test, _EVALUATION_BATCH)} for test in tests])
    meter.rows = rows  # their class means are computed with gradients, too
    return measured(meter, float(accuracies["3"].mean()) / 100, network, lambda x: _all_heads(network, x))


def _all_heads(network: nn.Module, x: Tensor) -> None:
    features = network.features(x)
    network.head(features, use_proj=True)
    network.head(features, use_proj=False)
    network.final_addaption_layer(features[-1])


def our_settings(given: Given) -> dict[str, Any]:
    """The settings that make our method the one that the other libraries have."""
    if given.method == "mose":
        return {"preset": "released"}
    shared = {"augment": "none", "init": "default", "buffer_batch": given.batch, "optimiser": "adam"}
    own = {
        "er": {"replay_loss": "one_mean"},
        "derpp": {"alpha": ALPHA, "beta": BETA, "memory_policy": "balanced"},
        "scr": {"projection": PROJECTION, "temperature": TEMPERATURE, "memory_policy": "balanced"},
    }
    return {**shared, "lr": LR, "weight_decay": WEIGHT_DECAY, **own[given.method]}


def by_us(given: Given) -> dict[str, Any]:
    import mose_fast

    class Watch(mose_fast.Listener):
        def on_start(self, config: Any, stream: Any, learner: Any, batch: int, batches: int) -> None:
            self.network = learner.network
            self.meter = Meter(self.network.stem.conv)

    watch = Watch()
    stream = {"name": given.data, "tasks": given.tasks, "batch": given.batch, "normalisation": "cifar10"}
    results = mose_fast.run(
        method=given.method,
        stream=stream,
        width=given.width,
        memory=given.memory,
        seed=given.seed,
        device="cpu",
        listeners=[watch],
        **our_settings(given),
    )
    watch.meter.seconds, watch.meter.steps = results["seconds"]["train"], results["steps"]
    resolved = results["resolved"]
    final = results["acc"][resolved["classifier"]][resolved["expert"]]
    return measured(watch.meter, final, watch.network, watch.network)


LIBRARIES: dict[str, Callable[[Given], dict[str, Any]]] = {
    "avalanche": by_avalanche,
    "capymoa": by_capymoa,
    "authors": by_authors,
    "ours": by_us,
}


def main() -> None:
    given = Given(**json.loads(sys.argv[1]))
    # As many cores as threads, so that no library has a further one for its loader or its views.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.threads])
    torch.set_num_threads(given.threads)
    with redirect_stdout(sys.stderr):
        result = LIBRARIES[given.by](given)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
