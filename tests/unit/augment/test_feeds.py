"""Three feeds make the same views of the same parameters: plain PyTorch, the native op, DALI.

Which one a run takes, and what it says.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from mose_fast import _dali
from mose_fast.augment import RECIPES, ViewMaker, choose_feed
from mose_fast.methods import create_learner
from mose_fast.reference import augment as reference
from mose_fast.settings.run import ConfigError
from tests.paths import ROOT

MEAN, STD = (0.5, 0.48, 0.44), (0.2, 0.24, 0.26)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")

NO_DALI = _dali.obstacle()
needs_dali = pytest.mark.skipif(NO_DALI is not None, reason=f"{NO_DALI}; {_dali.INSTALL}")

FEEDS = ("torch", "fused", pytest.param("dali", marks=needs_dali))


def noise(count: int, height: int = 32, width: int = 32, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (count, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def maker(feed: str, recipe: str = "simclr", inner: int = 2, mirror: bool = True) -> ViewMaker:
    return ViewMaker(recipe, inner, mirror=mirror, mean=MEAN, std=STD, feed=feed)


def truth(made: ViewMaker, images: torch.Tensor, sizes: tuple[int, ...], monkeypatch) -> torch.Tensor:
    """The views that a maker should make of step 9 of seed 5, in float64."""

    def in_float64(sources, rows, layout, codes, factors, mean, std, *, dtype, jitter_normalised, plain):
        return reference.augment(
            sources, rows, layout, codes, factors, list(mean), list(std), jitter_normalised, torch.float64, 3
        )

    with monkeypatch.context() as patched:
        patched.setattr("mose_fast.augment.views.augment", in_float64)
        exact = maker("torch")
        exact.recipe, exact.orientations = made.recipe, made.orientations
        return exact.make(images, sizes, 5, 9)[0]


def worst(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, in units of 1 + |value|."""
    return float(((ours.double() - wanted).abs() / (1 + wanted.abs())).max())


@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("side", [32, 64])
@pytest.mark.parametrize(
    ("recipe", "inner", "mirror"),
    [("none", 1, True), ("ocm", 2, True), ("simclr", 4, True), ("simclr", 2, False), ("gsa", 4, False)],
)
def test_every_feed_is_within_rounding_of_the_views_in_float64(recipe, inner, mirror, side, feed, monkeypatch):
    """1e-6, plain PyTorch 2**-21 side / std: its grid_sample takes coordinates in half image sizes,
    whose rounding shifts every pixel a little.
    """
    x, made = noise(20, side, side), maker(feed, recipe, inner, mirror)
    views, rows = made.make(x, (12, 8), 5, 9)
    assert views.is_contiguous(memory_format=torch.channels_last)
    assert views.dtype == torch.float32
    assert torch.equal(rows, maker("fused", recipe, inner, mirror).make(x, (12, 8), 5, 9)[1])
    bound = 2.0**-21 * side / min(STD) if feed == "torch" else 1e-6
    assert worst(views, truth(made, x, (12, 8), monkeypatch)) < bound


@needs_dali
@pytest.mark.parametrize(
    ("height", "width", "inner", "bound"),
    [
        (8, 8, 16, 1e-6),
        (32, 32, 16, 1e-6),
        (24, 16, 4, 1e-4),
        (16, 24, 2, 1e-4),
        (40, 40, 2, 1e-4),
        (224, 224, 1, 5e-3),
    ],
)
def test_dali_turns_and_samples_other_sizes(height, width, inner, bound, monkeypatch):
    """Less exactly where a side is no power of two: DALI on the CPU adds the step between two
    places again and again.
    """
    x, made = noise(9, height, width), maker("dali", inner=inner)
    assert worst(made.make(x, (9,), 5, 9)[0], truth(made, x, (9,), monkeypatch)) < bound


