"""What a run takes by itself on a GPU: every setting that is left to be decided, as it becomes
there. No GPU is needed.
"""

from __future__ import annotations

import pytest
import torch

from mose_fast import _dali
from mose_fast.device import choose_precision
from mose_fast.memory import ReplayMemory
from mose_fast.methods import METHODS, Learner, Planning, find_method
from mose_fast.settings.run import ConfigError, RunConfig, StreamConfig
from mose_fast.streams import create
from mose_fast.train.pipeline import resident

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HALF = {"mean": (0.5,) * 3, "std": (0.25,) * 3}


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that torch sees and a native library for it; learners then have no network, and a
    memory on the host.
    """
    on_host = ReplayMemory.__init__

    def there(
        capability: tuple[int, int] = (9, 0), backend: str = "cuda", dali: str | None = None, free: int = 80 * 2**30
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, 80 * 2**30))
        monkeypatch.setattr("mose_fast._loader.native", object())
        monkeypatch.setattr("mose_fast._loader.record", {"backend": backend})
        monkeypatch.setattr(_dali, "obstacle", lambda: dali)
        monkeypatch.setattr(
            ReplayMemory,
            "__init__",
            lambda memory, *sizes, **named: on_host(memory, *sizes, **{**named, "device": "cpu"}),
        )
        kinds = {kind for learner in METHODS.values() for kind in learner.__mro__ if "build_model" in vars(kind)}
        for kind in kinds:
            monkeypatch.setattr(kind, "build_model", lambda learner: None)

    return there


def learner(**settings) -> Learner:
    config = RunConfig.create(**settings)
    return find_method(config.method)(config, classes=10, **HALF)


def test_a_run_on_a_gpu_with_nothing_else_set_is_the_fast_path(gpu):
    gpu()
    for device in ("cuda", "auto"):
        mose = learner(device=device)
        assert mose.device == GPU
        assert mose.precision == ("bf16", "auto: compute capability 9.0")
        assert mose.kernels == "fused" and mose.shadowed
        assert mose.stepping == ("captured", "") and mose.reads_losses_late and mose.planning is Planning.CAPTURED
        assert mose.feed == ("dali", "")
        assert mose.evaluation_batch == 2048
    config = RunConfig()
    assert not config.deterministic
    assert config.checkpoint_every is None
    # What the process sets, PyTorch's default: trying every algorithm takes longer than it saves in
    # a run.
    assert not torch.backends.cudnn.benchmark


def test_without_dali_the_native_op_makes_views_inside_the_graph(gpu):
    gpu(dali="DALI is not installed")
    mose = learner(device="cuda")
    assert mose.feed.name == "fused" and mose.feed.reason.startswith("DALI is not installed: pip install")
    assert mose.views.capturable


@pytest.mark.parametrize("backend", ["cpu", None])
def test_without_kernels_for_the_gpu_pytorch_runs_the_network_and_steps_are_still_captured(gpu, monkeypatch, backend):
    gpu(backend=backend)
    if backend is None:
        monkeypatch.setattr("mose_fast._loader.native", None)
    mose = learner(device="cuda")
    assert mose.kernels == "torch" and not mose.shadowed
    assert mose.stepping.name == "captured" and mose.precision.name == "bf16"


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_older_gpus_compute_in_fp32(gpu, capability):
    gpu(capability)
    assert learner(device="cuda").precision == (
        "fp32",
        "auto: compute capability {}.{}, bf16 wants 8.0".format(*capability),
    )


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_takes_bf16_and_native_kernels_and_says_how_its_steps_run(gpu, name):
    gpu()
    made = learner(method=name, device="cuda")
    assert made.precision.name == "bf16"
    assert made.kernels == "fused"
    why = f"method {name!r} {made.not_captured}"
    assert made.stepping == (("captured", "") if made.planning is Planning.CAPTURED else ("eager", why))


def test_a_method_that_is_not_captured_says_why(gpu):
    gpu()
    for name, why in {"mir": "looks at the network", "gdumb": "trains a new network for each evaluation"}.items():
        with pytest.raises(ConfigError, match=f"step is 'captured', but method '{name}' {why}.*; wanted step 'auto'"):
            learner(method=name, device="cuda", step="captured")


@pytest.mark.parametrize(("free", "where"), [(80 * 2**30, "cuda"), (2**20, "cpu")])
def test_images_lie_on_the_gpu_where_they_leave_half_of_it(gpu, monkeypatch, free, where):
    gpu(free=free)
    stream = create(StreamConfig("digits"))
    monkeypatch.setattr(type(stream), "to", lambda self, device: f"on {device}")
    assert resident(stream, GPU) is stream if where == "cpu" else resident(stream, GPU) == "on cuda"


def test_on_the_cpu_nothing_has_changed(monkeypatch):
    mose = learner(device="cpu", width=1, memory=20, options={"buffer_batch": 4})
    assert mose.precision == ("fp32", "auto: on the CPU")
    assert mose.kernels == "torch" and mose.stepping == ("eager", "") and mose.feed == ("fused", "")
    assert mose.evaluation_batch == 256


@pytest.mark.parametrize("wanted", ["fp32", "tf32", "bf16"])
def test_a_precision_that_is_asked_for_is_taken_anywhere(gpu, wanted):
    assert choose_precision(wanted, CPU) == (wanted, "")
    gpu((7, 5))
    assert choose_precision(wanted, GPU) == (wanted, "")
