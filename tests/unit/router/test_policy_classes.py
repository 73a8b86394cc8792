from pathlib import Path

import pytest
import structlog

from kvbus_router.adapters.policy_classes import ClassesFile, load_classes
from kvbus_router.core.policy_classes import (
    MAX_CLASSES,
    MAX_FILE_BYTES,
    BadClasses,
    PolicyClass,
    PolicyClasses,
    Traits,
    read_classes,
)
from kvbus_runtime.metrics import Metrics
from kvbus_runtime.settings import BadSettings

FILE = b"""
[[class]]
name = "people"
input = "user"
weight = 4
priority = 5

[[class]]
name = "batch"
tenants = ["batch-*", "night"]
min_uncached_tokens = 100
max_priority = 2
max_strict_priority = 0
max_running = 8

[[class]]
name = "children"
sub_agents = true
max_uncached_tokens = 50
models = ["qwen*"]
"""


@pytest.mark.parametrize(
    ("traits", "name"),
    [
        (Traits(input_trigger="user", tenant="batch-7", uncached_tokens=500), "people"),
        (Traits(input_trigger="tool", tenant="batch-7", uncached_tokens=100), "batch"),
        (Traits(tenant="night", uncached_tokens=100), "batch"),
        (Traits(tenant="night", uncached_tokens=99), "default"),
        (Traits(tenant="day", uncached_tokens=500), "default"),
        (Traits(is_sub_agent=True, uncached_tokens=50, model="qwen3"), "children"),
        (Traits(is_sub_agent=True, uncached_tokens=51, model="qwen3"), "default"),
        (Traits(is_sub_agent=True, model="llama"), "default"),
        (Traits(model="qwen3"), "default"),
    ],
)
def test_the_first_class_that_fits_takes_a_request(traits: Traits, name: str) -> None:
    assert read_classes(FILE).of(traits).name == name


def test_without_a_file_everything_is_in_one_class_without_limits() -> None:
    found = PolicyClasses().of(Traits(tenant="any"))
    assert found == PolicyClass(name="default")
    assert (found.priority_of(3.5), found.strict_priority_of(7)) == (3.5, 7)


def test_what_fits_no_class_gets_what_the_file_says_of_the_default() -> None:
    classes = read_classes(b'[[class]]\nname = "default"\nweight = 0.5\n[[class]]\nname = "a"\ntenants = ["a"]')
    assert classes.of(Traits(tenant="b")).weight == 0.5
    assert classes.of(Traits(tenant="a")).name == "a"


def test_hints_are_cut_to_what_the_class_allows_and_its_own_come_on_top() -> None:
    batch = read_classes(FILE).named("batch")
    assert (batch.priority_of(100), batch.priority_of(-100)) == (2, -100)
    assert batch.strict_priority_of(9) == 0
    assert read_classes(FILE).named("people").priority_of(1) == 6


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"[[class]", "line 1"),
        (b"\xff", "utf-8"),
        (b'[[class]]\nname = "a"\nwieght = 2', "wieght"),
        (b'[[class]]\nname = "a"\nweight = 0', r"\$.class\[0\].weight"),
        (b'[[class]]\nname = "a"\nmax_running = -1', "max_running"),
        (b'[[class]]\nname = "a"\ninput = "machine"', "machine"),
        (b'[[class]]\nname = "a b"', "name"),
        (b"[[class]]\nweight = 1", "name"),
        (b"[limits]\na = 1", "limits"),
        (b'[[class]]\nname = "a"\n[[class]]\nname = "a"', "twice"),
        (b'[[class]]\nname = "default"\ntenants = ["x"]', "fits no other"),
        (b'[[class]]\nname = "a"\nmin_uncached_tokens = 5\nmax_uncached_tokens = 4', "below"),
        (b"a = " + b"[" * 100_000, "deep"),
        (b"a = " + b"{a=" * 3_000, "deep"),
        (b"a = " + b"9" * 5_000, "digits"),
    ],
)
def test_a_file_that_makes_no_sense_says_where(text: bytes, word: str) -> None:
    with pytest.raises(BadClasses, match=word):
        read_classes(text)


def test_the_number_of_classes_and_the_size_of_the_file_are_limited() -> None:
    def classes(count: int) -> bytes:
        return b"".join(b'[[class]]\nname = "c%d"\n' % number for number in range(count))

    assert len(read_classes(classes(MAX_CLASSES)).classes) == MAX_CLASSES + 1
    with pytest.raises(BadClasses, match="at most"):
        read_classes(classes(MAX_CLASSES + 1))
    assert read_classes(b"#" * MAX_FILE_BYTES) == PolicyClasses()
    with pytest.raises(BadClasses, match="bytes"):
        read_classes(b"#" * (MAX_FILE_BYTES + 1))


def test_a_bad_file_at_the_start_is_a_bad_setting(tmp_path: Path) -> None:
    file = tmp_path / "classes"
    with pytest.raises(BadSettings, match=file.name):
        load_classes(str(file))
    file.write_bytes(b"[[")
    with pytest.raises(BadSettings, match=file.name):
        load_classes(str(file))
    file.write_bytes(FILE)
    assert load_classes(str(file)) == (read_classes(FILE), FILE)
    assert load_classes("") == (PolicyClasses(), b"")


async def test_a_changed_file_is_applied_and_a_bad_one_leaves_the_old(tmp_path: Path) -> None:
    path = tmp_path / "classes.toml"
    path.write_bytes(FILE)
    applied: list[PolicyClasses] = []
    metrics = Metrics("router")
    file = ClassesFile(str(path), FILE, 1.0, apply=applied.append, metrics=metrics, log=structlog.get_logger())
    await file.look()
    assert not applied
    path.write_bytes(FILE.replace(b"weight = 4", b"weight = 9"))
    await file.look()
    assert [classes.named("people").weight for classes in applied] == [9]
    for bad in (b"[[class]]", b"\n"):
        path.write_bytes(bad)
        await file.look()
    path.unlink()
    await file.look()
    await file.look()
    assert len(applied) == 1
    path.write_bytes(FILE)
    await file.look()
    assert applied[1] == read_classes(FILE)
    reloads = [metrics.value("policy_class_reloads_total", {"outcome": outcome}) for outcome in ("applied", "refused")]
    assert reloads == [2, 3]


def test_the_example_is_a_file_that_can_be_used() -> None:
    classes, _ = load_classes(str(Path(__file__).parents[3] / "examples/policy-classes.toml"))
    assert [found.name for found in classes.classes] == ["people", "batch", "large", "default"]
