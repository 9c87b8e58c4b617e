"""``mose-fast check`` finds each kind of broken rule, and nothing in the methods of the package."""

import pytest

from mose_fast.methods import METHODS
from mose_fast.settings.run import METHOD_SETTINGS

FILE = """
import torch
from mose_fast.methods import BaselineOptions, Planning, Preset, ReplayLearner, cross_entropy, method

@method("mine", options=BaselineOptions, presets={{"table": Preset("")}}, year=2026, reference="a test", cost=1.0)
class Mine(ReplayLearner):
{body}
"""
NOISY = """
    def make_views(self, rows):
        views = super().make_views(rows)
        return views + 0.1 * torch.rand(len(views), 1, 1, 1)
"""
UNSAVED = """
    def after_update(self, outputs, rows):
        self.mean = outputs.logits.mean().detach()
"""
FORGETS = """
    calls = 0
    def losses(self, outputs, rows):
        self.calls += 1
        return {"loss": cross_entropy(outputs.logits, rows.labels) * self.calls}
"""
WAITS = """
    def losses(self, outputs, rows):
        loss = cross_entropy(outputs.logits, rows.labels)
        return {"loss": loss if loss.item() < 1e9 else 2 * loss}
"""
MASKED = """
    def losses(self, outputs, rows):
        known = rows.labels >= 0
        return {"loss": cross_entropy(outputs.logits[known], rows.labels[known])}
"""
INFINITE = """
    def losses(self, outputs, rows):
        return {"loss": cross_entropy(outputs.logits, rows.labels) * float("inf")}
"""
READS_AHEAD = """
    def build_memory(self):
        memory = super().build_memory()
        memory.keep("loss", by_steps=True)
        return memory
    def retrieve(self, x, y):
        return self.memory.extras["loss"][: self.memory.filled].argsort(descending=True)[:8]
"""
STORES_NOTHING = """
    planning = Planning.BATCH_BY_BATCH
    def build_memory(self):
        memory = super().build_memory()
        memory.keep("loss", by_steps=True)
        return memory
    def after_update(self, outputs, rows):
        self.memory.write_extra("loss", rows.stored, outputs.logits[: rows.sizes[0], 0])
"""
BROADCASTS = """
    def losses(self, outputs, rows):
        return {"loss": torch.nn.functional.mse_loss(outputs.logits, outputs.logits.detach()[None] + 1)}
"""
RULES = {
    "learns": "it learns, its losses are finite, and it predicts",
    "seed": "its results depend on the seed alone, not on PyTorch's random numbers",
    "saved": "saved in the middle of a task, it continues with the same bits",
    "captured": "its steps can be captured as CUDA graphs",
}


@pytest.fixture
def check(call, tmp_path, request):
    """What is told of a class with this body: the exit code, and what is broken by rule."""

    for table in (METHODS, METHOD_SETTINGS):
        known = dict(table)
        request.addfinalizer(lambda table=table, known=known: (table.clear(), table.update(known)))

    def told(body):
        (tmp_path / "mine.py").write_text(FILE.format(body=body))
        code, out, err = call("check", f"{tmp_path / 'mine.py'}:Mine")
        assert err == "" and len(out.splitlines()) == 6
        lines = [line.partition("  ") for line in out.splitlines()]
        assert {state.strip() for state, _, _ in lines} <= {"ok", "broken", "--"}
        broken = [text.strip() for state, _, text in lines if state == "broken"]
        return code, {rule: text for rule, told in RULES.items() for text in broken if text.startswith(told)}

    return told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "rule", "said"),
    [
        (NOISY, "seed", "wanted random numbers of mose_fast.ops.draws"),
        (UNSAVED, "saved", " in self.mean, which is not part of its state"),
        (FORGETS, "saved", "these differ: "),
        (WAITS, "captured", "item() in mine.py, line 10"),
        (MASKED, "captured", "indexing by a mask in mine.py, line 10"),
        (INFINITE, "learns", "the loss 'loss' of batch 0 is "),
        (READS_AHEAD, "learns", "memory.extras['loss'], which steps write, is used in plan, retrieve or store"),
        (STORES_NOTHING, "learns", "write_extra('loss', ...) got slots None"),
        (BROADCASTS, "learns", "mine.py, line 9 is warned of: Using a target size"),
    ],
)
def test_a_broken_rule_is_told_with_its_place(check, body, rule, said):
    code, broken = check(body)
    assert code == 1 and said in broken[rule]


def test_a_method_that_plans_batch_by_batch_may_ask_for_values(check):
    assert check("    planning = Planning.BATCH_BY_BATCH\n" + WAITS) == (0, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mose", "mir"])
def test_methods_of_the_package_keep_all_rules(call, name):
    code, out, _ = call("check", name)
    asked = 4 if name == "mir" else 6  # it looks at the network to plan
    assert code == 0 and out.count("ok  ") == asked and out.count("not asked, since planning is ") == 6 - asked


def test_what_is_no_method_is_refused_in_one_line(call):
    code, out, err = call("check", "nowhere.py:Mine")
    assert code == 2 and out == "" and err.count("\n") == 1 and "there is no file nowhere.py" in err


def test_the_switches_of_a_method_are_listed(call):
    code, out, _ = call("list", "methods", "derpp")
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert rows["alpha"].endswith("  0.1  weight of the distillation from stored logits") and "memory" not in rows
    code, out, err = call("list", "streams", "derpp")
    assert (code, out) == (2, "") and err == "mose-fast: list streams has no names; wanted list methods derpp\n"