@pytest.mark.parametrize("feed", FEEDS)
def test_grey_views_have_three_equal_values_before_normalisation_with_equal_constants(feed):
    equal = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
    views = ViewMaker("ocm", 1, mirror=True, feed=feed, **equal).augmented(noise(200), 1, 2)
    spread = (views.amax(1) - views.amin(1)).amax((1, 2))
    grey = spread < 1e-6
    assert 20 < int(grey.sum()) < 80  # a quarter
    assert float(spread[~grey].min()) > 0.5
    wanted = ViewMaker("ocm", 1, mirror=True, **equal).augmented(noise(200), 1, 2)
    assert torch.equal(grey, (wanted.amax(1) - wanted.amin(1)).amax((1, 2)) < 1e-6)


@pytest.mark.parametrize("feed", FEEDS)
def test_one_view_of_each_image_and_none(feed):
    x = noise(7)
    wanted = maker("fused").augmented(x, 3, 4)
    torch.testing.assert_close(maker(feed).augmented(x, 3, 4), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        maker(feed, "none").augmented(x, 3, 4), maker("fused").normalise(x), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(maker(feed).normalise(x), maker("fused").normalise(x), rtol=1e-6, atol=1e-6)
    assert maker(feed).augmented(x[:0], 3, 4).shape == (0, 3, 32, 32)
    torch.testing.assert_close(maker(feed).mild(x, 3, 4), maker("fused").mild(x, 3, 4), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("inner", [1, 2, 4])
def test_padding_adds_zero_views_and_changes_no_other(feed, inner):
    x, made = noise(20), maker(feed, inner=inner)
    padded = made.views(x, (12, 8), 5, 9, rows=27)
    count = 20 * made.views_per_row
    assert len(padded) == 27 * made.views_per_row
    assert torch.equal(padded[:count], made.views(x, (12, 8), 5, 9))
    assert not padded[count:].any()
    assert padded.is_contiguous(memory_format=torch.channels_last)


@needs_dali
def test_views_made_apart_are_not_applied_from_inputs():
    made, x = maker("dali"), noise(4)
    assert made.apart and not maker("fused").apart and not maker("torch").apart
    with pytest.raises(ValueError, match="feed is 'dali', which makes views apart"):
        made.apply(x, made.inputs(x, (4,), 1, 1))


@needs_dali
def test_dali_gives_the_views_of_each_call_whatever_came_before():
    """Steps of all sizes, beyond the first pipeline's too: no call returns another's views, and the
    same call the same bits.
    """
    made, fresh = maker("dali"), maker("dali")
    for sequence, count in enumerate([10, 96, 0, 1, 300, 96, 10]):
        x = noise(count, seed=sequence)
        views, rows = made.make(x, (count,), 1, sequence)
        assert len(views) == len(rows) == 4 * count
        if count:
            torch.testing.assert_close(views, maker("fused").make(x, (count,), 1, sequence)[0], rtol=1e-6, atol=1e-6)
        assert torch.equal(views, fresh.make(x, (count,), 1, sequence)[0])
    x = noise(96, seed=1)
    assert torch.equal(made.make(x, (96,), 1, 1)[0], fresh.make(x, (96,), 1, 1)[0])
    # Another size of images, and a use after the end.
    torch.testing.assert_close(
        made.make(noise(5, 64, 64), (5,), 1, 1)[0], maker("fused").make(noise(5, 64, 64), (5,), 1, 1)[0]
    )
    made.close()
    made.close()
    assert torch.equal(made.make(x, (96,), 1, 1)[0], fresh.make(x, (96,), 1, 1)[0])


@needs_dali
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_call_that_broke_off_leaves_nothing_behind(error, monkeypatch):
    """Rows were fed and their views never taken: the next call must not get them."""
    from nvidia.dali import Pipeline

    made = maker("dali")
    made.make(noise(20), (20,), 1, 0)

    def breaks(*arguments, **named):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Pipeline, "outputs", breaks)
        with pytest.raises(error):
            made.make(noise(20, seed=1), (20,), 1, 1)
    x = noise(20, seed=2)
    torch.testing.assert_close(
        made.make(x, (20,), 1, 2)[0], maker("fused").make(x, (20,), 1, 2)[0], rtol=1e-6, atol=1e-6
    )


@needs_dali
def test_views_outlive_their_pipeline_and_later_calls():
    made = maker("dali")
    first = made.make(noise(20), (20,), 1, 1)[0]
    kept = first.clone()
    for sequence in range(2, 6):
        made.make(noise(20, seed=sequence), (20,), 1, sequence)
    made.close()
    del made
    assert torch.equal(first, kept)


@needs_dali
def test_input_is_not_written_and_need_not_be_contiguous():
    wide = noise(12, 32, 64)
    before = wide.clone()
    views = maker("dali").make(wide[:, :, ::2], (12,), 1, 1)[0]
    assert torch.equal(wide, before)
    torch.testing.assert_close(
        views, maker("fused").make(wide[:, :, ::2].contiguous(), (12,), 1, 1)[0], rtol=1e-6, atol=1e-6
    )


@needs_dali
def test_two_threads_with_a_maker_each_and_with_one_together():
    shared = maker("dali")
    wanted = {s: maker("fused").make(noise(30, seed=s), (30,), 1, s)[0] for s in range(8)}
    failures = []

    def work(own: ViewMaker, sequences: range) -> None:
        try:
            for s in sequences:
                for made in (own, shared):
                    torch.testing.assert_close(
                        made.make(noise(30, seed=s), (30,), 1, s)[0], wanted[s], rtol=1e-6, atol=1e-6
                    )
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(maker("dali"), range(k, 8, 2))) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures


