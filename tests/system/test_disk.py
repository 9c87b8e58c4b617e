"""A run whose images stay on the disk is killed, and goes on to the results of an unbroken one."""

import signal

import pytest

from build_tools.image_folder import write_folder
from tests.system.test_kills import call, result


@pytest.mark.slow
def test_a_run_on_the_disk_is_killed_in_the_middle_and_continued(tmp_path):
    data = write_folder(tmp_path / "photos", classes=4, train=24, test=4, side=64)
    damaged = data / "train" / "class0002" / "0007.jpg"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    settings = ["--stream", str(data), "--resize", "16", "--load", "disk", "--on-error", "skip", "--tasks", "2"]
    settings += ["--batch", "8", "--width", "1", "--memory", "64", "--checkpoint-every", "2", "--device", "cpu"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    code, points = call(whole, ["run", *settings, "--out", str(whole)])
    assert code == 0 and result(whole)[0]["skipped"] == ["train/class0002/0007.jpg"]
    for at, command in ((points // 2, ["run", *settings, "--out"]), (points // 3, ["resume"])):
        code, _ = call(broken, [*command, str(broken)], at, signal.SIGKILL)
        assert code == -signal.SIGKILL
    code, _ = call(broken, ["resume", str(broken)])
    assert code == 0 and result(broken) == result(whole)