@pytest.mark.slow
@needs_dali
def test_a_program_ends_with_a_pipeline_open():
    program = (
        "import torch\nfrom mose_fast.augment import ViewMaker\n"
        "made = ViewMaker('ocm', 2, mirror=True, mean=(0.5,) * 3, std=(0.5,) * 3, feed='dali')\n"
        "print(made.make(torch.zeros(4, 32, 32, 3, dtype=torch.uint8), (4,), 0, 0)[0].shape[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["16"]), done.stderr


# Which feed


@pytest.fixture
def no_dali(monkeypatch):
    """DALI cannot be imported, as where it is not installed."""
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)


@pytest.fixture
def with_dali(monkeypatch):
    monkeypatch.setattr(_dali, "obstacle", lambda: None)


def test_automatic_choice_on_the_cpu_needs_no_dali(no_dali):
    assert choose_feed("auto", CPU, None) == ("fused", "")


def test_automatic_choice_on_cuda(with_dali):
    assert choose_feed("auto", CUDA, RECIPES["ocm"]) == ("dali", "")
    assert choose_feed("auto", CUDA, None).name == "dali"
    assert choose_feed("dali", CPU, RECIPES["simclr"]) == ("dali", "")
    for wanted in ("auto", "dali"):
        chosen = choose_feed(wanted, CUDA, RECIPES["scr"])
        assert str(chosen) == "fused (not dali, whose colour jitter gives other pixels)"
    assert choose_feed("torch", CUDA, RECIPES["scr"]) == ("torch", "")


def test_without_dali_the_automatic_choice_falls_back_and_says_so_in_a_line(no_dali):
    chosen = choose_feed("auto", CUDA, RECIPES["ocm"])
    assert chosen.name == "fused"
    assert "DALI is not installed" in str(chosen) and "pip install 'mose-fast[dali]'" in str(chosen)
    assert "\n" not in str(chosen)
    with pytest.raises(ConfigError, match=r"feed is 'dali', but DALI .*; wanted: pip install 'mose-fast\[dali\]'"):
        choose_feed("dali", CPU, None)


def test_a_dali_that_does_not_load_is_told_apart_from_a_missing_one(monkeypatch):
    def broken(name):
        raise ImportError("libdali.so: wrong ELF class")

    monkeypatch.setattr(_dali.importlib, "import_module", broken)
    assert choose_feed("auto", CUDA, None).reason.startswith("DALI cannot be imported (libdali.so: wrong ELF class)")
    with pytest.raises(ConfigError, match="wrong ELF class"):
        choose_feed("dali", CPU, None)


@needs_dali
def test_a_dali_whose_results_wait_for_the_gpu_when_they_are_freed_is_too_old(monkeypatch):
    monkeypatch.setattr(_dali, "version", lambda: "1.53.0")
    assert choose_feed("auto", CUDA, None).reason.startswith("DALI 1.53.0 is too old, wanted 2.1")
    monkeypatch.setattr(_dali, "version", lambda: "2.10.0.dev20261101")
    assert _dali.obstacle() is None


def test_makers_refuse_what_they_cannot_make():
    with pytest.raises(ValueError, match="feed is 'auto'; wanted fused, torch or dali"):
        maker("auto")
    with pytest.raises(ValueError, match="recipe 'scr', whose colour jitter"):
        maker("dali", "scr")


def test_only_the_native_op_can_be_captured_in_a_graph(monkeypatch):
    assert not maker("torch").capturable
    assert not maker("dali").capturable
    monkeypatch.setattr("mose_fast._loader.native", object())
    monkeypatch.setattr("mose_fast._loader.record", {"backend": "cuda"})
    assert maker("fused").capturable
    assert not maker("dali").capturable
    monkeypatch.setattr("mose_fast._loader.record", {"backend": "cpu"})
    assert not maker("fused").capturable
    monkeypatch.setattr("mose_fast._loader.native", None)
    assert not maker("fused").capturable


# Learners


def learner(method: str, feed: str, recipe: str):
    return create_learner(
        method=method,
        classes=4,
        image_size=(32, 32),
        width=2,
        memory=40,
        device="cpu",
        feed=feed,
        seed=3,
        options={"buffer_batch": 10, "augment": recipe},
        mean=MEAN,
        std=STD,
    )


def train(method: str, feed: str, recipe: str, steps: int = 4) -> list[float]:
    """Losses of the first steps on noise around a brightness that tells the class; the first batch
    may only be stored.
    """
    made = learner(method, feed, recipe)
    losses = []
    for step in range(steps):
        y = torch.arange(10) % 2
        x = (noise(10, seed=step) // 4 + 60 * y.view(-1, 1, 1, 1)).to(torch.uint8)
        result = made.observe(x, y, task=0)
        if result is not None:
            losses.append(float(result["loss"]))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("feed", ["torch", pytest.param("dali", marks=needs_dali)])
@pytest.mark.parametrize(
    ("method", "recipe"), [("mose", "ocm"), ("mose", "scr"), ("er", "simclr"), ("derpp", "pad_crop"), ("ocm", "simclr")]
)
def test_losses_of_three_steps_are_the_same_by_every_feed(method, recipe, feed):
    """Within 1e-4 of the first three losses, and 1e-3 of the next: Adam's first steps divide
    gradients by their own size, which makes rounding some twenty times as large with each step.
    """
    fused = train(method, "fused", recipe)
    assert len(fused) >= 3
    other = train(method, feed, recipe)
    assert other[:3] == pytest.approx(fused[:3], rel=1e-4)
    assert other == pytest.approx(fused, rel=1e-3)
    if feed == "dali" and recipe == "scr":
        assert other == fused


@needs_dali
def test_two_learners_in_one_process_and_the_same_bits_again():
    assert train("mose", "dali", "ocm") == train("mose", "dali", "ocm")


@needs_dali
def test_a_learner_tells_its_feed():
    assert str(learner("mose", "dali", "ocm").feed) == "dali"
    assert learner("mose", "dali", "scr").feed.name == "fused"
    assert str(learner("mose", "auto", "ocm").feed) == "fused"
    assert str(learner("mose", "torch", "scr").feed) == "torch"
